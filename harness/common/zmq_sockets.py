"""Sockets of ZeroMQ that a signal can't leave behind."""

from __future__ import annotations

import zmq

from harness.common.signals import postponed


def make(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket of this context, which closes it when it is destroyed. pyzmq tells the context of it a moment
    after it is there: were a signal raised between the two, `Context.destroy` would wait for it without end.
    """
    with postponed():
        return context.socket(kind)

"""The socket that a server listens on."""

from __future__ import annotations

import socket

from overlap_bench.engines.api import BadSetting


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to that address; port 0: any that is free. Nobody can connect before it listens."""
    if not 0 <= port <= 65535:
        raise BadSetting(f"--port must lie between 0 and 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadSetting(f"can't listen on {host}: {error.strerror}") from error
    except UnicodeError as error:  # a part of a name has at most 63 characters, and none is empty
        raise BadSetting(f"can't listen on {host}: it is no host's name") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise BadSetting(
            f"can't listen on {host} port {port}: {error.strerror}; --port 0 takes any that is free"
        ) from error
    return bound


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

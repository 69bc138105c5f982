"""How the host has a say in vLLM's core, where that is a process of its own. Nothing here needs vLLM.

While arms take turns, the core asks at this gate before it schedules a step, and sleeps until it is let
through; otherwise it goes by, and looks once a step whether turns have begun (a poll, 2 us). What it has
recorded it keeps until the host asks for it, on a second connection, which a thread of the core answers.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread

import msgspec

from overlap_bench.engines.api import EngineError, RoundRecord
from overlap_bench.engines.vllm.steps import Steps

FOLLOW = ("initialization failed", "EngineDeadError")  # what is printed of the end of another process
SHORT_S = 0.0002  # beside a step
ADDRESS = "BENCH_VLLM_GATE"  # in the environment of the core
BEGIN, END, GO, LOOK, FINISH = b"begin", b"end", b"go", b"look", b"finish"  # to a core that steps
CLEAR, COLLECT, COUNT, PROFILE, DELAY = b"clear", b"collect", b"count", b"profile", b"delay"  # to its records


def printed_error() -> str:
    """The last error that this process or one below it printed, where a file takes what they print."""
    try:
        printed = Path("/proc/self/fd/2").resolve().read_text(errors="replace")
    except OSError:
        return ""
    found = re.findall(r"\b(\w+(?:Error|Exception): .+)", printed)
    causes = [each for each in found if not any(name in each for name in FOLLOW)]
    return " ".join(causes[-1].split()) if causes else ""


def died() -> EngineError:
    """vLLM's core has ended, and has printed why."""
    cause = printed_error().removeprefix("EngineError: ")
    return EngineError(": ".join(filter(None, ("vLLM's engine core died", cause))))


@contextmanager
def core_lives() -> Iterator[None]:
    """Raises EngineError where the other end of a connection is gone."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise died() from error


class Asked(msgspec.Struct, frozen=True):
    """The core wants to schedule a step. `requests`: that it has been given so far. `outputs`: of requests,
    that all steps before have given. `begun`: steps that were scheduled ahead, and have not ended."""

    requests: int
    outputs: int
    begun: int


class Gate:
    """The host's side: made before the core is started, opened once that has booted."""

    def __init__(self) -> None:
        address = f"vllm-core-{secrets.token_hex(8)}"
        self._listener = Listener(f"\0{address}", "AF_UNIX")  # no file: nobody has to remove it
        os.environ[ADDRESS] = address
        self.asked: Asked | None = None  # until it is let through

    def open(self) -> None:
        self._steps, self._records = self._listener.accept(), self._listener.accept()
        self._listener.close()

    def fileno(self) -> int:
        """Readable once the core asks, or is gone."""
        return self._steps.fileno()

    def hear(self) -> Asked:
        """What the core asked; blocks until it has."""
        with core_lives():
            self.asked = msgspec.msgpack.decode(self._steps.recv_bytes(), type=Asked)
        return self.asked

    def begin(self) -> None:
        """From now on the core asks. It must be idle."""
        with core_lives():
            while self._steps.poll():  # what it asked while the turns before these were ended
                self._steps.recv_bytes()
            self._steps.send_bytes(BEGIN)

    def let(self, word: bytes) -> None:
        """Answer the core that asks: GO; or LOOK for requests that are on their way, or FINISH the steps that
        you have begun, and ask again."""
        with core_lives():
            self._steps.send_bytes(word)
        self.asked = None

    def finish(self) -> None:
        """Wait until the core has ended what it has begun, once every request has ended. It may ask once more
        before that, as vLLM schedules a step to tell its workers of these ends; unanswered, both would wait
        for ever."""
        while self.begun():
            if self.asked is not None or self._asks_now():
                self.let(FINISH)
            time.sleep(SHORT_S)

    def _asks_now(self) -> bool:
        with core_lives():
            if not self._steps.poll():
                return False
        self.hear()
        return True

    def end(self) -> None:
        """The core asks no more, and goes on where it waits."""
        with core_lives():
            self._steps.send_bytes(END)
        self.asked = None

    def clear(self) -> None:
        self._request(CLEAR)

    def begin_profile(self, steps: int) -> None:
        self._request(b"%s %d" % (PROFILE, steps))

    def delay(self, phase: str, ns: int) -> int:
        return int(self._request(b"%s %d %s" % (DELAY, ns, phase.encode())))

    def collect(self) -> tuple[RoundRecord, list[int]]:
        """What the core recorded; how many outputs of requests each step and all before it gave."""
        return msgspec.msgpack.decode(self._request(COLLECT), type=tuple[RoundRecord, list[int]])

    def begun(self) -> int:
        """How many steps are in flight."""
        return int(self._request(COUNT))

    def _request(self, word: bytes) -> bytes:
        with core_lives():
            self._records.send_bytes(word)
            return self._records.recv_bytes()

    def close(self) -> None:
        for each in (self._listener, getattr(self, "_steps", None), getattr(self, "_records", None)):
            if each is not None:
                each.close()


class Core:
    """The core's side, with what it has recorded."""

    def __init__(self, steps: Steps) -> None:
        address = f"\0{os.environ[ADDRESS]}"
        self._steps, records = Client(address, "AF_UNIX"), Client(address, "AF_UNIX")
        self._asks = False
        Thread(target=_answer, args=(records, steps), daemon=True).start()

    def ask(self, asked: Asked) -> bytes:
        """Before a step is scheduled: what to do, once the host has said so."""
        while self._steps.poll():
            self._asks = self._steps.recv_bytes() == BEGIN
        if not self._asks:
            return GO
        self._steps.send_bytes(msgspec.msgpack.encode(asked))
        word = self._steps.recv_bytes()
        self._asks = word != END
        return word if self._asks else GO


def _answer(records: Connection, steps: Steps) -> None:
    with records:  # closed by an error, whose traceback is in the log: else the host would wait for an answer
        while True:
            try:
                word = records.recv_bytes()
            except (EOFError, OSError):
                return  # the host is gone, and vLLM ends its core
            records.send_bytes(_answer_of(word, steps))


def _answer_of(word: bytes, steps: Steps) -> bytes:
    if word == CLEAR:
        steps.clear()
        return b""
    if word == COLLECT:
        return msgspec.msgpack.encode((steps.record(), steps.outputs))
    if word.startswith(PROFILE):
        steps.begin_profile(int(word.split()[1]))
        return b""
    if word.startswith(DELAY):
        _, ns, phase = word.decode().split(" ")
        return str(steps.put_delay(phase, int(ns))).encode()
    return str(steps.begun).encode()

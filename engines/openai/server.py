"""A server that is started by a command, watched, and stopped with all that it started."""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from overlap_bench.engines import api
from overlap_bench.engines.openai import endpoint
from overlap_bench.engines.openai.endpoint import Endpoint, Unreachable
from overlap_bench.engines.processes import TERMINATE_S, signal_at_parents_end

PORT = "{port}"
LOOK_S = 0.1  # between two questions whether it is ready


@dataclass(frozen=True, slots=True)
class Server:
    """A process group of its own, in the host's session. `log` is a file without a name."""

    popen: subprocess.Popen[bytes]
    pidfd: int  # readable once it has ended
    endpoint: Endpoint
    log: IO[bytes]

    def ended(self) -> bool:
        """Whether it has; it is left for `stop` to be reaped, so that others can see how it ended."""
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def failure(self, when: str, words: str = "") -> api.EngineError:
        """The error that it ended, hung or failed, with `words` as the reason, or else the last line of its
        log; what it printed is kept, and the file named."""
        ended = self.ended()
        self.log.seek(0)
        printed = self.log.read()
        lines = printed.decode(errors="replace").strip().splitlines()
        words = words or (lines[-1].strip() if lines else "it printed nothing")
        how = f"the server {_end(self.popen.pid)}" if ended else "the server"
        where = f"; its output is in {_keep(printed)}" if lines else ""
        return api.EngineError(f"{how} {when}: {words}{where}")

    def wait_until_ready(self, seconds: float) -> None:
        """Until /health gives 200, or, where there is none, /v1/models does (not the first choice: llama.cpp
        answers it while still loading). Raises EngineError where it ends before, or takes longer."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.ended():
                raise self.failure("before it was ready")
            with suppress(Unreachable):
                if self._is_ready(min(5.0, seconds)):
                    return
            time.sleep(LOOK_S)
        raise self.failure(f"was not ready after {seconds:g} s (start_timeout_s)")

    def _is_ready(self, seconds: float) -> bool:
        health, _ = endpoint.get(self.endpoint, "/health", seconds)
        if health == 200 or health >= 500:
            return health == 200
        return endpoint.get(self.endpoint, f"{self.endpoint.path}/models", seconds)[0] == 200

    def stop(self) -> None:
        """SIGTERM, and after a while SIGKILL, to the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGTERM)
        select.select([self.pidfd], [], [], TERMINATE_S)
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)  # what it left behind, too
        self.popen.wait()
        os.close(self.pidfd)
        self.log.close()


def start(command: str, variables: Mapping[str, str]) -> Server:
    """Start a server on a free port of this machine, with these variables beside those of this process.
    Raises BadSetting where the command can't be run."""
    port = free_port()
    try:
        words = [word.replace(PORT, str(port)) for word in shlex.split(command)]
    except ValueError as error:
        raise api.BadSetting(f"cmd={command}: {str(error).lower()}") from None
    log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
    try:
        popen = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **variables},
            process_group=0,
            preexec_fn=_end_with_host,
        )
    except OSError as error:
        raise api.BadSetting(f"can't start the server: {words[0]}: {error.strerror}") from error
    return Server(popen, os.pidfd_open(popen.pid), endpoint.parse(f"http://127.0.0.1:{port}"), log)


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_host() -> None:
    """A host that is killed can't stop it. SIGTERM, so that it can end what it started."""
    signal_at_parents_end(signal.SIGTERM)


def _keep(printed: bytes) -> str:
    with tempfile.NamedTemporaryFile(prefix="bench-server-", suffix=".log", delete=False) as kept:
        kept.write(printed)
    return kept.name


def _end(pid: int) -> str:
    """How a process that was not reaped yet ended."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if found is None or found.si_code == os.CLD_EXITED:
        return f"ended with status {found.si_status}" if found else "ended"
    return f"was killed by {signal.Signals(found.si_status).name}"

"""The other ranks of a model that spans several devices, as the first one has them: a process each, with a
device of its own (rank_process.py).

The first rank schedules, tells them of each step, and hears of them only when it asks: that a step is done
everywhere it knows from its own device, whose program waits for theirs. So a rank that dies or hangs is seen
at the first rank's device, which then waits in vain; `blame` says which rank it was.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from overlap_bench.engines.api import BadSetting, DeviceWork, EngineError, EngineOptions
from overlap_bench.engines.devices.base import RANK_LOST
from overlap_bench.engines.overlap.batch import Batch
from overlap_bench.engines.overlap.rank_process import (
    BEGIN,
    COLLECT,
    DRAIN,
    LENGTH,
    STOP,
    Broke,
    FromRank,
    RankConfig,
    Up,
    Worked,
)
from overlap_bench.engines.overlap.toggles import share
from overlap_bench.engines.processes import is_stopped

WORK_ROW_BYTES = 4 * 8  # of Device.work
BOOT_S = 180.0
ANSWER_S = 30.0  # longer than a device waits for another one
BLAME_S = 3.0  # until whoever is at fault has said so, or is gone
STOP_S = 3.0


class RankFailed(EngineError):
    """One of several ranks, which the message names."""

    names_process = True


def count_ranks(toggles: Mapping[str, str]) -> int:
    """Raises BadSetting for what is no number of ranks."""
    said = toggles.get("ranks", "1")
    if said != "1" and said not in share.SEVERAL:
        raise BadSetting(f"ranks={said}: it is a number from 1 to {share.MOST_RANKS}")
    return int(said)


@dataclass(slots=True)
class _Rank:
    """One of them. `unread`: what it said and was not looked at yet."""

    number: int
    process: subprocess.Popen[bytes]
    up: bool = False
    device: int | None = None
    unread: bytes = b""
    broke: Broke | None = None
    heard: list[FromRank] = field(default_factory=list)

    def hear(self, timeout: float) -> bool:
        """Read what it says, waiting for it for so long; whether it said anything."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return False
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self.unread += data
        while len(self.unread) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self.unread)[0]
            if len(self.unread) < end:
                break
            said: FromRank = msgspec.msgpack.decode(self.unread[LENGTH.size : end], type=FromRank)
            self.unread = self.unread[end:]
            if isinstance(said, Broke):
                self.broke = said
            else:
                self.heard.append(said)
        return bool(data)

    def failure(self) -> EngineError | None:
        """What it died of, if it did."""
        while self.hear(0):
            pass
        if self.broke is not None:
            said = self.broke.message
            return BadSetting(said) if self.broke.usage else RankFailed(f"{self}: {said}")
        code = self.process.poll()
        if code is None:
            return None
        return RankFailed(f"{self} died ({f'signal {-code}' if code < 0 else f'exit {code}'})")

    def silence(self) -> RankFailed:
        """It did not do its part, and lives: whether somebody has stopped one of its processes."""
        for what, pid in (("", self.process.pid), ("the device of ", self.device)):
            if pid and is_stopped(pid):
                return RankFailed(f"{what}rank {self.number} (pid {pid}) is stopped")
        return RankFailed(f"{self} does not answer")

    def __str__(self) -> str:
        return f"rank {self.number} (pid {self.process.pid})"


class OtherRanks:
    """All but the first. They boot while the first one does: call `wait_until_up` once its device is."""

    def __init__(
        self,
        options: EngineOptions,
        toggles: dict[str, str],
        ranks: int,
        cores: str,
        step_bytes: int,
        counters: dict[str, int],
    ) -> None:
        # A file that all can open and that nobody has to remove: the devices write to each other there how
        # they are reached.
        self._store = os.memfd_create("ranks", os.MFD_CLOEXEC)
        self.count = ranks  # the first one among them
        self.store = f"/proc/{os.getpid()}/fd/{self._store}"
        self._sender = share.CHOICES[toggles["share"]](ranks - 1, step_bytes, counters, self.check)
        self._ranks: list[_Rank] = []
        try:
            for rank, ends in enumerate(self._sender.ends, start=1):
                config = RankConfig(
                    options=options,
                    toggles=toggles,
                    rank=rank,
                    ranks=ranks,
                    store=self.store,
                    ends=ends,
                    cores=cores,
                )
                self._ranks.append(_Rank(rank, _start(config)))
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> dict[str, int | None]:
        """By role."""
        hosts = {f"rank {each.number}": each.process.pid for each in self._ranks}
        return hosts | {f"device of rank {each.number}": each.device for each in self._ranks}

    def wait_until_up(self) -> None:
        for rank in self._ranks:
            up = self._hear(rank, BOOT_S)
            assert isinstance(up, Up)
            rank.up, rank.device = True, up.device

    def send(self, number: int, batch: Batch) -> None:
        """Tell them of a step, ahead of the first rank's own launch: theirs may block until all have
        launched it."""
        self._sender.send(number, batch)

    def drain(self) -> None:
        """Return once they have nothing left to do."""
        self._order(DRAIN)

    def begin_round(self) -> None:
        """Have them forget what their devices did so far."""
        self._order(BEGIN)

    def work(self) -> list[DeviceWork]:
        """The programs of each one's device since begin_round."""
        rows = [each.programs for each in self._order(COLLECT) if isinstance(each, Worked)]
        return [DeviceWork(len(each) // WORK_ROW_BYTES, each) for each in rows]

    def _order(self, what: str) -> list[FromRank]:
        """What each one answers."""
        self._sender.order(what)
        return [self._hear(rank, ANSWER_S) for rank in self._ranks]

    def check(self) -> None:
        """Raise what ended one of them, if anything did."""
        for rank in self._ranks:
            failure = rank.failure()
            if failure is not None:
                raise failure

    def blame(self, error: EngineError) -> EngineError:
        """Who is at fault where the first rank failed with `error`: itself, unless it waited for another one
        in vain. Whose device died because another one had gone is not at fault either."""
        if isinstance(error, BadSetting):
            return error
        if RANK_LOST not in str(error):
            return error if isinstance(error, RankFailed) else RankFailed(f"rank 0: {error}")
        with suppress(EngineError):
            self._sender.order(DRAIN)  # a host only notices that its device is gone when it uses it
        deadline = time.monotonic() + BLAME_S
        while time.monotonic() < deadline:
            for rank in self._ranks:
                failure = rank.failure()
                if failure is not None and RANK_LOST not in str(failure):
                    return failure
            time.sleep(0.02)
        alive = [rank for rank in self._ranks if rank.failure() is None and not rank.heard]
        return alive[0].silence() if alive else RankFailed(str(error))

    def stop(self) -> None:
        with suppress(EngineError):
            self._sender.order(STOP)
        for rank in self._ranks:
            try:
                rank.process.wait(STOP_S if rank.up else 0)
            except subprocess.TimeoutExpired:
                rank.process.kill()  # its device dies with it
                rank.process.wait()
            assert rank.process.stdout is not None
            rank.process.stdout.close()
        self._sender.close()
        os.close(self._store)

    def _hear(self, rank: _Rank, patience: float) -> FromRank:
        """The next thing that a rank says."""
        deadline = time.monotonic() + patience
        while not rank.heard:
            rank.hear(0.1)
            failure = rank.failure()
            if failure is not None:
                raise self.blame(failure)
            if time.monotonic() > deadline:
                raise rank.silence()
        return rank.heard.pop(0)


def _start(config: RankConfig) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "overlap_bench.engines.overlap.rank_process",
            msgspec.json.encode(config).decode(),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        bufsize=0,
        pass_fds=config.ends.inherited,
    )

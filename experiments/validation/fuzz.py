"""What bad input does: requests to both servers, files to every reader, values to every option.

    python -m experiments.validation.fuzz [TARGET ...] [--cases 100000]

A case is made from its target's name and its number alone, so any can be tried again (`--only NUMBER`), and a
target that was cut off goes on where it was, as long as the code is the same. A case fails where it ends in
something other than the project's own one line with a documented exit code (a server: an answer that is no
server's fault), or takes longer than 5 s twice in a row. A target fails where its memory grows by more than
128 MiB once it is warm.
"""

from __future__ import annotations

import gc
import re
import sys
import tempfile
from pathlib import Path
from random import Random
from time import perf_counter

import msgspec

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.fuzzing import commands, files, servers
from experiments.fuzzing.case import LIMIT_S, Broken, Gone, Open, Target, TooLong, within
from harness.common.machine import code

TARGETS: dict[str, Open] = {
    "serve": servers.engine,
    "mock": servers.mock,
    "files": files.opened,
    "commands": commands.opened,
}
WARM = 300  # cases after which everything is imported, and memory counts
GROWTH = 128 << 20  # bytes
SETTLED = 500  # cases between two looks at what only shows after many
KEPT = 50  # failures of a target that are described
SHOWN = 600  # characters of a case
STATE = command_line.ROOT / "results" / "fuzz"


class Failure(msgspec.Struct, frozen=True):
    number: int
    kind: str
    case: str
    seen: str


class Found(msgspec.Struct):
    """What a target's cases gave so far, the first `cases` of them."""

    code: str
    cases: int = 0
    seconds: float = 0.0
    ended: dict[str, int] = {}
    broken: dict[str, int] = {}
    failures: list[Failure] = []
    took: dict[str, float] = {}  # seconds, by what was tried
    slowest_s: float = 0.0
    again: int = 0  # that were too slow once, and not a second time
    rss_warm: int = 0  # bytes
    rss_end: int = 0

    @property
    def grew(self) -> int:
        return self.rss_end - self.rss_warm


def count(among: dict[str, int], what: str) -> None:
    among[what] = among.get(what, 0) + 1


def try_one(name: str, number: int, target: Target[object], found: Found) -> None:
    case = target.make(Random(f"{name}/{number}"))
    began = perf_counter()
    try:
        try:
            ended = limited(target, case)
        except TooLong:  # once more: the machine is shared, and what is used for the first time is imported
            found.again += 1
            began = perf_counter()
            ended = limited(target, case)
        count(found.ended, ended)
        kind = ended.partition(":")[0]
        found.took[kind] = found.took.get(kind, 0.0) + perf_counter() - began
    except (Exception, TooLong) as error:
        kind, seen = type(error).__name__, str(error)
        if isinstance(error, Broken):
            kind, seen = error.kind, error.seen
        elif isinstance(error, TooLong):
            kind, seen = "slow", f"twice more than {LIMIT_S:g} s"
        count(found.broken, kind)
        if len(found.failures) < KEPT:
            found.failures.append(
                Failure(number, kind, _without_places(str(case))[:SHOWN], _without_places(seen))
            )
        print(f"{name} {number}: {kind}: {seen[:300]}\n    {str(case)[:300]}", file=sys.stderr)
        if isinstance(error, Gone):
            raise
    found.slowest_s = max(found.slowest_s, perf_counter() - began)


def limited(target: Target[object], case: object) -> str:
    began = perf_counter()
    with within(LIMIT_S):
        ended = target.attempt(case)
    if perf_counter() - began > LIMIT_S:  # it may have swallowed the signal
        raise TooLong
    return ended


def settle(target: Target[object], number: int, found: Found) -> None:
    try:
        target.settle()
    except Broken as broken:
        count(found.broken, broken.kind)
        found.failures.append(Failure(number, broken.kind, "after it", broken.seen))
        print(f"after {number}: {broken.kind}: {broken.seen}", file=sys.stderr)
    gc.collect()
    found.rss_end = target.rss()
    if not found.rss_warm and number >= WARM:
        found.rss_warm = found.rss_end


def measure(name: str, cases: int, state: Path | None) -> Found:
    """All cases up to that many; those that `state` has are not tried again."""
    now = code()
    version = f"{now.commit} {now.changes}"
    found = Found(version)
    if state is not None and state.exists():
        before = msgspec.json.decode(state.read_bytes(), type=Found)
        found = before if before.code == version else found
    if found.cases >= cases:
        return found
    with TARGETS[name]() as target:
        found.rss_warm = 0  # another process
        for number in range(found.cases, cases):
            began = perf_counter()
            try_one(name, number, target, found)
            found.cases = number + 1
            if found.cases % SETTLED == 0 or found.cases == cases:
                settle(target, found.cases, found)
                if state is not None:
                    state.parent.mkdir(parents=True, exist_ok=True)
                    state.write_bytes(msgspec.json.encode(found))
            found.seconds += perf_counter() - began
    return found


def _without_places(text: str) -> str:
    """What is kept names no folder of this machine."""
    return re.sub(rf"{command_line.ROOT}/|{tempfile.gettempdir()}/tmp\w+/", "", text)


def row(name: str, found: Found) -> list[str]:
    broken = ", ".join(f"{times:,} {kind}" for kind, times in found.broken.items())
    return [
        name,
        f"{found.cases:,}",
        broken or "none",
        f"{found.seconds:,.0f} s",
        f"{60 * found.cases / max(1.0, found.seconds):,.0f}",
        f"{found.slowest_s:.1f} s",
        f"{found.rss_warm >> 20} → {found.rss_end >> 20} MiB" + (" (grew)" if found.grew > GROWTH else ""),
        found.code[:7],
    ]


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=100_000, help="of each target (100,000)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this one case of a target, kept nowhere")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if given.only is not None:
        for name in given.targets:
            with TARGETS[name]() as target:
                found = Found("")
                try_one(name, given.only, target, found)
                print(target.make(Random(f"{name}/{given.only}")), found.ended, sep="\n")
        return
    for name in given.targets or TARGETS:
        print(row(name, measure(name, given.cases, STATE / f"{name}.json")), file=sys.stderr)
    known = {name: STATE / f"{name}.json" for name in TARGETS}
    every = {
        name: msgspec.json.decode(path.read_bytes(), type=Found)
        for name, path in known.items()
        if path.exists()
    }
    write_result(
        __file__,
        title="Bad input: what each target did with it",
        header=[
            "target",
            "cases",
            "failures",
            "time",
            "cases a minute",
            "slowest case",
            "memory, warm → end",
            "commit",
        ],
        rows=[row(name, found) for name, found in every.items()],
        data=msgspec.to_builtins(every),
    )


if __name__ == "__main__":
    main()

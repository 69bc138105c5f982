"""Whether a delay that was planted is found.

    python -m experiments.validation.plants [PAIRS] [device|host]    10 at the device by default

A pair is one `bench aa --inject-delay 3%` and one `--inject-delay 0%`, of 8 trials each, about 4 minutes
together. Later calls add to the pairs of earlier ones. The mean TPOT is the primary: in closed loop its
rounds spread less than those of the median. At the host, overlap absorbs a delay.
results/reference/plants_4_rounds.md is an earlier series, with 4 rounds a boot instead of the default.
"""

from __future__ import annotations

from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import CELLS, bench, cells, earlier, kept
from overlap_bench.harness.analysis import mechanism
from overlap_bench.harness.analysis.plain import from_plain
from overlap_bench.harness.analysis.result import Comparison

RUN = (
    *("aa", "--variant", "overlap", "--set", "schedule=overlap", "--trials", "8"),
    *("--primary", "tpot_ms_mean"),
)


def measured(share: str, place: str, seed: int) -> dict[str, Any]:
    run = bench(*RUN, "--inject-delay", share, "--inject-at", place, "--seed", str(seed))
    comparison = run["comparison"]
    return {
        **kept(run),
        "plant": share,
        "achieved": mechanism.planted_share(from_plain(comparison, Comparison)),
        "seen": mechanism.plant_seen(from_plain(comparison, Comparison))
        if share != "0%"
        else run_slower(comparison),
    }


def run_slower(comparison: dict[str, Any]) -> bool:
    """Where nothing was planted, `slower` is a false alarm."""
    verdict: str = comparison["metrics"][comparison["primary"]]["verdict"]
    return verdict == "slower"


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("pairs", nargs="?", type=int, default=10, metavar="PAIRS")
    parser.add_argument("place", nargs="?", choices=("device", "host"), default="device")
    given = parser.parse_args()
    runs = earlier(__file__)
    for _ in range(given.pairs):
        for share in ("3%", "0%"):
            runs.append({**measured(share, given.place, len(runs)), "place": given.place})
            write_result(
                __file__,
                title=f"Planted delays, 8 blocks, mean TPOT: {seen(runs)}",
                header=["planted", "achieved", "seen", *CELLS],
                rows=[
                    [
                        f"{run['plant']} at the {run['place']}",
                        f"{run['achieved']:+.2%}",
                        "yes" if run["seen"] else "no",
                        *cells(run),
                    ]
                    for run in runs
                ],
                data=runs,
            )


def seen(runs: list[dict[str, Any]]) -> str:
    """As in: 3% at the device seen in 9 of 10, ..."""
    counts: dict[str, list[bool]] = {}
    for run in runs:
        counts.setdefault(f"{run['plant']} at the {run['place']}", []).append(run["seen"])
    return ", ".join(f"{what} seen in {sum(found)} of {len(found)}" for what, found in counts.items())


if __name__ == "__main__":
    main()

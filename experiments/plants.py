"""Whether a delay that was planted is found: `python -m experiments.plants [PAIRS]`, 10 by default.

A pair is one `bench aa --plant 3%` and one `--plant 0%`, of 8 blocks each, about 4 minutes together. Later
calls add to the pairs of earlier ones. The mean TPOT is the primary: in closed loop its rounds spread less
than those of the median. `python -m experiments.plants PAIRS host` plants at the host instead, where overlap
absorbs it. results/reference/plants_4_rounds.md is an earlier series, with 4 rounds a boot instead of the
default.
"""

from __future__ import annotations

import sys
from typing import Any

from experiments.record import write_result
from experiments.repeated import CELLS, bench, cells, earlier, kept, wanted
from harness import plants

RUN = (
    *("aa", "--variant", "overlap", "--set", "schedule=overlap", "--blocks", "8"),
    *("--primary", "tpot_ms_mean"),
)


def measured(share: str, place: str, seed: int) -> dict[str, Any]:
    run = bench(*RUN, "--plant", share, "--plant-at", place, "--seed", str(seed))
    comparison = run["comparison"]
    return {
        **kept(run),
        "plant": share,
        "achieved": plants.achieved(comparison),
        "seen": plants.seen(comparison) if share != "0%" else run_slower(comparison),
    }


def run_slower(comparison: dict[str, Any]) -> bool:
    """Where nothing was planted, `slower` is a false alarm."""
    verdict: str = comparison["metrics"][comparison["primary"]]["verdict"]
    return verdict == "slower"


def main() -> None:
    place = sys.argv[2] if len(sys.argv) > 2 else "device"
    runs = earlier("plants")
    for _ in range(wanted(10)):
        for share in ("3%", "0%"):
            runs.append({**measured(share, place, len(runs)), "place": place})
            write_result(
                "plants",
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

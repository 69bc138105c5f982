"""Whether a change of the decode step is found in the part where it was made.

    python -m experiments.step_parts [ROUNDS]    5 by default, about 6 minutes each

A round is three runs of `bench aa --variant pinned-h2d`, of 6 blocks each: 2% of a step planted at the host,
2% at the device, nothing. The loop is serial, so that no overlap absorbs a delay at the host. Later calls add
to the rounds of earlier ones. `right`: the interval of the host's part (step_ms_same_device) and that of the
device's (step_ms_same_host) hold what was planted there, which is 0 for one of them or for both. At 95%, both
do so in 90% of the runs, or a little more, by chance alone.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from experiments.record import write_result
from experiments.repeated import bench, earlier, wanted
from harness import metrics, plants

NAME = "step_parts"
RUN = ("aa", "--variant", "pinned-h2d")
PLANTS = (("2%", "host"), ("2%", "device"), ("0%", "host"))
PARTS = {"host": metrics.SAME_DEVICE, "device": metrics.SAME_HOST}


def measured(share: str, place: str, seed: int) -> dict[str, Any]:
    run = bench(*RUN, "--plant", share, "--plant-at", place, "--seed", str(seed))
    comparison = run["comparison"]
    rows = {name: comparison["metrics"][name] for name in ("tpot_ms_p50", *metrics.MATCHED)}
    return {
        **{name: run[name] for name in ("code", "seconds", "commit")},
        "plant": share,
        "place": place,
        "achieved": plants.achieved(comparison),
        "metrics": rows,
        "noise": [line for line in comparison["warnings"] if line.startswith("noise")],
    }


def right(run: dict[str, Any]) -> bool:
    """Whether each part's interval holds what was planted there."""
    planted = {part: run["achieved"] if part == run["place"] else 0.0 for part in PARTS}
    rows = {part: run["metrics"][name] for part, name in PARTS.items()}
    return all(rows[part]["ci_low"] <= share <= rows[part]["ci_high"] for part, share in planted.items())


def cell(row: dict[str, Any]) -> str:
    verdict = f" {row['verdict']}" if row["verdict"] else ""
    return f"{row['change']:+.2%} [{row['ci_low']:+.2%}, {row['ci_high']:+.2%}]{verdict}"


def half_width(runs: list[dict[str, Any]], name: str) -> str:
    widths = [(run["metrics"][name]["ci_high"] - run["metrics"][name]["ci_low"]) / 2 for run in runs]
    return f"±{median(widths):.2%}"


def main() -> None:
    runs = earlier(NAME)
    for _ in range(wanted(5)):
        for share, place in PLANTS:
            runs.append(measured(share, place, len(runs)))
            write_result(
                NAME,
                title=f"A delay planted in each step, 6 blocks: right in {sum(map(right, runs))} of {len(runs)} "
                f"runs; median interval {half_width(runs, 'tpot_ms_p50')} for TPOT p50, "
                f"{half_width(runs, metrics.SAME_DEVICE)} for the host's part of the step, "
                f"{half_width(runs, metrics.SAME_HOST)} for the device's",
                header=["planted", "achieved", "TPOT p50", "host's part", "device's part", "right", "wall", "commit"],
                rows=[
                    [
                        f"{run['plant']} at the {run['place']}",
                        f"{run['achieved']:+.2%}",
                        cell(run["metrics"]["tpot_ms_p50"]),
                        *(cell(run["metrics"][name]) for name in PARTS.values()),
                        "yes" if right(run) else "no",
                        f"{run['seconds']:.0f} s",
                        run["commit"],
                    ]
                    for run in runs
                ],
                data=runs,
            )  # fmt: skip


if __name__ == "__main__":
    main()

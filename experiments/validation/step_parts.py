"""Whether a change of the decode step is found in the part where it was made.

    python -m experiments.validation.step_parts [ROUNDS]    5 by default, about 6 minutes each

A round is three runs of `bench aa --variant pinned-h2d`, of 6 blocks each: 2% of a step planted at the host,
2% at the device, nothing. The loop is serial: no overlap absorbs a delay at the host, or turns one at the
device into exposed host time saved. Later calls add to the rounds of earlier ones. `right`: the interval of
the host's part (step_ms_same_device) and that of the device's (step_ms_same_host) hold what was planted
there, which is 0 for one of them or for both; 95% intervals do so in about 90% of the runs. `seen in`: the
parts whose interval excludes 0.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from harness.analysis import mechanism
from harness.analysis.result import Comparison, from_plain
from harness.metrics import definitions

RUN = (
    *("aa", "--variant", "pinned-h2d"),
    *("--primary", "tpot_ms_p50", "--secondary", definitions.SAME_DEVICE),
)
PLANTS = (("2%", "host"), ("2%", "device"), ("0%", "host"))
HEADER = ["planted", "achieved", "TPOT p50", "host's part", "device's part", "right", "seen in", "commit"]
PARTS = {"host": definitions.SAME_DEVICE, "device": definitions.SAME_HOST}


def measured(share: str, place: str, seed: int) -> dict[str, Any]:
    run = bench(*RUN, "--plant", share, "--plant-at", place, "--seed", str(seed))
    comparison = run["comparison"]
    rows = {name: comparison["metrics"][name] for name in ("tpot_ms_p50", *definitions.MATCHED)}
    return {
        **{name: run[name] for name in ("code", "seconds", "commit")},
        "plant": share,
        "place": place,
        "achieved": mechanism.planted_share(from_plain(comparison, Comparison)),
        "metrics": rows,
        "noise": [line for line in comparison["warnings"] if line.startswith("noise")],
    }


def right(run: dict[str, Any]) -> bool:
    """Whether each part's interval holds what was planted there."""
    planted = {part: run["achieved"] if part == run["place"] else 0.0 for part in PARTS}
    rows = {part: run["metrics"][name] for part, name in PARTS.items()}
    return all(rows[part]["ci_low"] <= share <= rows[part]["ci_high"] for part, share in planted.items())


def seen(run: dict[str, Any]) -> str:
    rows = {part: run["metrics"][name] for part, name in PARTS.items()}
    clear = [part for part, row in rows.items() if row["ci_low"] > 0 or row["ci_high"] < 0]
    return ", ".join(clear) or "neither"


def cell(row: dict[str, Any]) -> str:
    verdict = f" {row['verdict']}" if row["verdict"] else ""
    return f"{row['change']:+.2%} [{row['ci_low']:+.2%}, {row['ci_high']:+.2%}]{verdict}"


def half_width(runs: list[dict[str, Any]], name: str) -> str:
    widths = [(run["metrics"][name]["ci_high"] - run["metrics"][name]["ci_low"]) / 2 for run in runs]
    return f"±{median(widths):.2%}"


def title(runs: list[dict[str, Any]]) -> str:
    tpot, host, device = (half_width(runs, name) for name in ("tpot_ms_p50", *PARTS.values()))
    return (
        "A delay planted in each step of a serial loop, 6 blocks: "
        f"right in {sum(map(right, runs))} of {len(runs)} runs; median interval {tpot} for TPOT p50, "
        f"{host} for the host's part of the step, {device} for the device's"
    )


def main() -> None:
    runs = earlier(__file__)
    for _ in range(command_line.wanted(__file__, __doc__, "ROUNDS", 5)):
        for share, place in PLANTS:
            runs.append(measured(share, place, len(runs)))
            write_result(
                __file__,
                title=title(runs),
                header=HEADER,
                rows=[
                    [
                        f"{run['plant']} at the {run['place']}",
                        f"{run['achieved']:+.2%}",
                        cell(run["metrics"]["tpot_ms_p50"]),
                        *(cell(run["metrics"][name]) for name in PARTS.values()),
                        "yes" if right(run) else "no",
                        seen(run),
                        run["commit"],
                    ]
                    for run in runs
                ],
                data=runs,
            )


if __name__ == "__main__":
    main()

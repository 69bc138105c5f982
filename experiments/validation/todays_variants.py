"""The variants of today's claims, on a device that takes as long as an H100 with a model of 8B.

    python -m experiments.validation.todays_variants [NAME ...]    all that are not there yet

Each is one `bench run --variant NAME --pace llama3-8b-h100`. Their steps give a request more than one token,
or are of other kinds than decode, so they are decided in rounds. Later calls add to the runs of earlier ones;
a name that is given is measured again.
"""

from __future__ import annotations

from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.main_command import change, half_width

PACE = "llama3-8b-h100"
NAMES = (
    *("chunked-prefill", "pinned-chunks", "multi-step", "speculation", "overlap-speculation", "thread-d2h"),
    "consecutive-prefill",  # older, and decided in rounds as well
)
SHOWN = ("tpot_ms_mean", "ttft_ms_mean", "itl_token_ms_p99", "throughput_tok_s", "device_busy")
COUNTERS = {
    "prompt_chunks": "chunks of prompts a step",
    "tokens_past_end": "tokens past an end a step",
    "accepted_drafts": "drafts kept a step",
    "draft_tokens": "of drafts",
    "dropped_rows": "dropped rows a round",
    "d2h_pinned_copies": "copies of ids a step",
}


def measured(variant: str) -> dict[str, Any]:
    run = bench("run", "--variant", variant, "--pace", PACE)
    comparison = run["comparison"]
    found = {*SHOWN, "round_step_ms", comparison["primary"]}
    return {
        "variant": variant,
        "device": f"paced, {PACE}",
        **{name: run[name] for name in ("code", "seconds", "commit", "loop_sd")},
        "primary": comparison["primary"],
        "metrics": {name: comparison["metrics"][name] for name in found if name in comparison["metrics"]},
        "mechanism": {name: each for name, each in comparison["mechanism"].items() if name in COUNTERS},
        "blocks": comparison["trials"],
        "outputs": comparison["outputs"],
        "said": [line for line in comparison["warnings"] if line.startswith(("undecided", "pace"))],
    }


def row(run: dict[str, Any]) -> list[str]:
    metrics = run["metrics"]
    primary = metrics[run["primary"]]
    busy = metrics["device_busy"]
    return [
        run["variant"],
        f"{run['primary']} {primary['before']:.2f} → {primary['after']:.2f}",
        change(primary),
        f"±{half_width(primary):.1%}",
        primary["verdict"] or "–",
        *(change(metrics[name]) for name in SHOWN[:4]),
        f"{busy['before']:.1%} → {busy['after']:.1%}",
        "; ".join(
            f"{COUNTERS[name]} {each['before'] or 0:.3g} → {each['after'] or 0:.3g}"
            for name, each in run["mechanism"].items()
        ),
        f"{run['outputs']['identical']} of {run['outputs']['compared']}",
        f"{run['blocks']}, {run['seconds']:.0f} s",
        run["commit"],
    ]


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, []])
    asked = parser.parse_args().names
    runs = {run["variant"]: run for run in earlier(__file__)}
    for name in asked or [each for each in NAMES if each not in runs]:
        runs[name] = measured(name)
        ordered = [runs[each] for each in NAMES if each in runs]
        write_result(
            __file__,
            title=f"The variants of today's claims, emulated device, paced: {PACE}; 95% intervals",
            header=[
                *("variant", "decided on, ms", "change", "half-width", "verdict"),
                *("TPOT mean", "TTFT mean", "p99 ITL", "tokens/s", "device busy", "mechanism"),
                *("outputs equal", "blocks, wall", "commit"),
            ],
            rows=[row(each) for each in ordered],
            data=ordered,
        )


if __name__ == "__main__":
    main()

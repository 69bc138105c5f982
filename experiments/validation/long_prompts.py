"""What a long prompt does to the requests that decode: whole, and in chunks.

    python -m experiments.validation.long_prompts [TOKENS ...]    all that are not there yet: 64 256 448 896

On a device that takes as long as an H100 with a model of 8B (paced, emulated). Requests of 64 tokens arrive
at random, 10 a second, each behind a prompt of that length; `chunked-prefill` with chunks of 64 tokens. Each
length is one `bench run`.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from experiments.common import command_line
from experiments.common.record import FOLDER, write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.main_command import change
from harness.report.figures import style

PACE = "llama3-8b-h100"
LENGTHS = ("64", "256", "448", "896")
METRICS = {"itl_token_ms_p99": "p99 ITL, ms", "ttft_ms_mean": "TTFT, mean, ms"}


def measured(tokens: str) -> dict[str, Any]:
    flags = ("--pace", PACE, "--input-tokens", tokens, "--set", "max_context=1024", "--blocks", "6")
    run = bench("run", "--variant", "chunked-prefill", *flags)
    comparison = run["comparison"]
    wanted = (*METRICS, "tpot_ms_mean", "throughput_tok_s")
    return {
        "tokens": tokens,
        **{name: run[name] for name in ("seconds", "commit", "loop_sd")},
        "metrics": {name: comparison["metrics"][name] for name in wanted},
        "mechanism": comparison["mechanism"],
        "outputs": comparison["outputs"],
    }


def row(run: dict[str, Any]) -> list[str]:
    metrics = run["metrics"]
    cells = [run["tokens"]]
    for name in METRICS:
        cells += [f"{metrics[name]['before']:.1f} → {metrics[name]['after']:.1f}", change(metrics[name])]
    cells += [change(metrics["tpot_ms_mean"]), change(metrics["throughput_tok_s"])]
    return [*cells, f"{run['outputs']['identical']} of {run['outputs']['compared']}", run["commit"]]


def draw(runs: list[dict[str, Any]]) -> Figure:
    """Both arms of each metric, over the prompt's length."""
    with style.drawing():
        figure, panels = style.panels(7.0, (3.2,) * len(METRICS), beside=True)
        looks = style.looks(["whole", "in chunks of 64"])
        for axes, (name, title) in zip(panels, METRICS.items(), strict=True):
            for side, (label, look) in zip(("before", "after"), looks.items(), strict=True):
                points = [(float(run["tokens"]), run["metrics"][name][side]) for run in runs]
                style.line(axes, points, look, label=label)
            axes.set_title(title, loc="left")
            axes.set_xlabel("tokens of a prompt")
            axes.set_ylim(bottom=0)
        style.legend_below(figure, panels[0])
    return figure


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("lengths", nargs="*", metavar="TOKENS", choices=[*LENGTHS, []])
    asked = parser.parse_args().lengths
    runs = {run["tokens"]: run for run in earlier(__file__)}
    for tokens in asked or [each for each in LENGTHS if each not in runs]:
        runs[tokens] = measured(tokens)
        ordered = [runs[each] for each in LENGTHS if each in runs]
        write_result(
            __file__,
            title=f"Prompts whole and in chunks of 64, emulated device, paced: {PACE}; 95% intervals",
            header=[
                *("prompt", "p99 ITL, ms", "change", "TTFT mean, ms", "change", "TPOT mean", "tokens/s"),
                *("outputs equal", "commit"),
            ],
            rows=[row(each) for each in ordered],
            data=ordered,
        )
        draw(ordered).savefig(FOLDER / "long_prompts.png", dpi=100)


if __name__ == "__main__":
    main()

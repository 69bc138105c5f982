"""When speculation pays: by the device's time for a step, and by how many drafts are kept.

    python -m experiments.validation.speculation [PACE ...]    all that are not there yet: 5ms 10ms 20ms

On the paced emulated device, at batch 16 (closed loop). A step that verifies three drafts of each request
runs four times the rows of a decode step; a row adds 50 us to either. Three models of one shape, whose
weights are drawn more and more narrowly: the narrower, the more their text repeats itself, and the more
drafts are kept. Two runs a point: `speculation`, off against on; and `overlap-speculation`, whether the next
step waits until the host knows how many drafts were kept.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from engines.overlap.presets import PRESETS, TOKENIZER_FILE
from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import bench, earlier
from experiments.validation.main_command import change

PACES = ("5ms", "10ms", "20ms")
WIDTHS = (0.2, 0.05, 0.03)  # initializer_range: of micro-gpt2, of echo-gpt2, and narrower still
VARIANTS = ("speculation", "overlap-speculation")
SHAPE = ("--blocks", "4", "--rounds", "3", "--concurrency", "16", "--num-requests", "32")


def make_model(width: float, where: Path) -> Path:
    """A folder with micro-gpt2's shape, and weights of that standard deviation."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(**PRESETS["micro-gpt2"].config | {"initializer_range": width})
    folder = where / f"gpt2-{width}"
    GPT2LMHeadModel(config).save_pretrained(folder)
    shutil.copy(TOKENIZER_FILE, folder / "tokenizer.json")
    return folder


def measured(pace: str, width: float) -> dict[str, Any]:
    found: dict[str, Any] = {"pace": pace, "width": width, "variants": {}}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(width, Path(folder))
        for variant in VARIANTS:
            flags = ("--pace", f"decode={pace}+50us*batch,prefill=40ms", "--model", str(model), *SHAPE)
            run = bench("run", "--variant", variant, *flags)
            comparison = run["comparison"]
            found["variants"][variant] = {
                **{name: run[name] for name in ("seconds", "commit", "loop_sd")},
                "tpot": comparison["metrics"]["tpot_ms_mean"],
                "busy": comparison["metrics"]["device_busy"],
                "drafts": comparison["mechanism"]["draft_tokens"],
                "kept": comparison["mechanism"]["accepted_drafts"],
                "outputs": comparison["outputs"],
            }
    return found


def row(point: dict[str, Any]) -> list[str]:
    on, ahead = (point["variants"][variant] for variant in VARIANTS)
    outputs = [on["outputs"], ahead["outputs"]]
    return [
        f"{point['pace']} + 50 us a row",
        f"{3 * on['kept']['after'] / on['drafts']['after']:.1f} of 3",
        f"{on['tpot']['before']:.2f} → {on['tpot']['after']:.2f}",
        change(on["tpot"]),
        on["tpot"]["verdict"] or "–",
        change(ahead["tpot"]),
        ahead["tpot"]["verdict"] or "–",
        f"{ahead['busy']['before']:.1%} → {ahead['busy']['after']:.1%}",
        f"{sum(each['identical'] for each in outputs)} of {sum(each['compared'] for each in outputs)}",
    ]


def main() -> None:
    parser = command_line.parser(__file__, __doc__)
    parser.add_argument("paces", nargs="*", metavar="PACE", choices=[*PACES, []])
    asked = parser.parse_args().paces
    points = {(each["pace"], each["width"]): each for each in earlier(__file__)}
    wanted = [(pace, width) for pace in asked or PACES for width in WIDTHS]
    for place in wanted if asked else [each for each in wanted if each not in points]:
        points[place] = measured(*place)
        ordered = [points[pace, width] for pace in PACES for width in WIDTHS if (pace, width) in points]
        write_result(
            __file__,
            title="When speculation pays, by the device's step and by the drafts kept; batch 16, paced",
            header=[
                *("decode step", "drafts kept", "TPOT mean, ms", "drafts against none", "verdict"),
                *("going on before the host knows how many", "verdict", "device busy", "outputs equal"),
            ],
            rows=[row(each) for each in ordered],
            data=ordered,
        )


if __name__ == "__main__":
    main()

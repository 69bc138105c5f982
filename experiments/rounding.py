"""How far rounding moves a model's choice between its two likeliest tokens: `python -m experiments.rounding`.

The same tokens go through a preset alone, and in a batch of eight, in bfloat16. At each place the lead of the
likeliest token over the second is taken from both. This is what makes a near-tie (harness/divergences.py) as
wide as the model's own rounding. Some minutes: llama-1b is 2 GB of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.overlap.presets import load_model
from experiments.record import write_result

MODELS = ("tiny-gpt2", "gpt2", "llama-1b")
BATCH, LENGTH, VOCABULARY = 8, 48, 4096


def measured(name: str) -> dict[str, float]:
    """In logits; `turned` is the share of places at which the choice is another."""
    model = load_model(name, torch.bfloat16, torch.device("cpu"), seed=0)
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        together = model(ids).logits.float()
        alone = torch.cat([model(each[None]).logits.float() for each in ids])
    likeliest = together.topk(2, -1).indices
    moved = lead(together, likeliest) - lead(alone, likeliest)
    return {
        "largest": together.abs().max().item(),
        "sd": moved.std().item(),
        "most": moved.abs().max().item(),
        "turned": (together.argmax(-1) != alone.argmax(-1)).float().mean().item(),
    }


def lead(logits: Tensor, tokens: Tensor) -> Tensor:
    """By how many logits the first of two tokens leads: [batch, length, vocabulary], [batch, length, 2]."""
    first, second = logits.gather(-1, tokens).unbind(-1)
    return first - second


def main() -> None:
    torch.set_num_threads(1)
    found = {name: measured(name) for name in MODELS}
    write_result(
        "rounding",
        title="What rounding moves: the lead of the likeliest token, bfloat16, alone or in a batch of 8",
        header=["model", "largest logit", "SD, logits", "at most, logits", "choices turned"],
        rows=[
            [
                name,
                f"{each['largest']:.3g}",
                f"{each['sd']:.3f}",
                f"{each['most']:.3f}",
                f"{each['turned']:.1%}",
            ]
            for name, each in found.items()
        ],
        data=found,
    )


if __name__ == "__main__":
    main()

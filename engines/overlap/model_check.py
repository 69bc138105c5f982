"""Does a published model, on this engine's attention, say what its author's code says? Asked at load: it may
cap or scale logits, attend to a sink, keep a state besides its keys and values, look at the longest row of a
batch. Its tokens would be wrong, and nothing else would tell.

Two requests of different length run side by side, all but their last tokens as prompts and the last as a
decode, and each must come out as it does alone. The longer one is longer than every number of tokens after
which the model's configuration hints at something else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.overlap.attention import Paged, Pages, Prefill
from overlap_bench.engines.overlap.models.contract import Attend, Model, Shape, refusing

A_FEW_TOKENS = range(1, 9)
_BLOCK = 16

# How far apart logits may be, relative to the largest: each layer sums in another order. Two attention
# kernels put llama-1b, 22 layers, 0.07 apart in bf16.
LOGITS_APART = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.01}


def check_model(name: str, model: Model, dtype: torch.dtype, device: torch.device, max_context: int) -> None:
    """Raises BadSetting for a model that this engine can't run, or not as its author's code does."""
    requests = [
        torch.arange(length, device=device) % (model.shape.vocabulary - 1) + 1
        for length in _lengths(model.shape, max_context)
    ]
    with refusing(name):
        expected = [each for ids in requests if (each := model.reference(ids[None])) is not None]
        if not expected:
            return
        found = _side_by_side(name, model, requests, dtype, device)
    for ids, ours, theirs in zip(requests, found, expected, strict=True):
        apart = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if not apart < LOGITS_APART[dtype]:
            raise BadSetting(
                f"{name}: its logits differ by {apart:.2g} from transformers' own behind {len(ids)} tokens; "
                "it does something that this engine does not"
            )


def _lengths(shape: Shape, max_context: int) -> tuple[int, int]:
    """The lengths of a short request and of a long one."""
    few = len(A_FEW_TOKENS)
    last = max((each for each in shape.thresholds if each < max_context), default=few)
    return min(few, max_context), min(last + few, max_context)


@dataclass(slots=True)
class _Checked:
    """Another's attention, for keys and values of the shape that the cache was made for."""

    inner: Attend
    shape: Shape
    name: str

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        room = (self.shape.kv_heads, self.shape.width)
        for what, each in (("keys", key), ("values", value)):
            if (each.shape[1], each.shape[3]) != room:
                raise BadSetting(
                    f"{self.name}: its {what} are {each.shape[1]} heads of {each.shape[3]}, where its "
                    f"configuration and a paged cache have {room[0]} of {room[1]}"
                )
        if not 0 <= layer < self.shape.layers:
            raise BadSetting(f"{self.name}: its attention has layer {layer} of {self.shape.layers}")
        return self.inner.attend(layer, query, key, value, scale)


def _side_by_side(
    name: str, model: Model, requests: list[Tensor], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """The logits behind the last two tokens of each request [2, vocabulary], in a cache of its own."""
    shape, rows = model.shape, len(requests)
    most = max(len(ids) for ids in requests)
    blocks = -(-most // _BLOCK)
    room = (rows * blocks, _BLOCK, shape.kv_heads, shape.width)
    keys, values = (
        [torch.zeros(room, dtype=dtype, device=device) for _ in range(shape.layers)] for _ in range(2)
    )
    pages = Pages(keys, values, _BLOCK)
    firsts = torch.arange(rows, device=device)[:, None] * blocks * _BLOCK
    lasts = torch.tensor([len(ids) - 1 for ids in requests], device=device)

    # The padding lies behind a row's own tokens, where the decode writes over its first and sees no other.
    places = torch.arange(most, device=device).repeat(rows, 1)
    padded = torch.nn.utils.rnn.pad_sequence(requests, batch_first=True)
    prompts = places < lasts[:, None]
    work = Prefill(pages, (firsts + places).flatten())
    hidden = model.hidden(padded * prompts, places * prompts, _Checked(work, shape, name))
    numbers = torch.arange(rows, device=device)
    behind_prompts = model.logits(hidden[numbers, lasts - 1])

    visible = torch.arange(blocks * _BLOCK, device=device) <= lasts[:, None]
    bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, float("-inf"))
    gathered = (torch.zeros(room, dtype=dtype, device=device), torch.zeros(room, dtype=dtype, device=device))
    tables = torch.arange(rows * blocks, dtype=torch.int32, device=device)
    step = Paged(pages, firsts.flatten() + lasts, tables, bias[:, None, None], gathered)
    hidden = model.hidden(padded[numbers, lasts][:, None], lasts[:, None], _Checked(step, shape, name))
    behind_steps = model.logits(hidden[:, 0])
    return [torch.stack(each) for each in zip(behind_prompts, behind_steps, strict=True)]

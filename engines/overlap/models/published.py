"""Any Hugging Face causal language model that takes a registered attention function, on transformers'
code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.overlap.models import gpt2
from overlap_bench.engines.overlap.models.contract import Attend, Shape
from overlap_bench.engines.overlap.models.tensor_parallel import COLUMNS, ROWS, Group, Plan, shard
from overlap_bench.engines.presets.checkpoints import end_ids, load_model, rescaled_after

ATTENTION = "overlap-paged"
_TELLING = ("window", "chunk", "local_att", "original_")  # in the names of numbers of tokens


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    work: Attend,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention; [batch, length, heads, width] comes back."""
    if softcap is not None or s_aux is not None:
        what = "caps its attention scores" if softcap is not None else "attends to sinks"
        raise BadSetting(f"the model {what}; this engine's attention does not")
    return work.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)


class Published:
    """engines.overlap.models.contract.Model. Raises BadSetting for what can't be run here."""

    def __init__(
        self, name: str, dtype: torch.dtype, device: torch.device, seed: int, group: Group | None = None
    ) -> None:
        self._loaded = load_model(name, dtype, device, seed)
        self.root: torch.nn.Module = self._loaded
        if self._loaded.base_model is self._loaded:
            kind = type(self._loaded).__name__
            raise BadSetting(f"{name} is a {kind}, whose layers this engine can't find: it has no base_model")
        self._own_attention = self._loaded.config._attn_implementation
        self._loaded.set_attn_implementation(ATTENTION)
        config = self._loaded.config.get_text_config()
        config.pad_token_id = None  # else each forward searches its ids for padding, and warns
        heads = config.num_attention_heads
        self.shape = Shape(
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            positions=config.max_position_embeddings,
            eos=end_ids(self._loaded),
            window=getattr(config, "sliding_window", None),
            rescaled=rescaled_after(config),
            thresholds=tuple(_thresholds(config.to_dict())),
        )
        if group is not None:
            self.shape = group.part_of(self.shape, name)
            shard(self._loaded.base_model, _plan(config, name), group, name)
            for module in self._loaded.modules():
                if hasattr(module, "split_size"):  # GPT-2's: of queries, keys and values in one matrix
                    module.split_size //= group.ranks

    def reference(self, input_ids: Tensor) -> Tensor:
        self._loaded.set_attn_implementation(self._own_attention)
        try:
            out: Tensor = self._loaded(input_ids, use_cache=False, logits_to_keep=2).logits[0, -2:]
        finally:
            self._loaded.set_attn_implementation(ATTENTION)
        return out

    def hidden(self, input_ids: Tensor, position_ids: Tensor, work: Attend) -> Tensor:
        out = self._loaded.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, work=work
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self._loaded.get_output_embeddings()(hidden)
        return out


def _plan(config: PreTrainedConfig, name: str) -> Plan:
    """How several ranks divide a model: as its own configuration says. What it divides in other ways than
    into columns and rows this engine does not know how to sum."""
    if config.model_type == "gpt2":
        return gpt2.PLAN
    own = config.base_model_tp_plan or {}
    kinds = {"colwise": COLUMNS, "rowwise": ROWS, "replicated_with_grad_allreduce": None}
    if not own or not kinds.keys() >= set(own.values()):
        raise BadSetting(f"{name} is a {config.model_type}, which this engine can't divide among ranks")
    return {pattern: kind for pattern, how in own.items() if (kind := kinds[how]) is not None}


def _thresholds(values: dict[str, Any]) -> Iterator[int]:
    """The numbers of tokens in a configuration that sound as if something changed behind them."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _thresholds(value)
        elif type(value) is int and any(word in key for word in _TELLING):
            yield value

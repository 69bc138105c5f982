"""Any Hugging Face causal language model that takes a registered attention function, on transformers' code;
and the presets in transformers' form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from overlap_bench.engines.api import BadFile, BadSetting, first_line
from overlap_bench.engines.overlap.models import gpt2
from overlap_bench.engines.overlap.models.contract import Attend, Shape
from overlap_bench.engines.overlap.models.tensor_parallel import COLUMNS, ROWS, Group, Plan, shard
from overlap_bench.engines.overlap.models.weights import fill
from overlap_bench.engines.overlap.presets import END_OF_TEXT_ID, PRESETS, Preset, local_folder, widened

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
            eos=_as_tuple(self._loaded.generation_config.eos_token_id),
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


def load_model(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> PreTrainedModel:
    """The causal LM of that name on `device`, in evaluation mode; `seed` makes a preset's weights. BadSetting
    for one that does not exist, is incomplete, or takes no attention function."""
    if name in PRESETS:
        made = _make(PRESETS[name], seed)
        for weight in made.parameters():  # no buffers: a rotary embedding's frequencies stay float32
            weight.data = weight.data.to(dtype)
        return made.to(device).eval()

    source = local_folder(name) or name
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of a config.json that says something odd, transformers raises what it likes
        raise BadFile(f"cannot load {name}: {first_line(error)}") from error
    try:
        kind = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise BadSetting(f"{name} is not a causal language model but a {config.model_type}") from None
    if not kind._supports_attention_backend:
        raise BadSetting(f"{name} is a {kind.__name__}, which does not support custom attention functions")
    try:
        model, info = kind.from_pretrained(source, dtype=dtype, output_loading_info=True)
    except UnpicklingError as error:  # torch's own message advises to let the file run its code
        raise BadFile(
            f"cannot load the weights of {name}: its pickle is damaged, or holds more than tensors, and what "
            "that is might run code; take weights as safetensors"
        ) from error
    except (OSError, EOFError, SafetensorError) as error:
        raise BadFile(f"cannot load the weights of {name}: {first_line(error)}") from error
    if info["missing_keys"]:
        raise BadFile(f"{name} has no weights for {', '.join(sorted(info['missing_keys'])[:3])}")
    return model.to(device).eval()


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


def rescaled_after(config: PreTrainedConfig) -> int | None:
    """Tokens after which transformers takes a batch's longest row to choose all rows' rotary frequencies."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_kind = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    return min(
        (
            each["original_max_position_embeddings"]
            for each in per_kind
            if each.get("rope_type") == "longrope"
        ),
        default=None,
    )


def _thresholds(values: dict[str, Any]) -> Iterator[int]:
    """The numbers of tokens in a configuration that sound as if something changed behind them."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _thresholds(value)
        elif type(value) is int and any(word in key for word in _TELLING):
            yield value


def _make(preset: Preset, seed: int) -> PreTrainedModel:
    """In float32, on the CPU, with the weights that weights.fill gives it."""
    config = AutoConfig.for_model(preset.model_type, **preset.config)
    state = torch.random.get_rng_state()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.random.set_rng_state(state)
    fill(model.named_parameters(), preset, seed)
    return model


def save(preset: Preset, folder: Path, seed: int = 0) -> None:
    """Write one as a model's author would publish it: configuration, weights, tokenizer. For an engine that
    takes its model from a folder, or for several that are to run on the same weights for certain."""
    model = _make(preset, seed)
    model.save_pretrained(folder)
    _save_tokenizer(model.config.vocab_size, folder)


def save_without_weights(preset: Preset, folder: Path) -> None:
    """The same without the weights, which take long: enough to ask whether an engine could run it."""
    config = AutoConfig.for_model(preset.model_type, **preset.config)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    _save_tokenizer(config.vocab_size, folder)


def _save_tokenizer(vocabulary: int, folder: Path) -> None:
    tokenizer = widened(vocabulary)
    end = tokenizer.id_to_token(END_OF_TEXT_ID)
    published = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end
    )
    published.save_pretrained(folder)


def _as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    """A configuration may name one end-of-text id, several, or none."""
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)

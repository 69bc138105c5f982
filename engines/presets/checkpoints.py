"""A causal language model in transformers' form: loaded from a folder or the hub, or a preset made, and saved
as its author would publish it."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from overlap_bench.engines.api import BadFile, BadSetting, first_line
from overlap_bench.engines.presets import END_OF_TEXT_ID, PRESETS, Preset, local_folder, widened
from overlap_bench.engines.presets.weights import fill


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


def end_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """A configuration may name one end-of-text id, several, or none."""
    ids: int | list[int] | None = model.generation_config.eos_token_id
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


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

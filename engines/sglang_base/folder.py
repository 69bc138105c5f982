"""A preset as the folder that SGLang loads a model from, without weights: its transformers is older than
ours, so it is written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from overlap_bench.engines.presets import END_OF_TEXT_ID, Preset, widened

ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}


def save(preset: Preset, folder: Path) -> None:
    """Write its configuration and its tokenizer."""
    config = {
        "model_type": preset.model_type,
        "architectures": [ARCHITECTURES[preset.model_type]],
        **preset.config,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = widened(preset.config["vocab_size"])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.id_to_token(END_OF_TEXT_ID)
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")

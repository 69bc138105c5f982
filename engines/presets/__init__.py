"""Which model an engine runs: a built-in preset, or a Hugging Face causal LM by path or hub id.

Presets have seeded random weights and a byte-level BPE of their own, so that everything runs offline. Their
initializer_range is 0.05 to 0.2: with the default 0.02 a tied GPT-2 emits two to four distinct tokens
whatever it is fed, and would hide a stale id, a wrong position or a replaced KV block.

The tiny ones are deep and narrow: their weights (2.8 MiB in tiny-gpt2) nearly fit a core's own caches, yet a
step is long. Wider ones are read through the last-level cache in each step, which the machines of one host
share: steps of 4 layers x 256 wander by 10% from one second to the next (results/reference/proofs/boots.md).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_bench.engines.api import BadFile, check_preset, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")
END_OF_TEXT_ID = 0


@dataclass(frozen=True, slots=True)
class Preset:
    """A model made from a seed. `config` is what its transformers configuration class takes."""

    summary: str
    model_type: str
    config: dict[str, Any]


_IDS = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": END_OF_TEXT_ID}
_INIT = {"initializer_range": 0.2, **_IDS}

PRESETS = {
    "micro-gpt2": Preset(
        summary="GPT-2, 2 layers x 64, vocabulary 4096: for a device with a pace, computed well before it",
        model_type="gpt2",
        config={"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 1024, "vocab_size": 4096, **_INIT},
    ),
    "echo-gpt2": Preset(
        summary="micro-gpt2 with smaller weights: its text repeats itself, as drafts of speculation need",
        model_type="gpt2",
        config={
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 4,
            "n_positions": 1024,
            "vocab_size": 4096,
            **_INIT,
            "initializer_range": 0.05,  # of three drafts 1.1 are kept; of micro-gpt2's 0.2, 0.1
        },
    ),
    "tiny-gpt2": Preset(
        summary="GPT-2, 8 layers x 64, vocabulary 4096",
        model_type="gpt2",
        config={"n_layer": 8, "n_embd": 64, "n_head": 4, "n_positions": 1024, "vocab_size": 4096, **_INIT},
    ),
    "tiny-gpt2-32": Preset(
        summary="tiny-gpt2 with two heads of 32: vLLM's kernels on a CPU have none for 16",
        model_type="gpt2",
        config={"n_layer": 8, "n_embd": 64, "n_head": 2, "n_positions": 1024, "vocab_size": 4096, **_INIT},
    ),
    "tiny-llama": Preset(
        summary="Llama, 8 layers x 64, 4 heads over 2 KV heads, vocabulary 4096",
        model_type="llama",
        config={
            "num_hidden_layers": 8,
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "vocab_size": 4096,
            "tie_word_embeddings": False,
            **_INIT,
        },
    ),
    "gpt2": Preset(
        summary="GPT-2, the 124M shape (12 layers x 768, vocabulary 50257), random weights",
        model_type="gpt2",
        config={
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
            **_INIT,
            # At this width 0.2 makes each query attend to a single key: in bf16 a third of the tokens change.
            "initializer_range": 0.06,
        },
    ),
    "llama-1b": Preset(
        summary="Llama, the 1.1B shape of TinyLlama (22 layers x 2048, vocabulary 32000), random weights",
        model_type="llama",
        config={
            "num_hidden_layers": 22,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
            **_INIT,
            "initializer_range": 0.05,  # enough, as it is not tied; 0.2 is too much for so many layers
        },
    ),
}


# Shapes of published models, for an engine whose device is a clock: nobody makes their weights.
_LLAMA3 = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
    **_IDS,
}
SHAPES = {
    "llama3-8b": Preset(
        summary="Llama 3 8B: 32 layers x 4096",
        model_type="llama",
        config={
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            **_LLAMA3,
        },
    ),
    "llama3-70b": Preset(
        summary="Llama 3 70B: 80 layers x 8192",
        model_type="llama",
        config={
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            **_LLAMA3,
        },
    ),
}


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that belongs to a model: what a client encodes prompts with."""
    if name in PRESETS or name in SHAPES:
        return TOKENIZER_FILE
    folder = local_folder(name)
    if folder is not None:
        if not (folder / "tokenizer.json").is_file():
            raise BadFile(f"no tokenizer at {name}: there is no tokenizer.json in it")
        return folder / "tokenizer.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "tokenizer.json"))
    except OSError as error:
        raise BadFile(f"cannot fetch the tokenizer.json of {name}: {first_line(error)}") from error


def load_tokenizer(name: str, vocabulary: int) -> Tokenizer:
    """The engine's tokenizer. Ids beyond a preset's own 4096 tokens decode to a space and their number, so
    that a model with a larger vocabulary has a text for whatever it emits. BadFile for a tokenizer whose
    ids the model does not know."""
    from tokenizers import Tokenizer

    if name in PRESETS:
        return widened(vocabulary)
    path = tokenizer_file(name)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise BadFile(f"cannot read the tokenizer {path}: {first_line(error)}") from error
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocabulary:
        raise BadFile(
            f"the tokenizer of {name} does not fit it: its ids go up to {highest}, and the model's "
            f"vocabulary ends at {vocabulary - 1}"
        )
    return tokenizer


def widened(vocabulary: int) -> Tokenizer:
    """The presets' tokenizer, with a text for each id of a vocabulary."""
    from tokenizers import Tokenizer

    content = json.loads(TOKENIZER_FILE.read_text("utf-8"))
    known = content["model"]["vocab"]
    known.update({f"Ġ{token}": token for token in range(len(known), vocabulary)})
    return Tokenizer.from_str(json.dumps(content))


def local_folder(name: str) -> Path | None:
    """The folder of a local model; None for what can only be a hub id."""
    check_preset(name, PRESETS)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise BadFile(f"no model at {name}: there is no such folder")
        return None
    if not (folder / "config.json").is_file():
        raise BadFile(f"no model at {name}: there is no config.json in it")
    return folder


def rescaling(name: str, tokens: int) -> str:
    """Why longer contexts than those tokens are refused: keys from before them would be of other frequencies,
    and so would all of a row beside a longer one."""
    return (
        f"{name} changes its rotary frequencies after {tokens} tokens, for whole batches (longrope): set "
        "max_context to that or less"
    )

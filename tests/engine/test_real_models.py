"""Models with weights and a tokenizer of their own, from a folder; and what a bad one is answered with."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from overlap_bench.engines import api
from overlap_bench.engines.api import BadSetting
from overlap_bench.engines.overlap import SPEC
from overlap_bench.engines.overlap.model_check import check_model
from overlap_bench.engines.overlap.models import published
from overlap_bench.engines.presets import PRESETS, load_tokenizer
from overlap_bench.engines.presets.checkpoints import load_model
from overlap_bench.engines.transformers.base import TransformersEngine
from tests.support.in_process_engine import Collected, near_ties, serve, some_requests
from tests.support.refusals import refusal

VOCABULARY = 512
SETTINGS = SPEC.check({"schedule": "overlap", "launch": "inline", "h2d": "packed", "graph": "on"})
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 96}
MODELS = {
    "gpt2": ("gpt2", {"tie_word_embeddings": True}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "llama": ("llama", GROUPED | {"tie_word_embeddings": False}),
    "llama-tied": ("llama", GROUPED | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", GROUPED | {"tie_word_embeddings": False, "head_dim": 32}),
}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A byte-level BPE of other tokens than the presets'."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    made.save(str(path))
    return path


def save(folder: Path, tokenizer: Path, model_type: str, **changes: object) -> str:
    """A small model of that type with random weights, as its author would publish it."""
    config = AutoConfig.for_model(model_type, **(SMALL | changes))
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    return str(folder)


@pytest.fixture(scope="session")
def make(tmp_path_factory, tokenizer) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def model(name: str) -> str:
        if name not in made:
            model_type, changes = MODELS[name]
            made[name] = save(tmp_path_factory.mktemp(name), tokenizer, model_type, **changes)
        return made[name]

    return model


def requests_of(vocabulary: int) -> list[api.Request]:
    """The usual mixed lengths, with ids that a small model knows."""
    return [
        api.Request(each.id, [token % vocabulary for token in each.prompt], each.max_new_tokens)
        for each in some_requests(8)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_saved_model_equal_generate(device, make, name):
    requests = requests_of(VOCABULARY)
    tokens, _, _ = serve(device, SETTINGS, requests, model=make(name), max_batch_size=4)
    assert near_ties(make(name), requests, tokens) == 0


@pytest.mark.parametrize("today", [{"chunk": "on", "steps": "8"}, {"spec": "ngram", "accept": "device"}])
@pytest.mark.parametrize("name", MODELS)
def test_a_published_models_code_takes_mixed_steps_and_drafts(device, make, name, today):
    requests, settings = requests_of(VOCABULARY), SPEC.check(SETTINGS | today)
    tokens, _, _ = serve(device, settings, requests, model=make(name), max_batch_size=4, chunk_tokens=7)
    assert near_ties(make(name), requests, tokens) == 0


def test_a_saved_models_own_tokenizer_reads_and_writes(device, make, tokenizer):
    own = Tokenizer.from_file(str(tokenizer))
    asked = "the quick brown fox"
    tokens, events, _ = serve(device, SETTINGS, [api.Request(0, asked, 8)], model=make("llama"))
    as_ids = api.Request(0, own.encode(asked).ids, 8)
    assert near_ties(make("llama"), [as_ids], tokens) == 0
    known = [token for token in tokens[0] if token < own.get_vocab_size()]
    text = "".join(event.text for event in events if isinstance(event, api.Chunk))
    assert text.rstrip("�") == own.decode(known).rstrip("�") or len(known) < 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["tiny-llama", "qwen3"])
def test_half_precision_parts_from_generate_only_at_near_ties(device, make, record_property, name, dtype):
    model = make(name) if name in MODELS else name
    requests = requests_of(VOCABULARY)
    tokens, _, _ = serve(device, SETTINGS, requests, model=model, dtype=dtype, max_batch_size=4)
    found = near_ties(model, requests, tokens, getattr(torch, dtype))
    record_property("near_ties", f"{found} of {len(requests)}")


def test_a_generation_config_says_what_ends_a_text(device, make, tmp_path):
    """Published models name several there, and one in the configuration."""
    folder = shutil.copytree(make("llama"), tmp_path / "model")
    request = requests_of(VOCABULARY)[0]
    long = api.Request(0, request.prompt, 16)
    tokens, _, _ = serve(device, SETTINGS, [long], model=str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, tokens[0][5]]}))
    stopping = api.Request(0, request.prompt, 16, stop_on_eos=True)
    stopped, _, _ = serve(device, SETTINGS, [stopping], model=str(folder))
    assert stopped[0] == tokens[0][: tokens[0].index(tokens[0][5]) + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_presets_frequencies_are_float32_in_every_dtype_as_those_of_a_folder_are(make, dtype):
    for name in ("tiny-llama", make("llama")):
        model = load_model(name, dtype, torch.device("cpu"), seed=0)
        assert {each.dtype for each in model.parameters()} == {dtype}
        assert {each.dtype for name, each in model.named_buffers() if "inv_freq" in name} == {torch.float32}


# -- bad ones ---------------------------------------------------------------------------------------------


def refused(name: str) -> str:
    def load() -> None:
        model = load_model(name, torch.float32, torch.device("cpu"), seed=0)
        load_tokenizer(name, model.config.vocab_size)

    return refusal(load)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "-1",
        '{"model_type": "llama", "vocab_size": [1]}',
        '{"model_type": "llama", "head_dim": Infinity}',
    ],
)
def test_a_configuration_that_cannot_be_understood(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert refused(str(tmp_path)).startswith(f"cannot load {tmp_path}: ")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("pytorch_model.bin", pickle.dumps({"weight": print}, 2)),  # something to call, and no tensor
        ("pytorch_model.bin", b"garbage"),
        ("pytorch_model.bin", b""),
        ("model.safetensors", b"garbage"),
    ],
    ids=["a call", "a broken pickle", "nothing", "broken safetensors"],
)
def test_weights_that_are_not_only_tensors_are_refused_and_nobody_is_advised_to_trust_them(
    make, tmp_path, file, content
):
    folder = shutil.copytree(make("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(content)
    said = refused(str(folder))
    assert said.startswith(f"cannot load the weights of {folder}: ")
    assert "weights_only" not in said


def test_weights_that_are_incomplete(make, tmp_path):
    """transformers would make up the rest."""
    folder = shutil.copytree(make("llama-tied"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert refused(str(folder)).startswith(f"{folder} has no weights for model.layers.2.")


def test_a_tokenizer_that_does_not_fit_the_model(tmp_path, tokenizer):
    folder = save(tmp_path / "llama", tokenizer, "llama", vocab_size=200)
    assert refused(folder).startswith(f"the tokenizer of {folder} does not fit it: its ids go up to ")


def test_a_tokenizer_that_is_damaged(make, tmp_path):
    folder = shutil.copytree(make("llama"), tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    assert refused(str(folder)).startswith(f"cannot read the tokenizer {folder}/tokenizer.json: ")


LONGROPE = GROUPED | {
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 8,
        "long_factor": [float(4 + number) for number in range(8)],
    },
}
LLAMA4 = GROUPED | {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96}
MLA = {"num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 96}
DIFFERENT = {
    "granite": ("its logits differ by", {"logits_scaling": 8.0, "tie_word_embeddings": False}),
    "gemma2": ("the model caps its attention scores", {"head_dim": 16}),
    "mistral": ("looks back 64 tokens only: set max_context to that", GROUPED | {"sliding_window": 64}),
    "phi3": ("after 128 tokens, for whole batches (longrope): set max_context to that or less", LONGROPE),
    # A state besides keys and values: a prompt comes out right, and every token behind it wrong.
    "minimax": ("its logits differ by", GROUPED | {"head_dim": 16, "num_local_experts": 4}),
    "deepseek_v3": ("its keys are 4 heads of 192, where its configuration", MLA),
    "llama4_text": ("is a Llama4ForCausalLM, whose layers this engine can't find", LLAMA4),
    "roberta": ("does not run on this engine: TypeError: ", {"intermediate_size": 96}),
}


@pytest.mark.parametrize("model_type", DIFFERENT)
def test_a_model_that_does_something_else_is_refused_by_name(device, tmp_path, tokenizer, model_type):
    """It would run, and its tokens would be wrong."""
    message, changes = DIFFERENT[model_type]
    folder = save(tmp_path / model_type, tokenizer, model_type, **changes)
    assert message in refusal(lambda: serve(device, SETTINGS, [api.Request(0, [1, 2], 3)], model=folder))


@pytest.mark.parametrize(
    ("model_type", "changes", "tokens"),
    [("phi3", LONGROPE, 136), ("mistral", GROUPED | {"sliding_window": 64}, 72)],
)
def test_the_check_at_load_goes_beyond_what_a_configuration_hints_at(
    monkeypatch, tmp_path, tokenizer, model_type, changes, tokens
):
    """Where nothing here knows the hint: other code may read it under another name."""
    folder = save(tmp_path / model_type, tokenizer, model_type, **changes)
    known = published.Shape
    monkeypatch.setattr(published, "Shape", lambda **has: known(**(has | {"window": None, "rescaled": None})))
    loaded = published.Published(folder, torch.float32, torch.device("cpu"), seed=0)
    with torch.no_grad():
        check_model(folder, loaded, torch.float32, torch.device("cpu"), max_context=64)
        with pytest.raises(BadSetting, match=rf"transformers' own behind (8|{tokens}) tokens"):
            check_model(folder, loaded, torch.float32, torch.device("cpu"), max_context=512)


def test_below_its_threshold_longrope_gives_the_tokens_of_generate(device, tmp_path, tokenizer):
    folder = save(tmp_path / "phi3", tokenizer, "phi3", **LONGROPE)
    requests = [*requests_of(VOCABULARY), api.Request(8, list(range(1, 101)), 28)]
    tokens, _, _ = serve(device, SETTINGS, requests, model=folder, max_batch_size=4, max_context=128)
    assert near_ties(folder, requests, tokens) == 0


def test_the_engine_transformers_refuses_the_same_rows_beside_longer_ones(tmp_path, tokenizer):
    folder = save(tmp_path / "phi3", tokenizer, "phi3", **LONGROPE)
    with pytest.raises(BadSetting, match="after 128 tokens, for whole batches"):
        TransformersEngine(api.EngineOptions(model=folder), {"batching": "static"}).start(Collected())


def test_a_kv_cache_that_no_memory_holds_is_refused_with_its_size(device):
    with pytest.raises(BadSetting, match=r"a KV cache of 1,000,000,000 blocks takes .* set num_blocks, or"):
        serve(device, SETTINGS, [api.Request(0, [1, 2], 3)], num_blocks=10**9)


def test_ids_beyond_the_vocabulary_are_answered_with_one_line(device):
    requests = [api.Request(0, [1, 4096], 3), api.Request(1, [-1], 3)]
    _, events, _ = serve(device, SETTINGS, requests)
    message = "the prompt has ids beyond the model's vocabulary, 0 to 4095"
    assert events == [api.Error(0, message), api.Error(1, message)]


@pytest.mark.parametrize(("name", "parameters"), [("gpt2", 124_439_808), ("llama-1b", 1_100_048_384)])
def test_a_large_preset_has_the_shape_it_is_named_for(name: str, parameters: int) -> None:
    """The published counts of GPT-2 and TinyLlama; no memory is taken for them."""
    preset = PRESETS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(preset.model_type, **preset.config))
    assert model.num_parameters() == parameters

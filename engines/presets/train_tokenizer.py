"""How tokenizer.json was made: `python -m overlap_bench.engines.presets.train_tokenizer`.

A byte-level BPE over the English that Python carries with it, so that the presets need no download. The file
is committed, because the text differs between Python versions and a token must not.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"  # gets id 0


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.topics.values(), trainer)
    return tokenizer


if __name__ == "__main__":
    train().save(str(Path(__file__).with_name("tokenizer.json")), pretty=False)

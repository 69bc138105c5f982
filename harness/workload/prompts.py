"""The texts that requests ask: from a file, a string, or Python's own documentation, and their token ids."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from typing import TYPE_CHECKING

from overlap_bench.engines.api import BadFile, BadSetting, first_line

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

ENGLISH = "english"
OPENINGS = "openings"  # of the same passages: as different, and as cheap as one short prompt
OPENING_WORDS = 6  # 10 tokens of the presets' tokenizer, and 34 at most
OF_PYTHON = (ENGLISH, OPENINGS)  # no files

# Standard library modules whose docstrings are prose. A name that this Python lacks is skipped, so the
# passages depend on the version of Python (as the topics do anyway), and on nothing else.
DOCUMENTED = (
    "_pydatetime", "_pydecimal", "argparse", "calendar", "collections", "configparser", "contextlib",
    "difflib", "fractions", "functools", "heapq", "inspect", "ipaddress", "logging", "mailbox", "optparse",
    "pathlib", "pickle", "random", "shutil", "smtplib", "statistics", "subprocess", "tempfile", "textwrap",
    "threading", "turtle", "typing", "zipfile",
)  # fmt: skip
PASSAGE_CHARACTERS = range(60, 601)  # one to a few sentences: 15-150 tokens, fits the smallest context
CODE = re.compile(r">>>|::|\*\*|``|__|==|\|")

TRIES = 64  # texts looked at for one of exactly the wanted number of tokens
LEAD_WORDS = 4
SPARE_WORDS = 64  # found beyond those that are needed, so that leads of different rounds differ too


def texts(prompt: str | None, prompts: str | None, random: np.random.Generator) -> list[str]:
    """The texts to ask, in the order in which requests take them: `prompts` where given, else `prompt`."""
    if prompts in OF_PYTHON:
        passages = english() if prompts == ENGLISH else openings()
        return [passages[index] for index in random.permutation(len(passages))]
    if prompts is not None:
        from overlap_bench.harness.workload import prompt_files

        file = prompt_files.read(prompts)
        count = len(file.asked)
        order = random.permutation(count) if file.are_conversations else range(count)
        return [file.asked[index].prompt for index in order]
    if not prompt:
        raise BadSetting("no prompt: give a prompt, a file of prompts, or prompts=english or openings")
    return [prompt]


def are_conversations(prompts: object) -> bool:
    """Whether prompts are a file of conversations. Raises BadFile."""
    if not isinstance(prompts, str) or prompts in OF_PYTHON:
        return False

    from overlap_bench.harness.workload import prompt_files

    return prompt_files.read(prompts).are_conversations


@cache
def english() -> tuple[str, ...]:
    """Passages of English prose out of Python's documentation, each once, in a fixed order."""
    from pydoc_data.topics import topics

    sources = [text for _, text in sorted(topics.items())]
    sources += [docstring for module in DOCUMENTED for docstring in docstrings(module)]
    paragraphs = (" ".join(part.split()) for text in sources for part in re.split(r"\n\s*\n", text))
    return tuple(dict.fromkeys(filter(is_prose, paragraphs)))


@cache
def openings() -> tuple[str, ...]:
    """The first words of each passage of `english`, each once."""
    return tuple(dict.fromkeys(" ".join(passage.split()[:OPENING_WORDS]) for passage in english()))


def english_digest() -> str:
    """BLAKE2b-128 of all passages, hexadecimal: another one where Python's documentation is another."""
    return blake2b("\n".join(english()).encode(), digest_size=16).hexdigest()


def docstrings(module: str) -> Iterator[str]:
    """Every docstring of a standard library module, read from its source without importing it."""
    spec = find_spec(module)
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, SourceFileLoader) else None
    for node in ast.walk(ast.parse(source or "")):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is sentences rather than code, a table or a heading."""
    fits = len(paragraph) in PASSAGE_CHARACTERS
    return fits and paragraph[0].isupper() and paragraph.endswith(".") and not CODE.search(paragraph)


@cache  # every arm asks for it in every round
def load_tokenizer(path: str) -> Tokenizer:
    from tokenizers import Tokenizer  # here, not above: the load generator imports this package, and is light

    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
        raise BadFile(f"cannot read the tokenizer {path}: {first_line(error)}") from None


def leads(count: int, tokenizer: Tokenizer, random: np.random.Generator) -> list[str]:
    """So many openings of a few words, no two of which begin with the same token: a prompt behind one of
    them shares no prefix with a prompt behind another. Raises BadSetting where words are too few."""
    words: dict[int, str] = {}  # by their first token
    for token in random.permutation(tokenizer.get_vocab_size()).tolist():
        word = tokenizer.decode([token]).strip()
        if len(word) > 2 and word.isascii() and word.isalpha():
            first = tokenizer.encode(word, add_special_tokens=False).ids[0]
            words.setdefault(first, word)
        if len(words) == count + SPARE_WORDS:
            break
    if len(words) < count:
        raise BadSetting(
            f"the tokenizer has words for {len(words)} unique prompts, not for {count}; ask for fewer"
        )
    firsts = list(words.values())
    return [
        " ".join([first, *(firsts[index] for index in random.integers(0, len(firsts), LEAD_WORDS - 1))])
        for first in firsts[:count]
    ]


def ids_of_length(lead: str, passages: list[str], start: int, length: int, tokenizer: Tokenizer) -> list[int]:
    """Exactly `length` token ids: `lead`, passage `start`, joined with those after it, and cut."""
    count = 1
    while count <= 2 * length:  # a passage has a token at least, so this is always enough
        joined = [passages[(start + index) % len(passages)] for index in range(count)]
        ids: list[int] = tokenizer.encode(" ".join([lead, *joined] if lead else joined)).ids
        if len(ids) >= length:
            return ids[:length]
        count *= 2
    raise BadSetting(f"the tokenizer makes no tokens of the prompt {passages[start][:40]!r}")


def text_of_length(lead: str, passages: list[str], start: int, length: int, tokenizer: Tokenizer) -> str:
    """A text of exactly `length` tokens. A cut inside a word can make it come back as more or fewer tokens
    than were cut; then the passage after it is tried."""
    for first in range(start, start + min(TRIES, len(passages))):
        ids = ids_of_length(lead, passages, first % len(passages), length, tokenizer)
        text: str = tokenizer.decode(ids)
        if len(tokenizer.encode(text).ids) == length:
            return text
    raise BadSetting(f"found no text of exactly {length} tokens; with pretok every length is possible")

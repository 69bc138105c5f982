"""What the documents say can be followed: their links lead somewhere, their commands exist.

A document names files, headings, commands and options by hand. Renaming one of those breaks no import, so
nothing but a reader would find it.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap_bench.harness.cli import app as cli
from tests.support.places import ROOT


def committed(name: Path) -> bool:
    """Whether a file is the project's own: not hidden, not built, and of `results` only the reference."""
    hidden = any(part.startswith(".") or part == "build" for part in name.parts)
    return not hidden and (name.parts[0] != "results" or name.parts[1] == "reference")


DOCUMENTS = [name for name in sorted(ROOT.rglob("*.md")) if committed(name.relative_to(ROOT))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"```bash\n(.*?)```", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
# This project's former words for turns, waiting arms, injected delays and predictions: no reader knows them.
OURS = re.compile(
    r"\b(slice[sd]?|segments?|batons?|parked|plant(s|ed)?|foretold|foretells?)\b", re.IGNORECASE
)
# A docstring that begins so has no subject.
HANGING = re.compile(r'^ *"""(?:Of|Those|That) .*$', re.MULTILINE)
MERGE = re.compile(r"^(?:<{7} |={7}$|>{7} ).*", re.MULTILINE)  # what git leaves where two sides conflict
SOURCES = ("engines", "examples", "experiments", "harness", "overlap_bench", "tests")


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(document: Path) -> list[str]:
    """Each relative link of a document that leads to no file, or to no heading of it."""
    broken = []
    for link in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = document.parent / name if name else document
        there = target.exists()
        if there and heading:
            there = heading in map(anchor, HEADING.findall(target.read_text()))
        if not there:
            broken.append(link)
    return broken


def commands(document: Path) -> Iterator[list[str]]:
    """The words of each `bench` command that a document shows."""
    for fence in FENCE.findall(document.read_text()):
        for line in fence.splitlines():
            words = shlex.split(line, comments=True)
            names = [k for k, word in enumerate(words) if word.split("/")[-1] == "bench"]
            if names:
                yield words[names[-1] + 1 :]


def unknown_word(words: list[str]) -> str | None:
    """The first command or option of `words` that `bench` does not have."""
    name, *words = words
    if name not in cli.COMMANDS:
        return name
    command: Any = cli.built(name)
    while getattr(command, "commands", None):
        name, *words = words
        if name not in command.commands:
            return name
        command = command.commands[name]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    return next((word for word in words if word.startswith("-") and word not in known), None)


def missing_modules(document: Path) -> list[str]:
    """Each module of this project that a document runs and that is not there."""
    named = re.findall(
        r"python -m ((?:overlap_bench|engines|harness|experiments)[\w.]*\w)(?!\w|\.…)", document.read_text()
    )
    files = {name: ROOT.joinpath(*name.split(".")) for name in named}
    return [
        name
        for name, file in files.items()
        if not (file.with_suffix(".py").exists() or (file / "__main__.py").exists())
    ]


def words_of_our_own(text: str) -> list[str]:
    """The words of a document's prose that only this project's authors know."""
    return [found.group() for found in OURS.finditer(CODE.sub("", text))]


def short(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("house", ["engines", "harness"])
def test_a_page_that_code_names_is_there(house: str) -> None:
    named = {
        page
        for path in (ROOT / house).rglob("*.py")
        for page in re.findall(r"results/reference/[\w/-]+\.md", path.read_text())
    }
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_every_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document) == []


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if list(commands(path))], ids=short)
def test_every_command_shown_exists_with_its_options(document: Path) -> None:
    assert [(words, word) for words in commands(document) if (word := unknown_word(words))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_no_document_uses_a_word_of_our_own(document: Path) -> None:
    assert words_of_our_own(document.read_text()) == []


def test_no_document_holds_both_sides_of_a_merge() -> None:
    assert [short(each) for each in DOCUMENTS if MERGE.search(each.read_text())] == []


def test_every_docstring_begins_with_what_it_describes() -> None:
    sources = [name for folder in SOURCES for name in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 500
    hanging = [(short(name), line) for name in sources for line in HANGING.findall(name.read_text())]
    assert hanging == []


def test_a_word_of_our_own_is_found_in_prose_and_not_in_code() -> None:
    text = "A parked arm, in `sliced_aa` or [a table](plants.md).\n```text\nsegment\n```\nEach Slice waits."
    assert words_of_our_own(text) == ["parked", "Slice"]


# A table of results/reference names the command of the day on which it was made.
@pytest.mark.parametrize("document", [each for each in DOCUMENTS if "reference" not in each.parts], ids=short)
def test_every_module_shown_exists(document: Path) -> None:
    assert missing_modules(document) == []


def test_a_broken_link_a_missing_heading_an_unknown_option_and_a_missing_module_are_found(
    tmp_path: Path,
) -> None:
    document = tmp_path / "page.md"
    document.write_text(
        "# One, and two\n[a](#one-and-two) [b](#two) [c](page.md#one) [d](gone.py) [e](https://example.com)\n"
        "```bash\nbench runs\n.venv/bin/bench run --variants x  # said\n"
        "bench experiment run gil --rounds 3\n```\n"
    )
    assert broken_links(document) == ["#two", "page.md#one", "gone.py"]
    assert [unknown_word(words) for words in commands(document)] == ["runs", "--variants", None]
    document.write_text(
        "`python -m experiments.gpu.check` and `python -m experiments.gone`. python -m venv .venv"
    )
    assert missing_modules(document) == ["experiments.gone"]

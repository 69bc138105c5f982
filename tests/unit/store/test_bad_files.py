"""A file that is at fault is told apart from a setting that is: BadFile, one line that names it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from overlap_bench.engines import api
from overlap_bench.harness.plan import experiment_file
from overlap_bench.harness.store.files import decoded
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.studies.imports import files
from overlap_bench.harness.trace import trace_file
from overlap_bench.harness.workload import prompt_files, prompts, traces
from tests.support.places import ROOT
from tests.support.refusals import refusal

READERS: dict[str, Callable[[Path], object]] = {
    "manifest": lambda path: read_manifest(path.parent),
    "result of another tool": lambda path: files.read(str(path)),
    "trace of a device": trace_file.read,
    "trace of arrivals": lambda path: traces.read(str(path), 1),
    "prompts": lambda path: prompt_files.read(str(path)),
    "tokenizer": lambda path: prompts.load_tokenizer(str(path)),
    "experiment": experiment_file.read,
}


DEEP = b"[" * 100_000
CONTENTS = {
    "missing": None,
    "binary": b"\xff\0",
    "cut short": b"{",
    "no text inside": b'{"schema_version": 1, "run": "\xff"}',
    "deep": DEEP,
    "deep inside": b'{"a": ' + DEEP + b"]" * len(DEEP) + b"}",
    "deep TOML": b"a = " + DEEP,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_cannot_be_understood(tmp_path: Path, kind: str, content: bytes | None) -> None:
    path = tmp_path / "manifest.json"
    if content is not None:
        path.write_bytes(content)
    assert str(tmp_path) in refusal(lambda: READERS[kind](path), api.BadFile)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    claim = ROOT / "harness" / "plan" / "claims" / "sglang-launch-done.toml"
    for encoding in ("utf-8-sig", "utf-16"):
        marked = tmp_path / claim.name
        marked.write_text(claim.read_text(encoding="utf-8"), encoding=encoding)
        assert experiment_file.read(marked) == experiment_file.read(claim)
    assert decoded("a plan", b'\xef\xbb\xbf{"schema_version": 1}', dict[str, int]) == {"schema_version": 1}

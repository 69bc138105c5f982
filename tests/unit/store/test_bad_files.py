"""A file that is at fault is told apart from a setting that is: BadFile, one line that names it."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from overlap_bench.engines import api
from overlap_bench.harness.plan import experiment_file
from overlap_bench.harness.store.files import decoded, digest
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.studies.imports import files
from overlap_bench.harness.trace import trace_file
from overlap_bench.harness.workload import prompt_files, prompts, traces
from tests.support.places import ROOT

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
    with pytest.raises(api.BadFile) as refused:
        READERS[kind](path)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("read", [digest, prompt_files.read])
def test_a_file_that_is_missing(tmp_path: Path, read: Callable[[str], object]) -> None:
    with pytest.raises(api.BadFile, match="nowhere: No such file"):
        read(str(tmp_path / "nowhere"))


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    claim = ROOT / "harness" / "plan" / "claims" / "sglang-launch-done.toml"
    for encoding in ("utf-8-sig", "utf-16"):
        marked = tmp_path / claim.name
        marked.write_text(claim.read_text(encoding="utf-8"), encoding=encoding)
        assert experiment_file.read(marked) == experiment_file.read(claim)
    assert decoded("a plan", b'\xef\xbb\xbf{"schema_version": 1}', dict[str, int]) == {"schema_version": 1}


def test_a_byte_order_mark_is_no_part_of_a_trace(tmp_path: Path) -> None:
    kernel = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5, "dur": 9}'
    plain, marked = tmp_path / "plain.json", tmp_path / "marked.json"
    plain.write_text(f'{{"traceEvents": [{kernel}]}}', encoding="utf-8")
    marked.write_text(plain.read_text(), encoding="utf-8-sig")
    packed = tmp_path / "marked.json.gz"
    packed.write_bytes(gzip.compress(marked.read_bytes()))
    for path in (plain, marked, packed):
        assert trace_file.read(path).rows()["work"] == 1

"""The command `bench trace`, and files that are no traces."""

import json
from pathlib import Path

import pytest

from tests.support import nsys_export as made
from tests.support.in_process import bench, complaint
from tests.support.traces import SPLIT, refused, two


def test_the_command_prints_before_and_after_as_json(tmp_path: Path) -> None:
    two(tmp_path)
    pair = str(tmp_path / "before.sqlite"), str(tmp_path / "after.sqlite")
    result = json.loads(bench("trace", *pair, "--format", "json").out)
    assert {"schema_version", "before", "after", "parts", "warnings"} == set(result)
    assert result["after"]["rows"]["work"] == 5


def test_the_command_prints_tables_that_fit_a_pipe(tmp_path: Path) -> None:
    made.write(tmp_path / "one.sqlite", SPLIT, ("a_very_long_kernel_name" * 10,))
    stdout = bench("trace", str(tmp_path / "one.sqlite"), "--all").out
    # Tables keep to 120 columns; notes are lines of their own length.
    assert max(len(line) for line in stdout.splitlines() if line.startswith(" ")) <= 120
    for title in ("Devices", "Ranges", "Synchronizations", "Copies", "Kernels", "API calls", "Longest gaps"):
        assert title in stdout


def test_bad_input_is_one_line_and_exit_2(tmp_path: Path) -> None:
    none = tmp_path / "none.sqlite"
    assert complaint("trace", str(none)) == f"bench: cannot read the trace {none}: No such file or directory"
    assert "Is a directory" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.sqlite", b"", "empty.sqlite is empty"),
        ("notes.txt", b"kernel 1: 3 us\n", "is neither an SQLite export of nsys"),
        ("run.nsys-rep", b"\0NSIGHT", "nsys export --type sqlite --output run.sqlite run.nsys-rep"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert said in refused(tmp_path / name)

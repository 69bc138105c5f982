"""The command `bench trace`, and files that are no traces."""

import json
from pathlib import Path

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


def test_a_missing_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.sqlite")
    assert "Is a directory" in refused(tmp_path)
    (tmp_path / "empty.sqlite").touch()
    assert refused(tmp_path / "empty.sqlite").endswith("empty.sqlite is empty")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("kernel 1: 3 us\n")
    assert "neither an SQLite export of nsys" in refused(path)


def test_a_report_of_nsys_is_refused_with_the_command_that_exports_it(tmp_path: Path) -> None:
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"\x00\x01NSIGHT" * 10)
    assert refused(path).endswith("nsys export --type sqlite --output run.sqlite run.nsys-rep")

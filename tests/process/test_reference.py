"""What is committed under results/ is small, tells nothing of the machine that made it, and can be shown."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from overlap_bench.harness.analysis import across_runs, frames, stored
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.studies import factorial
from tests.support.in_process import bench
from tests.support.places import ROOT

MOST_FILES, MOST_BYTES = 80, 4_000_000
TEXT = (".json", ".md", ".csv", ".txt")
# From a root on, at least two names deep, so that neither "/v1" nor "before/after" nor a URL is one.
ABSOLUTE = re.compile(r"(?<![\w./:~-])(?:/[A-Za-z_][\w.-]*(?:/[\w.-]+)+|[A-Z]:\\+\w+)")
RUNS = sorted(
    path.parent.relative_to(ROOT) for path in (ROOT / "results" / "reference").rglob("manifest.json")
)


def committed(*where: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *where], cwd=ROOT, check=True, capture_output=True)
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).exists()]


def absolute_paths(file: Path) -> Iterator[str]:
    """Every absolute path that a file names."""
    if file.suffix in TEXT:
        yield from ABSOLUTE.findall(file.read_text())
    elif file.suffix == ".parquet":
        content = parquet.ParquetFile(file)
        yield from ABSOLUTE.findall(str(content.metadata.metadata))
        table = content.read()
        for column in table.columns:
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                yield from ABSOLUTE.findall("\n".join(filter(None, column.unique().to_pylist())))


def test_the_reference_stays_small() -> None:
    files = committed("results/reference")
    assert 50 < len(files) <= MOST_FILES
    weight = sum(file.stat().st_size for file in files)
    assert weight < MOST_BYTES, f"{weight / 1e6:.1f} MB; python -m tests.support.keep leaves trials out"


def test_no_committed_result_names_a_path_of_the_machine_that_made_it() -> None:
    assert {
        file.relative_to(ROOT): found for file in committed("results") if (found := [*absolute_paths(file)])
    } == {}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "/".join(run.parts[-2:]))
def test_every_run_shows_what_it_found(run: Path) -> None:
    """Also those whose blocks were left out: a summary for each arm but the first, and a value for each
    block."""
    folder = ROOT / run
    manifest = read_manifest(folder)
    arms = [arm.name for arm in manifest.design.arms]
    summary = stored.result(folder, manifest)
    assert len(summary.comparisons) == len(arms) - 1
    last = across_runs.compare([f"{folder}:{arms[0]}", f"{folder}:{arms[-1]}"]).result.comparisons
    assert last == summary.comparisons[-1:]
    values = frames.load(folder).values
    assert len(values) == manifest.design.blocks * len(arms)
    assert values["tpot_ms_p50"].notna().all()
    if manifest.design.factorial is not None:
        effects = factorial.read(folder)[0].factorial
        assert effects.metrics


def test_the_page_of_claims_is_what_the_results_beside_it_say() -> None:
    """bench variants --claims --format markdown > results/reference/claims.md"""
    page = ROOT / "results" / "reference" / "claims.md"
    assert bench("variants", "--claims", "--format", "markdown").out == page.read_text()

"""What all tests share: a marker for each folder, where runs are signed, and a profiler's real export."""

import gc
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from overlap_bench.harness.common.git import environment

# A test that fails for being slow says nothing on a shared machine. CI draws other examples each time.
settings.register_profile("no clock", deadline=None, max_examples=50)
settings.load_profile("no clock")


HERE = Path(__file__).resolve().parent
# Files that README's test command leaves to CI, where `--late` runs them: more than half of all CPU time, for
# what few changes touch. One that is named on the command line runs in any case.
LATE = {
    *(f"engine/test_{name}.py" for name in (
        "cuda_logic", "divergences", "evaluation", "guards", "overlap_run", "ranks", "real_models",
        "scoring", "transformers_engine", "vllm_engine",
    )),
    *(f"process/test_{name}.py" for name in (
        "action", "across_runs", "bisect", "bisect_trials", "borrowed", "broken_engine", "experiment",
        "factorial", "fuzz", "gate_refs", "gpu_check", "installed", "keep", "notebooks", "openai_run",
        "openai_turns", "profile", "ray", "real_run", "record_pace", "sensitivity", "several_arms", "sweep",
        "trust",
    )),
}  # fmt: skip
_left: list[int] = []  # how many tests each collection left to CI
_state = tempfile.TemporaryDirectory(prefix="bench-tests-")


def pytest_configure() -> None:
    """Runs are signed here with a secret of the tests' own, and what a git hook exports leads no test's git
    elsewhere. Modules copy the environment as they are read."""
    os.environ["XDG_STATE_HOME"] = _state.name
    for name in os.environ.keys() - environment().keys():
        del os.environ[name]


def pytest_unconfigure() -> None:
    _state.cleanup()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late", action="store_true", help="run the tests that are left to CI, and no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-m unit` asks for a folder's tests, `-m "not process"` leaves one's out. Tests that stand beside an
    experiment are unit tests."""
    for item in items:
        item.add_marker(item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else "unit")
    named = {(config.invocation_params.dir / each.split("::")[0]).resolve() for each in config.args}
    late = [str(item.path).removeprefix(f"{HERE}/") in LATE and item.path not in named for item in items]
    wanted = config.getoption("--late")
    left = [item for item, is_late in zip(items, late, strict=True) if is_late != wanted]
    if not left:
        return
    items[:] = [item for item, is_late in zip(items, late, strict=True) if is_late == wanted]
    config.hook.pytest_deselected(items=left)
    if not wanted:
        _left.append(len(left))
        if hasattr(config, "workeroutput"):  # one of xdist's processes, which tells the one that reports
            config.workeroutput["left"] = len(left)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of xdist's processes has ended."""
    if left := getattr(node, "workeroutput", {}).get("left"):
        _left.append(left)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _left:
        terminalreporter.write_line(f"{_left[-1]} tests were left to CI: pytest -n 3 --dist loadfile --late")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What is there before a file's tests lives for ever: torch, pandas and all tests are a million objects,
    and each full collection of garbage, as a device asks for, would look at them for a quarter of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def h100_export() -> Path:
    """A real export of Nsight Systems. It is not ours to carry, so it lies beside the checkout, or beside the
    one that this worktree belongs to."""
    checkouts, git = [HERE.parent], HERE.parent / ".git"
    if git.is_file():  # of a worktree: "gitdir: CHECKOUT/.git/worktrees/NAME"
        checkouts.append(Path(git.read_text().partition(": ")[2].strip()).parents[2])
    for checkout in checkouts:
        path = checkout.parent / "shared" / "fixtures" / "nsys" / "h100_2gpu_1s.sqlite"
        if path.is_file():
            return path
    pytest.skip("no ../shared/fixtures/nsys/h100_2gpu_1s.sqlite beside the checkout")


@pytest.fixture(scope="session", params=["", "DEAF"], ids=["listening", "deaf"])
def nvtx_tool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that a small NVTX tool looks on at; see nvtx_tool.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("tool") / "nvtx_tool.so"
    source = HERE / "support" / "nvtx_tool.c"
    kind = [f"-D{request.param}"] if request.param else []
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", *kind, "-o", library, source], check=True)
    return {"NVTX_INJECTION64_PATH": str(library)}

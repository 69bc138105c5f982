"""A second build of the vLLM that an interpreter has, whose scheduler takes longer."""

import os
import shutil
import subprocess
from pathlib import Path

PLANTED_US = "BENCH_PLANTED_US"  # in the environment of an arm: how much longer each step is scheduled
SCHEDULER = Path("v1", "core", "sched", "scheduler.py")
WHERE = "import pathlib, vllm; print(pathlib.Path(vllm.__file__).parent)"
PATCH = f'''

# -- what makes this build another one --------------------------------------------------------------------
def _later(schedule):
    import os
    from time import perf_counter

    planted_s = float(os.environ.get("{PLANTED_US}", "0")) / 1e6

    def scheduled(*given, **named):
        until = perf_counter() + planted_s
        while perf_counter() < until:
            pass
        return schedule(*given, **named)

    return scheduled


Scheduler.schedule = _later(Scheduler.schedule)
'''


def interpreter() -> str:
    """The one that has vLLM, as BENCH_VLLM says."""
    if python := os.environ.get("BENCH_VLLM"):
        return python
    raise SystemExit("BENCH_VLLM names no interpreter that has vLLM (engines/vllm/README.md)")


def build(python: str, folder: Path) -> str:
    """An environment in `folder` like that of `python`: the same packages but for vLLM, which is a tree of
    links to that one's with one file of its own. Its interpreter."""
    package = Path(subprocess.check_output([python, "-c", WHERE], text=True).splitlines()[-1])
    mine = folder / "build" / "vllm"
    shutil.copytree(package, mine, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    patched = mine / SCHEDULER
    source = patched.read_text()
    patched.unlink()
    patched.write_text(source + PATCH)
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "paths.pth").write_text(f"{mine.parent}\n{package.parent}\n")
    return str(folder / "env" / "bin" / "python")

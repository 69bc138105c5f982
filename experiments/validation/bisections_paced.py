"""Whether `bench bisect` finds the commit that made our own engine slower, in the minutes that it foretold.

    python -m experiments.validation.bisections_paced [RUNS]    the next one by default, up to 12 minutes each

A fixed list of 13: 32 commits, one of which keeps the host busy for 2% of a step's pace (five times), or none
(five times), or 1% (three times), at a place that is drawn. Each has a repository made for it, of real
commits, in results/bisections/NUMBER. A run that was interrupted is gone on with; one whose minutes are up
is what it says then.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import earlier
from overlap_bench.harness.common.git import environment

EFFECTS = (0.02,) * 5 + (0.0,) * 5 + (0.01,) * 3
COMMITS = 32
PACE_MS, MINUTES = 10, 12
FOLDER = command_line.ROOT / "results" / "bisections"
CHANGED = Path("engines", "overlap", "loop.py")
AT = "        batch = self.scheduler.schedule()\n"
BUSY = """        until = perf_counter_ns() + {ns}
        while perf_counter_ns() < until:
            pass
"""
IDENTITY = ("-c", "user.name=example", "-c", "user.email=example@example.org")
HEADER = [
    "a commit is slower by", "said", "posterior", "found of it", "SD of a trial", "trials", "minutes",
    "foretold", "commit of bench",
]  # fmt: skip


def git(where: Path, *arguments: str) -> bytes:
    done = subprocess.run(
        ["git", *IDENTITY, *arguments], cwd=where, env=environment(), check=True, stdout=subprocess.PIPE
    )
    return done.stdout


def repository(where: Path, number: int, effect: float) -> int:
    """This project as it is committed, in COMMITS commits more; the place of the one that is slower."""
    place = int(np.random.default_rng([2026, number]).integers(1, COMMITS + 1))
    where.mkdir(parents=True)
    packed = git(
        command_line.ROOT, "archive", "HEAD", "overlap_bench", "engines", "harness", "pyproject.toml"
    )
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(where, filter="data")
    git(where, "init", "--quiet")
    file = where / CHANGED
    text = file.read_text()
    assert text.count(AT) == 1
    slower = text.replace(AT, AT + BUSY.format(ns=round(effect * PACE_MS * 1e6)))
    for each in range(COMMITS + 1):
        file.write_text((slower if effect and each >= place else text) + f"\n# {each}\n")
        git(where, "add", "--all")
        git(where, "commit", "--quiet", "--message", f"commit {each}")
        git(where, "tag", f"v{each}")
    return place


def measured(number: int) -> dict[str, Any]:
    """One run, from its start or from where it was interrupted."""
    folder, effect = FOLDER / str(number), EFFECTS[number]
    where, out, note = folder / "repository", folder / "out", folder / "place.json"
    if not note.exists():
        shutil.rmtree(folder, ignore_errors=True)
        note.write_text(json.dumps(repository(where, number, effect)))
    place = json.loads(note.read_text())
    begun = [each.parent for each in out.glob("*/bisect.json")]
    asked = ["--resume", str(begun[0])] if begun else [
        *("--engine", "overlap", "--set", "schedule=serial", "--pace", f"{PACE_MS}ms", "--seed", str(number)),
        *("--good", "v0", "--bad", f"v{COMMITS}", "--out", str(out)),
    ]  # fmt: skip
    command = [sys.executable, "-P", "-m", "overlap_bench", "bisect", *asked]
    done = subprocess.run(
        [*command, "--max-minutes", str(MINUTES), "--format", "json"],
        cwd=where,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(command_line.ROOT)},
    )
    if not done.stdout:
        raise SystemExit(f"{folder} ended with {done.returncode}; the next call goes on with it")
    found = json.loads(done.stdout)
    kept = ("verdict", "posterior", "effect", "ci_low", "ci_high", "sd", "trials", "minutes", "foretold")
    shutil.rmtree(where)
    order = [each["commit"] for each in found["commits"]]
    revision = git(command_line.ROOT, "rev-parse", "--short", "HEAD").decode().strip()
    return {
        "slower": effect,
        "place": place,
        "named": order.index(found["culprit"]) + 1 if found["culprit"] else None,
        "changes": len(found["changes"]),
        "commit": revision,
        **{name: found[name] for name in kept},
    }  # fmt: skip


def cells(run: dict[str, Any]) -> list[str]:
    right = run["named"] == run["place"] and run["changes"] == 1
    said = {"found": "the commit" if right else "another commit"}.get(run["verdict"], run["verdict"])
    foretold = run["foretold"]
    return [
        f"{run['slower']:.0%}" if run["slower"] else "none",
        said,
        f"{run['posterior']:.1%}" if run["verdict"] != "nothing to find" else "",
        f"{run['effect']:+.2%} [{run['ci_low']:+.2%}, {run['ci_high']:+.2%}]",
        f"{run['sd']:.2%}",
        str(run["trials"]),
        f"{run['minutes']:.1f}",
        "" if foretold is None else f"{foretold['minutes'][1]:.1f} ({foretold['trials'][1]} trials)",
        run["commit"],
    ]


def main() -> None:
    wanted = command_line.wanted(__file__, __doc__, "RUNS", 1)
    runs = earlier(__file__)
    for number in range(len(runs), min(len(runs) + wanted, len(EFFECTS))):
        runs.append(measured(number))
        write_result(
            __file__,
            title=f"Bisections of {COMMITS} commits of our own engine at a pace of {PACE_MS} ms: {len(runs)} "
            f"of {len(EFFECTS)} runs",
            header=HEADER,
            rows=[cells(each) for each in runs],
            data=runs,
        )


if __name__ == "__main__":
    main()

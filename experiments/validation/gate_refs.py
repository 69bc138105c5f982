"""The gate on two git refs of the example.

    python -m experiments.validation.gate_refs [PAIRS]    5 by default

The base is examples/own_engine as it is; one head has steps 5% longer, the other only a comment more. Each
gate run takes about half a minute. Later calls add to the runs of earlier ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import CELLS, bench, cells, earlier, kept
from overlap_bench.harness.common.git import environment

EXAMPLE = command_line.ROOT / "examples" / "own_engine"
RUN = ("gate", "--engine", "paced", "--no-pretok", "--max-regression", "2%", "--base-ref", "base")
HEADS = {"slower": "5% slower", "tidied": "no change"}


def repository(folder: Path) -> Path:
    """The example with its three branches, installed for whoever has it on the path."""
    engine = folder / "paced_engine.py"
    shutil.copy(EXAMPLE / engine.name, engine)
    text = engine.read_text()
    contents = {
        "base": text,
        "slower": text.replace("STEP_US = 2000", "STEP_US = 2100"),
        "tidied": text + "\n# tidied\n",
    }
    assert len(set(contents.values())) == len(contents)
    identity = ("-c", "user.name=example", "-c", "user.email=example@example.org")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, env=environment(), check=True)
    for branch, content in contents.items():
        engine.write_text(content)
        for command in (("add", engine.name), ("commit", "--quiet", "-m", branch), ("branch", branch)):
            subprocess.run(["git", *identity, *command], cwd=folder, env=environment(), check=True)
    information = folder / "paced_engine-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: paced-engine\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[bench.engines]\npaced = paced_engine:SPEC\n")
    return folder


def main() -> None:
    runs: list[dict[str, Any]] = earlier(__file__)
    with tempfile.TemporaryDirectory() as folder:
        where = repository(Path(folder))
        own = str(command_line.ROOT)
        os.environ["PYTHONPATH"] = os.pathsep.join([own, str(where), os.environ.get("PYTHONPATH", "")])
        for _ in range(command_line.wanted(__file__, __doc__, "PAIRS", 5)):
            for head in HEADS:
                run = bench(*RUN, "--head-ref", head, "--seed", str(len(runs)), where=where)
                (metric,) = run["gate"]["metrics"].values()
                runs.append({**kept(run), "head": head, "gate": metric})
                counts = ", ".join(
                    f"{what}: exit {sorted(each['code'] for each in runs if each['head'] == head)}"
                    for head, what in HEADS.items()
                )
                write_result(
                    __file__,
                    title=f"Gate at 2% on two refs of examples/own_engine; {counts}",
                    header=["head", "exit", "gate", "at best", "at worst", *CELLS],
                    rows=[
                        [
                            HEADS[each["head"]],
                            str(each["code"]),
                            each["gate"]["verdict"],
                            f"{each['gate']['best']:+.2%}",
                            f"{each['gate']['worst']:+.2%}",
                            *cells(each),
                        ]
                        for each in runs
                    ],
                    data=runs,
                )


if __name__ == "__main__":
    main()

"""What the baton costs an engine that is not taking turns.

    python -m experiments.validation.baton_cost    three minutes

`bench gate` of two refs of this project, in rounds of its own workload, where nobody takes turns: the base
has no word of turns in what an engine calls between two steps, the head is as it is. A serial loop, on a
device whose step takes 10 ms: there, what the host does more is seen in full.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from experiments.common import command_line
from experiments.common.record import write_result
from experiments.common.repeated_runs import CELLS, bench, cells, kept

# Of engines/host.py: what an engine calls between two steps, with the baton and without.
WITHOUT = {
    """        if self.turning:
            assert self.turns is not None
            self.turns.between_steps(engine, idle=timeout != 0)
        elif timeout != 0:
""": """        if timeout != 0:
""",
    """        if not self._deliver(engine):
            return False
        return self._park(engine) if self.turning else True
""": """        return self._deliver(engine)
""",
}
RUN = (
    *("gate", "--engine", "overlap", "--set", "schedule=serial", "--pace", "10ms"),
    *("--metric", "tpot_ms_p50", "--max-regression", "1%", "--blocks", "12"),
    *("--base-ref", "without", "--head-ref", "main"),
)


def repository(folder: Path) -> Path:
    """This project with both branches."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(command_line.ROOT), str(folder)], check=True)
    host = folder / "engines" / "host.py"
    text = host.read_text()
    for found, put in WITHOUT.items():
        assert text.count(found) == 1, found
        text = text.replace(found, put)
    identity = ("-c", "user.name=example", "-c", "user.email=example@example.org")
    for command in (("switch", "-q", "-C", "main"), ("switch", "-q", "-c", "without")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    host.write_text(text)
    subprocess.run(["git", *identity, "commit", "-aqm", "without the baton"], cwd=folder, check=True)
    return folder


def main() -> None:
    command_line.parser(__file__, __doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = bench(*RUN, where=repository(Path(folder) / "project"))
    found = kept(run)
    write_result(
        __file__,
        title=f"TPOT p50 with the baton against without, nobody taking turns: {found['verdict']}",
        header=["TPOT p50, ms", *CELLS],
        rows=[[f"{found['before']:.3f}", *cells(found)]],
        data={"run": found, "warnings": run["comparison"]["warnings"]},
    )


if __name__ == "__main__":
    main()

"""What tracing costs: one range of a phase, and its NVTX part, without and with a tool that looks on
(tests/nvtx_tool.c, which does nothing): `python -m experiments.tracing_cost`.

What all of it costs a step is a comparison of its own, `recorder` of experiments.variants: it is shown here
as it was measured last.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from timeit import repeat

from experiments.record import FOLDER, write_result

CALLS, REPEATS = 100_000, 15
TOOL = Path(__file__).parents[1] / "tests" / "nvtx_tool.c"
SETUP = """
from time import perf_counter_ns
import nvtx
from engines.overlap.recorder import H2D, NoRecorder, Recorder, Tracer
from engines.tracing import open_ranges
from engines.api import PHASES
domain = nvtx.get_domain("cost")
attributes = domain.get_event_attributes(message="h2d", category="h2d")
ranges = open_ranges("cost too", PHASES)
off, records, tracer = NoRecorder(), Recorder(), Tracer()
for each in (records, tracer):
    each.begin_round(0)
    each.add_step(0, "decode", 1, 1, 0)
"""
STATEMENTS = {
    "two stamps": "perf_counter_ns(); perf_counter_ns()",
    "recorder off": "off.end(H2D, 0, off.begin(H2D, 0))",
    "step records": "records.end(H2D, 0, records.begin(H2D, 0))",
    "step records and NVTX": "tracer.end(H2D, 0, tracer.begin(H2D, 0))",
    "NVTX alone, payload and all": "ranges.push(H2D, 0); ranges.pop()",
    "nvtx, push_range and pop_range": "domain.push_range(attributes); domain.pop_range()",
    "nvtx, annotate": "with nvtx.annotate('h2d', domain='cost', category='h2d', payload=0): pass",
}
UNTOOLED = ("NVTX alone, payload and all", "step records and NVTX")  # not made where no tool is attached


def nanoseconds(tooled: bool) -> dict[str, float]:
    """The fastest of REPEATS, per statement, in this process."""
    space: dict[str, object] = {}
    exec(SETUP, space)
    return {
        name: min(repeat(statement, globals=space, number=CALLS, repeat=REPEATS)) / CALLS * 1e9
        for name, statement in STATEMENTS.items()
        if tooled or name not in UNTOOLED
    }


def in_a_process(tool: str | None) -> dict[str, float]:
    environment = {**os.environ, "NVTX_INJECTION64_PATH": tool or ""}
    command = [sys.executable, "-m", "experiments.tracing_cost", "tooled" if tool else "untooled"]
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(out)
    return found


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(nanoseconds(sys.argv[1] == "tooled")))
        return
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/tool.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, TOOL], check=True)
        untooled, tooled = in_a_process(None), in_a_process(library)
    rows = [
        [name, f"{untooled[name]:.0f}" if name in untooled else "not made", f"{tooled[name]:.0f}"]
        for name in STATEMENTS
    ]
    step = next(
        row for row in json.loads((FOLDER / "variants.json").read_text())["rows"] if row[0] == "recorder"
    )
    rows.append([f"all of it, on a step: {step[3]} {step[4]}, {step[5]} (commit {step[9]})", "", ""])
    write_result(
        "tracing_cost",
        title="What one range costs, ns",
        header=["begin and end of", "no tool", "a tool that does nothing"],
        rows=rows,
        data={"untooled_ns": untooled, "tooled_ns": tooled, "step": step},
    )


if __name__ == "__main__":
    main()

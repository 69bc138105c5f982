"""`bench profile`: a short window of steady decode of each arm, looked at closely; alone, or (nsys) each arm
in a process below Nsight Systems. That disturbs what is looked at, so nothing here is a measurement: a
profile has a folder of its own kind, which nothing that reads runs mistakes for one."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from overlap_bench.engines import api
from overlap_bench.engines.tracing import WINDOW, WINDOW_DOMAIN
from overlap_bench.harness.common import processes
from overlap_bench.harness.common.machine import code, fingerprint, versions
from overlap_bench.harness.common.processes import Child, postponed, undisturbed
from overlap_bench.harness.plan.design import Arm, Design, round_seed
from overlap_bench.harness.run import records
from overlap_bench.harness.run.hosts import RunFailed, environment
from overlap_bench.harness.run.session import Booted, Session
from overlap_bench.harness.run.trial import least_context, planned, warmup
from overlap_bench.harness.store.files import PROFILE, PROFILE_FILE, SCHEMA_VERSION, write_bytes, write_json
from overlap_bench.harness.store.manifest import whole_or_none, without_places
from overlap_bench.harness.trace import picture
from overlap_bench.harness.trace.chrome_export import chrome_trace
from overlap_bench.harness.trace.timeline import Timeline, timeline

PROFILED_ARM = "overlap_bench.harness.studies.profiled_arm"
STEPS = 24  # of the window
FEWEST_STEPS = 2  # from the start of a step on the device to the next one's: what a picture shows
CAPTURED = ".captured"
REPORT, EXPORT = ".nsys-rep", ".sqlite"
RANGE = f"{WINDOW}@{WINDOW_DOMAIN}"
BEGAN = "Capture range started"  # what nsys prints then
TRACE = ".trace.json"
PICTURES = ("steps.png", "steps.svg")

Say = Callable[[str], object]


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """One arm: what it did in the window, and what its engine says of itself."""

    timeline: Timeline
    description: api.Description


class ProfiledArm(msgspec.Struct, frozen=True, kw_only=True):
    """All that harness.studies.profiled_arm needs, as JSON. `design` has one arm."""

    design: Design
    steps: int
    file: str  # that gets the Captured, as msgpack


@dataclass(frozen=True, slots=True)
class Nsys:
    path: str
    graph_trace: str


def profile(
    design: Design, steps: int, nsys: Nsys | None, results: Path, say: Say
) -> tuple[list[Path], Path]:
    """Profile every arm into a new folder under `results`: the traces, one per arm, that an analysis reads,
    and the picture. Raises BadSetting, RunFailed, WriteFailed; a profile that is not finished leaves no
    folder."""
    with whole_or_none(results, f"{PROFILE}-{design.name}") as (folder, now):
        say(f"writing to {folder}")
        programs = [] if nsys is None else commands(nsys, design, steps, folder)
        if nsys is None:
            captured = capture(design, steps, say)
        else:
            captured = [
                _capture_with(nsys.path, arm, program, folder, say)
                for arm, program in zip(design.arms, programs, strict=True)
            ]
        say("drawing")
        for each in captured:
            told = {
                "run": folder.name,
                "toggles": each.description.toggles,
                "device": each.description.device,
            }
            write_bytes(folder / f"{each.timeline.arm}{TRACE}", chrome_trace(each.timeline, told))
        kind = captured[0].description.device["kind"]
        picture.draw(
            [(each.timeline, title(each, captured)) for each in captured],
            f"{design.name}: steady decode, profiled, on the {kind} device",
            [folder / name for name in PICTURES],
        )
        about = {
            "schema_version": SCHEMA_VERSION,
            "kind": PROFILE,
            "run": folder.name,
            "created": now.isoformat(timespec="seconds"),
            "design": design,
            "steps": steps,
            "nsys": programs,  # the commands that captured; none without nsys
            "machine": fingerprint(),
            "code": code(),
            "versions": versions(),
            "descriptions": {each.timeline.arm: without_places(each.description) for each in captured},
        }
        write_json(folder / PROFILE_FILE, about)
    # nsys sees no device where there is no GPU: then our own timeline is what there is to analyse.
    analysed = EXPORT if nsys is not None and kind == "cuda" else TRACE
    if nsys is not None and analysed == TRACE:
        say(
            "nsys saw no GPU: its reports have ranges and system calls, but no kernels and no copies; the "
            "tables are of the built-in timeline"
        )
    return [folder / f"{arm.name}{analysed}" for arm in design.arms], folder / PICTURES[0]


def capture(design: Design, steps: int, say: Say) -> list[Captured]:
    """Boot every arm of the design, warm up, and profile a round of each."""
    with Session() as session:
        say("booting")
        booted = session.boot(design.arms)
        context = least_context([each.description for each in booted.values()])
        return [_capture(session, design, booted[arm.name], context, steps, say) for arm in design.arms]


def _capture(
    session: Session, design: Design, booted: Booted, context: int, steps: int, say: Say
) -> Captured:
    name, workload = booted.arm.name, design.workload
    fewer = warmup(workload)
    for index in range(-design.warmup_rounds, 0):
        say(f"{name}: warm-up")
        asked, _ = planned(fewer, round_seed(design.seed, 0, index), booted, context)
        session.begin(booted)
        session.load(booted, asked, fewer.concurrency, fewer.interval_ns, lambda progress: None)
    say(f"{name}: the profiled round")
    asked, _ = planned(workload, round_seed(design.seed, 0, 0), booted, context)
    session.begin_profile(booted, steps)
    done = session.load(booted, asked, workload.concurrency, workload.interval_ns, lambda progress: None)
    record = session.collect(booted)
    if all(done.data.errors):
        raise api.EngineError(f"{name} served no request: {done.data.errors[0]}")
    profile = record.profile
    if profile is None or profile.closed_ns < 0:
        raise api.BadSetting(
            f"{name} never reached {steps} steps of steady decode: ask for more of it (--max-new-tokens), "
            "for requests that come together (--arrival burst), or for a shorter window (--steps)"
        )
    found = timeline(
        name,
        profile,
        records.device_frame(record),
        records.steps_frame(record),
        records.requests_frame(done),
        {**booted.pids, **session.pids},
        booted.description.device,
    )
    return Captured(timeline=found, description=booted.description)


# ---------------------------------------------------------------------------------------------------------
# Below Nsight Systems


def check(steps: int | None) -> None:
    """Raises BadSetting where a window can't be that long."""
    if steps is not None and steps < FEWEST_STEPS:
        raise api.BadSetting(f"--steps must be at least {FEWEST_STEPS}, not {steps}")


def find_nsys(given: str | None, device: str) -> str | None:
    """The nsys to use: the one that was given, else the one on PATH where it has a GPU to look at. Raises
    BadSetting where the given one does not exist."""
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise api.BadSetting(f"--nsys {given}: there is no such program")
        return found
    return shutil.which("nsys") if device == "cuda" else None


def commands(nsys: Nsys, design: Design, steps: int, folder: Path) -> list[list[str]]:
    """What captures each arm into `folder`."""
    found = []
    for arm in design.arms:
        config = ProfiledArm(
            design=msgspec.structs.replace(design, arms=(arm,)),
            steps=steps,
            file=str((folder / arm.name).with_suffix(CAPTURED)),
        )
        program = [sys.executable, "-m", PROFILED_ARM, msgspec.json.encode(config).decode()]
        found.append(nsys_capture(nsys.path, folder / arm.name, nsys.graph_trace, program))
    return found


def _capture_with(nsys: str, arm: Arm, command: Sequence[str], folder: Path, say: Say) -> Captured:
    """Below nsys; the report and its export are then in `folder`."""
    output = folder / arm.name
    say(f"{arm.name}: boot, warm-up and the profiled round, under {nsys}")
    said = _run(nsys, "profile", arm, command, folder)
    report = output.with_suffix(REPORT)
    if not report.exists():
        why = _why_no_report(said)
        raise RunFailed(
            f"{nsys} profile of {arm.name} wrote no {report.name}{': ' if why else ''}{why}", said
        )
    say(f"{arm.name}: exporting to SQLite")
    _run(nsys, "export", arm, nsys_export(nsys, output), folder)
    captured = output.with_suffix(CAPTURED)
    found: Captured = msgspec.msgpack.decode(captured.read_bytes(), type=Captured)
    captured.unlink()
    return found


def _run(path: str, what: str, arm: Arm, command: Sequence[str], folder: Path) -> str:
    """Run a command of nsys to its end, and end all that it started; what it printed. Raises RunFailed. nsys
    starts the program through an agent that detaches itself, so this process asks to inherit what nsys
    leaves behind."""
    log = folder / f"{arm.name}.log"
    known = processes.below()
    # What nsys and the program leave lying about when they are killed lies in `scratch`.
    with processes.adopting_orphans(), TemporaryDirectory(prefix="bench-") as scratch:
        started: list[Child] = []
        try:
            with postponed():
                started.append(
                    processes.start(f"{path} {what}", command, environment({"TMPDIR": scratch}), log)
                )
            processes.wait(started, None)
        except OSError as error:
            raise api.BadSetting(f"can't run {path}: {error.strerror}") from error
        finally:
            with undisturbed():
                ended_well = all(child.ended() and child.code == 0 for child in started)
                processes.end(started)
                processes.end_orphans(known, processes.GRACE_S if ended_well else 0.0)
    (child,) = started
    said = child.output()
    if child.code:
        how = (
            f"was killed by {signal.Signals(-child.code).name}"
            if child.code < 0
            else f"failed (status {child.code})"
        )
        line = _last_line(said)
        raise RunFailed(f"{path} {what} of {arm.name} {how}{': ' if line else ''}{line}", said)
    log.unlink()
    return said


def _last_line(said: str) -> str:
    """The last that is no warning: nsys prints those first, and nothing after them where it is killed."""
    lines = [line.strip() for line in said.splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("WARNING")), "")


def _why_no_report(said: str) -> str:
    """Nsight Systems ends with status 0 where it could not import what it captured, and where there was
    nothing to capture."""
    errors = [line.strip() for line in said.splitlines() if "error" in line.lower()]
    if errors:
        return errors[0]
    return "" if BEGAN in said else f"its capture range ({RANGE}) never began"


def nsys_capture(nsys: str, output: Path, graph_trace: str, program: Sequence[str]) -> list[str]:
    """Run `program` and all that it starts; the report goes to `output` with REPORT behind it."""
    return [
        nsys,
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--trace-fork-before-exec=true",
        f"--cuda-graph-trace={graph_trace}",
        "--capture-range=nvtx",
        f"--nvtx-capture={RANGE}",
        "--capture-range-end=stop",  # the program goes on to its own end
        f"--output={output}",
        *program,
    ]


def nsys_export(nsys: str, output: Path) -> list[str]:
    """From the report at `output` + REPORT to `output` + EXPORT."""
    return [
        nsys,
        "export",
        "--type=sqlite",
        f"--output={output.with_name(output.name + EXPORT)}",
        str(output.with_name(output.name + REPORT)),
    ]


def title(captured: Captured, among: Sequence[Captured]) -> str:
    """The arm and those of its toggles that are not the same in all arms; all of them where none differs."""
    own = captured.description.toggles
    differing = {
        name: choice
        for name, choice in own.items()
        if any(other.description.toggles.get(name) != choice for other in among)
    }
    spelled = (f"{name}={choice}" for name, choice in (differing or own).items())
    return f"{captured.timeline.arm}: {', '.join(spelled)}"

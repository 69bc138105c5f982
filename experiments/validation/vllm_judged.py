"""vLLM's argued changes, judged: a page for people who decide what to merge, of what vllm_toggles measured.

    python -m experiments.validation.vllm_judged [FOLDER]

FOLDER is that of vllm_toggles: its cells take the place of the same ones in results/reference, in the file
vllm_toggles.json. All else is made of that file, with FOLDER or without: the page in results/reference, as
markdown and for a browser; the changes' rows among the claims (harness/analysis/claims.json and
results/reference/claims.md). README's sentence is printed. Notebook 06 reads the same file: execute it anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from experiments.common import judgement
from experiments.common.command_line import ROOT, parser
from experiments.common.judgement import (
    BATCHES,
    BETWEEN,
    HERE,
    MATTERS,
    MODES,
    NOTHING,
    PACE,
    WIDE,
    Cell,
    Judged,
    Judgement,
    Row,
)
from experiments.common.record import FOLDER
from overlap_bench.harness.analysis import catalogue
from overlap_bench.harness.analysis.catalogue import Entry
from overlap_bench.harness.analysis.experiment_result import Change, finding
from overlap_bench.harness.analysis.result import MetricRow
from overlap_bench.harness.analysis.words import interval
from overlap_bench.harness.common.formatting import percent
from overlap_bench.harness.common.machine import fingerprint
from overlap_bench.harness.metrics.definitions import METRICS, phase_in_turns
from overlap_bench.harness.report import catalogue_tables, html
from overlap_bench.harness.report.page import Page, Table, markdown_page, tabulated
from overlap_bench.harness.store.manifest import read_manifest
from overlap_bench.harness.studies.catalogue import SHIPPED, catalogue_of

SOURCE = FOLDER / "vllm_toggles.json"
PAGE = "proofs/vllm_toggles.md"  # below results/reference
MANIFESTS = "runs/*/*/manifest.json"  # of what vllm_toggles ran
CLAIMS = ROOT / "harness" / "analysis" / SHIPPED
TITLE = "vLLM's argued changes, judged"
NOTE = (
    "Change = after/before − 1: negative is shorter. Its own phase: whether it does what it says, in turns, "
    "without async scheduling. A step: without async scheduling / with it; in parentheses what to expect by "
    "the phase's change and by what a microsecond in it costs a step, else what was run whole. "
    "?: other processes used the cores, so there is no verdict. "
    f"Starts to matter: where its whole interval is beyond {MATTERS:.0%} of a step; nowhere: all are within. "
    f"Depends on the host: whether that answer, not its size, is another one at batch {BETWEEN} (256 for "
    "vllm-output-chunk) where the device takes half as long, as long as here, and twice as long. Our "
    "rewriting: one side is what we wrote after the source's description, so there is no verdict on the pull "
    "request itself."
)


SETTING = (
    "Scheduler, model runner and output processing share one process (`multiprocessing=off`) on two cores, "
    "so texts are made on the step. Prompts have 6 to 25 tokens, answers 64; all requests begin and end "
    "together (those of vllm-remove-all end one by one). The prefix cache is off unless the change needs it. "
    "vLLM's server has a process for its core, schedules ahead and caches prefixes."
)
NOTES = (
    "Until commit f01ed5f7 a cell ran with stream_interval 8 where its variant does not set it; vLLM's own "
    "is 1. With 8 a step was about 3.5% shorter at batch 64, so the cells from before that commit make a "
    "change look larger than it is by that share of it: −2.07% for −2.00%.",
    "vLLM's core in a process of its own asks before each step of a turn whether it may begin: 40 to 70 us "
    "by an estimate, which the after arm of vllm-multiprocessing alone pays (0.5 to 1 point at batch 1).",
    "This host's k, as each call finds it, was 0.83 to 0.85 for vllm-async-scheduling on the EPYC, and 0.98 "
    "to 1.92 on the Xeon, whose speed changes: a device is as many times as slow as an H100. "
    "vllm-async-speculation's 2k was 3.1 times so, vllm-detokenizer's k/2 0.86 times.",
    "Most of vllm-env-cache's gain is one read for each request as its output is counted. vLLM's server does "
    "that in another process than the core's, where no variable is kept in either choice: with "
    "`multiprocessing=on` a step at 64 changed by +0.12% [−0.92%, +1.2%] (four trials, the Xeon).",
    "Of a hundred intervals of 95%, a few miss by chance. A cell that was measured again shows the later "
    "run: on the Xeon, as their other devices, vllm-runner, -multiprocessing, -prefix-caching and -heap at "
    "64; for more trials vllm-block-hash, -block-hasher and -block-map at 64, vllm-block-hash at 16 and "
    "vllm-runner at 2k; without other work beside it vllm-slots at 2k and vllm-detokenizer at k/2.",
    "A step is a trimmed mean over turns, without the collector's rare pauses; for vllm-heap it is the "
    "untrimmed one.",
    "Up to 128 requests both arms of vllm-output-chunk process all outputs at once, so only 256 is shown; "
    "its source is about tail latency.",
    "Requests of vllm-remove-all end one by one (32 to 96 new tokens): the batch is that at the start.",
    "Machines differ: vllm-multiprocessing at batch 64 was −0.98% [−1.8%, −0.11%] on the EPYC (four "
    "trials), and is −4.0% on the Xeon.",
    "+0.00% with async scheduling: the host prepares the next step while the device computes, so a step "
    "lasts as long as the device and a shorter phase gains nothing. On the Xeon, at batch 1, 16 and 256, a "
    "phase could be 4 ms longer before a step is.",
    "Under drafts turns have no equal steps: a step of vllm-async-speculation is its TPOT, of rounds.",
)


class Known(msgspec.Struct, frozen=True):
    """A number that a source measured."""

    change: str
    batch: int
    of: str  # "phase" or "whole"
    reported: float
    says: str
    why: str = ""  # it may be another here


KNOWN = (
    Known(
        "vllm-async-speculation",
        16,
        "whole",
        1726 / 2082 - 1,
        "29184: 1,726 -> 2,082 tokens/s at 16 requests (Qwen3-1.7B on an H20)",
        "of another model and card, other drafts are right, and its before may draft on the CPU",
    ),
    Known(
        "vllm-update",
        1,
        "whole",
        0,
        "46112: no help at 16 and below",
        "our rewriting still calls what it replaces, with no request left: 28 us a step",
    ),
    Known("vllm-update", 16, "whole", 0, "46112: no help at 16 and below"),
    Known(
        "vllm-update",
        256,
        "phase",
        0.254 / 0.287 - 1,
        "46112: .287 -> .254 ms at 256, the function alone",
        "the after is our rewriting, and append is more than that function",
    ),
    Known(
        "vllm-flat-logprobs",
        64,
        "whole",
        13583 / 13023 - 1,
        "57442: 13,583 ± 823 -> 13,023 ± 231 tokens/s at 64 (0.5B)",
        "of a model whose steps are shorter, and within its own scatter",
    ),
    Known(
        "vllm-flat-logprobs",
        256,
        "whole",
        0,
        "57442: no help at 512, 3,917 against 3,922 tokens/s",
        "of another batch and model; async scheduling, vLLM's default, would hide it",
    ),
    Known(
        "vllm-slots",
        256,
        "whole",
        165.90 / 171.53 - 1,
        "29206: 171.5 -> 165.9 s (opt-125m, batch 3,000, async scheduling)",
    ),
    Known(
        "vllm-prefix-caching",
        256,
        "whole",
        0.01,
        "V1's announcement: throughput less than 1% lower at a hit rate of 0%",
    ),
    Known(
        "vllm-block-map",
        256,
        "whole",
        1 / 1.015 - 1,
        "24830: +1.5% throughput of decodes (opt-125m)",
        "its answers are of 2,000 tokens, whose objects the collector walks over; here of 64",
    ),
)


# ---------------------------------------------------------------------------------------------------------
# The page


def page(found: Judgement) -> Page:
    done = [each for each in found.changes if each.is_measured]
    without, with_it = (sum(each.changes_a_step(mode) for each in done) for mode in MODES)
    tried = sum(any(cell.step is not None for cell in each.of("on")) for each in done)
    return Page(
        f"{len(done)} of {len(found.changes)} argued changes to vLLM's host code judged at an H100's pace: "
        f"{without} change a decode step by {MATTERS:.0%} or more at some batch; with async scheduling "
        f"{with_it} of the {tried} that were tried.",
        tuple(_lines(found)),
        (_changes(found), *_known_answers(found), *_every_cell(found)),
        [*judgement.failures(found)],
        [
            f"{found.date}, `python -m experiments.validation.vllm_toggles PYTHON FOLDER`, commit "
            f"{' and '.join(found.commits)}.",
            *NOTES,
        ],
    )


def _lines(found: Judgement) -> Iterator[str]:
    yield (
        f"The host code is vLLM's own, on {found.machine} where a cell names no other. The device is a "
        f"clock, {found.pace}: an H100's times, stretched by this host's slowness k."
    )
    expected = [cell.added for _, cell in found.cells if cell.foretold is not None and cell.whole is None]
    several = sum(added > 1 for added in expected)
    more = f", in {several} of {len(expected)} such cells the sum of all phases" if several else ""
    yield (
        "A cell that was not run whole is expected: the phase's change in us, times what a microsecond of "
        f"that phase costs a step{more}."
    )
    yield SETTING
    match = judgement.Agreement.of(found)
    if match.cells:
        wide = f"; {match.wide} of the runs' are ±{WIDE:.0%} or wider, and show little" if match.wide else ""
        yield (
            f"The intervals expected and those run whole overlap in {match.agree} of {match.cells} cells, of "
            f"which {match.with_effect} have an effect (the run's interval leaves out 0){wide}. Most "
            "expected ones use the phases of the same run: this checks how much of a phase a step feels."
        )
    outputs = [cell.outputs for _, cell in found.cells if cell.outputs is not None]
    if outputs:
        same, compared = (sum(each) for each in zip(*outputs, strict=True))
        yield (
            f"Outputs: {same:,} of {compared:,} identical in both arms. At a pace tokens depend on the "
            "prompt alone: this checks texts and bookkeeping, not attention."
        )


def _changes(found: Judgement) -> Table:
    steps = {f"a step at {batch}": partial(_step, batch) for batch in BATCHES}
    columns: dict[str, Callable[[Judged], str]] = {
        "change": lambda each: each.name + (" (our rewriting)" if each.rewritten else ""),
        "the source says": lambda each: f"{each.source}: {each.says}",
        "its own phase": _own_phase,
        **steps,
        "starts to matter": lambda each: _in_both_modes(each, judgement.starts),
        "depends on the host": lambda each: _in_both_modes(each, judgement.depends_on_host),
    }
    measured_first = sorted(found.changes, key=lambda each: not each.is_measured)
    return tabulated("Change by change", measured_first, columns, NOTE, tuple(steps))


def _own_phase(each: Judged) -> str:
    """Whether it does what it says, at the largest batch that was tried."""
    if not each.phase:
        return "no single one"
    rows = [(cell.batch, cell.phase) for cell in each.of("off") if cell.phase is not None]
    if not rows:
        return f"{each.phase}: {NOTHING}"
    batch, row = rows[-1]
    return f"{each.phase} at {batch}: {_said(row)}" + (f", {row.verdict}" if row.verdict else "")


def _step(batch: int, each: Judged) -> str:
    said = []
    for mode in MODES:
        cell = next((one for one in each.of(mode) if one.batch == batch and one.step is not None), None)
        shown = "" if cell is None or cell.step is None else percent(cell.step.change) + _mark(cell.step)
        said.append(NOTHING if cell is None else shown if cell.whole is not None else f"({shown})")
    return NOTHING if {*said} == {NOTHING} else " / ".join(said)


def _in_both_modes(each: Judged, say: Callable[[Judged, str], str]) -> str:
    without, with_it = (say(each, mode) for mode in MODES)
    return without if with_it == NOTHING else f"{without}; async: {with_it}"


def _mark(row: Row | None) -> str:
    return " ?" if row is not None and row.disturbed else ""


def _said(row: Row | None) -> str:
    return "" if row is None else f"{percent(row.change)} {interval(row)}".rstrip()


def _known_answers(found: Judgement) -> Iterator[Table]:
    """What sources measured themselves, beside what it is here."""
    by_name = {each.name: each for each in found.changes}
    rows = []
    for known in KNOWN:
        cell = next((one for one in by_name[known.change].of("off") if one.batch == known.batch), None)
        row: Row | None = getattr(cell, known.of, None)
        if row is not None and row.ends is not None:
            low, high = row.ends
            says = finding(known.reported, Change(value=row.change, low=low, high=high))
            if known.why and not low <= known.reported <= high:
                says += f": {known.why}"
            what = f"{known.change}, {'its phase' if known.of == 'phase' else 'a step'} at {known.batch}"
            rows.append((what, known.says, percent(known.reported), _said(row), says))
    if rows:
        columns = ("change", "the source says", "that is", "here", "finding")
        yield Table("Known answers", columns, tuple(rows), "", ("that is", "here"))


def _every_cell(found: Judgement) -> Iterator[Table]:
    rows = [(each, cell) for each, cell in found.cells if cell.step is not None]
    columns: dict[str, Callable[[tuple[Judged, Cell]], str]] = {
        "change": lambda row: row[0].name,
        "where": lambda row: judgement.where(row[1]),
        "its own phase": lambda row: _said(row[1].phase) + _mark(row[1].phase),
        "expected": lambda row: _said(row[1].foretold),
        "run whole": lambda row: _said(row[1].whole) + _mark(row[1].whole),
        "trials": lambda row: str(row[1].trials or ""),
        "overlap": lambda row: {True: "yes", False: "no", None: ""}[row[1].overlaps],
    }
    if rows:
        note = (
            "95% intervals; ?: other processes used the cores, so there is no verdict. What a change makes "
            "of other phases than its own shows in the whole run, and in what is expected where all phases "
            "add up."
        )
        numbers = ("its own phase", "expected", "run whole", "trials")
        yield tabulated("Cell by cell", rows, columns, note, numbers)


# ---------------------------------------------------------------------------------------------------------
# What else is made of it


def readme(found: Judgement) -> str:
    """README's sentences."""
    whole = [(each.name, cell.batch, cell.whole) for each, cell in found.cells if cell.at == HERE]
    most = min(
        ((row.change, name, batch) for name, batch, row in whole if row is not None),
        default=None,
    )
    more = "" if most is None else f" The most: `{most[1]}`, {percent(most[0])} at batch {most[2]}."
    return f"{page(found).conclusion}{more} [Change by change](results/reference/{PAGE})."


def entries(found: Judgement) -> Iterator[Entry]:
    """Rows of the claims: each change's own phase at the largest batch, and the step run whole at BETWEEN or
    the largest."""
    known = judgement.variants()
    for each in found.changes:
        own = [(phase_in_turns(each.phase), cell, cell.phase) for cell in each.of("off")]
        whole = [(cell.metric, cell, cell.whole) for cell in each.of("off")]
        whole.sort(key=lambda row: row[1].batch == BETWEEN)
        for rows in (own, whole):
            there = [(metric, cell, row) for metric, cell, row in rows if row is not None]
            for metric, cell, row in there[-1:]:
                yield catalogue.measured(
                    known[each.name],
                    metric,
                    MetricRow(unit="", better="", **msgspec.to_builtins(row)),
                    f"paced: {found.pace}",
                    machine=cell.machine or found.machine,
                    batch=float(cell.batch),
                    step_ms=cell.whole.before if cell.whole and METRICS[cell.metric].of_turns else None,
                    found_in=PAGE,
                )


def claims(found: Judgement, shipped: str) -> str:
    """The file of claims, with these changes' rows in place of those that it had."""
    content = json.loads(shipped)
    others = [each for each in content["entries"] if each["found_in"] != PAGE]
    content["entries"] = [*others, *map(msgspec.to_builtins, entries(found))]
    return json.dumps(content, indent=0, ensure_ascii=False) + "\n"


def for_browsers(found: Judgement) -> str:
    return html.page_of_tables(TITLE, page(found))


# ---------------------------------------------------------------------------------------------------------
# The files


def of_folder(folder: Path) -> Judgement:
    """What a folder of vllm_toggles shows."""
    kept = folder / "cells.json"
    return Judgement(
        date=time.strftime("%Y-%m-%d"),
        commits=sorted({read_manifest(each.parent).code.commit[:10] for each in folder.glob(MANIFESTS)}),
        machine=fingerprint().cpu,
        pace=PACE.format(at=HERE),
        changes=judgement.judged(json.loads(kept.read_text()) if kept.exists() else {}, folder),
    )


def merged(before: Judgement, now: Judgement) -> Judgement:
    """What is known once more was measured. A cell is that of now, unless before has it run whole, or
    expected, where now does not."""
    known = {(each.name, *_place(cell)): cell for each, cell in before.cells}
    machine = now.machine if now.machine != before.machine else ""

    def kept(name: str, cell: Cell) -> Cell:
        measured = cell.whole is not None or cell.phase is not None
        here = msgspec.structs.replace(cell, machine=machine) if measured else cell
        return _better(known.get((name, *_place(cell)), here), here)

    changes = [
        msgspec.structs.replace(
            each, cells=[*_with_latest_phases([kept(each.name, one) for one in each.cells])]
        )
        for each in now.changes
    ]
    commits = sorted({*before.commits, *now.commits})
    return msgspec.structs.replace(now, commits=commits, machine=before.machine, changes=changes)


def _better(before: Cell, now: Cell) -> Cell:
    as_much = (now.whole is not None, now.step is not None) >= (
        before.whole is not None,
        before.step is not None,
    )
    if not as_much:
        return before
    if now.foretold is not None or before.foretold is None:
        return now
    # Of slopes that this folder does not have. Here, without async scheduling, it was of the phase as it was.
    if (now.mode, now.at) == ("off", HERE) and now.phase != before.phase:
        return now
    return msgspec.structs.replace(now, foretold=before.foretold, added=before.added)


def _with_latest_phases(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The cells, with the phase that was measured last where that is another cell's: beside async scheduling,
    and on other hosts, a phase is that of here without it. What was expected of another one goes, but where
    nothing of it is felt."""
    here = {each.batch: each for each in cells if (each.mode, each.at) == ("off", HERE)}
    for each in cells:
        own = here.get(each.batch)
        if each.whole is None and each.phase is not None and own is not None and own.phase is not None:
            hidden = each.foretold is not None and each.foretold.ends == (0, 0)
            still = each.foretold if hidden or each.phase == own.phase else None
            yield msgspec.structs.replace(each, phase=own.phase, machine=own.machine, foretold=still)
        else:
            yield each


def _place(cell: Cell) -> tuple[int, str, str]:
    return cell.batch, cell.mode, cell.at


def read() -> Judgement:
    return msgspec.json.decode(SOURCE.read_bytes(), type=Judgement)


def main() -> None:
    asked = parser(__file__, __doc__)
    asked.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", help="where vllm_toggles keeps cells"
    )
    folder: Path | None = asked.parse_args().folder
    if folder is not None:
        found = merged(read(), of_folder(folder))
        SOURCE.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    found, place = read(), FOLDER / PAGE
    place.write_text(markdown_page(page(found)))
    place.with_suffix(".html").write_text(for_browsers(found))
    CLAIMS.write_text(claims(found, CLAIMS.read_text()))
    (FOLDER / "claims.md").write_text(catalogue_tables.to_markdown(catalogue_of(None)))
    print(readme(found))


if __name__ == "__main__":
    main()

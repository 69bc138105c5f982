"""The command `bench`: every command there is, in the order of the help. How one ends is in printing.py.

A command's module is imported once the command is asked for: the help of `bench` needs a name and a line of
each, and `bench variants` no options of a run. Each command is a thin call into the rest, and its heavy
imports wait again until it needs them.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from overlap_bench.harness.cli import printing

HELP = "Does this overlap optimization really help, by how much, and how sure are we?"
# By name: where it is ("MODULE:FUNCTION" of harness.cli), and a line that fits 80 columns.
COMMANDS = {
    "run": ("measure:run", "Compare a before with an after, or measure one arm."),
    "aa": ("measure:aa", "Measure an arm against itself: this machine's noise floor."),
    "compare": ("measure:compare", "Print a stored run again, or compare several."),
    "rerun": ("measure:rerun", "Measure a stored run again, as its manifest says."),
    "profile": ("look:profile", "Show where the time of a few decode steps goes."),
    "sensitivity": ("look:sensitivity", "Show what a microsecond in each host phase costs a step."),
    "explain": ("look:explain", "Explain a run: its steps, its late requests, its change."),
    "report": ("look:report", "Write what a run found as one web page, or markdown."),
    "gate": ("measure:gate", "Fail where a change makes a metric worse; for pull requests."),
    "bisect": ("bisect:bisect", "Find the commit that changed a metric by a few per cent."),
    "trace": ("look:trace", "Summarize a trace of Nsight Systems, or a Chrome trace."),
    "variants": ("available:variants", "List the named before/after pairs, or show one."),
    "engines": ("available:engines", "List the engines and their toggles."),
    "devices": ("available:devices", "List what an engine can run on, and the paces."),
    "pace": ("pace:pace", "Record a card's speed, and its host's, for --pace."),
    "doctor": ("available:doctor", "Check this machine for what would spoil a measurement."),
    "factorial": ("measure:factorial", "Measure several toggles in all their settings."),
    "sweep": ("measure:sweep", "Measure a grid of runs over a setting or two."),
    "import": ("exchange:import_", "Turn another tool's result file into a run."),
    "mock": ("exchange:mock", "Serve tokens at known times, to check a client with."),
    "serve": ("exchange:serve", "The old name of mock: bench serve --mock."),
    "eval": ("exchange:eval_", "Compare accuracy before and after."),
    "experiment": ("experiment:experiment", "Repeat what the sources claim."),
}

OLD_NAMES = ("serve",)  # which go on working
# Of options, which go on working too.
OLD_FLAGS = {
    "--blocks": "--trials",
    "--max-blocks": "--max-trials",
    "--segments": "--interleaved-rounds",
    "--plant": "--inject-delay",
    "--plant-at": "--inject-at",
}


def built(name: str) -> Any:
    """The command of that name, with all its options."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(f"overlap_bench.harness.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False)
    alone.command(name, help=_prose(inspect.getdoc(found) or ""))(found)
    return typer.main.get_command(alone)


def _prose(docstring: str) -> str:
    """Its paragraphs without the line breaks of the source."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.split("\n\n"))


class Bench(TyperGroup):
    """Knows each command by its line of help, and builds the one that is asked for."""

    def __init__(self) -> None:
        lines = [
            TyperCommand(name, help=line, hidden=name in OLD_NAMES) for name, (_, line) in COMMANDS.items()
        ]
        super().__init__(name="bench", help=HELP, commands=lines, no_args_is_help=True)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else built(name), list(map(_of_today, rest))


def _of_today(word: str) -> str:
    """An option by its name of today, and a line where it was given by an older one."""
    flag, equals, value = word.partition("=")
    if flag not in OLD_FLAGS:
        return word
    printing.say(f"{flag} is called {OLD_FLAGS[flag]} now")
    return f"{OLD_FLAGS[flag]}{equals}{value}"


def main() -> None:
    printing.run(Bench())

"""The command `bench`: every command there is, in the order of the help. How one ends is in exit_codes.py.

Each is a thin call into the rest, and heavy imports wait until one needs them.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from harness.cli import exchange, exit_codes, experiment, look, measure

app = typer.Typer(
    help="Does this overlap optimization really help, by how much, and how sure are we?",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a docstring
    pretty_exceptions_enable=False,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": measure.run,
    "aa": measure.aa,
    "compare": measure.compare,
    "rerun": measure.rerun,
    "profile": look.profile,
    "explain": look.explain,
    "report": look.report,
    "gate": measure.gate,
    "trace": look.trace,
    "variants": look.variants,
    "engines": look.engines,
    "devices": look.devices,
    "doctor": look.doctor,
    "factorial": measure.factorial,
    "sweep": measure.sweep,
    "import": exchange.import_,
    "serve": exchange.serve,
    "eval": exchange.eval_,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(experiment.experiment, name="experiment")


def main() -> None:
    """Run the command line and exit."""
    exit_codes.run(typer.main.get_command(app))

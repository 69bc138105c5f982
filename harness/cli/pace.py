"""Paces of one's own: `bench pace record`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from overlap_bench.engines import api
from overlap_bench.harness.cli.options import option

RECORDER = Path(api.__file__).parents[1] / "record_pace.py"  # a file that needs nothing of this package

pace = typer.Typer(
    help="Paces: how long a device takes, for --pace. bench devices lists those that come with it.",
    no_args_is_help=True,
    add_completion=False,
)


@pace.callback()
def group() -> None:
    """Keep `record` a command of its own, though it is the only one."""


@pace.command("record")
def record(
    out: Annotated[Path | None, option(None, "The profile's file (MODEL-CARD.toml).", "-o", "--out")] = None,
    model: Annotated[
        str | None,
        option(None, "llama3-8b, qwen2.5-0.5b, gpt2, or a config.json of a decoder (llama3-8b)."),
    ] = None,
    python: Annotated[
        Path | None, option(None, "Interpreter that has torch for the card, and maybe vLLM (this one).")
    ] = None,
) -> None:
    """Record this card and its host as a profile: a minute, some more where vLLM is installed.

    On a machine without bench, engines/record_pace.py does it alone: it needs torch and nothing else.
    """
    options = {"--out": out, "--model": model}
    given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    try:
        done = subprocess.run([str(python or sys.executable), str(RECORDER), *given], stdout=subprocess.PIPE)
    except OSError as error:
        raise api.BadSetting(f"{python} does not run: {error.strerror or error}") from error
    if done.returncode:
        raise typer.Exit(done.returncode if done.returncode == 2 else 4)
    written = done.stdout.decode().split("\n")[0]
    api.make_pace(written)
    sys.stdout.write(f"{written}\nbench run --variant overlap --pace {written}    # its times as they are\n")
    sys.stdout.write(
        f"bench run --variant overlap --pace '{written}*k'    # stretched to this host's speed\n"
    )

"""What goes wrong, by whose fault it is. Every message is one line for the person who asked.

EngineError         it broke: the run has failed (exit code 4)
  BadSetting        what was asked is wrong (exit code 2)
    BadFile         the file or folder that was named is at fault (exit code 2)
"""

from __future__ import annotations

LONGEST = 1000  # characters of a library's error


class EngineError(Exception):
    """An engine, or whatever else the run needs, cannot do what it was asked."""

    # Whether the message names the process at fault: others that have ended by then only followed it.
    names_process = False


class BadSetting(EngineError):
    """What was asked is wrong: an unknown toggle, an impossible combination, a prompt that is too long."""


class BadFile(BadSetting):
    """What was named can't be read, is damaged, or is not what it was taken for."""


def first_line(error: Exception) -> str:
    """The first line of a library's paragraphs, no longer than anybody reads: it may quote a whole file."""
    return str(error).strip().split("\n")[0].rstrip(".")[:LONGEST]

"""How wide the columns of a table are in a terminal that is too narrow for them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

NAMES = 20  # columns no wider are of names, and stay whole


def keep_words(table: Table, rows: Sequence[Sequence[str]], width: int) -> None:
    """Where a rich table of these rows is wider than `width`: give each column room for its longest word, the
    first one always, and share out the rest by what each lacks. Where that is too wide too, words longer than
    some length are broken, the same one in each column but the first."""
    columns = list(zip(*rows, strict=True))
    whole = [max(len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    room = width - 3 * (len(columns) - 1) - 2  # the rest is padding and border, as in SIMPLE_HEAD
    if sum(whole) <= room:
        return
    first, *others = (
        most if most <= NAMES else max(map(_longest_word, cells))
        for most, cells in zip(whole, columns, strict=True)
    )
    found = [[first, *(min(each, most) for each in others)] for most in range(1, max(others, default=0) + 1)]
    fits = [each for each in found if sum(each) <= room]
    if not fits:
        return
    least = fits[-1]
    lacks = [most - each for most, each in zip(whole, least, strict=True)]
    for column, each, lack in zip(table.columns, least, lacks, strict=True):
        column.width = each + (room - sum(least)) * lack // sum(lacks)


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)

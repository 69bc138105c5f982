"""The programs that can run a step, each with the size of one call.

What each computes stands in model.py, in a function of its name; what it is told lies in memory as layout.py
says.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from overlap_bench.engines.overlap.layout import program_name


class _Program(msgspec.Struct, frozen=True, kw_only=True):
    """Its own fields are what it is called with. `family`: how tokens are chosen (layout.FAMILIES). `gives`:
    how many tokens each row is given, one decode step after another (toggle steps); or at most, where the
    device counts them (toggle spec)."""

    family: str = "greedy"
    gives: int = 1
    counted: ClassVar[bool] = False  # whether how many they were comes back with them, a count for each row

    @property
    def name(self) -> str:
        return program_name(str(self.__struct_config__.tag), self.family)

    @property
    def arguments(self) -> tuple[int, ...]:
        return msgspec.structs.astuple(self)[:-2]

    @property
    def metadata(self) -> str:
        """The buffer in which it finds what it is told."""
        return self.name


class Prefill(_Program, frozen=True, tag="prefill"):
    """Whole prompts, padded on the right to `length`."""

    rows: int
    length: int
    kind: ClassVar[str] = "prefill"  # of the step, where it is recorded
    decode_rows: ClassVar[int] = 0  # of its rows, the first ones

    @property
    def tokens(self) -> int:
        """Tokens fed to the model, padding included."""
        return self.rows * self.length


class Extend(Prefill, frozen=True, tag="extend"):
    """What is left of prompts behind a cached prefix, padded to `length`, over at most `blocks` blocks."""

    blocks: int


class Mixed(_Program, frozen=True, tag="mixed"):
    """Rows that decode over at most `decode_blocks` blocks, then parts of prompts, padded to `length`, over
    at most `blocks` (toggle chunk)."""

    decode_rows: int
    decode_blocks: int
    prompts: int
    length: int
    blocks: int

    @property
    def kind(self) -> str:
        return "mixed" if self.decode_rows else "prefill"

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prompts

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prompts * self.length


class Decode(_Program, frozen=True, tag="decode"):
    """The newest token of each row, padding rows included, over at most `blocks` blocks."""

    rows: int
    blocks: int
    kind: ClassVar[str] = "decode"

    @property
    def decode_rows(self) -> int:
        return self.rows

    @property
    def tokens(self) -> int:
        return self.rows * self.gives

    @property
    def metadata(self) -> str:
        return f"{self.name}.{self.rows}.{self.blocks}"


class Verify(Decode, frozen=True, tag="verify"):
    """Drafts behind the newest token of each row; the device knows what and where these are."""

    counted: ClassVar[bool] = True


Program = Prefill | Extend | Mixed | Decode | Verify

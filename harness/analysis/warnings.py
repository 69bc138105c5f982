"""Warnings, as a type: what a reader must know besides the verdict.

A warning is one class: its fields, its severity, its sentence (what happened; what it may mean; what to try)
and where it applies. To add one, write its class: in run_warnings.py or arm_warnings.py if it is about what
was measured, in verdict_warnings.py if it is about what can be decided by it. It is then found, ranked, shown
and stored like all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, ClassVar, Self, cast

import msgspec

UNDECIDED = "undecided"
TAG = "warning"  # the field that tells the classes apart, of what msgspec makes of one


class Severity(IntEnum):
    """What a warning says of the verdict, which decision.py makes: it decides where the warning is shown, and
    never the verdict."""

    OVERRULES = 0  # why there is no verdict, or why the numbers are not what they are called
    QUALIFIES = 1  # the verdict holds with what is said here
    UNKNOWN = 2  # of a stored text: it may do any of this
    DESCRIBES = 3  # it tells how the run was measured


class Warning:
    """What a reader must know besides the verdict. `of`: the part of a result that it is about, "" all."""

    __slots__ = ()
    of: str
    weight: Severity | None  # of this one, where it is another than is usual of its kind
    usual: ClassVar[Severity] = Severity.DESCRIBES
    says: ClassVar[str] = ""  # the sentence, with its fields in {}; one that needs more has `sentence`
    settles: ClassVar[bool] = False  # whether it says why nothing is decided, or what would decide it

    @property
    def kind(self) -> str:
        """Its name in stored files: late_sends of the class LateSends."""
        return str(cast(Any, self).__struct_config__.tag)

    @property
    def severity(self) -> Severity:
        """What it says of the verdict."""
        return self.usual if self.weight is None else self.weight

    @property
    def text(self) -> str:
        """What is shown, on one line: an error that it quotes may have several."""
        return " ".join(f"{self.of + ': ' if self.of else ''}{self.sentence()}".split())

    @property
    def leads(self) -> bool:
        """Whether it stands right below the verdict, and nobody has to ask for it."""
        return self.severity <= Severity.QUALIFIES

    def sentence(self) -> str:
        """What happened; what it may mean; what to try."""
        fields = cast(Any, self).__struct_fields__
        return self.says.format(**{name: getattr(self, name) for name in fields})

    def about(self, what: str) -> Self:
        """The same warning, of that part of a result alone."""
        of = f"{what}: {self.of}" if self.of else what
        return cast(Self, msgspec.structs.replace(cast(Any, self), of=of))


def _name(of_class: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", of_class).lower()


class Kind(
    Warning,
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field=TAG,
    tag=_name,
):
    """The fields that every kind of warning has; a class that derives from it adds its own."""

    of: str = ""
    weight: Severity | None = None


class Told(Kind, frozen=True):
    """A warning that was stored as a sentence, or by a version of this program that knows more kinds."""

    said: str
    was: str = ""
    usual = Severity.UNKNOWN

    @property
    def kind(self) -> str:
        return self.was

    def sentence(self) -> str:
        return self.said


class ToldUndecided(Told, frozen=True):
    """The same, of one that says why nothing is decided."""

    settles: ClassVar[bool] = True


def ranked(warnings: Iterable[Warning]) -> list[Warning]:
    """Each once, those first that do most to the verdict."""
    return sorted(dict.fromkeys(warnings), key=lambda each: each.severity)


def texts(warnings: Iterable[Warning]) -> list[str]:
    """What they say, in the order of `ranked`."""
    return [each.text for each in ranked(warnings)]


def kinds(of: type[Any] = Kind) -> Iterator[type[Any]]:
    """Every class of warnings below that one, in the order in which they are written."""
    for each in of.__subclasses__():
        yield each
        yield from kinds(each)


def applicable(of: type[Any], what: object) -> list[Warning]:
    """Each warning of the kinds below that one which applies to `what`: the base says what that is."""
    return ranked(each for kind in kinds(of) for each in kind.found(what))


def of_fields(plain: dict[str, Any]) -> Warning:
    """What msgspec made of a warning, as a warning again. Raises msgspec.ValidationError."""
    known: dict[str, type[Warning]] = {each.__struct_config__.tag: each for each in kinds()}
    return msgspec.convert(plain, known.get(plain[TAG], Told))


def stored(plain: dict[str, Any]) -> dict[str, Any]:
    """What msgspec made of a warning, as it stands in a file: its kind, its fields, and its sentence for
    readers that know neither."""
    warning = of_fields(plain)
    fields = {name: value for name, value in plain.items() if name != TAG}
    return {"kind": warning.kind, "severity": int(warning.severity), **fields, "text": warning.text}


def read(plain: Any) -> Warning:
    """What `stored` made, or an older file's sentence, as a warning again. Raises ValueError."""
    match plain:
        case str():
            settles = plain.startswith(f"{UNDECIDED}: ")
            return ToldUndecided(plain, UNDECIDED) if settles else Told(plain)
        case {"kind": str(kind), "text": str(text), "severity": int(severity)}:
            try:
                return of_fields({**plain, TAG: kind})
            except msgspec.ValidationError:  # of a newer version, or of an older one
                told = ToldUndecided if text.startswith(f"{UNDECIDED}: ") else Told
                return told(text, kind, weight=None if severity == told.usual else Severity(severity))
    raise ValueError("it has a warning without a sentence")

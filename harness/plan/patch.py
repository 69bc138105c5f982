"""A unified diff that an arm's package is given: a copy of what is installed, with the diff in it.

What a diff changes follows from its text alone, so a run is refused before anything starts, and its record
holds the diff itself: the file may change, or be gone, and the run can be measured again all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from overlap_bench.engines import api
from overlap_bench.harness.plan.design import Patch, package_of, started_by

OURS = "overlap_bench"
STRIPS = (1, 0, 2, 3, 4, 5, 6, 7, 8, 9)  # leading folders of a diff's paths, what git writes first
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
NOWHERE = "/dev/null"  # the other side of a file that is new, or removed
UNFIT = (
    (
        re.compile(r"(?m)^diff --(?:cc|combined) .+\nindex "),
        "is a combined diff, as git shows of a merge, and fits no side; try git diff main...branch",
    ),
    (
        re.compile(r"(?m)^Only in \S+: \S+\s*$"),
        "lacks files that only one side has, as diff -ru does; use diff -ruN, or git diff",
    ),
)


def read_patch(file: str, packages: Sequence[str]) -> Patch:
    """The diff in a file, for packages of these names. Raises BadSetting where there is none, or it changes
    none of their files."""
    try:
        with Path(file).expanduser().open(encoding="utf-8-sig", newline="") as opened:
            text = opened.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise api.BadSetting(f"patch={file} can't be read: {why}") from error
    for kind, why in UNFIT:
        if kind.search(text):
            raise api.BadSetting(f"patch={file} {why}")
    changed = list(dict.fromkeys(_changed(text)))
    if not changed:
        raise api.BadSetting(f"patch={file} is no unified diff, such as git diff writes: it changes no file")
    for strip in STRIPS:
        stripped = list(dict.fromkeys("/".join(each.split("/")[strip:]) for each in changed))
        files = tuple(each for each in stripped if package_of(each) in packages)
        if files:
            left_out = tuple(each for each in stripped if each and each not in files)
            return Patch(file=file, text=text, strip=strip, files=files, left_out=left_out)
    raise api.BadSetting(
        f"patch={file} changes no file of {' or '.join(packages)}, but {', '.join(changed[:3])}: its paths "
        f"must lead from the folder that holds {packages[0]}"
    )


def _changed(text: str) -> Iterator[str]:
    """Every file that a diff names, but for what stands within its hunks."""
    removed = added = 0  # lines of a hunk that are still to come
    for line in text.split("\n"):
        if removed > 0 or added > 0:
            removed -= line[:1] in ("-", " ", "")
            added -= line[:1] in ("+", " ", "")
        elif hunk := HUNK.match(line):
            removed, added = (1 if each is None else int(each) for each in hunk.groups())
        elif line.startswith(("--- ", "+++ ")):
            name = line[4:].partition("\t")[0].strip()
            if name != NOWHERE:
                yield f"b/{name.removeprefix('a/')}" if name.startswith("a/") else name
        elif moved := re.match(r"(?:rename|copy) (?:from|to) (.+)", line):
            yield f"b/{moved[1].rstrip()}"
        elif alone := re.fullmatch(r"diff --git a/(.+) b/\1\r?", line):
            yield f"b/{alone[1]}"  # an empty file, or one that is no text, has no more lines than this


def packages_of(spec: api.EngineSpec, python: str | None, toggles: Mapping[str, str]) -> Sequence[str]:
    """The top-level packages and modules that an engine is about."""
    _, served = started_by(python, toggles)
    return [served] if served else spec.packages or [spec.build.partition(":")[0].partition(".")[0]]


def patch_of(file: str, spec: api.EngineSpec, python: str | None, toggles: Mapping[str, str]) -> Patch:
    """The diff that an arm of this engine is given. Raises BadSetting, also where its code is not this
    project's to change."""
    if "url" in toggles:
        raise api.BadSetting(f"patch={file}: the server at {toggles['url']} runs already; start it by cmd=")
    packages = packages_of(spec, python, toggles)
    if any(each.partition(".")[0] == OURS for each in packages):
        raise api.BadSetting(
            f"patch={file}: engine {spec.name} is overlap-bench's own; bench gate --base-ref compares commits"
        )
    return read_patch(file, packages)

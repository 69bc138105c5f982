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
NOWHERE = "/dev/null"  # the other side of a file that is new, or removed
COMMIT = re.compile(r"(?m)^(?=(?:From|commit) [0-9a-f]{40,}\b)")  # of git format-patch, or of git log -p
SECTION = re.compile(r"(?m)^(?=diff )")  # a line of a hunk begins otherwise
# What git takes for names, and not what a commit's message says, or what is in a hunk.
HEADER = re.compile(r"diff --git (.+?)\r?\n(?:old|new|deleted|index|similarity|dissimilarity|rename|copy) ")
MOVED = re.compile(r"(?m)^(?:rename|copy) from (.+?)\r?\n(?:rename|copy) to (.+?)\r?$")
SIDES = re.compile(r"(?m)^--- (.+)\n\+\+\+ (.+)\n@@ -")
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
    changed = list(dict.fromkeys(name for each in SECTION.split(text) for name in _changed(each)))
    if not changed:
        raise api.BadSetting(f"patch={file} is no unified diff, such as git diff writes: it changes no file")
    for strip in STRIPS:
        stripped = list(dict.fromkeys(_stripped(each, strip) for each in changed))
        files = tuple(each for each in stripped if package_of(each) in packages)
        if files:
            left_out = tuple(each for each in stripped if each and each not in files)
            return Patch(file=file, text=text, strip=strip, files=files, left_out=left_out)
    raise api.BadSetting(
        f"patch={file} changes no file of {' or '.join(packages)}, but {', '.join(changed[:3])}: its paths "
        f"must lead from the folder that holds {packages[0]}"
    )


def commits(patch: Patch) -> Iterator[tuple[str, list[str]]]:
    """The commits of a diff, to be applied one after the other, and the files of the packages that each
    names, as often as it does. At once, git would take what a later one renames, copies or removes as it was
    before the first. What is about other files alone is left out."""
    above = 0
    for text in COMMIT.split(patch.text):
        parts = [(each, _own(patch, each)) for each in SECTION.split(text)]
        if files := [name for _, names in parts for name in names]:
            # git refuses a name with fewer folders than it strips. With blank lines in place of what is left
            # out, a line that it names in an error is the diff's own.
            kept = (each if names else "\n" * each.count("\n") for each, names in parts)
            yield "".join(["\n" * above, *kept]), files
        above += text.count("\n")


def unquoted(name: str) -> str:
    """A name as git writes it, with the quotes and escapes of C where it is no plain text."""
    if not name.startswith('"'):
        return name
    octets = name[1:-1].encode().decode("unicode_escape", "ignore").encode("latin-1", "ignore")
    return octets.decode(errors="replace")


def _own(patch: Patch, section: str) -> list[str]:
    found = dict.fromkeys(_stripped(each, patch.strip) for each in _changed(section))
    return [each for each in found if package_of(each) in patch.packages]


def _stripped(name: str, strip: int) -> str:
    return "/".join(name.split("/")[strip:])


def _changed(section: str) -> Iterator[str]:
    """Every file that a part of a diff names."""
    header = HEADER.match(section)
    moved = MOVED.search(section) if header else None
    if header and moved:  # whose lines have no prefix such as a/, whether or not the others do
        prefix = "" if header[1] == " ".join(moved.groups()) else "b/"
        yield from (f"{prefix}{unquoted(each)}" for each in moved.groups())
    elif header:  # an empty file, or one that is no text, has no more lines than this
        words = header[1].split(" ")
        yield _name(" ".join(words[len(words) // 2 :]))
    for sides in SIDES.findall(section):
        named = [name for name in map(_name, sides) if name != NOWHERE]
        # Of pool.py and pool.py.orig, git takes the shorter one.
        yield from (each for each in named if not any(each != it and each.startswith(it) for it in named))


def _name(side: str) -> str:
    name = unquoted(side.partition("\t")[0].strip())
    return f"b/{name.removeprefix('a/')}" if name.startswith("a/") else name


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

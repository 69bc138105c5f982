"""Repositories that tests make, and what a repository looks like that nothing has written into."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

IDENTITY = (
    *("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"),
    *("-c", "protocol.file.allow=always"),
)


def git(where: Path, *arguments: str) -> str:
    """What git prints there."""
    done = subprocess.run(["git", *IDENTITY, *arguments], cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(where: Path, files: Mapping[str, str | bytes], name: str) -> str:
    """Commit these files, in a new repository where there is none, and give the commit that branch; its
    hash."""
    where.mkdir(parents=True, exist_ok=True)
    if not (where / ".git").exists():
        git(where, "init", "--quiet")
    for path, content in files.items():
        (where / path).parent.mkdir(parents=True, exist_ok=True)
        (where / path).write_bytes(content.encode() if isinstance(content, str) else content)
    git(where, "add", "--all")
    git(where, "commit", "--quiet", "--allow-empty", "--message", name)
    git(where, "branch", "--force", name)
    return git(where, "rev-parse", "HEAD").strip()


def files(tree: Path) -> dict[str, tuple[bool, bytes]]:
    """All that a tree holds besides its repositories: whether it may be run, or where it links to; and its
    content."""
    found = {}
    for path in tree.rglob("*"):
        if ".git" in path.relative_to(tree).parts or (path.is_dir() and not path.is_symlink()):
            continue
        name, linked = str(path.relative_to(tree)), path.is_symlink()
        content = str(path.readlink()).encode() if linked else path.read_bytes()
        found[name] = (not linked and bool(path.stat().st_mode & 0o100), content)
    return found


def fingerprint(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every path below a folder, itself included, with its mode, its time and its content."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found

"""The commits between two refs, as a bisection takes them."""

from pathlib import Path

import pytest

from overlap_bench.engines import api
from overlap_bench.harness.run.worktrees import between, resolve
from tests.support.repositories import commit, fingerprint, git


def span(where: Path, good: str, bad: str) -> list[tuple[str, str]]:
    return between(resolve(good, where), resolve(bad, where))


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """main: one, two, a merge of side (its two commits), four with no subject at all."""
    where = tmp_path_factory.mktemp("repository")
    for name in ("one", "two"):
        commit(where, {"a": name}, name)
    git(where, "checkout", "--quiet", "-b", "side", "one")
    for name in ("side-1", "side-2"):
        commit(where, {"b": name}, name)
    git(where, "checkout", "--quiet", "main")
    git(where, "merge", "--quiet", "--no-ff", "--message", "merged: side | of \x0b two", "side")
    git(where, "branch", "merged")
    git(where, "commit", "--quiet", "--allow-empty", "--allow-empty-message", "--message", "")
    git(where, "branch", "four")
    return where


def test_what_a_merge_brought_is_its_own(where: Path) -> None:
    before = fingerprint(where / ".git")
    found = span(where, "one", "four")
    assert [commit for commit, _ in found] == [
        git(where, "rev-parse", name).strip() for name in ("two", "merged", "four")
    ]
    assert [subject for _, subject in found] == ["two", "merged: side | of \x0b two", ""]
    assert fingerprint(where / ".git") == before


def test_settings_of_the_user_change_nothing(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = span(where, "one", "four")
    for number, (name, value) in enumerate((("log.showSignature", "true"), ("format.pretty", "fuller"))):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", name)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", value)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    assert span(where, "one", "four") == plain


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("two", "two", "two and two are the same commit"),
        ("four", "one", "four is later than one: give the earlier one as --good"),
        ("two", "side", "side does not descend from two: --good [0-9a-f]{10} is where they parted"),
    ],
)
def test_what_no_line_joins_is_refused(where: Path, good: str, bad: str, message: str) -> None:
    with pytest.raises(api.BadSetting, match=message):
        span(where, good, bad)


def test_a_shallow_clone_is_told_as_such(where: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", "--no-single-branch", where.as_uri(), "clone")
    with pytest.raises(api.BadSetting, match="this clone is shallow, fetch it first"):
        span(tmp_path / "clone", "origin/one", "origin/four")

"""A file of variants that can't be understood."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import api
from harness.plan import variants


@pytest.mark.parametrize("content", [b"\xff", b"a = [", b"a = " + b"[" * 100_000, b'a = "x"'])
def test_one_line_says_which_file_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "variants.toml").write_bytes(content)
    monkeypatch.setattr(variants, "files", lambda _: tmp_path)
    with pytest.raises(api.BadFile, match=r"^engines/variants\.toml"):
        variants.load_variants()

"""Files that two nodes may want to create at the same moment."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from zeroband.checkpoint.storage import LocalStorage


def test_file_is_not_there_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node that finds it reads it at once."""
    seen: list[bool] = []
    sync = os.fsync

    def look(handle: int) -> None:
        seen.append((tmp_path / "owner.json").exists())
        sync(handle)

    monkeypatch.setattr(os, "fsync", look)
    assert LocalStorage(tmp_path, "a").create("owner.json", b"mine")
    assert seen[0] is False
    assert (tmp_path / "owner.json").read_bytes() == b"mine"


@pytest.mark.parametrize("has_links", [True, False])
def test_first_one_creates_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool) -> None:
    if not has_links:

        def refuse(*_: Any) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    first, second = LocalStorage(tmp_path / "run", "a"), LocalStorage(tmp_path / "run", "b")
    assert first.create("owner.json", b"first")
    assert not second.create("owner.json", b"second")
    assert first.read("owner.json") == b"first"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["owner.json"]

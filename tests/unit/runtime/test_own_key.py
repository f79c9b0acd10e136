"""The file of a node's own key."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from zeroband.errors import ConfigError
from zeroband.observe.view import short_key
from zeroband.runtime.run_folder import KEY_FILE, own_key


def test_key_is_made_once_for_each_folder_and_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = own_key(tmp_path / "run" / "a")
    assert own_key(tmp_path / "run" / "a") == first != own_key(tmp_path / "run" / "b")
    assert (tmp_path / "run" / "a" / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "run" / "a").iterdir()] == [KEY_FILE]
    said = [record.fields["key"] for record in caplog.records if hasattr(record, "fields")]  # type: ignore[attr-defined]
    assert said[0] == short_key(first.name("a")) and len(said) == 2


def test_key_that_others_may_read_or_that_is_damaged_is_refused_with_the_way_out(tmp_path: Path) -> None:
    own_key(tmp_path)
    path = tmp_path / KEY_FILE
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"open to other users \(mode 0640\); chmod 600 it"):
        own_key(tmp_path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="holds 5 bytes instead of 32; remove the file"):
        own_key(tmp_path)


def test_folder_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the key of this node, .*, cannot be kept"):
        own_key(tmp_path / "file")

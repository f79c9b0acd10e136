"""What members of a save believe of each other's records."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.checkpoint.manifest import CheckpointKey, StoredFile
from zeroband.checkpoint.peers import Shares
from zeroband.checkpoint.storage import LocalStorage

FILES = {"nodes/b/state.json": StoredFile(3, "00", "11")}
KEY = CheckpointKey(bytes(32))


def shares(folder: Path, key: CheckpointKey | None, attempt: str = "now") -> Shares:
    return Shares(LocalStorage(folder, "a"), "step_00000010.tmp", attempt, (), key)


@pytest.mark.parametrize("key", [KEY, None])
def test_record_of_a_member_is_read_by_the_others(tmp_path: Path, key: CheckpointKey | None) -> None:
    shares(tmp_path, key).publish("b", FILES)
    assert shares(tmp_path, key).read("b") == FILES


@pytest.mark.parametrize("key", [CheckpointKey(bytes(31) + b"1"), None])
def test_record_of_somebody_without_the_token_is_no_record(tmp_path: Path, key: CheckpointKey | None) -> None:
    shares(tmp_path, key).publish("b", FILES)
    assert shares(tmp_path, KEY).read("b") is None


@pytest.mark.parametrize(("attempt", "member"), [("now", "c"), ("then", "b")])
def test_record_of_another_member_or_save_is_no_record(tmp_path: Path, attempt: str, member: str) -> None:
    theirs = shares(tmp_path, KEY, attempt)
    theirs.publish(member, FILES)
    folder = tmp_path / "step_00000010.tmp/parts"
    (folder / f"{attempt}-{member}.json").rename(folder / "now-b.json")
    assert shares(tmp_path, KEY).read("b") is None

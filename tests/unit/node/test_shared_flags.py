"""The notice flags: words of one page that several processes share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroband.node.shared_flags import SharedFlags


@pytest.fixture
def flags(tmp_path: Path) -> Iterator[SharedFlags]:
    flags = SharedFlags(tmp_path / "flags", create=True)
    yield flags
    flags.close()


@pytest.fixture
def other(flags: SharedFlags) -> Iterator[SharedFlags]:
    """The same flags as another process maps it."""
    other = SharedFlags(flags.path, create=False)
    yield other
    other.close()


def test_new_board_says_nothing(flags: SharedFlags) -> None:
    assert (flags.progress, flags.aborted_version, flags.is_fenced, flags.serves_state) == (0, 0, False, False)


def test_writes_are_seen_through_another_mapping(flags: SharedFlags, other: SharedFlags) -> None:
    flags.advance()
    flags.advance()
    flags.abort(7)
    flags.set_fenced(True)
    flags.set_serves_state(True)
    assert (other.progress, other.aborted_version, other.is_fenced, other.serves_state) == (2, 7, True, True)


def test_words_do_not_touch_each_other(flags: SharedFlags) -> None:
    flags.abort(2**40)
    flags.set_fenced(True)
    flags.set_fenced(False)
    assert (flags.progress, flags.aborted_version, flags.is_fenced, flags.serves_state) == (0, 2**40, False, False)


def test_time_of_the_newest_advance_is_seen_by_others(flags: SharedFlags, other: SharedFlags) -> None:
    assert other.advanced_at_s == 0
    before_s = time.monotonic()
    flags.advance()
    assert before_s <= other.advanced_at_s <= time.monotonic()


def test_abort_never_goes_back(flags: SharedFlags) -> None:
    flags.abort(7)
    flags.abort(5)
    assert flags.aborted_version == 7


def test_opening_a_board_leaves_what_is_on_it(flags: SharedFlags) -> None:
    flags.abort(3)
    SharedFlags(flags.path, create=True).close()
    assert flags.aborted_version == 3


def test_board_that_was_not_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SharedFlags(tmp_path / "flags", create=False)


def test_board_is_readable_by_its_owner_only(flags: SharedFlags) -> None:
    assert flags.path.stat().st_mode & 0o777 == 0o600


def test_session_of_the_node_is_read_by_its_guardian(tmp_path: Path) -> None:
    trainer, guardian = SharedFlags(tmp_path / "flags", create=True), SharedFlags(tmp_path / "flags", create=False)
    assert guardian.session == ""
    for session in ("0123456789abcdef" * 2, "another", ""):
        trainer.set_session(session)
        assert guardian.session == session
    assert guardian.progress == 0 and not guardian.is_fenced

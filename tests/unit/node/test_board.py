"""The notice board: words of one page that several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroband.node.board import NodeBoard


@pytest.fixture
def board(tmp_path: Path) -> Iterator[NodeBoard]:
    board = NodeBoard(tmp_path / "board", create=True)
    yield board
    board.close()


@pytest.fixture
def other(board: NodeBoard) -> Iterator[NodeBoard]:
    """The same board as another process maps it."""
    other = NodeBoard(board.path, create=False)
    yield other
    other.close()


def test_new_board_says_nothing(board: NodeBoard) -> None:
    assert (board.progress, board.aborted_version, board.is_fenced, board.serves_state) == (0, 0, False, False)


def test_writes_are_seen_through_another_mapping(board: NodeBoard, other: NodeBoard) -> None:
    board.advance()
    board.advance()
    board.abort(7)
    board.set_fenced(True)
    board.set_serves_state(True)
    assert (other.progress, other.aborted_version, other.is_fenced, other.serves_state) == (2, 7, True, True)


def test_words_do_not_touch_each_other(board: NodeBoard) -> None:
    board.abort(2**40)
    board.set_fenced(True)
    board.set_fenced(False)
    assert (board.progress, board.aborted_version, board.is_fenced, board.serves_state) == (0, 2**40, False, False)


def test_abort_never_goes_back(board: NodeBoard) -> None:
    board.abort(7)
    board.abort(5)
    assert board.aborted_version == 7


def test_opening_a_board_leaves_what_is_on_it(board: NodeBoard) -> None:
    board.abort(3)
    NodeBoard(board.path, create=True).close()
    assert board.aborted_version == 3


def test_board_that_was_not_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NodeBoard(tmp_path / "board", create=False)


def test_board_is_readable_by_its_owner_only(board: NodeBoard) -> None:
    assert board.path.stat().st_mode & 0o777 == 0o600


def test_session_of_the_node_is_read_by_its_guardian(tmp_path: Path) -> None:
    trainer, guardian = NodeBoard(tmp_path / "board", create=True), NodeBoard(tmp_path / "board", create=False)
    assert guardian.session == ""
    for session in ("0123456789abcdef" * 2, "another", ""):
        trainer.set_session(session)
        assert guardian.session == session
    assert guardian.progress == 0 and not guardian.is_fenced

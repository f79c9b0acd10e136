"""The table of events, and the log that writes it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from zeroband.observe.events import EVENTS, EVENTS_FILE, EventLog


def test_event_log_writes_the_event_before_it_returns(tmp_path: Path) -> None:
    EventLog(tmp_path / "n0", now=lambda: 5.0).emit("joined", member_id="n0#ab", round=0, lanes=2)
    assert json.loads((tmp_path / "n0" / EVENTS_FILE).read_text()) == {
        "at_s": 5.0,
        "kind": "joined",
        "member_id": "n0#ab",
        "round": 0,
        "lanes": 2,
    }


def test_event_log_also_logs_the_event_at_its_level(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("zeroband"), "propagate", True)
    EventLog(tmp_path).emit("peer_lost", round=3, member_ids=["n2#cd"])
    record = caplog.records[-1]
    assert (record.levelname, record.getMessage()) == ("WARNING", "peer_lost")
    assert record.__dict__["fields"] == {"round": 3, "member_ids": ["n2#cd"]}


def test_event_log_refuses_a_kind_that_is_not_in_the_table(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not in EVENTS: peer_gone"):
        EventLog(tmp_path).emit("peer_gone")


@pytest.mark.parametrize("kind", [kind for kind in EVENTS if EVENTS[kind].fields])
def test_event_log_refuses_an_event_without_its_fields(tmp_path: Path, kind: str) -> None:
    with pytest.raises(AssertionError, match=f"{kind} without {EVENTS[kind].fields[0]}"):
        EventLog(tmp_path).emit(kind)


def test_event_log_sets_the_time_itself(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="at_s is set by the log"):
        EventLog(tmp_path).emit("run_finished", step=3, at_s=1.0)

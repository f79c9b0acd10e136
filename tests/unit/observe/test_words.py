"""Every kind of event has a sentence that says what its fields hold."""

from __future__ import annotations

from string import Formatter

import pytest

from zeroband.observe.events import EVENTS
from zeroband.observe.view import EventView
from zeroband.observe.words import event_in_words


@pytest.mark.parametrize("kind", list(EVENTS))
def test_words_use_fields_that_the_kind_always_carries(kind: str) -> None:
    used = {name for _, name, _, _ in Formatter().parse(EVENTS[kind].words) if name}
    assert used <= {"node", *EVENTS[kind].fields}


def test_members_are_said_by_their_nodes() -> None:
    event = EventView(1.0, "a", "peer_lost", {"round": 3, "member_ids": ["c#2", "b#1"]})
    assert event_in_words(event) == "Round 3 goes on without b, c."


def test_unknown_kinds_and_missing_fields_are_told_all_the_same() -> None:
    assert event_in_words(EventView(1.0, "a", "danced", {})) == "a: danced"
    assert event_in_words(EventView(1.0, "a", "left", {})) == "a left: ?."

"""What a guardian tells its trainer of the node's links: when it is news, at most so often, of this membership only."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from zeroband.elastic.guardian.link_report import (
    INTERVAL_S,
    LINKS_FILE,
    LinkReader,
    Links,
    LinkSeen,
    LinkWriter,
    is_notable_change,
)

A, B, C = "a#1", "b#1", "c#1"
LINK = LinkSeen(100, 40.0, is_cut_off=False)


@pytest.mark.parametrize(
    ("now", "is_news"),
    [
        ({B: LINK}, False),
        ({B: replace(LINK, mbit_s=149, rtt_ms=59.0)}, False),
        ({B: replace(LINK, mbit_s=151)}, True),
        ({B: replace(LINK, mbit_s=60)}, True),
        ({B: replace(LINK, mbit_s=None)}, True),
        ({B: replace(LINK, rtt_ms=20.0)}, True),
        ({B: replace(LINK, rtt_ms=None)}, True),
        ({B: replace(LINK, is_cut_off=True)}, True),
        ({B: LINK, C: LINK}, True),
        ({C: LINK}, True),
        ({}, True),
    ],
)
def test_links_are_news_where_a_person_would_want_to_know(now: Links, is_news: bool) -> None:
    assert is_notable_change({B: LINK}, now) == is_news


def test_short_round_trips_that_differ_are_no_news() -> None:
    assert not is_notable_change({B: replace(LINK, rtt_ms=0.1)}, {B: replace(LINK, rtt_ms=4.0)})


def test_trainer_gets_what_the_guardian_told_once(tmp_path: Path) -> None:
    writer, reader = LinkWriter(tmp_path, A), LinkReader(tmp_path, A)
    assert reader.read_changes() is None
    writer.write({C: LINK, B: LINK}, 0.0)
    assert reader.read_changes() == [{"to": member, **asdict(LINK)} for member in (B, C)]
    assert reader.read_changes() is None


def test_news_are_told_no_sooner_than_some_seconds_after_the_last(tmp_path: Path) -> None:
    writer, reader = LinkWriter(tmp_path, A), LinkReader(tmp_path, A)
    told = list[float]()
    for tenth in range(100):
        writer.write({B: LINK} if len(told) % 2 == 0 else {B: LINK, C: LINK}, tenth / 10)
        if reader.read_changes() is not None:
            told.append(tenth / 10)
    assert told == [0.0, 3.0, 6.0, 9.0] and INTERVAL_S == 3.0


def test_links_that_stay_are_told_once(tmp_path: Path) -> None:
    writer = LinkWriter(tmp_path, A)
    writer.write({}, 0.0)
    assert not (tmp_path / LINKS_FILE).exists()
    writer.write({B: LINK}, 1.0)
    written = (tmp_path / LINKS_FILE).stat().st_mtime_ns
    for now_s in (10.0, 20.0):
        writer.write({B: LINK}, now_s)
    assert (tmp_path / LINKS_FILE).stat().st_mtime_ns == written


def test_what_was_told_in_another_membership_or_is_no_report_is_passed_over(tmp_path: Path) -> None:
    reader = LinkReader(tmp_path, A)
    LinkWriter(tmp_path, "a#0").write({B: LINK}, 0.0)
    assert reader.read_changes() is None
    for text in ("", "[]", '{"member": "a#1"}', '{"member": "a#1", "links": {"b#1": {"x": 1}}}'):
        (tmp_path / LINKS_FILE).write_text(text)
        assert reader.read_changes() is None
    LinkWriter(tmp_path, A).write({B: LINK}, 0.0)
    assert reader.read_changes() == [{"to": B, **asdict(LINK)}]


def test_guardian_that_replaces_another_tells_nothing_twice(tmp_path: Path) -> None:
    reader = LinkReader(tmp_path, A)
    LinkWriter(tmp_path, A).write({B: LINK}, 0.0)
    assert reader.read_changes() is not None
    LinkWriter(tmp_path, A).write({B: LINK}, 0.0)
    assert reader.read_changes() is None


def test_folder_that_is_gone_is_done_without_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    writer, reader = LinkWriter(folder, A), LinkReader(folder, A)
    writer.write({B: LINK}, 0.0)
    folder.mkdir()
    writer.write({B: LINK}, 5.0)
    assert reader.read_changes() is not None

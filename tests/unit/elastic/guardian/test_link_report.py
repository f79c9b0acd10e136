"""A guardian's reports of links: after notable changes, at a limited rate, of this membership only."""

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
def test_notable_change_of_links_is_reported(now: Links, is_news: bool) -> None:
    assert is_notable_change({B: LINK}, now) == is_news


def test_small_change_of_a_short_round_trip_is_not_reported() -> None:
    assert not is_notable_change({B: replace(LINK, rtt_ms=0.1)}, {B: replace(LINK, rtt_ms=4.0)})


def test_trainer_gets_each_report_once(tmp_path: Path) -> None:
    writer, reader = LinkWriter(tmp_path, A), LinkReader(tmp_path, A)
    assert reader.read_changes() is None
    writer.write({C: LINK, B: LINK}, 0.0)
    assert reader.read_changes() == [{"to": member, **asdict(LINK)} for member in (B, C)]
    assert reader.read_changes() is None


def test_reports_are_written_at_most_every_few_seconds(tmp_path: Path) -> None:
    writer, reader = LinkWriter(tmp_path, A), LinkReader(tmp_path, A)
    told = list[float]()
    for tenth in range(100):
        writer.write({B: LINK} if len(told) % 2 == 0 else {B: LINK, C: LINK}, tenth / 10)
        if reader.read_changes() is not None:
            told.append(tenth / 10)
    assert told == [0.0, 3.0, 6.0, 9.0] and INTERVAL_S == 3.0


def test_unchanged_links_are_written_once(tmp_path: Path) -> None:
    writer = LinkWriter(tmp_path, A)
    writer.write({}, 0.0)
    assert not (tmp_path / LINKS_FILE).exists()
    writer.write({B: LINK}, 1.0)
    written = (tmp_path / LINKS_FILE).stat().st_mtime_ns
    for now_s in (10.0, 20.0):
        writer.write({B: LINK}, now_s)
    assert (tmp_path / LINKS_FILE).stat().st_mtime_ns == written


def test_invalid_report_or_one_of_another_membership_is_ignored(tmp_path: Path) -> None:
    reader = LinkReader(tmp_path, A)
    LinkWriter(tmp_path, "a#0").write({B: LINK}, 0.0)
    assert reader.read_changes() is None
    for text in ("", "[]", '{"member": "a#1"}', '{"member": "a#1", "links": {"b#1": {"x": 1}}}'):
        (tmp_path / LINKS_FILE).write_text(text)
        assert reader.read_changes() is None
    LinkWriter(tmp_path, A).write({B: LINK}, 0.0)
    assert reader.read_changes() == [{"to": B, **asdict(LINK)}]


def test_report_of_a_replacement_guardian_without_a_change_is_ignored(tmp_path: Path) -> None:
    reader = LinkReader(tmp_path, A)
    LinkWriter(tmp_path, A).write({B: LINK}, 0.0)
    assert reader.read_changes() is not None
    LinkWriter(tmp_path, A).write({B: LINK}, 0.0)
    assert reader.read_changes() is None


def test_missing_folder_is_ignored_and_retried(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    writer, reader = LinkWriter(folder, A), LinkReader(folder, A)
    writer.write({B: LINK}, 0.0)
    folder.mkdir()
    writer.write({B: LINK}, 5.0)
    assert reader.read_changes() is not None

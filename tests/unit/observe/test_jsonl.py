"""Lines on disk: whole after a kill, strict JSON, and readable while they are written."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroband.errors import ConfigError
from zeroband.observe.jsonl import JsonlTail, JsonlWriter, encode_line


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_encode_line_writes_numbers_that_json_lacks_as_strings(value: float) -> None:
    line = encode_line({"a": value, "b": [value, {"c": value}], "d": 1.5})
    read = json.loads(line, parse_constant=refuse_constant)
    assert read == {"a": str(value), "b": [str(value), {"c": str(value)}], "d": 1.5}
    assert repr(float(read["a"])) == repr(value)


def test_encode_line_keeps_floats_to_the_last_bit() -> None:
    assert json.loads(encode_line({"a": 0.1 + 0.2}))["a"] == 0.1 + 0.2


def test_encode_line_holds_one_line_whatever_the_text() -> None:
    assert encode_line({"path": Path("x"), "text": "two\nlines\u2028é"}).count(b"\n") == 1


def test_writer_appends_to_what_an_earlier_start_wrote(tmp_path: Path) -> None:
    path = tmp_path / "node" / "metrics.jsonl"
    for step in (1, 2):
        writer = JsonlWriter(path)
        writer.append({"step": step})
        writer.close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_writer_ends_a_half_line_of_an_earlier_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    JsonlWriter(path).append({"step": 2})
    tail = JsonlTail(path)
    assert (tail.read(), tail.skipped_lines) == ([{"step": 1}, {"step": 2}], 1)


def test_writer_ends_its_own_half_line_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    writer.append({"step": 1})
    monkeypatch.undo()
    writer.append({"step": 2})
    assert JsonlTail(tmp_path / "metrics.jsonl").read() == [{"step": 2}]


def test_writer_reports_a_full_disk_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("zeroband"), "propagate", True)
    caplog.set_level("INFO")
    writer = JsonlWriter(Path("/dev/full"))
    writer.append({"step": 1})
    writer.append({"step": 2})
    assert [record.getMessage() for record in caplog.records] == ["lines are being lost"]


def test_writer_says_when_a_full_disk_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("zeroband"), "propagate", True)
    caplog.set_level("INFO")
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    writer.append({"step": 1})
    monkeypatch.undo()
    writer.append({"step": 2})
    assert [record.getMessage() for record in caplog.records] == ["lines are being lost", "lines are written again"]


def test_writer_refuses_a_folder_that_it_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file/node/metrics\.jsonl: .*; set run\.dir"):
        JsonlWriter(tmp_path / "file" / "node" / "metrics.jsonl")


def test_tail_gives_nothing_before_the_file_is_there(tmp_path: Path) -> None:
    tail = JsonlTail(tmp_path / "metrics.jsonl")
    before = tail.read()
    JsonlWriter(tmp_path / "metrics.jsonl").append({"step": 1})
    assert (before, tail.read()) == ([], [{"step": 1}])


def test_tail_starts_again_when_the_file_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    tail = JsonlTail(path)
    tail.read()
    path.write_bytes(b'{"step": 3}\n')
    assert tail.read() == [{"step": 3}]


def test_tail_starts_again_when_the_file_was_replaced_by_a_longer_one(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    path.write_bytes(b'{"step": 1}\n')
    tail = JsonlTail(path)
    tail.read()
    other.write_bytes(b'{"step": 7}\n{"step": 8}\n')
    other.replace(path)
    assert tail.read() == [{"step": 7}, {"step": 8}]


def test_tail_skips_and_counts_lines_that_are_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\nnot json\n[1]\n\xff\xfe\n\n{"step": 2}\n')
    tail = JsonlTail(path)
    assert (tail.read(), tail.skipped_lines) == ([{"step": 1}, {"step": 2}], 3)


@settings(max_examples=25)
@given(
    steps=st.lists(st.integers(0, 10**12), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_tail_gives_every_line_once_however_the_file_grew(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    data = b"".join(encode_line({"step": step, "text": "\u00e9"}) for step in steps)
    tail = JsonlTail(path)
    seen: list[int] = []
    for stop in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        path.touch()
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(data[file.tell() : stop])
        seen += [record["step"] for record in tail.read()]
    assert seen == steps


def test_file_that_is_removed_is_made_anew_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.append({"step": 1})
    path.unlink()
    for step in (2, 3):
        writer.append({"step": step})
    assert path.read_text() == '{"step": 2}\n{"step": 3}\n'
    said = ["a file was removed; what comes from now on is in a new one"]
    assert [record.message for record in caplog.records] == said
    shutil.rmtree(path.parent)
    writer.append({"step": 4})
    writer.close()
    assert path.read_text() == '{"step": 4}\n'
    assert [record.message for record in caplog.records] == said, "whoever keeps the folder says that it went"

"""Lines on disk: whole after a kill, strict JSON, and readable while they are written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroband.errors import ConfigError
from zeroband.observe.jsonl import JsonlTail, JsonlWriter, encode_line

Said = Callable[[], list[str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def short_writes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A disk that takes five bytes of a line, until this is undone."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    return monkeypatch


def write(path: Path, *steps: int) -> JsonlWriter:
    writer = JsonlWriter(path)
    for step in steps:
        writer.write({"step": step})
    return writer


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_encode_line_writes_numbers_that_json_lacks_as_strings(value: float) -> None:
    line = encode_line({"a": value, "b": [value, {"c": value}], "d": 1.5})
    read = json.loads(line, parse_constant=pytest.fail)
    assert read == {"a": str(value), "b": [str(value), {"c": str(value)}], "d": 1.5}
    assert repr(float(read["a"])) == repr(value)


def test_encode_line_keeps_floats_to_the_last_bit_and_is_one_line_whatever_the_text() -> None:
    assert json.loads(encode_line({"a": 0.1 + 0.2}))["a"] == 0.1 + 0.2
    assert encode_line({"path": Path("x"), "text": "two\nlines\u2028é"}).count(b"\n") == 1


def test_writer_appends_to_what_an_earlier_start_wrote(path: Path) -> None:
    for step in (1, 2):
        write(path, step).close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_writer_ends_a_half_line_of_an_earlier_start(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"step": 1}\n{"ste')
    write(path, 2)
    tail = JsonlTail(path)
    assert (tail.read(), tail.skipped_lines) == ([{"step": 1}, {"step": 2}], 1)


def test_full_disk_is_said_once_and_when_it_has_room_again_which_ends_the_half_line(
    path: Path, said: Said, short_writes: pytest.MonkeyPatch
) -> None:
    writer = write(path, 1, 2)
    assert said() == ["cannot write; lines are lost"]
    short_writes.undo()
    writer.write({"step": 3})
    assert JsonlTail(path).read() == [{"step": 3}]
    assert said() == ["cannot write; lines are lost", "writing works again"]


def test_disk_that_refuses_a_line_is_said_once(said: Said) -> None:
    write(Path("/dev/full"), 1, 2)
    assert said() == ["cannot write; lines are lost"]


def test_writer_refuses_a_folder_that_it_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file/node/metrics\.jsonl: .*; set run\.dir"):
        JsonlWriter(tmp_path / "file" / "node" / "metrics.jsonl")


def test_file_that_is_removed_is_made_anew_and_said_once(path: Path, said: Said) -> None:
    writer = write(path, 1)
    path.unlink()
    for step in (2, 3):
        writer.write({"step": step})
    assert path.read_text() == '{"step": 2}\n{"step": 3}\n'
    removed = ["file was removed; continuing in a new one"]
    assert said() == removed
    shutil.rmtree(path.parent)
    writer.write({"step": 4})
    writer.close()
    assert path.read_text() == '{"step": 4}\n'
    assert said() == removed, "the owner of the folder says that it went"


def test_tail_gives_nothing_before_the_file_is_there(path: Path) -> None:
    tail = JsonlTail(path)
    before = tail.read()
    write(path, 1)
    assert (before, tail.read()) == ([], [{"step": 1}])


@pytest.mark.parametrize("is_replaced", [False, True], ids=["cut", "replaced by a longer one"])
def test_tail_starts_again_with_another_file(tmp_path: Path, is_replaced: bool) -> None:
    path, new = tmp_path / "metrics.jsonl", b'{"step": 7}\n' if not is_replaced else b'{"step": 7}\n{"step": 8}\n'
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' if not is_replaced else b'{"step": 1}\n')
    tail = JsonlTail(path)
    tail.read()
    if is_replaced:
        (tmp_path / "other").write_bytes(new)
        (tmp_path / "other").replace(path)
    else:
        path.write_bytes(new)
    assert tail.read() == [{"step": 7}, {"step": 8}][: 1 + is_replaced]


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
    tail, seen, written = JsonlTail(path), list[int](), 0
    for stop in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[written:stop])
        written = stop
        seen += [record["step"] for record in tail.read()]
    assert seen == steps

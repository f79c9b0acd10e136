"""Log lines: who prints them, and what a line holds."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroband.observe.log import ROOT, LineFormatter, format_fields, get_logger, setup_logging


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


def test_get_logger_keeps_every_module_below_the_root() -> None:
    names = {"zeroband": "zeroband", "zeroband.outer": "zeroband.outer", "__main__": "zeroband.main", "x": "zeroband.x"}
    assert {name: get_logger(name).name for name in names} == names


def test_console_has_lines_of_local_rank_0_by_the_newest_setup_and_none_of_other_packages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handlers = list(logging.getLogger().handlers)
    setup_logging("INFO", "a", 0)
    setup_logging("INFO", "ab12", 0)
    get_logger("zeroband.outer.diloco").info("committed", extra={"fields": {"round": 3, "took_s": 0.25}})
    logging.getLogger("another.package").info("theirs")
    line = capsys.readouterr().err
    assert line.endswith("INFO    node=ab12 local_rank=0 outer.diloco: committed round=3 took_s=0.25\n")
    assert line.count("committed") == 1 and "theirs" not in line
    assert logging.getLogger().handlers == handlers


def test_console_has_nothing_of_other_local_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("DEBUG", "ab12", 1)
    get_logger("zeroband.outer").error("broken")
    output = capsys.readouterr()
    assert output.err + output.out == ""


def test_file_has_lines_of_every_local_rank_and_is_made_anew_where_it_was_removed(tmp_path: Path) -> None:
    file = tmp_path / "new" / "log.txt"
    for local_rank in (0, 1):
        setup_logging("INFO", "a", local_rank, file)
        get_logger("zeroband.x").info("here")
    assert [line.split(" ", 2)[2] for line in file.read_text().splitlines()] == [
        "   node=a local_rank=0 x: here",
        "   node=a local_rank=1 x: here",
    ]
    shutil.rmtree(file.parent)
    get_logger("zeroband.x").warning("still here")
    assert "still here" in file.read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((3, "3"), (1 / 3, "0.333333"), (float("nan"), "nan"), ("plain", "plain"), ("", '""'), (None, "None")),
        *(("two words", '"two words"'), ('a="b"', r'"a=\"b\""'), ("two\nlines", r'"two\nlines"')),
        *((("a#1", "b#2"), "a#1,b#2"), ([], "[]")),
    ],
)
def test_format_fields_can_be_told_apart(value: object, text: str) -> None:
    assert format_fields({"key": value, "after": 1}) == f"key={text} after=1"


def test_line_formatter_writes_one_line_for_a_message_of_two() -> None:
    record = logging.LogRecord("zeroband.x", logging.INFO, "", 0, "first %s\nsecond", ("one",), None)
    record.created, record.msecs = 0.0, 7.0
    assert LineFormatter("a", 0).format(record) == (
        "1970-01-01T00:00:00.007Z INFO    node=a local_rank=0 x: first one second"
    )


def test_line_formatter_appends_the_traceback_of_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("INFO", "a", 0)
    try:
        raise ValueError("the reason")
    except ValueError:
        get_logger("zeroband.x").exception("failed", extra={"fields": {"step": 3}})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("x: failed step=3")
    assert lines[-1] == "ValueError: the reason"

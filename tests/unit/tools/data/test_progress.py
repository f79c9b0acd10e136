from __future__ import annotations

import io
import os
import pty
import re
from contextlib import suppress

import pytest

from zeroband.tools.data.prepare import Shown

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def work(shown: Shown, clock: Clock) -> None:
    """A half in two steps of 15 s."""
    with shown.block:
        for _ in range(2):
            clock.now_s += 15.0
            shown.advance(250, 75_000)


def all_of(screen: io.RawIOBase) -> bytes:
    """What was written to a terminal that is closed by now; a read gives what has come through so far."""
    parts: list[bytes] = []
    with suppress(OSError):  # EIO: there is no more
        while part := screen.read(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_bar_of_a_terminal_shows_share_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    leader, follower = pty.openpty()
    clock = Clock()
    with os.fdopen(follower, "w") as terminal:
        work(Shown("tokens", 1000, 0, terminal, clock), clock)
    with os.fdopen(leader, "rb", buffering=0) as screen:
        seen = ESCAPES.sub("", all_of(screen).decode())
    last = seen.split("\r")[-2]
    assert re.search(r"^\n?tokens \S+ +50% 150k tokens, 5k/s 0:00:30", last), seen


def test_lines_of_a_file_show_share_rate_and_time_left() -> None:
    clock, out = Clock(), io.StringIO()
    work(Shown("tokens", 1000, 0, out, clock), clock)
    assert out.getvalue().splitlines() == [
        *("tokens: 25%, 75k tokens, 5k/s", "tokens: 50%, 150k tokens, 5k/s, 30 s left"),
    ]


def test_progress_counts_what_was_finished_before_but_not_its_speed() -> None:
    clock, out = Clock(), io.StringIO()
    shown = Shown("tokens", total=1000, done=500, stream=out, now=clock)
    for _ in range(2):
        assert out.getvalue() == ""
        clock.now_s += 5.0
        shown.advance(100, 50)
    clock.now_s += 10.0
    shown.finish(250)
    assert out.getvalue().splitlines() == [
        *("tokens: 70%, 100 tokens, 10/s, 15 s left", "tokens: 75%, 100 tokens, 5/s, 25 s left"),
    ]

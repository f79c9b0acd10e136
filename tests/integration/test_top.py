"""`zeroband top` on a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_TIMEOUT_S = 60.0


class Terminal:
    """A command on a terminal of this size, and what it drew so far."""

    def __init__(self, command: list[str], columns: int, lines: int, env: dict[str, str]) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, env)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.drawn = ""

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        end_s = time.monotonic() + _TIMEOUT_S
        while not condition(self.drawn):
            assert time.monotonic() < end_s, self.drawn
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.drawn += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # it has ended
                    assert condition(self.drawn), self.drawn
                    return

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    @property
    def is_line_by_line(self) -> bool:
        """Whether the terminal waits for Enter and echoes, as a shell expects it."""
        flags = termios.tcgetattr(self._master)[3]
        return bool(flags & termios.ICANON and flags & termios.ECHO)

    def exit_code(self) -> int:
        self.wait_for(lambda drawn: "\x1b[?1049l" in drawn)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_top_redraws_a_run_on_a_terminal_and_leaves_it_as_it_was(tmp_path: Path, key: str) -> None:
    node_dir = tmp_path / "runs" / "first" / "node0"
    node_dir.mkdir(parents=True)
    events = [
        {"at_s": 1.0, "kind": "node_started", "total_steps": 10, "local_world_size": 1, "parameters": 7},
        {"at_s": 2.0, "kind": "joined", "member_id": "node0#a", "round": 0},
    ]
    metrics = node_dir / "metrics.jsonl"
    (node_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    metrics.write_text(json.dumps({"at_s": 3.0, "step": 3, "train/loss": 4.5}) + "\n")
    env = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-m", "zeroband.tools.top", str(tmp_path / "runs")]
    terminal = Terminal(command, 80, 24, env)
    terminal.wait_for(lambda drawn: "3/10" in drawn and "q: end" in drawn)
    assert not terminal.is_line_by_line
    with metrics.open("a") as file:
        file.write(json.dumps({"at_s": 4.0, "step": 4, "train/loss": 4.25}) + "\n{half a li")
    terminal.wait_for(lambda drawn: "4/10" in drawn and "loss 4.25" in drawn)
    frame = terminal.drawn.rpartition("╭")[2]
    terminal.press(key)
    assert terminal.exit_code() == 0
    assert terminal.is_line_by_line
    assert frame.count("\n") <= 23

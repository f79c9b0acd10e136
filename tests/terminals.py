"""A command on a terminal of its own, and what it draws there."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Callable

_TIMEOUT_S = 60.0


class Terminal:
    """A command on a terminal of this size, and what it drew so far."""

    def __init__(self, command: list[str], columns: int, lines: int, env: dict[str, str]) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
            os.execve(command[0], command, env)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.drawn = ""

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        end_s = time.monotonic() + _TIMEOUT_S
        while not condition(self.drawn):
            assert time.monotonic() < end_s, self.drawn
            assert self._reads_on(), self.drawn

    def _reads_on(self) -> bool:
        """Read what is there after a moment. False: whoever drew has ended."""
        try:
            if select.select([self._master], [], [], 0.1)[0]:
                self.drawn += self._decoder.decode(os.read(self._master, 65536))
        except OSError:
            return False
        return True

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    @property
    def is_line_by_line(self) -> bool:
        """Whether the terminal waits for Enter and echoes, as a shell expects it."""
        flags = termios.tcgetattr(self._master)[3]
        return bool(flags & termios.ICANON and flags & termios.ECHO)

    def exit_code(self) -> int:
        """Read to the end; the command's exit code."""
        end_s = time.monotonic() + _TIMEOUT_S
        while self._reads_on():
            assert time.monotonic() < end_s, self.drawn
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

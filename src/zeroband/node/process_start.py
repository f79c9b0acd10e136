"""What a process of ours puts right before it does anything: closed streams, a terminal that goes away, no home folder.

Loads no other package.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO, cast

_STANDARD = (0, 1, 2)
_NOWHERE = "/nonexistent"
"""A home folder as Debian writes it where there is none: what looks for files there finds none."""


class LenientStream:
    """A text stream whose reader may go away: what cannot be written any more is dropped, and raises nothing.

    For what a process says while it works. A terminal that closes, a pipe without a reader and a full disk are no
    reason to lose the work.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write what can be written; characters that the stream's encoding lacks as escapes."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError):  # ValueError: it is closed
            return len(text)

    def flush(self) -> None:
        """Write what waits, or drop it: Python would try it again when the process ends, and make 120 of its code."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            send_nowhere(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def send_nowhere(stream: TextIO) -> None:
    """Drop what waits to be written to a stream that cannot take it, and all that follows."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def keep_standard_streams() -> None:
    """Open /dev/null for what was closed of standard input, output and error: else the next file gets that number.

    Libraries write to 1 and 2 whatever is behind them, and Python has no `sys.stdout` then.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115  for as long as it runs


def load_unwinder() -> None:
    """Load what glibc opens when the first thread ends: without a free descriptor then, it aborts the process.

    Does nothing where the C library is another one.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")


def outlast_readers(*, stdout: bool) -> None:
    """Drop what is written to a standard error that is closed; `stdout`: and to a standard output."""
    for name in ("stderr", *(("stdout",) if stdout else ())):
        stream = getattr(sys, name)
        if not isinstance(stream, LenientStream):
            setattr(sys, name, cast(TextIO, LenientStream(stream)))


def give_home(environ: MutableMapping[str, str]) -> str:
    """Give a process whose user has no home folder, as in containers, one for its caches. Returns what to say of it.

    Libraries ask for the home folder and the user's name when they are imported, and some fail without. The folder is
    this user's alone, since what lies in it may be loaded as code.
    """
    user = os.getuid()
    try:
        pwd.getpwuid(user)
    except KeyError:
        environ.setdefault("USER", str(user))
    else:
        return ""
    if environ.get("HOME"):
        return ""
    try:
        environ["HOME"] = str(_home_of(user))
    except OSError:  # nothing can be written here
        environ["HOME"] = _NOWHERE
    return f"zeroband: user {user} has no home folder here; caches go to {environ['HOME']}, or where HOME is set to"


def _home_of(user: int) -> Path:
    home = Path(tempfile.gettempdir()) / f"zeroband-home-{user}"
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
        return home
    return Path(tempfile.mkdtemp(prefix="zeroband-home-"))  # somebody else made it


def load_uncollected(module: str) -> ModuleType:
    """Import a module with the garbage collector off, and exempt what it made from later collections.

    An import keeps nearly all that it makes. Searching that for garbage takes a fifth of the processor time of
    `import torch` (1.7 s -> 1.4 s), and would again slow every full collection while training.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def uncollected(module: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs `main()` of a module of ours, loaded as `load_uncollected` does."""
    return [sys.executable, "-m", __name__, module, *arguments]


if __name__ == "__main__":
    del sys.argv[0]
    sys.exit(load_uncollected(sys.argv[0]).main())

"""Fixes for a process's surroundings before anything else: closed streams, lost terminals, a missing home folder.

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
"""Debian's home folder of users without one: nothing is ever found there."""


class LenientStream:
    """A text stream that drops what it cannot write, without raising.

    A closed terminal, a pipe without a reader or a full disk must not end the training.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Write, with escapes for characters that the encoding lacks."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError):  # ValueError: it is closed
            return len(text)

    def flush(self) -> None:
        """Flush, or drop the buffer: Python would flush again at exit, fail, and exit with 120."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            redirect_to_null(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redirect_to_null(stream: TextIO) -> None:
    """Drop a stream's buffer and everything written to it later."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams: otherwise the next opened file gets number 1 or 2.

    Libraries write to 1 and 2 whatever is open there, and Python sets `sys.stdout` to None.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115  kept until the exit


def load_unwinder() -> None:
    """Load glibc's unwinder now: it is opened when the first thread ends, and a full descriptor table would abort then.

    No-op with other C libraries.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")


def ignore_closed_streams(*, stdout: bool) -> None:
    """Ignore a closed standard error; `stdout`: and a closed standard output."""
    for name in ("stderr", *(("stdout",) if stdout else ())):
        stream = getattr(sys, name)
        if not isinstance(stream, LenientStream):
            setattr(sys, name, cast(TextIO, LenientStream(stream)))


def ensure_home(environ: MutableMapping[str, str]) -> str:
    """Give a process without a home folder, as in containers, one for its caches. Returns a notice for the user.

    Some libraries fail at import without a home folder or user name. The folder is private, since its content may be
    loaded as code.
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
    return f"zeroband: user {user} has no home folder; caches go to {environ['HOME']} (set HOME for another)"


def _home_of(user: int) -> Path:
    home = Path(tempfile.gettempdir()) / f"zeroband-home-{user}"
    home.mkdir(mode=0o700, exist_ok=True)
    found = home.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
        return home
    return Path(tempfile.mkdtemp(prefix="zeroband-home-"))  # another user created it


def load_uncollected(module: str) -> ModuleType:
    """Import a module with the garbage collector off, and exempt its objects from later collections.

    An import keeps nearly all that it creates. Scanning it takes a fifth of the processor time of `import torch`
    (1.7 s -> 1.4 s), and would slow every full collection during training.
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

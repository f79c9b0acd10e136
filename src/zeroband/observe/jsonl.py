"""JSON Lines on disk: append whole lines that survive a kill, and follow a file that grows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

_HEAD_BYTES = 1 << 16
"""The beginning of a file, by which it is told from others."""

_log = get_logger(__name__)


class JsonlWriter:
    """A sink that appends records to a file, each with one system call, so that a SIGKILL leaves no half line.

    A half line from a crash of the machine, or from a full disk, is ended first, so that the next record is readable.
    A disk that refuses a line is reported when that begins and when it ends; the run goes on. A file that somebody
    removed is reported and made anew: lines behind no name would be lost without a word. Where its folder went too,
    the owner of the folder reports that.
    Any thread may write. Raises ConfigError where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; set run.dir to a folder that this user may write to"
            ) from error
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._is_failing = False

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._folder_inode = self._path.parent.stat().st_ino
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _reopen_if_removed(self) -> None:
        if os.fstat(self._fd).st_nlink:
            return
        folder_inode = self._folder_inode
        new = self._open()
        os.dup2(new, self._fd, inheritable=False)  # the number stays, which other threads may be writing to
        os.close(new)
        self._is_torn = False
        if self._folder_inode == folder_inode:
            _log.warning(
                "a file was removed; what comes from now on is in a new one", extra={"fields": {"path": self._path}}
            )

    def write(self, record: Mapping[str, object]) -> None:
        """Append a line. Numbers that JSON lacks are written as the strings "nan", "inf" and "-inf"."""
        line = encode_line(record)
        try:
            self._reopen_if_removed()
            data = b"\n" + line if self._is_torn else line
            written = os.write(self._fd, data)
            self._is_torn = written < len(data)
            failure = f"{written} of {len(data)} bytes written" if self._is_torn else None
        except OSError as error:
            failure = str(error.strerror)
        self._note(failure)

    def _note(self, failure: str | None) -> None:
        if (failure is not None) == self._is_failing:
            return
        self._is_failing = failure is not None
        if failure is not None:
            _log.warning("lines are being lost", extra={"fields": {"path": self._path, "error": failure}})
        else:
            _log.info("lines are written again", extra={"fields": {"path": self._path}})

    def close(self) -> None:
        """Close the file; nothing can be written afterwards. Closing again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def encode_line(record: Mapping[str, object]) -> bytes:
    """A record as one line of strict JSON, end of line included; values that JSON lacks become strings."""
    try:
        text = json.dumps(record, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(record), allow_nan=False, default=str)
    return text.encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in cast("Mapping[str, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in cast("list[object]", value)]
    return value


class FilePlace(NamedTuple):
    """How far a file was read, wherever it lies."""

    file: str = ""
    """What tells it from others of its name: a hash of how it begins. Empty: it has no line yet."""
    offset: int = 0
    """Bytes from its beginning to the end of the last line."""


class LineTail:
    """Reads a growing file once, line by line, each with its place, so that another reader can go on from there.

    A half-written last line waits for its end. A file that is not there yet gives nothing; another file of the name,
    and one that was cut, is read from its beginning. `most_behind`: bytes before the end of the file; what lies before
    them is left out.
    """

    def __init__(self, path: Path, *, most_behind: int | None = None) -> None:
        self.path = path
        self.has_more = False
        """Whether the last call stopped at its bound."""
        self._most_behind = most_behind
        self._place = FilePlace()
        self._inode = 0

    def go_to(self, place: FilePlace) -> None:
        """Have the next call read what is behind this place, if it is one of the file that is there."""
        self._place, self._inode = place, 0

    def lines(self, most_bytes: int | None = None, *, skips_long: bool = True) -> list[tuple[FilePlace, bytes | None]]:
        """The next lines, each with its end; `most_bytes`: of the file, for this call.

        Of a longer line: None, or without `skips_long` all of it. Raises OSError where the file is there and cannot be
        read.
        """
        self.has_more = False
        try:
            seen = self.path.stat()  # a tenth of what plan costs
            if (seen.st_ino, seen.st_size) == (self._inode, self._place.offset):
                return []
            with self.path.open("rb") as file:
                return self._next(file, most_bytes, skips_long) if self._find_place(file) else []
        except FileNotFoundError:
            return []

    def _find_place(self, file: IO[bytes]) -> bool:
        """Whether there is a place to read on from, which `file` is at then."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._place.offset:
            head = file.readline(_HEAD_BYTES)
            if not head.endswith(b"\n") and len(head) < _HEAD_BYTES:
                return False
            name = hashlib.blake2b(head, digest_size=8).hexdigest()
            is_known = name == self._place.file and self._place.offset <= status.st_size
            self._inode, self._place = status.st_ino, self._place if is_known else FilePlace(name)
        if self._most_behind is not None and status.st_size - self._place.offset > self._most_behind:
            file.seek(status.st_size - self._most_behind)
            if not _skip_line(file):
                return False
            self._place = FilePlace(self._place.file, file.tell())
        file.seek(self._place.offset)
        return True

    def _next(self, file: IO[bytes], most_bytes: int | None, skips_long: bool) -> list[tuple[FilePlace, bytes | None]]:
        name, end = self._place
        data = file.read(most_bytes if most_bytes is not None else -1)
        self.has_more = len(data) == most_bytes
        if not skips_long and b"\n" not in data:
            data += file.readline()
        found: list[tuple[FilePlace, bytes | None]] = []
        for line in data.split(b"\n")[:-1]:
            end += len(line) + 1
            found.append((FilePlace(name, end), line))
        if not found and self.has_more and _skip_line(file):
            end = file.tell()
            found.append((FilePlace(name, end), None))
        self._place = FilePlace(name, end)
        return found


def _skip_line(file: IO[bytes]) -> bool:
    """Go behind the next end of a line, if there is one."""
    while part := file.readline(_HEAD_BYTES):
        if part.endswith(b"\n"):
            return True
    return False


class JsonlTail(LineTail):
    """The records of a growing file; each call gives those that are new since the last."""

    skipped_lines = 0
    """Whole lines that were no JSON object."""

    def read(self, most_bytes: int | None = None) -> list[dict[str, Any]]:
        """The new records, in the order of the file. `most_bytes`: read no more of it, but a longer line whole.

        Raises OSError where the file is there and cannot be read.
        """
        lines = [line for _, line in self.lines(most_bytes, skips_long=False) if line and line.strip()]
        records = [record for line in lines if (record := decode_line(line)) is not None]
        self.skipped_lines += len(lines) - len(records)
        return records


def last_lines(path: Path, most_bytes: int) -> list[bytes]:
    """The whole lines in the last bytes of a file, each with its end; none where it is missing.

    Raises OSError where the file is there and cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - most_bytes)
        file.seek(start)
        return file.read(most_bytes).splitlines(keepends=True)[1 if start else 0 :]
    return []


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The record that a line holds; None where it is no JSON object."""
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None

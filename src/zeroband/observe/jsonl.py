"""JSON Lines files: append whole lines that survive a kill, and follow a growing file."""

from __future__ import annotations

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
"""Size of the beginning of a file by which it is identified."""

_log = get_logger(__name__)


class JsonlWriter:
    """A sink that appends records to a file, each with one system call, so that SIGKILL leaves no partial line.

    A partial line from a machine crash or a full disk is terminated before the next record. Write errors are logged
    when they start and when they end; the run continues. A removed file is recreated with a warning, unless its folder
    was removed, which the folder's owner reports. Any thread may write. Raises ConfigError if the file cannot be
    opened.
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
        os.dup2(new, self._fd, inheritable=False)  # keep the descriptor: other threads may be writing to it
        os.close(new)
        self._is_torn = False
        if self._folder_inode == folder_inode:
            _log.warning("file was removed; continuing in a new one", extra={"fields": {"path": self._path}})

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record. Non-finite numbers become the strings "nan", "inf" and "-inf"."""
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
            _log.warning("cannot write; lines are lost", extra={"fields": {"path": self._path, "error": failure}})
        else:
            _log.info("writing works again", extra={"fields": {"path": self._path}})

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def encode_line(record: Mapping[str, object]) -> bytes:
    """Encode a record as a line of strict JSON; values without JSON form become strings."""
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
    """A position in a file, independent of its path."""

    file: str = ""
    """Hash of the file's beginning, which identifies it; empty before its first line."""
    offset: int = 0
    """Bytes up to the end of the last line read."""


class LineTail:
    """Follows a growing file line by line, each with its position, from which another reader can continue.

    A partial last line waits for its end. A missing file is empty; a replaced or truncated one is read from its
    beginning. `most_behind`: start at most this many bytes before the end.
    """

    def __init__(self, path: Path, *, most_behind: int | None = None) -> None:
        self.path = path
        self.has_more = False
        """Whether the last call stopped at its limit."""
        self._most_behind = most_behind
        self._place = FilePlace()
        self._inode = 0

    def go_to(self, place: FilePlace) -> None:
        """Make the next call continue at this position if it is one of the current file."""
        self._place, self._inode = place, 0

    def lines(self, most_bytes: int | None = None, *, skips_long: bool = True) -> list[tuple[FilePlace, bytes | None]]:
        """Return the next lines, each with the position of its end, reading at most `most_bytes`.

        A longer line is returned as None, or whole without `skips_long`. Raises OSError if an existing file cannot be
        read.
        """
        self.has_more = False
        try:
            seen = self.path.stat()  # a tenth of the cost of opening it
            if (seen.st_ino, seen.st_size) == (self._inode, self._place.offset):
                return []
            with self.path.open("rb") as file:
                return self._next(file, most_bytes, skips_long) if self._find_place(file) else []
        except FileNotFoundError:
            return []

    def _find_place(self, file: IO[bytes]) -> bool:
        """Seek to where reading continues. Returns False if there is no such position yet."""
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
    """Seek past the next end of a line. Returns whether there was one."""
    while part := file.readline(_HEAD_BYTES):
        if part.endswith(b"\n"):
            return True
    return False


class JsonlTail(LineTail):
    """Follows the records of a growing file."""

    skipped_lines = 0
    """Number of whole lines that were not JSON objects."""

    def read(self, most_bytes: int | None = None) -> list[dict[str, Any]]:
        """Return the new records. `most_bytes`: to read, except that a longer line is read whole.

        Raises OSError if an existing file cannot be read.
        """
        lines = [line for _, line in self.lines(most_bytes, skips_long=False) if line and line.strip()]
        records = [record for line in lines if (record := decode_line(line)) is not None]
        self.skipped_lines += len(lines) - len(records)
        return records


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Decode a record; None if the line is not a JSON object."""
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None

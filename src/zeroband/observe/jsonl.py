"""JSON Lines on disk: append whole lines that survive a kill, and follow a file that grows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

_log = get_logger(__name__)


class JsonlWriter:
    """Appends records to a file, each with one system call, so that a SIGKILL leaves no half line.

    A half line from a crash of the machine, or from a full disk, is ended first, so that the next record is readable.
    A disk that refuses a line is reported when that begins and when it ends; the run goes on.
    Any thread may append. Raises ConfigError where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; set run.dir to a folder that this user may write to"
            ) from error
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._is_failing = False

    def append(self, record: Mapping[str, object]) -> None:
        """Add a line. Numbers that JSON lacks are written as the strings "nan", "inf" and "-inf"."""
        line = encode_line(record)
        try:
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
        """Close the file; nothing can be appended afterwards. Closing again does nothing."""
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


class JsonlTail:
    """Reads a growing file once: each call gives the whole lines that are new since the last.

    A half-written last line waits for its end. A file that is not there yet gives nothing; one that was replaced or
    cut is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self.skipped_lines = 0
        """Whole lines that were no JSON object."""
        self.has_more = False
        """Whether the last call stopped at its bound."""

    def read(self, most_bytes: int | None = None) -> list[dict[str, Any]]:
        """The new records, in the order of the file. `most_bytes`: read no more of it, but a longer line whole."""
        self.has_more = False
        try:
            seen = self._path.stat()  # a tenth of what opening costs
            if (seen.st_ino, seen.st_size) == (self._inode, self._offset):
                return []
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                data = file.read() if most_bytes is None else file.read(most_bytes) + file.readline()
                self.has_more = self._offset + len(data) < status.st_size
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        records = [self._decode(line) for line in whole.split(b"\n") if line.strip()]
        return [record for record in records if record is not None]

    def _decode(self, line: bytes) -> dict[str, Any] | None:
        try:
            value: object = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            return cast("dict[str, Any]", value)
        self.skipped_lines += 1
        return None

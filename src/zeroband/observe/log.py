"""Log lines: one line per event, fixed fields, units in keys. Standard logging, set up by the trainer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

ROOT = "zeroband"
"""The package's root logger."""

_PLAIN = re.compile(r"[^\s=\"]+")


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module, by `__name__`.

    `extra={"fields": {"took_s": 0.3}}` appends `took_s=0.3` to the message.
    """
    if name == ROOT or name.startswith(ROOT + "."):
        return logging.getLogger(name)
    return logging.getLogger(f"{ROOT}.{name.strip('_')}")  # a script started by path is called __main__


def setup_logging(level: str, node_id: str, local_rank: int, file: Path | None = None) -> None:
    """Log to standard error on local rank 0, and to `file` on every rank. Replaces an earlier set-up."""
    logger = logging.getLogger(ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = []
    if local_rank == 0:
        handlers.append(logging.StreamHandler(sys.stderr))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_LastingFile(file, encoding="utf-8"))
    if not handlers:
        handlers.append(logging.NullHandler())  # without handlers, logging prints warnings on standard error
    for handler in handlers:
        handler.setFormatter(LineFormatter(node_id, local_rank))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class _LastingFile(logging.FileHandler):
    """Recreates its file if it was removed."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            if self.stream is not None and not os.fstat(self.stream.fileno()).st_nlink:
                Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
                old = self.setStream(self._open())
                if old is not None:
                    old.close()
        super().emit(record)


def format_fields(fields: Mapping[str, object]) -> str:
    """Return `key=value` pairs; values with blanks, quotes or `=` are JSON strings."""
    return " ".join(f"{key}={_format_value(value)}" for key, value in fields.items())


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ",".join(_format_value(item) for item in cast("list[object]", value)) or "[]"
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return ",".join(f"{key}:{_format_value(item)}" for key, item in pairs) or "none"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class LineFormatter(logging.Formatter):
    """Formats `2026-01-31T12:00:00.000Z INFO    node=a local_rank=0 outer.diloco: message key=value`, in UTC.

    Only tracebacks take further lines.
    """

    converter = time.gmtime

    def __init__(self, node_id: str, local_rank: int) -> None:
        super().__init__()
        self._where = format_fields({"node": node_id, "local_rank": local_rank})

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, cached for the other handlers."""
        line: str | None = vars(record).get("line")
        if line is None:
            line = record.line = self._line_of(record)
        return line

    def _line_of(self, record: logging.LogRecord) -> str:
        at = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z"
        part = record.name.removeprefix(ROOT + ".")
        message = " ".join(record.getMessage().splitlines())
        line = f"{at} {record.levelname:<7} {self._where} {part}: {message}"
        fields = cast("Mapping[str, Any]", getattr(record, "fields", {}))
        if fields:
            line = f"{line} {format_fields(fields)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

"""What the package's log said during a test."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[logging.LogRecord]]:
    monkeypatch.setattr(logging.getLogger("zeroband"), "propagate", True)
    caplog.set_level("INFO")
    return lambda: caplog.records


@pytest.fixture
def said(heard: Callable[[], list[logging.LogRecord]]) -> Callable[[], list[str]]:
    """Messages."""
    return lambda: [record.getMessage() for record in heard()]


@pytest.fixture
def reasons(heard: Callable[[], list[logging.LogRecord]]) -> Callable[[], list[str]]:
    """Reasons of warnings."""
    return lambda: [record.__dict__["fields"]["reason"] for record in heard() if record.levelno >= logging.WARNING]

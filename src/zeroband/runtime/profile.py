"""Profiles some inner steps of this rank with torch.profiler. Main thread."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from zeroband.config.training import ProfileConfig
from zeroband.observe.log import get_logger

_log = get_logger(__name__)


class StepProfiler:
    """Writes one trace of the steps in `train.profile`, if any. Steps count from 1, as in metrics."""

    def __init__(self, config: ProfileConfig | None, node_dir: Path, *, rank: int, device: torch.device) -> None:
        self._first, self._last = config.steps if config else (0, 0)
        self._file = node_dir / f"profile-rank{rank}-step{self._first}-{self._last}.json.gz"
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._trace: profile | None = None
        self._step: record_function | None = None

    def begin(self, step: int) -> None:
        """Begin a step. An interrupted step may begin again."""
        self._close_step()
        if not self._first <= step <= self._last:
            return
        if self._trace is None:
            self._trace = profile(activities=self._activities, acc_events=True)  # otherwise torch 2.11 warns of cycles
            self._trace.start()
        self._step = record_function(f"inner step {step}")
        self._step.__enter__()

    def end(self, step: int) -> None:
        """End a step, and write the trace after the last one."""
        self._close_step()
        if self._trace is None or step < self._last:
            return
        self._trace.stop()
        self._trace.export_chrome_trace(str(self._file))
        self._trace = None
        _log.info("profile written", extra={"fields": {"steps": (self._first, self._last), "file": str(self._file)}})

    def _close_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

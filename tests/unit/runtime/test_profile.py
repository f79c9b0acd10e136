"""The trace of some inner steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from zeroband.config.training import ProfileConfig
from zeroband.runtime.profile import StepProfiler

CPU = torch.device("cpu")


def make_steps(profiler: StepProfiler, steps: range, broken_off: tuple[int, ...] = ()) -> None:
    for step in steps:
        profiler.begin(step)
        torch.ones(4, 4) @ torch.ones(4, 4)
        if step not in broken_off:
            profiler.end(step)


def spans_in(file: Path) -> dict[str, tuple[float, float]]:
    """Begin and end of each step that a trace names."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert "aten::mm" in {event["name"] for event in events}
    steps = [event for event in events if event["name"].startswith("inner step")]
    return {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in steps}


@pytest.mark.slow
def test_step_that_was_broken_off_ends_where_the_next_one_begins(tmp_path: Path) -> None:
    """Fenced in step 2, the node comes back at step 4."""
    profiler = StepProfiler(ProfileConfig(steps=(2, 4)), tmp_path, rank=0, device=CPU)
    make_steps(profiler, range(1, 3), broken_off=(2,))
    make_steps(profiler, range(4, 6))
    spans = spans_in(tmp_path / "profile-rank0-step2-4.json.gz")
    assert spans.keys() == {"inner step 2", "inner step 4"}
    assert spans["inner step 2"][1] <= spans["inner step 4"][0]


@pytest.mark.slow
def test_trace_is_written_where_the_run_goes_on_behind_its_last_step(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(steps=(2, 3)), tmp_path, rank=0, device=CPU)
    make_steps(profiler, range(1, 3))
    make_steps(profiler, range(5, 6))
    assert spans_in(tmp_path / "profile-rank0-step2-3.json.gz").keys() == {"inner step 2"}


def test_nothing_is_traced_unless_it_was_asked_for(tmp_path: Path) -> None:
    make_steps(StepProfiler(None, tmp_path, rank=0, device=CPU), range(1, 4))
    assert list(tmp_path.iterdir()) == []

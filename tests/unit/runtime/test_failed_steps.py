"""A run that learns nothing ends by itself, and exports nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zeroband
from zeroband.errors import LearnsNothing
from zeroband.runtime.loop import FailedSteps

NAN = math.nan


def played(limit: int | None, *steps: tuple[float, Any], has_learned: bool = False) -> tuple[int | None, FailedSteps]:
    """Steps of (norm, what came of a round: True it counted, False it was left out, None there was none).

    Returns the step at which the node ended, if it did.
    """
    failed = FailedSteps(limit, has_learned=has_learned)
    for number, (norm, counted) in enumerate(steps, start=1):
        rounds: Any = () if counted is None else (SimpleNamespace(is_left_out=not counted),)
        try:
            failed.note(number, norm, 1.0 if math.isfinite(norm) else NAN, rounds)
        except LearnsNothing:
            return number, failed
    return None, failed


def test_ends_at_the_limit_of_steps_in_a_row() -> None:
    bad, good = (NAN, None), (1.0, None)
    assert played(3, bad, bad, bad, bad)[0] == 3
    assert played(3, bad, bad, good, bad, bad)[0] is None
    assert played(None, *[bad] * 500)[0] is None


def test_ends_where_rounds_leave_out_what_finite_gradients_made() -> None:
    phase = [(1.0, None), (NAN, None), (NAN, False)]
    assert played(4, *phase * 4)[0] == 9  # the third round
    assert played(4, *phase * 2, (1.0, True), *phase * 2)[0] is None
    assert played(100, *[(0.0, False)] * 200)[0] == 100  # a round in each step


def test_one_long_round_that_is_left_out_is_an_accident() -> None:
    long = [*[(1.0, None)] * 500, (1.0, False)]
    assert played(100, *long, (1.0, True))[0] is None


@pytest.mark.parametrize(
    ("steps", "has_learned", "raises"),
    [
        ([(1.0, None), (NAN, None)], False, True),
        ([(NAN, None), (1.0, None)], False, False),
        ([(1.0, False)], False, True),
        ([(1.0, False)], True, False),
        ([(1.0, True), (1.0, False)], False, False),
        ([], False, False),
    ],
)
def test_a_model_without_a_loss_is_nothing_to_export(steps: list[Any], has_learned: bool, raises: bool) -> None:
    _, failed = played(100, *steps, has_learned=has_learned)
    if not raises:
        failed.require_something()
        return
    with pytest.raises(LearnsNothing, match="nothing was learned in the last"):
        failed.require_something()


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_that_learns_nothing_ends_with_a_code_of_its_own_and_exports_nothing(tmp_path: Path) -> None:
    trainer = Path(zeroband.__file__).parent / "train.py"
    flags = "--model.n_layers 1 --model.d_model 16 --model.n_heads 1 --data.seq_length 16 --train.total_steps 50"
    flags += " --data.source.type synthetic --data.source.documents 100 --train.batch_size 2 --train.micro_bs 2"
    flags += " --optim.adamw.lr 1e38 --optim.warmup_steps 0 --train.non_finite_steps 4 --no-observe.report"
    paths = ["--run.dir", tmp_path, "--data.cache_dir", tmp_path / "cache", "--export.path", tmp_path / "export"]
    command = [sys.executable, trainer, *flags.split(), *paths]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert (ran.returncode, (tmp_path / "export").exists()) == (4, False), ran.stderr
    assert "nothing was learned in 4 inner steps in a row (train.non_finite_steps)" in ran.stderr

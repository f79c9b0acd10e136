"""The trainer's loop, with parts that only stand for the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from zeroband import train
from zeroband.snapshots import NoSnapshots


def test_inner_steps_end_where_a_round_that_travelled_completes_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, node = MagicMock(progress=SimpleNamespace(is_complete=False)), MagicMock()
    node.loader.remaining, node.config.train.batch_size = 40, 4
    node.faults.extra_s.return_value = 0.0

    def sync(step: int, *_: Any, ends_round: bool) -> tuple[()]:
        assert step < 3 and not ends_round
        hooks.progress = SimpleNamespace(is_complete=step == 2)
        return ()

    hooks.inner_step, hooks.sync_parameters = 0, MagicMock(side_effect=sync)
    monkeypatch.setattr(train, "forward_backward", lambda *_: train.Passed(1.0, 10, 0.0, ends_round=False))
    train.train_round(node, MagicMock(hooks=hooks), NoSnapshots(), None)
    assert hooks.sync_parameters.call_count == 3

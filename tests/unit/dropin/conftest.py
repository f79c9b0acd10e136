"""Nodes with a loop of their own, on a real store; their leases are held in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memberships import hold_leases_here
from torch import nn

import zeroband

ADAMW = partial(torch.optim.AdamW, lr=0.05)

Join = Callable[..., zeroband.DiLoCoOptimizer]


@pytest.fixture
def run_id(tmp_path: Path) -> str:
    """A run that no other test has, of this checkout or another one: all of them share /dev/shm."""
    return f"{tmp_path.name}-{secrets.token_hex(4)}"


@pytest.fixture
def join(redis_url: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """join(model, ...): a node of one run, with exact averages and its lease held here; closed at the end."""
    hold_leases_here(monkeypatch)
    made: list[zeroband.DiLoCoOptimizer] = []

    def join_one(model: nn.Module, **arguments: Any) -> zeroband.DiLoCoOptimizer:
        fixed = {"run.id": run_id, "run.dir": tmp_path, "fault.detect_s": 60.0}
        settings = {**fixed, **arguments.pop("settings", {})}
        if settings.get("outer.type") not in ("sparseloco", "demo"):
            settings = {"comm.codec": "fp32", **settings}
        arguments = {"batch_size": 8, "inner_steps": 2, "store": redis_url, "inner_optimizer": ADAMW, **arguments}
        made.append(zeroband.DiLoCoOptimizer(params=model.named_parameters(), settings=settings, **arguments))
        return made[-1]

    yield join_one
    for optimizer in made:
        optimizer.close()

"""A state whose parts are of several rounds, made one by the journal: what a joiner has got from donors that go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeroband.config.outer import CustomConfig, DilocoConfig, OuterSGDConfig, SparseLocoConfig
from zeroband.elastic.rounds.outer_state import LaterPart
from zeroband.errors import RecoveryFailed
from zeroband.state.round_state import RoundState

StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]

ADAMW = """
from functools import partial
import torch
from zeroband.outer.torch_optimizer import TorchDiLoCo, TorchOuterOptimizer

class Mine(TorchDiLoCo):
    def __init__(self, parts, config, settings):
        super().__init__(parts, config, TorchOuterOptimizer(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)))

ALGORITHM = Mine
"""
ROUNDS = 5
CUTS = (0, 3, 9, 10, 14, 22)
OF_ROUND = (0, 2, 4, 0, 3)
"""Of which copy the values between two cuts are."""


class TwoLayers(nn.Module):
    """22 parameters, 11 in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(11, 1, bias=False) for _ in range(2)])


def diloco(fragments: int = 1) -> DilocoConfig:
    sgd = OuterSGDConfig(lr=0.7, momentum=0.9)
    return DilocoConfig(type="diloco", inner_steps=fragments, fragments=fragments, optimizer=sgd)


@pytest.fixture(params=["diloco", "fragments", "sparse", "adamw"])
def algorithm(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    match request.param:
        case "diloco":
            return diloco()
        case "fragments":
            return diloco(fragments=2)
        case "sparse":
            return SparseLocoConfig(type="sparseloco", inner_steps=1, k=2, chunk=4)
        case _:
            (tmp_path / "adamw.py").write_text(ADAMW)
            return CustomConfig(type="custom", inner_steps=1, algorithm=str(tmp_path / "adamw.py"))


def mixed(run: Any, noise: Noise) -> tuple[RoundState, Any, Sequence[LaterPart]]:
    """The first of some rounds, a joiner with parts of several of them, and which those are."""
    copies: list[RoundState] = []
    for seed in range(ROUNDS):
        run.round(a=noise(seed))
        copies.append(run["a"].outer.copy_state())
    joiner, later = run.add("b"), list[LaterPart]()
    for (start, stop), number in zip(pairwise(CUTS), OF_ROUND, strict=True):
        for name, section in copies[number].sections.items():
            joiner.buffers[name][start:stop] = section[start:stop]
        if number:
            later.append((start, stop, copies[number].round))
    return copies[0], joiner, later


def test_parts_of_several_rounds_become_the_members_state_to_the_last_bit(
    start_run: StartRun, noise: Noise, algorithm: Any
) -> None:
    run = start_run(algorithm, "a", model=TwoLayers)
    oldest, joiner, later = mixed(run, noise)
    joiner.outer.adopt(oldest.round, oldest.record, later=later)
    joiner.outer.catch_up(run["a"].outer.round)
    assert joiner.outer.state_digest == run["a"].outer.state_digest
    assert torch.equal(joiner.params, run["a"].buffers["params"])  # a node may be ahead of the outer ones
    reports = run.round_with_joiner("b", a=noise(20))
    assert reports["a"].state_digest == reports["b"].state_digest


def test_mixed_state_is_verified_once_it_is_one_and_not_stamped_before(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", model=TwoLayers)
    stamped: list[int] = []
    run.memory = SimpleNamespace(stamp=lambda sections, round, record, state: stamped.append(round))
    oldest, joiner, later = mixed(run, noise)
    joiner.buffers["momentum"][20] += 1.0
    joiner.outer.adopt(oldest.round, oldest.record, later=later)
    newest = run["a"].outer.round
    with pytest.raises(RecoveryFailed, match=f"the state after round {newest} has digest"):
        joiner.outer.catch_up(newest)
    assert stamped == [newest]

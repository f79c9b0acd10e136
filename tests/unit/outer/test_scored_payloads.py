"""Payloads scored by held-out loss, in runs of several nodes that train a small model of text in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.unit.conftest import FakeNode, FakeRun, ModelOf
from torch import Tensor

from zeroband.config.optim import AdamWConfig, OptimConfig
from zeroband.config.outer import ClipConfig, DemoConfig, SparseLocoConfig
from zeroband.elastic.membership.trust import ScoringRule
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.outer.scoring import SCORED

StartRun = Callable[..., FakeRun]
Lie = Callable[[Tensor], Tensor]

SYMBOLS, WIDTH, INNER_STEPS, LR = 24, 8, 12, 0.5
EMBEDDING, HEAD = "layers.0.embedding", "layers.1.head"
SHAPES = {EMBEDDING: (SYMBOLS, WIDTH), HEAD: (WIDTH, SYMBOLS)}
NAMES = "abcde"
CLIP = ClipConfig(type="clip")
SPARSELOCO = SparseLocoConfig(type="sparseloco", inner_steps=1, k=8, chunk=8, robust=CLIP)
DEMO = DemoConfig(type="demo", k=8, chunk=8, robust=CLIP)
SMALL_STEPS = OptimConfig(adamw=AdamWConfig(lr=0.01), warmup_steps=0)
EACH_ROUND = ScoringRule(rounds=1, members=len(NAMES), counts=True)


def honest(update: Tensor) -> Tensor:
    return update


@cache
def text_of(name: str) -> Tensor:
    """(1500,) int64 drawn by a chain that all share in most of its steps, and that differs from member to member."""
    random = torch.Generator().manual_seed(ord(name))
    common = torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(0))
    chances = (2 * common + 0.5 * torch.randn(SYMBOLS, SYMBOLS, generator=random)).softmax(dim=1)
    drawn = torch.multinomial(chances, 1500, replacement=True, generator=random).tolist()
    symbols = [0]
    for place in range(1499):
        symbols.append(drawn[symbols[-1]][place])
    return torch.tensor(symbols)


def a_model() -> ModelOf:
    model, random = ModelOf(SHAPES), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=random))
    return model


def loss_of(params: Mapping[str, Tensor], places: Tensor, name: str) -> Tensor:
    text = text_of(name)
    logits = params[EMBEDDING][text[places]].tanh() @ params[HEAD]
    return torch.nn.functional.cross_entropy(logits, text[places + 1])


def learn(node: FakeNode, name: str, number: int) -> Tensor:
    """What some inner steps on a member's own text change of its parameters, (n,)."""
    random = torch.Generator().manual_seed(100 * number + ord(name))
    params = {key: p.detach().clone().requires_grad_() for key, p in sorted(node.model.named_parameters())}
    for _ in range(INNER_STEPS):
        loss = loss_of(params, torch.randint(1000, (64,), generator=random), name)
        gradients = torch.autograd.grad(loss, list(params.values()))
        with torch.no_grad():
            for parameter, gradient in zip(params.values(), gradients, strict=True):
                parameter.sub_(LR * gradient)
    return torch.cat([p.detach().flatten() for p in params.values()]) - node.params


class OwnRows:
    """Losses on the last third of a member's own text, which it does not train on. Counts what it is asked."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.asked = 0

    def loss(self, values: Iterable[tuple[str, Tensor]], lot: int) -> float:
        self.asked += 1
        params = {key: part.clone().view(SHAPES[key]) for key, part in values}
        return float(loss_of(params, 1000 + torch.arange(64) + lot % 400, self._name))


def train(run: FakeRun, rounds: int, lies: Mapping[str, Lie], first: int = 0) -> list[dict[str, RoundReport]]:
    """Rounds of all nodes, whose states are equal after each."""
    reports: list[dict[str, RoundReport]] = []
    for number in range(first, first + rounds):
        sign = -1 if isinstance(run.algorithm, DemoConfig) else 1  # that takes gradients
        updates = {name: sign * lies.get(name, honest)(learn(run[name], name, number)) for name in run.nodes}
        reports.append(run.round(**updates))
        assert len({report.state_digest for report in reports[-1].values()}) == 1
        assert len({report.gains for report in reports[-1].values()}) == 1
    return reports


def flipped(update: Tensor) -> Tensor:
    return -update


@pytest.mark.slow
def test_flipped_payloads_score_below_all_honest_ones_and_count_nothing_in_the_end(start_run: StartRun) -> None:
    run = start_run(SPARSELOCO, *NAMES, model=a_model, scoring=EACH_ROUND, scorer=OwnRows)
    reports = train(run, 8, {"e": flipped})
    for of_round in reports[1:7]:
        gains = dict(of_round["a"].gains)
        assert gains["e"] < 0 < min(gains[name] for name in "abcd")
    assert [reports[-1][name].trust for name in NAMES] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert "e" not in dict(train(run, 2, {"e": flipped}, first=8)[-1]["a"].gains), "it sends nothing"


@pytest.mark.slow
def test_flipped_payloads_agree_with_a_result_of_which_most_values_are_their_own(start_run: StartRun) -> None:
    """What the scores are for: by the cosines alone nobody would notice."""
    run = start_run(SPARSELOCO, *NAMES, model=a_model, scoring=replace(EACH_ROUND, counts=False), scorer=OwnRows)
    reports = train(run, 8, {"e": flipped})
    assert dict(reports[-1]["a"].gains)["e"] < 0, "shown, and not acted on"
    assert {report.trust for report in reports[-1].values()} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [SPARSELOCO, DEMO], ids=["sparseloco", "demo"])
def test_measuring_changes_no_bit(start_run: StartRun, algorithm: SparseLocoConfig | DemoConfig) -> None:
    plain = start_run(algorithm, *"abc", model=a_model, optim=SMALL_STEPS)
    with pytest.raises(KeyError):  # it costs nothing where it is off
        plain["a"].buffers[SCORED]
    states = [of_round["a"].state_digest for of_round in train(plain, 2, {})]
    shown = start_again(plain, replace(EACH_ROUND, counts=False))
    reports = train(shown, 2, {})
    assert [of_round["a"].state_digest for of_round in reports] == states
    assert len(reports[1]["a"].gains) == 3 and reports[1]["a"].score_s is not None


@pytest.mark.slow
def test_flipped_gradients_of_demo_score_below_honest_ones(start_run: StartRun) -> None:
    run = start_run(DEMO, *NAMES, model=a_model, optim=SMALL_STEPS, scoring=EACH_ROUND, scorer=OwnRows)
    reports = train(run, 6, {"e": flipped})
    for of_round in reports[1:]:
        gains = dict(of_round["b"].gains)
        assert gains["e"] < 0 < min(gains[name] for name in "abcd")


@pytest.mark.slow
def test_payloads_of_fragments_are_scored(start_run: StartRun) -> None:
    config = SPARSELOCO.model_copy(update={"inner_steps": 2, "fragments": 2, "fragment_pattern": "sequential"})
    run = start_run(config, *NAMES, model=a_model, scoring=replace(EACH_ROUND, counts=False), scorer=OwnRows)
    reports = train(run, 4, {"e": flipped})
    for of_round in reports[1:]:
        gains = dict(of_round["c"].gains)
        assert gains["e"] < 0 < min(gains[name] for name in "abcd")


@pytest.mark.slow
def test_joiner_comes_to_the_scores_of_the_others(start_run: StartRun) -> None:
    run = start_run(SPARSELOCO, *"abce", model=a_model, scoring=EACH_ROUND, scorer=OwnRows)
    train(run, 3, {"e": flipped})
    run.add("d").receive(run["a"])
    updates = {name: learn(run[name], name, 3) for name in "abce"}
    reports = run.round_with_joiner("d", **{**updates, "e": flipped(updates["e"])})
    assert len({reports[name].state_digest for name in NAMES}) == 1
    train(run, 4, {"e": flipped}, first=4)
    records = [run[name].outer.record for name in NAMES]
    assert (
        all(record == records[0] for record in records) and records[0]["gain"]["e"] < -0.3 < 0 < records[0]["gain"]["d"]
    )


def start_again(run: FakeRun, scoring: ScoringRule) -> FakeRun:
    """A run of the same nodes from the same start, with scores."""
    folder = run.folder / "again"
    folder.mkdir()
    again = FakeRun(run.algorithm, folder, run.local, founders=len(run.nodes), model=a_model, optim=run.optim)
    again.scoring, again.scorer = scoring, OwnRows
    for name in run.nodes:
        again.add(name)
    again.together(**{name: again[name].outer.found for name in run.nodes})
    return again

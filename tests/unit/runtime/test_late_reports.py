"""What inner steps show is read late: the real steps of a small model, and who is told of them when."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, call

import pytest
import torch
from tests.unit.runtime.conftest import BATCH, Build
from torch.utils._python_dispatch import TorchDispatchMode

from zeroband.data.loader import IGNORED, Loader, MicroBatch
from zeroband.elastic.membership.progress import RunShape
from zeroband.errors import Leaving
from zeroband.model import parallel
from zeroband.model.parallel import clip_grad_norm_
from zeroband.node.async_copy import PendingNumbers
from zeroband.outer.no_algorithm import NoAlgorithm
from zeroband.runtime import loop
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.checkpointing import Checkpointing
from zeroband.runtime.report import InnerStep, PassResult, Report

STEPS = 5


class Rows(Report):
    """A report that keeps what it is told."""

    def __init__(self) -> None:
        self.results: list[InnerStep] = []

    @property
    def steps(self) -> list[int]:
        return [made.number + 1 for made in self.results]

    def step_done(self, made: InnerStep) -> None:
        self.results.append(made)


class Reads(TorchDispatchMode):
    """Counts the operations for which the host waits until a GPU has come to a value."""

    KINDS = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith(self.KINDS)
        return func(*args, **(kwargs or {}))


class MixedLoader:
    """A loader whose rows come of several sources in turn. `sources`: one each of the first rows, then again."""

    def __init__(
        self, loader: Loader, sources: Sequence[int], *, names: Sequence[str] = ("web", "code", "math")
    ) -> None:
        self._loader = loader
        self._turn = itertools.cycle(sources)
        self.source_names = tuple(names)
        self.targets_by_source, self.passes = (0,) * len(names), (0.0,) * len(names)
        self.batches: list[list[MicroBatch]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def next_step(self) -> list[MicroBatch]:
        batches = [
            replace(batch, sources=torch.tensor([next(self._turn) for _ in batch.tokens]))
            for batch in self._loader.next_step()
        ]
        counted = [0] * len(self.source_names)
        for batch in batches:
            for row, source in zip(batch.targets.tolist(), batch.sources.tolist(), strict=True):
                counted[source] += len(row) - row.count(IGNORED)
        self.targets_by_source = tuple(counted)
        self.passes = tuple(0.25 * (len(self.batches) + 1) for _ in counted)
        self.batches.append(batches)
        return batches


def mixed(node: TrainerParts, sources: Sequence[int]) -> TrainerParts:
    """The node as if its data were a mixture."""
    return replace(node, loader=cast(Any, MixedLoader(node.loader, sources)))


@pytest.fixture
def alone(build: Build) -> Build:
    """alone(**settings): a node that trains alone."""
    few = {"train.compile": "false", "optim.clip_norm": 0.5, "train.total_steps": 100}
    return lambda **settings: build(**{**few, **settings})


def training_of(node: TrainerParts, outer: Any, report: Rows) -> loop.Training:
    return loop.Training(node, MagicMock(outer=outer), MagicMock(), Checkpointing(), report)


def train(node: TrainerParts, steps: int = STEPS) -> Rows:
    """Make the run of a node alone; what was reported of it."""
    report = Rows()
    loop.train_round(training_of(node, NoAlgorithm(RunShape(steps, BATCH)), report))
    return report


@pytest.mark.slow  # a dispatch mode loads torch's compiler
@pytest.mark.parametrize(("dtype", "sources"), [("float32", ()), ("bfloat16", ()), ("float32", (0, 1, 1))])
def test_no_value_of_the_device_is_read_in_a_step_but_the_late_one(
    alone: Build, monkeypatch: pytest.MonkeyPatch, dtype: str, sources: Sequence[int]
) -> None:
    node, read, made = alone(**{"train.dtype": dtype}), PendingNumbers.read, list[int]()
    node = mixed(node, sources) if sources else node

    def note(reading: PendingNumbers) -> list[float]:
        made.append(node.inner.step_count)
        return read(reading)

    monkeypatch.setattr(PendingNumbers, "read", note)
    with Reads() as reads:
        report = train(node)
    assert reads.count == 0
    assert report.steps == [1, 2, 3, 4, 5]
    assert made == [2, 2, 3, 3, 4, 4, 5, 5, 5, 5]  # for the algorithm and for the report, when the next one was made


class NoFloat64(TorchDispatchMode):
    """A device such as Apple's GPUs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert not isinstance(out, torch.Tensor) or out.dtype != torch.float64, f"{func} made a float64"
        return out


@pytest.mark.slow  # a dispatch mode loads torch's compiler
def test_step_of_a_device_without_float64_makes_none(alone: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    node, wide = alone(), train(alone())
    for module in (parallel, loop):
        monkeypatch.setattr(module, "widest_float", lambda _: torch.float32)
    with NoFloat64():
        report = train(node)
    assert [seen.loss for seen in report.results] == pytest.approx([seen.loss for seen in wide.results], rel=1e-5)


def test_reported_steps_are_those_of_a_loop_that_reads_at_once(alone: Build) -> None:
    report, plain = train(alone()), alone()
    plain.loader.assign([(0, STEPS * BATCH)])
    expected = list[tuple[float, float, float]]()
    for _ in range(STEPS):
        passed = loop.forward_backward(plain)
        norm = clip_grad_norm_(plain.model, None).item()
        for parameter in plain.model.parameters():
            assert parameter.grad is not None
            if norm > 0.5:
                parameter.grad.mul_(0.5 / norm)
        expected.append((passed.nats.item() / passed.tokens, norm, plain.inner.lr))
        plain.inner.step()
        plain.inner.zero_grad()
    assert [(seen.loss, seen.grad_norm, seen.lr) for seen in report.results] == expected
    assert expected[0][1] > 0.5 and expected[-1][0] < expected[0][0]


# -- several sources ------------------------------------------------------------------------------------------------


def loss_by_hand(node: TrainerParts, batches: Sequence[MicroBatch], source: int) -> float:
    """Mean over the targets of a source, in float64."""
    nats, targets = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            log_p = node.model(batch.tokens, batch.cu_seqlens).double().log_softmax(-1)
            for row, of_row in enumerate(batch.sources.tolist()):
                learned = batch.targets[row] != IGNORED
                if of_row == source:
                    nats -= log_p[row, learned, batch.targets[row, learned]].sum().item()
                    targets += int(learned.sum())
    return nats / targets


def test_each_source_has_the_mean_loss_of_its_rows_and_none_without_rows(alone: Build) -> None:
    node = mixed(alone(**{"optim.z_loss": 1e-3, "optim.adamw.lr": 1e-9}), (0, 1, 0, 0, 1, 0, 0, 0))
    report = train(node, 2)
    expected = [
        {name: loss_by_hand(node, batches, number) for number, name in enumerate(("web", "code"))}
        for batches in node.loader.batches
    ]
    assert report.steps == [1, 2]
    for seen, wanted, data_pass in zip(report.results, expected, (0.25, 0.5), strict=True):
        assert {name: one.loss for name, one in seen.sources.items()} == {
            "web": pytest.approx(wanted["web"], rel=1e-5),
            "code": pytest.approx(wanted["code"], rel=1e-5),
            "math": None,
        }
        assert [one.tokens for one in seen.sources.values()] == [3 * 16, 16, 0]
        assert [one.data_pass for one in seen.sources.values()] == [data_pass] * 3
        assert seen.loss == pytest.approx((3 * wanted["web"] + wanted["code"]) / 4, rel=1e-5)


def test_telling_sources_apart_changes_no_bit_of_what_is_learned(alone: Build) -> None:
    plain, told = (alone(**{"optim.z_loss": 1e-3}) for _ in range(2))
    start = {name: value.detach().clone() for name, value in plain.model.named_parameters()}
    expected, found = train(plain), train(mixed(told, (0, 1)))
    for (name, ours), (_, theirs) in zip(*(node.model.named_parameters() for node in (told, plain)), strict=True):
        assert torch.equal(ours, theirs) and not torch.equal(ours, start[name])
    assert [(seen.loss, seen.grad_norm) for seen in found.results] == [
        (seen.loss, seen.grad_norm) for seen in expected.results
    ]
    assert all(seen.sources.keys() == {"web", "code", "math"} for seen in found.results)
    assert not any(seen.sources for seen in expected.results)


def test_loss_that_is_no_number_is_that_of_one_source(alone: Build) -> None:
    node, bad = alone(), 200
    with torch.no_grad():
        node.model.embed_tokens.weight[bad] = math.nan
    node = mixed(node, (0, 1))
    plain = node.loader.next_step

    def next_step() -> list[MicroBatch]:
        batches = plain()
        for batch in batches:
            batch.tokens[batch.sources == 1, 0] = bad
        return batches

    node.loader.next_step = next_step
    (seen,) = train(node, 1).results
    assert math.isnan(seen.loss) and math.isnan(seen.grad_norm)
    web, code = seen.sources["web"].loss, seen.sources["code"].loss
    assert web is not None and math.isfinite(web) and code is not None and math.isnan(code)


def test_step_of_all_nodes_has_the_losses_of_sources_too(alone: Build) -> None:
    report, told, outer = Rows(), list[tuple[int, float]](), NoAlgorithm(RunShape(2, BATCH))
    hooks = MagicMock(wraps=outer, has_own_steps=False)
    hooks.inner_step, hooks.learned = 0, lambda tokens, loss: told.append((tokens, loss))
    hooks.sync_gradients.return_value, hooks.sync_gradients.side_effect = 0.5, None
    type(hooks).progress = property(lambda _: outer.progress)
    loop.train_round(training_of(mixed(alone(), (0, 0, 1)), hooks, report))
    assert [seen.grad_norm for seen in report.results] == [0.5, 0.5]
    assert report.results[0].loss == train(alone(), 1).results[0].loss
    assert told == [(seen.passed.tokens, seen.loss) for seen in report.results]
    for seen in report.results:
        sums = [one.loss * one.tokens for one in seen.sources.values() if one.loss is not None]
        assert len(sums) == 2 and sum(sums) / seen.passed.tokens == pytest.approx(seen.loss, rel=1e-5)


def test_step_without_a_target_leaves_the_model_alone_and_weighs_nothing(alone: Build, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    path = tmp_path / "chats.jsonl"
    asked, answered = {"role": "user", "content": "?" * 16 * 50}, {"role": "assistant", "content": "!"}
    path.write_text(json.dumps({"messages": [asked, answered]}))
    chats = json.dumps({"type": "chat", "paths": [str(path)]})
    node, told = alone(**{"data.source": chats, "data.hold_out": 0}), list[tuple[int, float]]()
    before = {name: value.detach().clone() for name, value in node.model.named_parameters()}
    outer = NoAlgorithm(RunShape(2, BATCH))
    outer.learned = lambda tokens, loss: told.append((tokens, loss))
    report = Rows()
    loop.train_round(training_of(node, outer, report))
    assert [seen.passed.tokens for seen in report.results] == [0, 0]
    assert [tokens for tokens, _ in told] == [0, 0]
    assert all(torch.equal(value, before[name]) for name, value in node.model.named_parameters())
    assert node.inner.step_count == 2, "the schedule goes on"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("dtype", "sources"), [("float32", ()), ("bfloat16", ()), ("bfloat16", (0, 1, 1))])
def test_no_step_waits_for_the_gpu(alone: Build, dtype: str, sources: Sequence[int]) -> None:
    node = alone(**{"train.dtype": dtype, "model.d_model": 64})
    node = mixed(node, sources) if sources else node
    train(node, 2)  # what is set up once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = train(node)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.steps == [1, 2, 3, 4, 5]
    assert all(math.isfinite(seen.loss) for seen in report.results)


# -- who is told when -----------------------------------------------------------------------------------------------


@pytest.fixture
def told(alone: Build, monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """An algorithm whose third step is a boundary, and the report; in the order in which they are called."""
    losses = iter((1.0, 2.0, 3.0))

    def pass_backward(node: TrainerParts, while_waiting: object) -> PassResult:
        node.loader.next_step()
        return PassResult(torch.tensor([10 * next(losses)]), 10, 0.0, 0)

    monkeypatch.setattr(loop, "forward_backward", pass_backward)
    told = MagicMock()
    told.outer.inner_step, told.outer.progress, told.outer.upcoming.return_value = (
        0,
        SimpleNamespace(is_complete=False),
        ((0, 12),),
    )
    told.outer.is_time_over.return_value, told.outer.sync_gradients.return_value = False, None
    told.outer.is_boundary.side_effect = [False, False, True]
    return told


def calls_of(told: MagicMock) -> list[Any]:
    """The calls that tell of steps, without what else they say."""
    said: list[Any] = []
    for name, args, _ in told.mock_calls:
        if name == "report.step_done":
            said.append(("report", args[0].number + 1))
        elif name == "outer.learned":
            said.append(("learned", *args))
        elif name == "outer.sync_parameters":
            said.append(("synced", args[0]))
    return said


def test_steps_are_told_of_one_step_late_in_order_and_all_before_a_boundary(alone: Build, told: MagicMock) -> None:
    loop.train_round(training_of(alone(), told.outer, told.report))
    assert told.outer.is_boundary.mock_calls == [call(ends_round=ends) for ends in (False, False, True)]
    assert calls_of(told) == [
        *(("synced", 0), ("synced", 1), ("learned", 10, 1.0), ("report", 1)),
        *(("learned", 10, 2.0), ("report", 2), ("learned", 10, 3.0), ("synced", 2), ("report", 3)),
    ]


def test_step_before_the_one_that_is_cut_short_is_told_of(
    alone: Build, told: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(step: int, **_: Any) -> tuple[()]:
        if step == 1:
            raise Leaving("asked to leave")
        return ()

    told.outer.sync_parameters.side_effect = leave
    with pytest.raises(Leaving):
        loop.train_round(training_of(alone(), told.outer, told.report))
    assert ("report", 1) in calls_of(told)

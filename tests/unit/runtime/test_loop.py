"""The trainer's loop, with parts that only stand for the real ones."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from tests.unit.model.foreign import trained_with
from torch import Tensor, nn

import zeroband
from zeroband.config.optim import OptimConfig
from zeroband.elastic.store.fact_records import shortened
from zeroband.errors import LearnsNothing, Leaving
from zeroband.model.optim import InnerOptimizer
from zeroband.node.mesh import LocalMesh
from zeroband.observe.events import EVENTS_FILE, EventLog
from zeroband.runtime import loop
from zeroband.runtime.checkpointing import Checkpointing
from zeroband.runtime.loop import NonFiniteSteps
from zeroband.runtime.report import PassResult, Report

TrainOn = Callable[..., InnerOptimizer]


PASSED = PassResult(nats=torch.tensor([20.0]), tokens=10, data_s=0.0, data_pass=0)


def a_node(**parts: Any) -> MagicMock:
    """A node of one rank that nobody asked to leave."""
    node = MagicMock(**parts)
    node.loader.remaining, node.config.train.batch_size = 40, 4
    node.departure.is_urgent, node.local.world_size, node.faults.extra_s.return_value = False, 1, 0.0
    return node


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(3, 2)


@pytest.fixture
def train_on(model: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> TrainOn:
    """train_on(hooks, gradients, clip_norm): inner steps by gradients of these values, 10 tokens each."""

    def train_on(hooks: MagicMock, gradients: list[float], clip_norm: float | None = 1.0) -> InnerOptimizer:
        optim, left = OptimConfig(clip_norm=clip_norm), list(gradients)
        inner = InnerOptimizer(model, optim, total_steps=10)
        node = a_node(model=model, parameters=model, inner=inner)
        node.config.optim = optim

        def pass_backward(*_: object) -> PassResult:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model.weight.grad[0, 0] = left.pop(0)  # pyright: ignore[reportOptionalSubscript]
            node.loader.remaining = 40 if left else 0
            return PASSED

        monkeypatch.setattr(loop, "forward_backward", pass_backward)
        hooks.inner_step, hooks.progress, hooks.round = 0, SimpleNamespace(is_complete=False), 0
        hooks.is_time_over.return_value = False
        loop.train_round(loop.Training(node, MagicMock(outer=hooks), MagicMock(), Checkpointing(), Report()))
        return inner

    return train_on


def held(model: nn.Module, inner: InnerOptimizer) -> list[Tensor]:
    return [*model.parameters(), *inner.named_moments().values()]


def test_inner_steps_end_where_a_round_that_travelled_completes_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = MagicMock(progress=SimpleNamespace(is_complete=False))
    hooks.is_time_over.return_value, hooks.sync_gradients.return_value = False, None

    def sync(step: int, *_: Any, ends_round: bool) -> tuple[()]:
        assert step < 3 and not ends_round
        hooks.progress = SimpleNamespace(is_complete=step == 2)
        return ()

    hooks.inner_step, hooks.sync_parameters = 0, MagicMock(side_effect=sync)
    monkeypatch.setattr(loop, "forward_backward", lambda *_: PASSED)
    loop.train_round(loop.Training(a_node(), MagicMock(outer=hooks), MagicMock(), Checkpointing(), Report()))
    assert hooks.sync_parameters.call_count == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_gradient_of_this_node_that_is_not_finite_moves_the_schedule_alone(
    model: nn.Linear, train_on: TrainOn, caplog: pytest.LogCaptureFixture, bad: float, clip_norm: float | None
) -> None:
    hooks, start = MagicMock(), {name: value.clone() for name, value in model.state_dict().items()}
    hooks.sync_gradients.return_value = None
    inner = train_on(hooks, [0.5, bad], clip_norm)
    after_both = [value.detach().clone() for value in held(model, inner)]
    assert (inner.step_count, inner.update_count) == (2, 1)
    assert [call.args for call in hooks.learned.call_args_list] == [(10, 2.0), (0, 2.0)]
    assert [record.message for record in caplog.records] == ["non-finite gradient: inner step skipped"]
    model.load_state_dict(start)
    inner = train_on(hooks, [0.5], clip_norm)
    assert all(torch.equal(a, b) for a, b in zip(after_both, held(model, inner), strict=True))


@pytest.mark.parametrize(
    ("hooks", "norm"),
    [(MagicMock(has_own_steps=False), float("nan")), (MagicMock(has_own_steps=False), None)],
    ids=["norm of all nodes", "step of all nodes"],
)
def test_step_that_all_nodes_make_is_made_in_any_case(
    model: nn.Linear, train_on: TrainOn, hooks: MagicMock, norm: float | None
) -> None:
    hooks.sync_gradients.return_value = norm
    inner = train_on(hooks, [float("nan")])
    assert inner.update_count == 1 and model.weight[0, 0].isnan()


# -- before and after the run ------------------------------------------------------------------------------------------

LLAMA = {"type": "llama", "d_model": 16, "n_layers": 2, "n_heads": 2}


def test_each_micro_batch_is_a_sign_of_life(local: LocalMesh, tmp_path: Path) -> None:
    """A step of many may take longer than `fault.hung_s`."""
    node, signs = trained_with(LLAMA, local, tmp_path, train={"batch_size": 6, "micro_bs": 2}), list[None]()
    node.loader.assign([(0, 6)])
    assert node.loader.is_ready(60)
    loop.forward_backward(node, lambda: signs.append(None))
    node.loader.close()
    assert len(signs) == 3


@pytest.mark.parametrize("evaluates", [True, False])
def test_model_is_compiled_before_the_first_step_and_stays_as_it_was(
    local: LocalMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluates: bool
) -> None:
    """As training calls it and as evaluation does, with a compiler that only notes what it is called with."""
    seen = set[tuple[bool, torch.Size]]()

    def compile(function: Callable[..., Any], *, fullgraph: bool) -> Callable[..., Any]:
        def compiled(x: Tensor, *rest: Any, **named: Any) -> Any:
            seen.add((torch.is_grad_enabled(), x.shape))
            torch.rand(1)  # whatever draws numbers
            return function(x, *rest, **named)

        return compiled

    monkeypatch.setattr(torch, "compile", compile)
    sections = {"eval": {"every_steps": 5}} if evaluates else {}
    node = trained_with(LLAMA, local, tmp_path, train={"compile": True}, data={"hold_out": 0.2}, **sections)
    before, random_state = [p.detach().clone() for p in node.model.parameters()], torch.get_rng_state()
    loop.compile_model(node)
    first = {with_gradients for with_gradients, _ in seen}
    assert first == ({True, False} if evaluates else {True})
    assert all(torch.equal(a, b) for a, b in zip(before, node.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in node.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    shapes = {shape for with_gradients, shape in seen if with_gradients}
    node.loader.assign([(0, 4)])
    assert node.loader.is_ready(60)
    loop.forward_backward(node)
    node.loader.close()
    assert {shape for with_gradients, shape in seen if with_gradients} == shapes


def test_nothing_is_run_before_the_first_step_where_nothing_is_compiled(local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(LLAMA, local, tmp_path)
    node.model.register_forward_pre_hook(lambda *_: pytest.fail("a pass for nothing"))
    loop.compile_model(node)
    node.loader.close()


def test_model_is_compiled_before_anybody_waits_for_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    order = MagicMock()
    order.open_run.side_effect = InterruptedError
    for name in ("build_trainer", "open_evaluation_sets", "open_report", "barrier", "register_stack_dump"):
        monkeypatch.setattr(loop, name, MagicMock())
    for name in ("compile_model", "open_run"):
        monkeypatch.setattr(loop, name, getattr(order, name))
    with ExitStack() as stack, pytest.raises(InterruptedError):
        loop.train(MagicMock(), MagicMock(), MagicMock(), stack)
    assert [call[0] for call in order.mock_calls] == ["compile_model", "open_run"]


@pytest.mark.parametrize(
    ("error", "is_cut_short", "waits"),
    [(None, False, True), (Leaving("asked"), False, True), (Leaving("asked"), True, False), (OSError(), False, False)],
)
def test_groups_of_a_node_end_when_all_its_ranks_have_come_to_their_end(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, is_cut_short: bool, waits: bool
) -> None:
    """Rank 0 may still write an export, and the last checkpoint, when the others have nothing left to do."""
    order, departure = MagicMock(), MagicMock(is_cut_short=is_cut_short)

    def train(config: object, local: object, departure: object, stack: ExitStack, port: object) -> None:
        stack.callback(order.write)
        if error is not None:
            raise error

    monkeypatch.setattr(loop, "init_local_mesh", lambda kind: order.local)
    monkeypatch.setattr(loop, "open_own_store", lambda config, *_: (config, None))
    monkeypatch.setattr(loop, "agree", lambda config, local: config)
    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(loop, "barrier", order.barrier)
    order.barrier.side_effect = RuntimeError("Connection closed by peer")
    with nullcontext() if error is None else pytest.raises(type(error)):
        loop.run(MagicMock(), departure)
    assert [call[0] for call in order.mock_calls] == ["write", *["barrier"] * waits, "local.close"]


# -- a run that learns nothing ends by itself, and exports nothing ---------------------------------------------------

NAN = math.nan


def played(
    limit: int | None, *steps: tuple[float, Any], has_learned: bool = False
) -> tuple[int | None, NonFiniteSteps]:
    """Steps of (norm, what came of a round: True it counted, False it was left out, None there was none).

    Returns the step at which the node ended, if it did.
    """
    failed = NonFiniteSteps(limit, has_learned=has_learned)
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
        failed.require_progress()
        return
    with pytest.raises(LearnsNothing, match="nothing was learned in the last"):
        failed.require_progress()


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


def test_sample_is_written_whole_and_its_event_has_how_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, node, events = "Once upon a time. " * 200, a_node(node_dir=tmp_path), EventLog(tmp_path)
    node.local.rank, node.local.device = 0, torch.device("cpu")
    node.tokenizer.decode.return_value = text
    monkeypatch.setattr(loop, "prompt_of", lambda *_: SimpleNamespace(ids=np.array([1, 2])))
    monkeypatch.setattr(loop, "generate", lambda _, ids, **__: ids)
    loop.write_sample(node, "Once", 5, events)
    events.close()
    told = json.loads((tmp_path / EVENTS_FILE).read_bytes())
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") == text
    assert (told["path"], told["text"]) == (str(tmp_path / "sample.txt"), text[:1000])
    for record in (told, {**told, "more": ["x" * 5000]}):  # however the store tells it
        assert "text" in shortened(record)

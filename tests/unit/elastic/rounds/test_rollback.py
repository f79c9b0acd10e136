"""Going back to a checkpoint at a boundary: all members at once, or nobody; what follows is as the first time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.audits import audit_of
from tests.unit.conftest import FakeRun, StartRun
from torch import Tensor

from zeroband.config.outer import DdpConfig, DilocoConfig, OuterSGDConfig
from zeroband.config.schema import RollbackConfig
from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.orders import roll_back
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import RestartPoint
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.node.mesh import LocalMesh
from zeroband.state.round_state import RoundState

Noise = Callable[..., Tensor]
OUTER = OuterSGDConfig(momentum_warmup_rounds=5)
ALGORITHMS = [DilocoConfig(type="diloco", inner_steps=1, optimizer=OUTER), DdpConfig(type="ddp")]


def save(run: FakeRun, step: int, *readers: str) -> None:
    """Keep the state of now as a checkpoint."""
    run.checkpoints[step] = (run["a"].outer.copy_state(), readers or tuple(run.nodes))


def order(run: FakeRun, step: int) -> None:
    run.store.give_orders(lambda given: roll_back(given, step, [step]))


def go_back(run: FakeRun, **updates: Tensor) -> dict[str, RoundReport]:
    """A round of which all members learn that they go back; they take the checkpoint."""
    outcomes: dict[str, Any] = run.together(
        **{name: lambda name=name, u=u: run[name].take_step(u, 10) for name, u in updates.items()}
    )
    for name, outcome in outcomes.items():
        assert isinstance(outcome, RolledBack), outcome
        copy = run.checkpoints[outcome.step][0]
        run[name].inner.zero_grad()
        digest = run[name].outer.adopt(outcome.report.round, outcome.record, copy.sections)
        assert digest == outcome.report.state_digest == copy.state_digest
        run[name].steps = 0
    return {name: outcome.report for name, outcome in outcomes.items()}


def learn(run: FakeRun, update: Tensor, **losses: float) -> dict[str, RoundReport]:
    """A round of nodes that see these losses."""
    for name, loss in losses.items():
        run[name].loss = loss
    return run.round(**dict.fromkeys(losses, update))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounds_after_a_rollback_are_those_of_the_first_time(
    start_run: StartRun, noise: Noise, algorithm: DilocoConfig | DdpConfig
) -> None:
    run = start_run(algorithm, "a", "b")
    run.round(a=noise(1), b=noise(2))
    save(run, 1)
    first = [run.round(a=noise(10 + n), b=noise(20 + n))["a"] for n in range(3)]
    order(run, 1)
    back = go_back(run, a=noise(50), b=noise(51))
    assert back["a"].round == 5 and back["a"].progress.inner_step == 1
    again = [run.round(a=noise(10 + n), b=noise(20 + n)) for n in range(3)]
    assert (
        [r["a"].state_digest for r in again] == [r["b"].state_digest for r in again] == [r.state_digest for r in first]
    )
    assert [r["a"].round for r in again] == [6, 7, 8]
    assert [r["a"].progress.assigned for r in again] == [r.progress.assigned for r in first]
    assert torch.equal(run["a"].params, run["b"].params)


def test_progress_of_a_rollback_says_what_it_follows(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ALGORITHMS[0], "a", "b")
    run.round(a=noise(1), b=noise(2))
    save(run, 1)
    before = run["a"].outer.progress
    run.round(a=noise(3), b=noise(4))
    order(run, 1)
    progress = go_back(run, a=noise(5), b=noise(6))["b"].progress
    assert progress.follows == (before.founding, 1) and progress.founding != before.founding
    assert (progress.tokens, progress.ledgers) == (before.tokens, before.ledgers)


def test_run_goes_on_as_it_was_where_a_member_cannot_have_the_checkpoint(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ALGORITHMS[0], "a", "b")
    run.round(a=noise(1), b=noise(2))
    save(run, 1, "a")
    order(run, 1)
    reports = run.round(a=noise(3), b=noise(4))
    assert {r.round for r in reports.values()} == {2} and reports["a"].progress.inner_step == 2
    assert any("b has no checkpoint of step 1" in failure for failure in reports["b"].failures)
    assert run.store.view(0).orders.rollback is None


def test_member_that_dies_before_it_goes_back_is_gone_without(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ALGORITHMS[0], "a", "b")
    run.round(a=noise(1), b=noise(2))
    save(run, 1)
    run.round(a=noise(3), b=noise(4))
    order(run, 1)
    run["b"].member.close()
    assert go_back(run, a=noise(5))["a"].members == ("a",)


def test_nobody_catches_up_over_a_rollback(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ALGORITHMS[0], "a", "b")
    run.round(a=noise(1), b=noise(2))
    save(run, 1)
    run.round(a=noise(3), b=noise(4))
    order(run, 1)
    go_back(run, a=noise(5), b=noise(6))
    run.round(a=noise(7), b=noise(8))
    assert [run["a"].entry(round) is not None for round in (1, 2, 3, 4)] == [False, False, False, True]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("skip_data", [True, False])
def test_spike_of_the_common_loss_takes_all_members_back_once(
    start_run: StartRun, noise: Noise, algorithm: DilocoConfig | DdpConfig, skip_data: bool
) -> None:
    run = start_run(algorithm, "a", "b", rollback=RollbackConfig(skip_data=skip_data))
    for n in range(6):
        learn(run, noise(n), a=3.0, b=3.0)
    save(run, 6)
    learn(run, noise(6), a=7.0, b=3.9)  # a spike on one node, not in the mean
    learn(run, noise(7), a=3.0, b=3.0)
    assert run.said == []
    learn(run, noise(8), a=20.0, b=3.9)
    back = go_back(run, a=noise(50), b=noise(51))
    assert run.said == [("rollback_ordered", 9)] and run.store.view(0).orders.rollback is None
    assert back["a"].progress == back["b"].progress and back["a"].progress.inner_step == 6
    for n in range(20, 23):
        reports = learn(run, noise(n), a=3.0, b=3.0)
        assert reports["a"].state_digest == reports["b"].state_digest
    assert len(run.said) == 1
    left_out = run.store.verdicts[10].record["skipped"]
    assert left_out == ({SHARED: ((48, 72),)} if skip_data else {})
    assert audit_of(run).is_exact


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_round_in_which_no_update_is_finite_takes_the_run_back(
    start_run: StartRun, noise: Noise, algorithm: DilocoConfig | DdpConfig
) -> None:
    run = start_run(algorithm, "a", "b", rollback=RollbackConfig())
    learn(run, noise(1), a=3.0, b=3.0)
    save(run, 1)
    bad = noise(2)
    bad[3] = float("nan")
    run.round(a=bad, b=noise(3))
    assert run.said == []
    run.round(a=bad, b=bad)
    assert go_back(run, a=noise(4), b=noise(5))["a"].progress.inner_step == 1
    assert run.said == [("rollback_ordered", 3)]


def test_step_of_which_nothing_was_learned_has_no_part_in_the_loss(start_run: StartRun, noise: Noise) -> None:
    run = start_run(DilocoConfig(type="diloco", inner_steps=2, optimizer=OUTER), "a")
    run["a"].loss = 2.0
    run["a"].diloco_step(noise(1), 10)
    run["a"].loss = float("nan")
    report = run["a"].diloco_step(0 * noise(1), 0)
    assert report is not None and report.weights == (10,)
    assert LossRecord.of(run["a"].outer.record).loss == 2.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_run_that_is_founded_on_a_checkpoint_goes_on_as_the_first_one_did(
    start_run: StartRun, noise: Noise, algorithm: DilocoConfig | DdpConfig, local: LocalMesh, tmp_path: Path
) -> None:
    first = start_run(algorithm, "a", "b")
    first.round(a=noise(1), b=noise(2))
    first.round(a=noise(3), b=noise(4))
    copy = first["a"].outer.copy_state()
    reports = [first.round(a=noise(10 + n), b=noise(20 + n))["a"] for n in range(3)]
    (tmp_path / "again").mkdir()
    run = FakeRun(algorithm, tmp_path / "again", local, founders=2)
    assert run.store.propose_restart_point(RestartPoint(9, 2, copy.state_digest, "a"), run.store.view(0))
    for name in ("a", "b"):
        assert run.add(name).outer.adopt(copy.round, copy.record, copy.sections) == copy.state_digest
        if algorithm.type == "diloco":  # whose inner state the checkpoint holds by node
            ours, theirs = run[name].inner, first[name].inner
            for moment, values in theirs.named_moments().items():
                ours.named_moments()[moment].copy_(values)
            ours.seek(2, update_count=theirs.update_count)
    run.together(**{name: partial(run[name].outer.found, 9) for name in ("a", "b")})
    assert run["a"].outer.progress.assigned == first_assigned(copy)
    again = [run.round(a=noise(10 + n), b=noise(20 + n))["a"] for n in range(3)]
    assert [r.round for r in again] == [10, 11, 12]
    assert [r.state_digest for r in again] == [r.state_digest for r in reports]
    assert [r.progress.inner_step for r in again] == [r.progress.inner_step for r in reports]
    assert [r.progress.assigned for r in again] == [r.progress.assigned for r in reports]


def first_assigned(copy: RoundState) -> dict[str, tuple[tuple[int, int], ...]]:
    return dict(Progress.from_record(copy.record["progress"]).assigned)

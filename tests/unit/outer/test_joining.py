"""A joiner trains at once, on samples that it claims, and counts in full from its first contribution."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from tests.oracles.problem import ProblemModel
from tests.unit.audits import audit_of
from tests.unit.outer.test_late import BATCH, Nesterov, diloco, weighted
from torch import Tensor

from zeroband.config.outer import DilocoConfig, SparseLocoConfig
from zeroband.data.ledger import SHARED
from zeroband.elastic.rounds.journal import Journal
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.errors import Fenced, RunOver
from zeroband.state.digest import digest_of

StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]


def claimed_by(run: Any, name: str) -> tuple[int, int]:
    (span,) = run[name].outer.upcoming()
    return span


def weights_of(run: Any, member: str) -> list[int]:
    """What a member weighed in the committed rounds that it was in."""
    plans = [verdict.plan for verdict in run.store.verdicts]
    return [plan.weights[plan.members.index(member)] for plan in plans if member in plan.members]


def a_joiner(run: Any, name: str = "c") -> Any:
    node = run.add(name)
    node.receive(run["a"])
    assert node.join() is None
    return node


def test_joiner_trains_before_any_round_has_heard_of_it(start_run: StartRun, noise: Noise) -> None:
    """Its samples lie behind all that was dealt and that the next round deals."""
    run = start_run(diloco(), "a", "b")
    c = a_joiner(run)
    assert c.dealt_steps == 2 and claimed_by(run, "c")[0] >= run["a"].outer.progress.ledgers[SHARED].next
    assert c.diloco_step(noise(90), 10, ends_round=False) is None
    assert len(run.store.verdicts) == 1, "that of the founding"


def test_first_contribution_counts_in_full(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", "b")
    c, expected = a_joiner(run), Nesterov(run["a"].params)
    assert c.diloco_step(noise(90), 10) is None
    reports = run.round_with_late("c", [noise(91)], a=noise(3), b=noise(4))
    start = expected.theta
    sent = {"a": start - (start + noise(3)), "b": start - (start + noise(4))}
    sent["c"] = start - (start + noise(90) + noise(91))
    expected.step(weighted(sent, {"a": 10, "b": 10, "c": 20}))
    for report in reports.values():
        assert (report.round, report.weights, report.samples) == (1, (10, 10, 20), (4, 4, 8))
        assert report.state_digest == digest_of(expected.theta, expected.velocity)
    reports = run.round(a=noise(5), b=noise(6), c=noise(7))
    assert len({report.state_digest for report in reports.values()}) == 1
    assert weights_of(run, "c") == [20, 10]
    assert audit_of(run).is_exact and audit_of(run).trained == BATCH * (4 + 3)


@pytest.mark.parametrize("missed", [1, 3])
def test_rounds_pass_while_a_joiner_trains(start_run: StartRun, noise: Noise, missed: int) -> None:
    """It is late in them, so they deal it more, and it trains on while what it learned waits for the next one."""
    run = start_run(diloco(), "a", "b")
    c = a_joiner(run)
    claimed, expected = claimed_by(run, "c"), Nesterov(c.params)
    learned = expected.theta - (expected.theta + noise(90) + noise(91))
    assert c.diloco_step(noise(90), 10) is None
    for round in range(1, missed + 1):
        updates = {"a": noise(10 * round), "b": noise(10 * round + 1)}
        sent = {name: expected.theta - (expected.theta + update) for name, update in updates.items()}
        expected.step(weighted(sent, {"a": 10, "b": 10}))
        report = run.round(**updates)["a"]
        assert (report.members, report.late) == (("a", "b"), ("c",))
    assert run["a"].outer.progress.assigned["c"][0] == claimed
    assert c.diloco_step(noise(91), 10, ends_round=True) is None, "it stands still"
    assert torch.equal(c.params, expected.theta)
    assert c.diloco_step(noise(92), 10, ends_round=False) is None, "it stands still"
    reports = run.round(a=noise(3), b=noise(4))
    sent = {name: expected.theta - (expected.theta + noise(seed)) for name, seed in (("a", 3), ("b", 4))}
    expected.step(weighted({**sent, "c": learned}, {"a": 10, "b": 10, "c": 20}))
    assert reports["a"].weights == (10, 10, 20)
    assert reports["a"].state_digest == digest_of(expected.theta, expected.velocity)
    run.together(
        a=lambda: run["a"].take_step(noise(5), 10),
        b=lambda: run["b"].take_step(noise(6), 10),
        c=lambda: c.diloco_step(noise(93), 10, ends_round=True),
    )
    assert len({node.outer.state_digest for node in run.nodes.values()}) == 1
    assert weights_of(run, "c") == [20, 20]
    assert audit_of(run).is_exact and audit_of(run).trained == BATCH * (2 * missed + 2 + 2 + 2 + 2)


def test_joiner_that_claims_while_a_round_is_open_comes_to_a_later_one(start_run: StartRun, noise: Noise) -> None:
    """The plan did not know it; its claim lies beyond what that deals, so it stands."""
    run = start_run(diloco(), "a", "b")
    run.add("c").receive(run["a"])
    propose, joined = run["a"].member.store.propose_plan, []

    def propose_and_join(plan: Any, **more: Any) -> bool:
        is_first = propose(plan, **more)
        if is_first and not joined:
            joined.append(run["c"].join())
        return is_first

    for name in ("a", "b"):
        run[name].member.store.propose_plan = propose_and_join
    report = run.round(a=noise(1), b=noise(2))["a"]
    assert joined == [None] and report.late == ()
    claimed = claimed_by(run, "c")
    assert run["c"].diloco_step(noise(90), 10) is None
    reports = run.round_with_late("c", [noise(91)], a=noise(3), b=noise(4))
    assert (reports["c"].round, reports["c"].weights, reports["c"].samples) == (2, (10, 10, 20), (4, 4, 8))
    assert claimed[0] >= run["a"].outer.progress.ledgers[SHARED].next - 4 * 8
    assert len({report.state_digest for report in reports.values()}) == 1 and audit_of(run).is_exact


def test_joiner_whose_samples_were_dealt_to_others_begins_again(
    start_run: StartRun, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it learned from them counts for nothing: each sample counts once."""
    run = start_run(diloco(), "a", "b")
    c = a_joiner(run)
    run.store.record.claims.clear()  # the store lost them
    for seed in range(8):
        run.round(a=noise(seed), b=noise(20 + seed))
    assert c.diloco_step(noise(90), 10) is None
    outcome = run.together(c=lambda: c.diloco_step(noise(91), 10, ends_round=True))["c"]
    assert isinstance(outcome, Fenced)
    assert audit_of(run).is_exact
    run.replace_member("c")
    c.receive(run["a"])
    assert run.round_with_joiner("c", a=noise(3), b=noise(4))["c"].weights == (10, 10, 10)
    assert audit_of(run).is_exact


def test_claim_that_the_store_lost_counts_with_the_contribution(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", "b")
    c = a_joiner(run)
    run.store.record.claims.clear()
    assert c.diloco_step(noise(90), 10) is None
    reports = run.round_with_late("c", [noise(91)], a=noise(3), b=noise(4))
    assert reports["c"].weights == (10, 10, 20) and audit_of(run).is_exact


def test_samples_of_a_joiner_that_dies_go_back(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", "b")
    c = a_joiner(run)
    claimed = claimed_by(run, "c")
    c.diloco_step(noise(90), 10)
    run.round(a=noise(1), b=noise(2))
    c.member.close()
    for seed in range(3, 9):
        report = run.round(a=noise(seed), b=noise(20 + seed))["a"]
    assert "c" not in report.progress.assigned and report.late == ()
    assert claimed[1] <= report.progress.ledgers[SHARED].next and audit_of(run).is_exact


def test_joiner_that_dies_before_any_round_leaves_no_trace(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", "b")
    a_joiner(run).member.close()
    report = run.round(a=noise(1), b=noise(2))["a"]
    assert report.late == () and run.store.plans[-1].claims == () and audit_of(run).is_exact


def test_crowd_of_joiners_counts_in_one_round(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=1), "a")
    for name in "bcdef":
        a_joiner(run, name)
    spans = sorted(claimed_by(run, name) for name in "bcdef")
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))

    def contribute_last() -> Any:
        for name in "bcdef":
            run.store.await_ready(1, name)
        return run["a"].take_step(noise(1), 10)

    works: dict[str, Callable[[], Any]] = {n: lambda n=n: run[n].take_step(noise(ord(n)), 10) for n in "bcdef"}
    reports = run.together(a=contribute_last, **works)
    assert {report.weights for report in reports.values()} == {(10,) * 6}
    assert len({report.state_digest for report in reports.values()}) == 1
    assert audit_of(run).is_exact and audit_of(run).trained == BATCH * 6


def test_joiner_that_is_asked_to_leave_hands_over_what_it_learned(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", "b")
    c = a_joiner(run)
    c.departure.ask(0.0)
    reports = run.round_with_late("c", [noise(90)], a=noise(3), b=noise(4))
    assert reports["a"].weights == (10, 10, 10) and "c" not in reports["a"].progress.assigned
    c.member.close()
    run.round(a=noise(5), b=noise(6))
    assert audit_of(run).is_exact and audit_of(run).trained == BATCH * (3 + 2)


def test_last_round_waits_for_a_joiner_that_trains(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=1), "a", "b", total_steps=1)
    c = a_joiner(run)
    with run.hurry():
        reports = run.together(
            a=lambda: run["a"].take_step(noise(1), 10),
            b=lambda: run["b"].take_step(noise(2), 10),
            c=lambda: (run.store.await_ready(1, "b"), c.take_step(noise(3), 10))[1],
        )
    assert reports["a"].weights == (10, 10, 10) and reports["c"].progress.is_complete
    assert audit_of(run).is_exact


def test_joiner_without_a_step_left_claims_nothing(start_run: StartRun) -> None:
    """Only the rounds are left that send the other fragments."""
    config = DilocoConfig(type="diloco", inner_steps=4, fragments=2)
    run = start_run(config, "a", total_steps=2, model=ProblemModel)
    release, vote = [], run["a"].member.vote

    def vote_later(plan: Any, *rest: Any) -> None:
        if plan.round == 2:  # the closing one
            run.add("c").receive(run["a"])
            release.append(run["c"].join())
            assert run["c"].outer.upcoming() == () and run.store.record.claims == {}
        vote(plan, *rest)

    run["a"].member.vote = vote_later
    run["a"].take_steps([torch.zeros_like(run["a"].params) for _ in range(2)], 10)
    assert release == [None] and run["a"].outer.progress.is_complete
    with pytest.raises(RunOver):
        run["c"].join()


def test_joiner_that_trains_is_fenced_when_the_run_goes_back(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=1), "a", "b")
    run.round(a=noise(1), b=noise(2))
    run.checkpoints[1] = run["a"].outer.copy_state(), ("a", "b")
    run.round(a=noise(3), b=noise(4))
    c = a_joiner(run)
    run["a"].member.store.give_orders(lambda given: type(given)(version=given.version + 1, rollback=1))
    outcomes = run.together(a=lambda: run["a"].take_step(noise(5), 10), b=lambda: run["b"].take_step(noise(6), 10))
    assert all(isinstance(outcome, RolledBack) for outcome in outcomes.values())
    outcome = run.together(c=lambda: c.take_step(noise(7), 10))["c"]
    assert isinstance(outcome, Fenced)


CONFIGS = {
    "delayed": DilocoConfig(type="diloco", inner_steps=2, overlap="full"),
    "eager": DilocoConfig(type="diloco", inner_steps=2, overlap="full", merge="eager"),
    "overlapping": DilocoConfig(type="diloco", inner_steps=4, overlap=1, merge="mix", alpha=0.5),
    "fragments": DilocoConfig(type="diloco", inner_steps=8, fragments=2, overlap=1, merge="mix", alpha=0.5),
    "sparse": SparseLocoConfig(type="sparseloco", inner_steps=2),
}


def trains(run: Any, config: Any) -> Callable[..., dict[str, Any]]:
    """trains(phases, "a", "b"): so many phases of these nodes, at the same time; what each came to."""
    chance = torch.Generator().manual_seed(1)

    def train(name: str, phases: int) -> None:
        def step(number: int, params: Tensor) -> Tensor:
            return params + 0.01 * torch.randn(params.shape, generator=chance)

        run[name].train(step, phases * config.phase_steps)

    def all_train(phases: int, *names: str) -> dict[str, Any]:
        return run.together(**{name: lambda name=name: train(name, phases) for name in names})

    return all_train


@pytest.mark.parametrize("missed", [0, 2])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_joiner_counts_from_its_first_contribution_whatever_the_schedule(
    start_run: StartRun, config: Any, missed: int
) -> None:
    """Rounds that travel beside training, fragments, payloads; before it contributes, `missed` rounds pass."""
    run = start_run(config, "a", "b", total_steps=40, model=ProblemModel)
    all_train = trains(run, config)
    all_train(3, "a", "b")
    c = a_joiner(run)
    if missed:
        all_train(missed, "a", "b")
    all_train(40 // config.phase_steps, "a", "b", "c")
    assert all(node.outer.progress.is_complete for node in run.nodes.values())
    assert len({node.outer.state_digest for node in run.nodes.values()}) == 1
    assert weights_of(run, "c")[0] > 0
    assert 0 not in [w for v in run.store.verdicts[1:] if v.plan.steps != (0,) * len(v.members) for w in v.plan.weights]
    assert audit_of(run).is_exact
    assert c.made_steps > 0


@pytest.mark.parametrize("config", [CONFIGS["delayed"], CONFIGS["eager"]], ids=["delayed", "eager"])
def test_joiner_waits_for_a_round_that_members_apply_at_their_next_boundary(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    """Until then no journal has it, however long the phase is and however soon a donor gives up."""
    monkeypatch.setattr("zeroband.outer.schedule.APPLIED_S", 0.001)
    monkeypatch.setattr(Journal, "await_entry", partialmethod(Journal.await_entry, timeout_s=0.0))
    run = start_run(config, "a", "b", total_steps=40, model=ProblemModel)
    all_train, asked, in_vain = trains(run, config), list[int](), threading.Event()
    all_train(3, "a", "b")
    c = a_joiner(run)
    all_train(1, "a", "b")
    newest = run["a"].outer.round + 1
    run.store.await_committed(newest)
    fetch = run.fetch_entry

    def count_and_fetch(round: int, *rest: Any) -> Any:
        asked.append(round)
        if asked.count(newest) > 2:
            in_vain.set()
        return fetch(round, *rest)

    run.fetch_entry = count_and_fetch

    def go_on(name: str) -> None:
        assert in_vain.wait(10.0)
        all_train(1, name)

    outcomes = run.together(c=lambda: all_train(1, "c")["c"], a=lambda: go_on("a"), b=lambda: go_on("b"))
    assert outcomes == {"a": None, "b": None, "c": None} and c.outer.round >= newest
    all_train(40 // config.phase_steps, "a", "b", "c")
    assert len({node.outer.state_digest for node in run.nodes.values()}) == 1
    assert weights_of(run, "c")[0] > 0 and audit_of(run).is_exact


def test_joiner_is_fenced_if_the_members_die_before_they_apply_a_round(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "await_entry", partialmethod(Journal.await_entry, timeout_s=0.0))
    config = CONFIGS["delayed"]
    run = start_run(config, "a", "b", total_steps=40, model=ProblemModel)
    all_train = trains(run, config)
    all_train(3, "a", "b")
    a_joiner(run)
    all_train(1, "a", "b")
    run.store.await_committed(run["a"].outer.round + 1)
    for name in ("a", "b"):
        run[name].member.close()
    assert isinstance(all_train(1, "c")["c"], Fenced)

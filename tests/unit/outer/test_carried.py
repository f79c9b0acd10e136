"""Contributions of members with slow links: fetched before their round, and counted by a carrier."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from tests.unit.audits import audit_of
from tests.unit.elastic.transport.oracle import averaged
from tests.unit.outer.background import ROUND, await_end
from tests.unit.outer.test_late import Average, Nesterov, diloco
from tests.unit.outer.test_overlap import assert_one_outer_state
from torch import Tensor

from zeroband.config.outer import DilocoConfig, SparseLocoConfig
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.membership.round_rules import Rules
from zeroband.elastic.rounds.interfaces import CONTRIBUTION
from zeroband.elastic.transport.base import Rates
from zeroband.kernels.codec import CODECS
from zeroband.outer.diloco import PARAMS
from zeroband.state.digest import digest_of

StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]

FAST, SLOW = "abc", "d"
RULES = Rules(straggler_grace=0.1, transfer_bytes=12_500_000)
"""Three nodes move a state in 0.3 s, the fourth in 10 s; rounds of 12 s may be longer by a tenth."""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroband.elastic.rounds.carriage._PAUSE_S", 0.002)


@pytest.fixture
def start(start_run: StartRun, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A run of a, b, c and d, whose link is slow."""

    def begin(**more: Any) -> Any:
        config = more.pop("config", diloco(inner_steps=1))
        run = start_run(config, *FAST, SLOW, journal_rounds=20, **more)
        for name, node in run.nodes.items():
            monkeypatch.setattr(node.mesh, "_rules", RULES)
            monkeypatch.setattr(node.lanes, "measured", partial(Rates, own=10 if name == SLOW else 500))
        return run

    return begin


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20.0
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def round_of(
    run: Any,
    round: int,
    more: dict[str, Callable[[], Any]] | None = None,
    *,
    waits_for_slow: bool = True,
    waits_for_whole: bool = False,
    **updates: Tensor,
) -> Any:
    """A round that begins when the slow node stands at its boundary, twelve seconds after the one before."""

    def phase_passes() -> None:
        run.now_s += 12.0

    begins = Barrier(len(updates), phase_passes, timeout=20.0)

    def step(name: str, update: Tensor) -> Any:
        if waits_for_slow:
            run.store.await_ready(round, SLOW)
        if waits_for_whole:
            until_whole(run)
        begins.wait()  # each measures the phase from when it saw the verdict before
        return run[name].take_step(update, 10)

    works = {name: partial(step, name, update) for name, update in updates.items()}
    return run.together(**works, **(more or {}))


def learn(run: Any, update: Tensor) -> Any:
    """An inner step of the slow node, with which its phase ends."""
    return run[SLOW].diloco_step(update, 10, ends_round=True)


def carrier_of(run: Any) -> str:
    (carried,) = run.store.plans[-1].carried
    assert carried.member == SLOW
    return str(carried.carrier)


def until_whole(run: Any) -> None:
    """Wait until the carrier holds what the slow node offers now."""
    carrier = run[carrier_of(run)].carriage
    until(lambda: run[SLOW].carriage.offered is not None)
    until(lambda: [carry.offer for carry in carrier.whole()] == [run[SLOW].carriage.offered.state_digest])


def mean_with(run: Any, sent: dict[str, Tensor], carried: Tensor, codec: str) -> Tensor:
    """What a round of equal weights comes to, one of which a carrier adds to its own, written out."""
    carrier, encode = carrier_of(run), CODECS[codec]
    encoded, total = encode.encode(carried), sent[carrier] * 0.5
    encode.add(encoded, 0.5, total)
    shares = {name: 0.5 if name == carrier else 0.25 for name in FAST}
    sent = {**sent, carrier: total}
    return sum((sent[name] * shares[name] for name in FAST), torch.zeros(22))


def updates_of(noise: Noise, round: int, names: str = FAST) -> dict[str, Tensor]:
    return {name: noise(10 * round + n) for n, name in enumerate(names)}


def sent_from(start: Tensor, updates: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: start - (start + update) for name, update in updates.items()}


def first_round(run: Any, noise: Noise) -> Nesterov:
    """The first round, by which all learn that the link is slow; the reference after it."""
    expected = Nesterov(run["a"].params)
    outcomes = round_of(run, 1, {SLOW: lambda: learn(run, noise(4))}, **updates_of(noise, 1))
    sent = sent_from(expected.theta, updates_of(noise, 1))
    expected.step(sum((sent[name] * (1 / 3) for name in FAST), torch.zeros(22)))
    assert outcomes["a"].state_digest == digest_of(expected.theta, expected.velocity)
    assert outcomes["a"].late == (SLOW,) and outcomes["a"].carried == ()
    assert outcomes[SLOW] is None, "it trains on"
    return expected


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_contribution_of_a_slow_link_counts_once_its_carrier_has_it(
    start: Callable[..., Any], noise: Noise, codec: str
) -> None:
    """And so does the next one, made from where the outer parameters were when it began, whatever came meanwhile."""
    run = start(codec=codec)
    begin = run["a"].params
    expected = first_round(run, noise)
    learned = begin - (begin + noise(4))
    for round in (2, 3):
        until_whole(run)
        outcomes = round_of(run, round, **updates_of(noise, round))
        sent = sent_from(expected.theta, updates_of(noise, round))
        began_at = expected.theta
        expected.step(mean_with(run, sent, learned, codec))
        for name in FAST:
            assert outcomes[name].state_digest == digest_of(expected.theta, expected.velocity), name
        assert outcomes["a"].carried == ((SLOW, 10, 4),) and outcomes["a"].late == (SLOW,)
        assert run["a"].outer.progress.tokens == 10 * (3 * round + round - 1)
        assert learn(run, noise(100 + round)) is None, "it stands still"
        assert run[SLOW].outer.state_digest == outcomes["a"].state_digest
        learned = began_at - (began_at + noise(100 + round))
        torch.testing.assert_close(run[SLOW].buffers[CONTRIBUTION], learned, rtol=0, atol=1e-6)
        learned = run[SLOW].buffers[CONTRIBUTION].clone()
    assert audit_of(run).is_exact and audit_of(run).trained == 4 * (3 * 3 + 2)


def test_round_goes_on_while_what_is_offered_has_not_come_and_counts_it_later(
    start: Callable[..., Any], noise: Noise
) -> None:
    run = start()
    run.is_link_cut = True
    first_round(run, noise)
    for round in (2, 3):
        assert round_of(run, round, **updates_of(noise, round))["a"].carried == ()
    run.is_link_cut = False
    until_whole(run)
    assert round_of(run, 4, **updates_of(noise, 4))["a"].carried == ((SLOW, 10, 4),)
    await_end(ROUND)  # else it trains a phase more at first
    assert learn(run, noise(5)) is None
    assert run[SLOW].outer.round == 4, "it replays all that it missed"
    assert run[SLOW].outer.state_digest == run["a"].outer.state_digest
    assert audit_of(run).is_exact


def test_member_that_was_late_before_its_link_was_known_to_be_slow_is_carried(
    start: Callable[..., Any], noise: Noise
) -> None:
    """It comes to the next boundary during training with nothing offered yet; then it offers all that it learned."""
    run = start()
    with run.hurry(*FAST):
        assert run.round(**updates_of(noise, 1))["a"].late == (SLOW,)
    assert learn(run, noise(4)) is None
    outcomes = round_of(run, 2, **updates_of(noise, 2))
    assert [(c.member, c.offer) for c in run.store.plans[-1].carried] == [(SLOW, "")]
    outcomes = round_of(run, 3, {SLOW: lambda: learn(run, noise(5))}, waits_for_whole=True, **updates_of(noise, 3))
    assert outcomes["a"].carried == ((SLOW, 20, 8),) and outcomes[SLOW] is None
    assert run["a"].outer.progress.tokens == 10 * (3 * 3 + 2)
    assert audit_of(run).is_exact


def test_carrier_that_is_lost_before_the_round_leaves_the_contribution_to_another_one(
    start: Callable[..., Any], noise: Noise
) -> None:
    run = start()
    first_round(run, noise)
    until_whole(run)
    lost = carrier_of(run)
    rest = FAST.replace(lost, "")
    run[lost].member.close()
    assert round_of(run, 2, **updates_of(noise, 2, rest))[rest[0]].carried == ()
    assert carrier_of(run) in rest
    until_whole(run)
    assert round_of(run, 3, **updates_of(noise, 3, rest))[rest[0]].carried == ((SLOW, 10, 4),)
    assert audit_of(run).is_exact


@pytest.mark.parametrize("point", ["opened@2", "reduced@2", "voted@2"])
def test_carrier_that_is_lost_in_the_round_leaves_the_contribution_for_the_next_one(
    start: Callable[..., Any], noise: Noise, point: str
) -> None:
    """It counts once, in the round whose plan lists it."""
    run = start(inject={"a": [f"{point}=SIGKILL"]})
    first_round(run, noise)
    until_whole(run)
    assert carrier_of(run) == "a"
    outcomes = round_of(run, 2, **updates_of(noise, 2))
    counted = [v.round for v in run.store.verdicts if v.plan.counted]
    assert outcomes["b"].state_digest == outcomes["c"].state_digest
    if not counted:
        until_whole(run)
        round_of(run, 3, **updates_of(noise, 3, "bc"))
    await_end(ROUND)  # else it trains a phase more at first
    learn(run, noise(5))
    assert [len(v.plan.counted) for v in run.store.verdicts].count(1) == 1
    assert run[SLOW].outer.round == run.store.verdicts[-1].round
    assert audit_of(run).is_exact


def test_contribution_of_a_member_that_is_lost_counts_where_the_plan_lists_it(
    start: Callable[..., Any], noise: Noise
) -> None:
    """Its samples are settled then; of one that is lost before they go back."""
    run = start()
    first_round(run, noise)
    until_whole(run)
    run[SLOW].member.close()
    outcomes = round_of(run, 2, **updates_of(noise, 2))
    assert outcomes["a"].carried == () and outcomes["a"].late == ()
    assert SLOW not in run["a"].outer.progress.assigned
    round_of(run, 3, waits_for_slow=False, **updates_of(noise, 3))
    assert audit_of(run).is_exact


def test_damaged_contribution_is_not_carried(start: Callable[..., Any], noise: Noise) -> None:
    run = start()
    run.is_link_cut, asked = True, []
    first_round(run, noise)
    run.damage = lambda update: asked.append(update) or update + 1
    run.is_link_cut = False
    until(lambda: len(asked) > 1)
    assert run[carrier_of(run)].carriage.whole() == ()
    assert round_of(run, 2, **updates_of(noise, 2))["a"].carried == ()


def test_what_encoding_took_is_fed_back_on_both_ends(start: Callable[..., Any], noise: Noise) -> None:
    """The member's own error into its next contribution, the carrier's in units of its own one."""
    run = start(codec="int4")
    round_of(run, 1, {SLOW: lambda: learn(run, noise(4))}, **updates_of(noise, 1))
    until_whole(run)
    offered, codec = run[SLOW].buffers[CONTRIBUTION].clone(), CODECS["int4"]
    round_of(run, 2, **updates_of(noise, 2))
    carrier = run[carrier_of(run)]
    plan = run.store.verdicts[-1].plan
    brought = [run.store.sent[plan.id, 0][member] for member in plan.members]
    _, taken = averaged(codec, brought, list(plan.shares), (0, 22, 22, 22))
    place = plan.members.index(carrier.member.member_id)
    assert plan.shares[place] == 0.5
    torch.testing.assert_close(carrier.feedback.residual, taken[place] * 2, rtol=0, atol=0)
    learn(run, noise(5))
    fed_back = offered - codec.decode(codec.encode(offered), 22)
    assert fed_back.abs().max() > 0
    torch.testing.assert_close(run[SLOW].feedback.residual, fed_back, rtol=0, atol=0)


def test_last_round_waits_for_a_member_with_a_slow_link_which_takes_part(
    start: Callable[..., Any], noise: Noise
) -> None:
    """There is no later round in which what it learned could be carried."""
    run = start(total_steps=3)
    first_round(run, noise)
    until_whole(run)
    assert round_of(run, 2, **updates_of(noise, 2))["a"].carried == ((SLOW, 10, 4),)
    outcomes = round_of(
        run, 3, {SLOW: lambda: run[SLOW].take_step(noise(5), 10)}, waits_for_slow=False, **updates_of(noise, 3)
    )
    assert outcomes["a"].members == (*FAST, SLOW) and outcomes["a"].progress.is_complete
    assert len({outcome.state_digest for outcome in outcomes.values()}) == 1
    assert outcomes["a"].progress.tokens == 10 * (3 * 3 + 2)
    assert audit_of(run).is_exact


def test_member_whose_link_is_fast_again_takes_part_again(
    start: Callable[..., Any], noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    first_round(run, noise)
    until_whole(run)
    monkeypatch.setattr(run[SLOW].lanes, "measured", partial(Rates, own=500))
    assert round_of(run, 2, **updates_of(noise, 2))["a"].late == (SLOW,)
    assert learn(run, noise(5)) is None
    outcomes = round_of(run, 3, {SLOW: run[SLOW].outer.flush}, **updates_of(noise, 3))
    assert outcomes["a"].members == (*FAST, SLOW) and outcomes["a"].late == outcomes["a"].carried == ()
    assert [report.round for report in outcomes[SLOW]] == [3]
    assert run[SLOW].outer.state_digest == outcomes["a"].state_digest
    assert run["a"].outer.progress.tokens == 10 * (3 * 3 + 2)
    assert audit_of(run).is_exact


@pytest.mark.parametrize(
    "config",
    [
        diloco(inner_steps=1, optimizer=Average.config),
        DilocoConfig(type="diloco", inner_steps=1, robust={"type": "centered_clip"}),
        SparseLocoConfig(type="sparseloco", inner_steps=1, k=4),
    ],
    ids=["parameters", "robust", "payloads"],
)
def test_contribution_that_cannot_be_carried_is_waited_for(
    start: Callable[..., Any], noise: Noise, config: Any
) -> None:
    run = start(config=config)
    run.together(
        **{name: partial(run[name].diloco_step, noise(n), 10, ends_round=True) for n, name in enumerate("abcd")}
    )
    run.store.await_ready(1, SLOW)
    assert run.store.view(1).ready[SLOW].offer is None
    assert run.store.plans[-1].members == (*FAST, SLOW)


def test_slow_node_trains_on_while_what_it_offered_has_not_come(start: Callable[..., Any], noise: Noise) -> None:
    """It stands still after none of its phases. What it learned in all of them counts, most of it later."""
    run = start()
    run.is_link_cut = True
    first_round(run, noise)
    for round in (2, 3):
        assert round_of(run, round, **updates_of(noise, round))["a"].carried == ()
        assert learn(run, noise(4 + round)) is None
        assert run[SLOW].outer.round == 1, "its state waits for what it offered"
        assert run[SLOW].outer.inner_step == round + 1
    run.is_link_cut = False
    until_whole(run)
    assert round_of(run, 4, **updates_of(noise, 4))["a"].carried == ((SLOW, 10, 4),)
    await_end(ROUND)  # else it trains a phase more at first
    assert learn(run, noise(9)) is None
    assert run[SLOW].outer.round == 4 and run[SLOW].outer.inner_step == 5
    assert run[SLOW].outer.state_digest == run["a"].outer.state_digest
    learned = -(noise(6) + noise(7) + noise(9))
    torch.testing.assert_close(run[SLOW].buffers[CONTRIBUTION], learned, rtol=0, atol=1e-5)
    until_whole(run)
    assert round_of(run, 5, **updates_of(noise, 5))["a"].carried == ((SLOW, 30, 12),)
    assert learn(run, noise(10)) is None
    assert run[SLOW].outer.state_digest == run["a"].outer.state_digest
    assert audit_of(run).is_exact and audit_of(run).trained == 4 * (3 * 5 + 4)


class Overlapped:
    """A run whose rounds overlap the next phase, which goes on until two contributions of the slow node have counted.

    A member applies a round with its next phase; until then nobody can replay it.
    """

    def __init__(self, run: Any, noise: Noise) -> None:
        self.run, self.noise = run, noise
        self.learned: list[Tensor] = []
        """By the slow node."""
        self._is_over, self._ends, self._passed = Event(), False, 0
        self._begins = Barrier(len(FAST), self._phase_passes, timeout=20.0)
        run.together(**{name: partial(self._go_on, name) for name in FAST}, **{SLOW: self._learn_on})
        run.together(**{name: run[name].outer.flush for name in FAST})

    @property
    def plans(self) -> list[RoundPlan]:
        return [verdict.plan for verdict in self.run.store.verdicts[1:]]

    def update(self, name: str, round: int) -> Tensor:
        return self.noise(1000 * ord(name) + round)

    def means(self) -> Iterator[Tensor]:
        """Of the training that each round counts."""
        learned = iter(self.learned)
        for plan in self.plans:
            total, weight = sum(10 * self.update(name, plan.round) for name in FAST), 30
            for one in plan.counted:
                total += 10 * sum(next(learned) for _ in range(one.steps))
                weight += 10  # of one phase, however many it holds
            yield total / weight

    def _go_on(self, name: str) -> None:
        for round in itertools.count(1):
            self._begins.wait()
            if self._ends:
                return
            self.run[name].diloco_step(self.update(name, round), 10, ends_round=True)

    def _learn_on(self) -> None:
        while sum(len(plan.counted) for plan in self.plans) < 2:
            self.learned.append(self.noise(len(self.learned)))
            learn(self.run, self.learned[-1])
        self._is_over.set()

    def _phase_passes(self) -> None:
        """Let the clock go on, for all of them, once the round that they sent last is committed: none is late."""
        if self._passed == 0:
            self.run.store.await_ready(1, SLOW)
        until(lambda: len(self.plans) >= self._passed)
        self._passed += 1
        self._ends = self._is_over.is_set()
        self.run.now_s += 12.0


@pytest.mark.parametrize("merge", ["overwrite", "mix", "eager"])
def test_nobody_waits_for_a_slow_link_in_overlapped_rounds(
    start: Callable[..., Any], noise: Noise, monkeypatch: pytest.MonkeyPatch, merge: str
) -> None:
    config = DilocoConfig(type="diloco", inner_steps=1, overlap="full", merge=merge, optimizer=Nesterov.config)
    run = start(config=config)
    for name, node in run.nodes.items():
        monkeypatch.setattr(node.mesh, "_rules", replace(RULES, hidden=1.0))
        monkeypatch.setattr(node.lanes, "measured", partial(Rates, own=4 if name == SLOW else 500))
    expected, overlapped = Nesterov(run["a"].params), Overlapped(run, noise)
    assert all(plan.members == tuple(FAST) and plan.late == (SLOW,) for plan in overlapped.plans)
    for mean in overlapped.means():
        expected.step(-mean)
    if merge == "overwrite":  # test_late.py has what the other ways keep of the training since a contribution
        torch.testing.assert_close(run["a"].buffers[PARAMS], expected.theta, rtol=0, atol=1e-5)
    assert_one_outer_state(run, *FAST)
    assert audit_of(run).is_exact

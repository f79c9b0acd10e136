"""Samples that joiners claim: pure, and by random runs in which each sample counts once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from zeroband.data.ledger import SHARED, Ledger, count, take
from zeroband.elastic.membership.plan_checks import plan_objection, refuse_excess
from zeroband.elastic.membership.progress import Progress, RunShape, choose_claim, deal_claims, valid_claims
from zeroband.elastic.membership.records import Claim, Ready, RoundPlan, Verdict, View
from zeroband.elastic.membership.round_rules import ElapsedWaits, Rules, must_leave, next_plan

A, B, C, D = "a#1", "b#1", "c#1", "d#1"
LEDGERS = {SHARED: Ledger(100, ((4, 8),), {A: ((80, 90),), B: ((90, 100),)})}
SHAPE = RunShape(total_steps=10_000, batch_size=2)
RULES = Rules(shape=SHAPE)


@pytest.mark.parametrize(
    ("claims", "kept"),
    [
        ({C: Claim(100, 110)}, [C]),
        ({C: Claim(99, 110)}, []),
        ({C: Claim(120, 120)}, []),
        ({C: Claim(1 << 50, (1 << 50) + 1)}, []),
        ({C: Claim(120, 130), D: Claim(110, 121)}, [C]),
        ({C: Claim(120, 130), D: Claim(110, 120)}, [C, D]),
        ({C: Claim(120, 130), D: Claim(0, 10, "d/7")}, [C, D]),
        ({A: Claim(120, 130)}, []),
    ],
    ids=["next", "dealt", "empty", "far", "overlapping", "apart", "of another corpus", "of one that holds some"],
)
def test_claims_stand_behind_all_that_was_dealt(claims: dict[str, Claim], kept: list[str]) -> None:
    assert sorted(valid_claims(LEDGERS, claims)) == kept


def test_first_of_two_arguments_counts_where_claims_overlap() -> None:
    assert valid_claims(LEDGERS, {D: Claim(110, 121)}, {C: Claim(120, 130)}) == {D: Claim(110, 121)}


def test_what_lies_before_a_claim_goes_to_the_pool() -> None:
    dealt = deal_claims({C: Claim(120, 130), D: Claim(135, 140)}, LEDGERS)[SHARED]
    assert (dealt.next, dealt.returned) == (140, ((4, 8), (100, 120), (130, 135)))
    assert (dealt.assigned[C], dealt.assigned[D]) == (((120, 130),), ((135, 140),))


def test_claim_is_chosen_behind_the_others_and_behind_what_a_round_deals() -> None:
    first = choose_claim(LEDGERS, SHARED, 10, {})
    assert first.start >= 100 + 20
    assert choose_claim(LEDGERS, SHARED, 10, {C: first}).start == first.stop
    assert choose_claim(LEDGERS, SHARED, 10, {C: Claim(1 << 50, 1 << 51)}) == first, "what cannot stand is not avoided"


def boundary(
    ready: dict[str, Ready], *, alive: tuple[str, ...] = (A, B, C), ledgers: Mapping[str, Ledger] = LEDGERS
) -> View:
    plan = RoundPlan(3, 1, 2, (A, B), (10, 10), (5, 5), (5, 5))
    progress = Progress(10, 100, ledgers)
    verdict = Verdict(plan, "d", {"progress": progress.to_record()})
    return View(plan, verdict, frozenset(alive), ready, {}, None)


MEMBER = Ready(3, 10, "d", steps=5, steps_requested=5)
CLAIM = Claim(140, 150)


def test_joiner_that_trains_is_late_in_the_next_plan_and_dealt_what_it_claims() -> None:
    view = boundary({A: MEMBER, B: MEMBER})
    plan = next_plan(view, 3, RULES, claims=lambda: {C: CLAIM, "dead#1": Claim(150, 160)})
    assert isinstance(plan, RoundPlan)
    assert (plan.members, plan.late, plan.claims) == ((A, B), (C,), ((C, CLAIM),))
    assert plan_objection(plan, view, RULES) is None
    assert Progress(10, 100, LEDGERS).after(plan, SHAPE).assigned[C][0] == CLAIM.span


def test_claims_are_asked_for_only_where_somebody_lives_whom_no_round_lists() -> None:
    view = boundary({A: MEMBER, B: MEMBER}, alive=(A, B))
    plan = next_plan(view, 3, RULES, claims=lambda: pytest.fail("all who live are listed"))
    assert isinstance(plan, RoundPlan) and plan.claims == ()


def test_joiner_at_the_boundary_counts_up_to_what_it_claims() -> None:
    view = boundary({A: MEMBER, B: MEMBER, C: replace(MEMBER, claim=CLAIM)})
    assert refuse_excess(view, 3, RULES).refused == {}
    plan = next_plan(view, 3, RULES)
    assert isinstance(plan, RoundPlan)
    assert (plan.members, plan.weights, plan.claims) == ((A, B, C), (10, 10, 10), ((C, CLAIM),))
    assert plan_objection(plan, view, RULES) is None
    more = boundary({**view.ready, C: replace(MEMBER, claim=CLAIM, steps=6)})
    assert refuse_excess(more, 3, RULES).refused == {C: "steps=6, but it was dealt samples for 5"}
    void = boundary({**view.ready, C: replace(MEMBER, claim=Claim(90, 100))})
    assert refuse_excess(void, 3, RULES).refused == {C: "steps=5, but it was dealt samples for 0"}


@pytest.mark.parametrize("is_dealt", [False, True])
def test_claim_counts_for_no_more_steps_than_the_run_has(*, is_dealt: bool) -> None:
    """Also once a round has dealt it to its joiner."""
    huge, most = Claim(140, 1 << 32), SHAPE.total_steps
    ledgers = deal_claims({C: huge}, LEDGERS) if is_dealt else LEDGERS
    for steps, refused in (most, {}), (most + 1, {C: f"steps={most + 1}, but it was dealt samples for {most}"}):
        ready = {A: MEMBER, C: replace(MEMBER, claim=None if is_dealt else huge, steps=steps)}
        assert refuse_excess(boundary(ready, ledgers=ledgers), 3, RULES).refused == refused


@pytest.mark.parametrize("claims", [(), ((C, Claim(140, 151)),), ((C, CLAIM), (D, Claim(150, 160)))])
def test_plan_whose_claims_are_not_those_of_its_members_does_not_follow(
    claims: tuple[tuple[str, Claim], ...],
) -> None:
    view = boundary({A: MEMBER, B: MEMBER, C: replace(MEMBER, claim=CLAIM)})
    plan = next_plan(view, 3, RULES)
    assert isinstance(plan, RoundPlan)
    assert "its claim of" in (plan_objection(replace(plan, claims=claims), view, RULES) or "")


def test_last_round_waits_for_a_joiner_that_trains() -> None:
    ready = {m: replace(MEMBER, steps_requested=0) for m in (A, B)}
    patience = ElapsedWaits(stragglers_are_late=True)
    wait = next_plan(boundary(ready), 3, RULES, patience, claims=lambda: {C: CLAIM})
    assert not isinstance(wait, RoundPlan) and wait.waiting_for == (C,)


@pytest.mark.parametrize("calls", [False, True])
def test_joiner_that_is_called_is_waited_for_as_long_as_for_late_members(calls: bool) -> None:
    view, rules = boundary({A: MEMBER, B: MEMBER}), replace(RULES, syncs_on_demand=calls)
    early = next_plan(view, 3, rules, claims=lambda: {C: CLAIM})
    assert isinstance(early, RoundPlan) is not calls
    plan = next_plan(view, 3, rules, ElapsedWaits(stragglers_are_late=True), claims=lambda: {C: CLAIM})
    assert isinstance(plan, RoundPlan) and (plan.members, plan.late) == ((A, B), (C,))


def test_joiner_is_left_once_another_was_dealt_what_it_claims() -> None:
    view = boundary({})
    assert must_leave(view, C, 2, CLAIM) is None
    assert must_leave(view, C, 2, Claim(90, 100)) is not None
    assert must_leave(view, C, 2) is not None


class Run:
    """Rounds by the rules alone, with members that are late, die, join, and joiners that no plan sees in time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.names = iter(range(10_000))
        self.phase, self.round = self.chance.randint(1, 5), 0
        self.shape = replace(SHAPE, reads_ahead=self.chance.random() < 0.3)
        self.holds: dict[str, list[int]] = {}
        """Samples that each living node reads, in its order."""
        self.claims: dict[str, Claim] = {}
        self.trained: list[int] = []
        self.fenced = 0
        founders = tuple(f"n{next(self.names):04}" for _ in range(3))
        self.plan = RoundPlan(1, 1, 0, founders, (0,) * 3, (0,) * 3, (self.phase,) * 3)
        self.progress = Progress.at_start().begin(self.plan, self.shape, after_round=None)
        self._follow(founders)

    def _follow(self, names: object) -> None:
        for name in [n for n in self.holds if n in self.progress.assigned] + list(names):  # type: ignore[call-overload]
            spans = self.progress.assigned.get(name, ())
            self.holds[name] = [index for start, stop in spans for index in range(start, stop)]

    def join(self) -> None:
        name = f"n{next(self.names):04}"
        samples = self.chance.randint(1, 2 * self.phase) * self.shape.batch_size
        claim = choose_claim(self.progress.ledgers, SHARED, samples, self.claims)
        self.claims[name], self.holds[name] = claim, list(range(*claim.span))

    def step(self) -> None:
        for _ in range(self.chance.choice([0, 0, 1, 3])):
            self.join()
        for name in [n for n in self.holds if self.chance.random() < 0.05 and len(self.holds) > 1]:
            del self.holds[name]  # it died
        unseen = {n for n in self.claims if self.chance.random() < 0.3}  # it came while the round was opened
        dealt = valid_claims(
            self.progress.ledgers, {n: c for n, c in self.claims.items() if n in self.holds and n not in unseen}
        )
        known = [n for n in self.holds if n in self.progress.assigned or n in dealt]
        members = sorted(n for n in known if self.chance.random() < 0.7)
        if not members:
            return
        late = tuple(n for n in known if n not in members)
        batch = self.shape.batch_size
        steps = tuple(min(len(self.holds[n]) // batch, self.phase, self.chance.randint(0, 9)) for n in members)
        asked, weights = (self.phase * (1 + self.shape.reads_ahead),) * len(members), tuple(s * 7 for s in steps)
        self.round += 1
        plan = RoundPlan(
            self.round + 1, 1, self.round, tuple(members), weights, steps, asked, late=late, claims=tuple(dealt.items())
        )
        for name, made in zip(members, steps, strict=True):
            self.trained += self.holds[name][: made * batch]
        self.progress = self.progress.after(plan, self.shape)
        self._follow(known)
        for name in self.holds.keys() - {*known}:  # joiners of which this round has not heard
            if not valid_claims(self.progress.ledgers, {name: self.claims[name]}):
                self.fenced += 1
                del self.holds[name]
        self.claims = {n: c for n, c in self.claims.items() if n in self.holds}

    def check(self) -> None:
        ledger = self.progress.ledgers[SHARED]
        owed = [index for start, stop in ledger.owed for index in range(start, stop)]
        assert sorted([*self.trained, *owed]) == list(range(ledger.next)), "each sample counts once, or is owed"
        for name, spans in ledger.assigned.items():
            if name in self.holds:
                assert count(spans) == len(self.holds[name]) and take(spans, 1)[0][0][0] == self.holds[name][0]


@pytest.mark.parametrize("seed", range(60))
def test_each_sample_counts_once_whoever_joins_dies_or_is_late(seed: int) -> None:
    run = Run(seed)
    for _ in range(60):
        run.step()
        run.check()
    assert run.round > 20 and len(set(run.trained)) == len(run.trained) > 50

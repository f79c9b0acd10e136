"""A run with several stores keeps one line of history.

Stores die, nodes are cut off and lost, and whatever they do, no round is committed twice, and none by fewer than half
of those who may commit it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.memory_store import MemoryRecord, MemoryStore

from zeroband.elastic.membership.records import Peer, Ready, RoundPlan, StoreTerm, Verdict, View
from zeroband.elastic.membership.round_rules import ElapsedWaits, Rules, next_plan, next_verdict
from zeroband.elastic.membership.succession import (
    Begin,
    Enter,
    KeepWaiting,
    Line,
    MemberReport,
    Pledge,
    Rejoin,
    SplitBrain,
    StoreProbe,
    are_distinct,
    detect_split_brain,
    electors,
    goes_on_elsewhere,
    may_commit,
    next_step,
)

NODES, STORES, STEPS = 5, 3, 1200
RULES = Rules(has_several_stores=True)
LEASE_S = 5.0


@dataclass
class Place:
    """A store that may be down; with its memory goes its id."""

    name: str
    lives: int = 0
    is_up: bool = True
    record: MemoryRecord = field(default_factory=MemoryRecord)
    told_at: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def id(self) -> str:
        return f"{self.name}.{self.lives}"


@dataclass
class SimulatedMember:
    """What a member knows, as it goes round by round."""

    id: str
    store: MemoryStore
    place: Place
    generation: StoreTerm
    promises: tuple[StoreTerm, ...]
    committed: Verdict | None
    plan: RoundPlan | None = None
    vote: str | None = None
    votes_to_send: list[tuple[RoundPlan, str, StoreTerm]] = field(default_factory=list[Any])
    """Votes that are on their way."""

    @property
    def promised(self) -> StoreTerm:
        return self.promises[-1]

    @property
    def member_report(self) -> MemberReport:
        round = -1 if self.committed is None else self.committed.round
        record = {"after": round}
        return MemberReport(self.promises, self.generation, self.committed, self.plan, self.vote, record)


class History:
    """All that was ever committed, wherever that was."""

    def __init__(self, first: Verdict) -> None:
        self.verdicts = {first.round: first}

    def commit(self, verdict: Verdict) -> None:
        known = self.verdicts.get(verdict.round)
        assert known is None or (known.plan, known.digest) == (verdict.plan, verdict.digest), "two histories"
        before = self.verdicts.get(verdict.round - 1)
        assert known is not None or before is not None, "a round after one that nobody committed"
        if known is None and before is not None:
            assert 2 * len({*electors(before)} & {*verdict.members}) >= len(electors(before)), "by a minority"
        self.verdicts[verdict.round] = verdict


class Play:
    """Some nodes and stores, and whatever happens to them in an order that follows from a number."""

    def __init__(self, seed: int, *, mixes_waits: bool = False) -> None:
        self.random, self._mixes_waits = random.Random(seed), mixes_waits
        self.places = [Place(f"s{i}") for i in range(STORES)]
        self.serial = NODES
        ids = tuple(f"n{i}#{i}" for i in range(NODES))
        ones = tuple(1 for _ in ids)
        founding = RoundPlan(1, 1, 0, ids, ones, ones, ones)
        first = Verdict(founding, "d0", {"session": "one"})
        self.history = History(first)
        begun = StoreTerm(1, self.places[0].id)
        record = self.places[0].record
        record.generation, record.committed, record.plan = begun, first, founding
        record.plans.append(founding)
        self.cut: set[tuple[int, str]] = set()
        """Nodes and stores that do not reach one another."""
        self.nodes: list[SimulatedMember | None] = [
            SimulatedMember(m, MemoryStore(record), self.places[0], begun, (begun,), first) for m in ids
        ]
        self.now = 0
        self.mistakes = 0

    def reaches(self, node: int, place: Place) -> bool:
        return place.is_up and (node, place.name) not in self.cut

    # -- what happens to them -----------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += 1
        for place in self.places:
            place.record.let_pass(200, is_silent=False)
        chance = self.random.random()
        if chance < 0.006:
            self._lose_store(self.random.choice(self.places))
        elif chance < 0.05:
            place = self.random.choice(self.places)
            place.is_up = True
        elif chance < 0.06:
            self._cut()
        elif chance < 0.12:
            self.cut.clear()
        elif chance < 0.121:
            self.nodes[self.random.randrange(NODES)] = None
        elif chance < 0.13:
            self._begin_by_mistake(self.random.choice(self.places))
        else:
            self._act(self.random.randrange(NODES))

    def _lose_store(self, place: Place) -> None:
        place.lives += 1
        place.is_up = False
        place.record = MemoryRecord(now_ms=place.record.now_ms)
        place.told_at = {}

    def _begin_by_mistake(self, place: Place) -> None:
        """Somebody finds an empty store and begins a run there, as if there were none."""
        if place.is_up and place.record.generation is None:
            place.record.generation = StoreTerm(1, place.id)
            self.mistakes += 1

    def _cut(self) -> None:
        """Cut some of the nodes off from some of the stores."""
        some = self.random.sample(range(NODES), self.random.randint(1, NODES - 1))
        for place in self.random.sample(self.places, self.random.randint(1, STORES)):
            self.cut |= {(node, place.name) for node in some}

    # -- what a node does ---------------------------------------------------------------------------------------

    def _act(self, node: int) -> None:
        member = self.nodes[node]
        if member is None:
            self._join(node)
            return
        if self.random.random() < 0.15:
            member.votes_to_send = []  # lost on the way
        record = member.place.record
        has_store = self.reaches(node, member.place) and record.generation == member.generation
        if not has_store:
            self._seek(node, member, has_store=False)
        elif member.promised > member.generation:
            self._seek(node, member, has_store=True)
        else:
            self._take_part(node, member)

    def _join(self, node: int) -> None:
        """Begin anew as another member that has the newest state of the newest store that is seen."""
        seen = [p for p in self.places if self.reaches(node, p) and p.record.generation is not None]
        place = max(seen, key=lambda p: p.record.generation, default=None)  # type: ignore[arg-type, return-value]
        if place is None or place.record.committed is None:
            return
        self.serial += 1
        generation = place.record.generation
        assert generation is not None
        store, committed = MemoryStore(place.record), place.record.committed
        self.nodes[node] = SimulatedMember(f"n{node}#{self.serial}", store, place, generation, (generation,), committed)

    def _take_part(self, node: int, member: SimulatedMember) -> None:
        store = member.store
        store.renew_lease(member.id, Peer(f"n{node}", "h", 1, True), first=True)
        for plan, digest, generation in member.votes_to_send:
            store.vote(plan, member.id, digest, generation=generation)
        member.votes_to_send = []
        assert member.committed is not None
        round = member.committed.round + 1
        view = store.view(round)
        if self._learn(node, member, view):
            return
        if self.random.random() < 0.7:
            view = store.announce_ready(member.id, Ready(round, 1, f"state {member.committed.round}", 1, 1))
        self._advance(node, member, view, round)

    def _learn(self, node: int, member: SimulatedMember, view: View) -> bool:
        """Whether the member knows now what it did not."""
        assert member.committed is not None
        if view.committed is not None and view.committed.round > member.committed.round:
            if view.committed.round > member.committed.round + 1 or member.id not in view.committed.members:
                self.nodes[node] = None  # it was left behind
                return True
            member.committed, member.vote = view.committed, None
            return True
        if view.plan is not None and (member.plan is None or view.plan.version > member.plan.version):
            member.plan, member.vote = view.plan, None
        return False

    def _advance(self, node: int, member: SimulatedMember, view: View, round: int) -> None:
        plan = view.plan
        if plan is None or plan.round != round or not view.can_finish(plan):
            decision = next_plan(view, round, RULES, ElapsedWaits(stragglers_are_late=self.random.random() < 0.3))
            if isinstance(decision, RoundPlan) and decision != plan:
                member.store.propose_plan(decision, current=plan, generation=member.generation)
            elif view.committed is not None and not may_commit(view.ready.keys() & view.alive, view.committed):
                self._seek(node, member, has_store=True)
            return
        if member.id in plan.members and member.vote is None and member.plan == plan:
            member.vote = f"result of {plan.id}"
            member.votes_to_send.append((plan, member.vote, member.promised))
            return
        verdict = next_verdict(view, plan, {"after": round - 1})
        if isinstance(verdict, Verdict) and member.store.propose_verdict(verdict, generation=member.generation):
            self.history.commit(verdict)
            if self.random.random() < 0.5:
                member.committed, member.vote = verdict, None

    def _candidates(self, node: int, member: SimulatedMember) -> Iterator[tuple[Place, StoreProbe]]:
        for place in self.places:
            if self.reaches(node, place):
                place.told_at[member.id] = self.now
                place.record.member_reports[member.id] = member.member_report
                fresh = {m: a for m, a in place.record.member_reports.items() if self.now - place.told_at[m] < 60}
                committed = place.record.committed
                round = -1 if committed is None else committed.round
                yield place, StoreProbe(place.id, place.record.generation, round, fresh)

    def _seek(self, node: int, member: SimulatedMember, *, has_store: bool) -> None:
        places = dict[str, Place]()
        candidates = list[StoreProbe]()
        for place, candidate in self._candidates(node, member):
            places[candidate.store] = place
            candidates.append(candidate)
        has_waited = not self._mixes_waits or self.random.random() < 0.5
        match next_step(candidates, member.member_report, has_store=has_store, has_waited=has_waited):
            case Enter(candidate, generation):
                self._enter(node, member, places[candidate.store], generation)
            case Pledge(generation):
                member.promises = (*member.promises, generation)
            case Begin(candidate, generation, state):
                if MemoryStore(places[candidate.store].record).begin(generation, state):
                    self.history.commit(state.committed)
            case Rejoin():
                self.nodes[node] = None
            case _:
                pass

    def _enter(self, node: int, member: SimulatedMember, place: Place, generation: StoreTerm) -> None:
        if generation != member.generation:
            inherited = place.record.plan
            member.vote = member.vote if inherited == member.plan else None
            member.plan = inherited
            if member.vote is not None and inherited is not None:
                member.votes_to_send.append((inherited, member.vote, generation))
        member.place, member.store = place, MemoryStore(place.record)
        member.generation, member.promises = generation, (generation,)
        self._learn(node, member, member.store.view(0))


def play(seed: int, *, mixes_waits: bool = False) -> Play:
    game = Play(seed, mixes_waits=mixes_waits)
    for _ in range(STEPS):
        game.step()
    return game


@pytest.mark.parametrize("first", [0, 40, pytest.param(80, marks=pytest.mark.soak)])
def test_there_is_one_line_of_history_whatever_is_cut_off_and_lost(first: int) -> None:
    games = [play(seed) for seed in range(first, first + 40)]
    rounds = [max(game.history.verdicts) for game in games]
    moved = [max([0, *(p.record.generation.number for p in game.places if p.record.generation)]) for game in games]
    assert sum(rounds) > 300 and sum(number > 1 for number in moved) > 20, (rounds, moved)
    assert sum(game.mistakes for game in games) > 20


def test_round_that_a_generation_began_with_outlives_the_store_of_that_generation() -> None:
    play(64, mixes_waits=True)


def a_line(session: str, *, round: int = 5, tokens: int = 100) -> Line:
    return Line(session, round, tokens, ("a#1",))


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        (a_line("b", tokens=101), a_line("a")),
        (a_line("b", round=6), a_line("a")),
        (a_line("b", tokens=101), a_line("a", round=9)),
        (a_line("a"), a_line("b")),
    ],
)
def test_of_two_lines_all_members_let_the_same_one_go_on(winner: Line, loser: Line) -> None:
    for meeting in (SplitBrain(winner, loser), SplitBrain(loser, winner)):
        assert (meeting.winner, meeting.loser) == (winner, loser)
    assert meeting.involves(a_line(loser.session, round=99)) and not meeting.involves(a_line("c"))


@pytest.mark.parametrize(
    ("own", "others", "met"),
    [
        ("a", "", ""),
        ("a", "a", ""),
        ("a", "b", "ab"),
        ("b", "a", ""),  # it is for those of a to write down
        ("b", "acd", ""),
        ("a", "dcab", "ab"),
    ],
)
def test_split_brain_is_recorded_by_the_line_whose_session_sorts_first(own: str, others: str, met: str) -> None:
    seen = detect_split_brain(a_line(own), [a_line(other) for other in others])
    assert (seen and (seen.one.session, seen.other.session)) == (tuple(met) or None)


def test_line_of_a_verdict_has_its_session_and_its_tokens() -> None:
    plan = RoundPlan(1, 1, 3, ("a#1", "b#1"), (8, 8), (1, 1), (1, 1))
    verdict = Verdict(plan, "d", {"session": "s", "progress": {"tokens": 7}})
    assert Line.of(verdict) == Line("s", 3, 7, ("a#1", "b#1"))
    assert Line.of(Verdict(plan, "d", {})) is None and Line.of(None) is None


def test_one_store_under_two_names_is_one() -> None:
    one, again, other = StoreProbe("x", None), StoreProbe("x", None), StoreProbe("y", None)
    assert are_distinct([one], 1) and not are_distinct([one, again], 2) and are_distinct([one, again, other], 2)


LINE = Line("one", 0, 0, ("n0#0", "n1#1", "n2#2"))


def store_of(report: MemberReport, stores: Mapping[str, StoreProbe]) -> StoreProbe | None:
    return next((known for known in stores.values() if known.generation == report.generation), None)


def trains(member: str, own: Mapping[str, MemberReport], stores: Mapping[str, StoreProbe], committed: Verdict) -> bool:
    """Whether a member goes on in its store: with a quorum of those who promised no other, and no line ahead of it."""
    generation, promised = own[member].generation, own[member].promised
    together = [other for other, told in own.items() if told.generation == told.promised == generation]
    has_store = store_of(own[member], stores) is not None
    has_quorum = has_store and promised == generation and may_commit(together, committed)
    return has_quorum and not goes_on_elsewhere([*stores.values()], generation, LINE)


def begun(known: StoreProbe, generation: StoreTerm) -> StoreProbe:
    """A store in which a member begins a generation, unless it holds one as new."""
    is_newer = known.generation is None or known.generation < generation
    return replace(known, generation=generation, committed_round=0, line=LINE) if is_newer else known


def moved_together(seed: int, *, misses: float = 0.0, returns_at: int | None = None) -> int:
    """How many of three members that lost their store go on in one generation, in one of two others.

    Each asks one store after the other, so what it knows of the first is older than what it knows of the last. At first
    it does not reach some, with the chance `misses`. `returns_at`: step at which the lost store answers again.
    """
    chance = random.Random(seed)
    ids, ones = ("n0#0", "n1#1", "n2#2"), (1, 1, 1)
    plan = RoundPlan(1, 1, 0, ids, ones, ones, ones)
    first, committed = StoreTerm(1, "gone"), Verdict(plan, "d0", {"session": "one"})
    own = {member: MemberReport((first,), first, committed, plan, "d0", {}) for member in ids}
    stores = {name: StoreProbe(name, None) for name in "ab"}
    asked: dict[str, dict[str, StoreProbe]] = {member: {} for member in ids}
    train = set[str]()  # since something last changed
    for step in range(1000):
        stores |= {"gone": StoreProbe("gone", first, committed_round=0, line=LINE)} if step == returns_at else {}
        member = chance.choice(ids)
        if trains(member, own, stores, committed):
            train |= {member} if step >= (returns_at or 0) else set()
            if len(train) == len(ids):
                break  # all do, for ever
            continue
        train.clear()
        if len(asked[member]) < len(stores):
            place = chance.choice([name for name in stores if name not in asked[member]])
            known = stores[place]
            if step > 200 or chance.random() >= misses:
                known = stores[place] = replace(known, member_reports={**known.member_reports, member: own[member]})
                asked[member][place] = known
            else:
                asked[member][place] = StoreProbe("", None)
            continue
        seen = [known for _, known in sorted(asked[member].items()) if known.store]
        asked[member] = {}
        has_store = store_of(own[member], stores) is not None
        match next_step(seen, own[member], has_store=has_store, has_waited=step > 200):
            case Pledge(generation):
                own[member] = replace(own[member], promises=(*own[member].promises, generation))
            case Begin(candidate, generation, _):
                stores[candidate.store] = begun(stores[candidate.store], generation)
            case Enter(_, generation):
                own[member] = replace(own[member], generation=generation, promises=(generation,))
            case Rejoin():
                return 0  # it gives up its vote although no round was committed without it
            case _:
                pass
    return max(Counter(own[member].generation for member in ids if len(own[member].promises) == 1).values(), default=0)


@pytest.mark.parametrize(("misses", "least"), [(0.0, 3), (0.4, 2)])
def test_members_that_lose_a_store_together_go_on_together(misses: float, least: int) -> None:
    """None is left behind by its promise; where they do not reach all stores, enough of them are left to go on."""
    assert [seed for seed in range(120) if moved_together(seed, misses=misses) < least] == []


@pytest.mark.parametrize("returns_at", [5, 10, 20, 40, 80])
def test_where_a_store_answers_again_after_a_promise_all_move_and_none_is_left_behind(returns_at: int) -> None:
    """The member that promised cannot come back; those that found their store again went on without it."""
    assert [seed for seed in range(60) if moved_together(seed, returns_at=returns_at) < 3] == []


def test_store_that_answers_again_is_entered_again_unless_a_member_has_promised_another() -> None:
    ids, ones, first = ("n0#0", "n1#1", "n2#2"), (1, 1, 1), StoreTerm(1, "back")
    own = MemberReport((first,), first, Verdict(RoundPlan(1, 1, 0, ids, ones, ones, ones), "d0", {"session": "one"}))
    back, ahead = StoreProbe("back", first, committed_round=0), replace(own, promises=(first, StoreTerm(2, "b")))
    for reports, step in (
        ({"n0#0": own, "n1#1": own}, Enter(back, first)),
        ({"n0#0": own, "n1#1": ahead}, Pledge(StoreTerm(2, "b"))),
        ({"n1#1": ahead}, Enter(back, first)),  # fewer than a majority report there
    ):
        seen = [back, StoreProbe("b", None, member_reports=reports)]
        assert next_step(seen, own, has_store=False, has_waited=True) == step
        assert goes_on_elsewhere(seen, first, LINE) == isinstance(step, Pledge)
    assert not goes_on_elsewhere(seen, first, replace(LINE, session="another"))


def test_another_store_than_the_first_is_promised_once_all_had_the_time_to_tell() -> None:
    """Most members may be cut off from the first one."""
    ids, ones, first = ("n0#0", "n1#1", "n2#2"), (1, 1, 1), StoreTerm(1, "gone")
    own = MemberReport((first,), first, Verdict(RoundPlan(1, 1, 0, ids, ones, ones, ones), "d0", {"session": "one"}))
    seen = [
        StoreProbe("a", None, member_reports={"n0#0": own}),
        StoreProbe("b", None, member_reports=dict.fromkeys(ids, own)),
    ]
    assert isinstance(next_step(seen, own, has_store=False, has_waited=False), KeepWaiting)
    assert next_step(seen, own, has_store=False, has_waited=True) == Pledge(StoreTerm(2, "b"))


def test_generation_begins_above_what_any_of_its_members_has_promised() -> None:
    """Else the one that promised another store could not vote there, and had to come back as another member."""
    ids, ones, first = ("n0#0", "n1#1", "n2#2"), (1, 1, 1), StoreTerm(1, "gone")
    own = MemberReport((first,), first, Verdict(RoundPlan(1, 1, 0, ids, ones, ones, ones), "d0", {"session": "one"}))
    here = replace(own, promises=(first, StoreTerm(2, "a")))
    member_reports = {"n0#0": here, "n1#1": here, "n2#2": replace(own, promises=(first, StoreTerm(2, "b")))}
    step = next_step([StoreProbe("a", None, member_reports=member_reports)], here, has_store=False, has_waited=False)
    assert step == Pledge(StoreTerm(3, "a"))

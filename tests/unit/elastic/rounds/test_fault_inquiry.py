"""Members of a round that failed, of which one proposes the next plan and lies about who was at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.memberships import UNWATCHED, a_member
from tests.memory_store import MemoryRecord, MemoryStore

from zeroband.elastic.membership.blame import Findings, findings_after
from zeroband.elastic.membership.records import Blame, Evidence, Ready, RoundPlan
from zeroband.elastic.membership.round_rules import Rules, Wait
from zeroband.elastic.membership.topology import LinkTable
from zeroband.elastic.rounds.member import Member, Rule
from zeroband.elastic.store.interface import Store
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.node.shared_flags import SharedFlags

NAMES = "abcd"
ALL_CAME = Evidence(("ha", "hb", "hc", "hd"))
LIMIT_S = UNWATCHED.detect_s


@dataclass
class Round:
    """Four members in round 1, each of which decides when the test says so."""

    members: dict[str, Member]
    plan: RoundPlan
    now_s: list[float]
    rules: dict[str, Rule[Any]]
    events: list[tuple[str, str, dict[str, Any]]]
    client: redis.Redis | None

    @property
    def store(self) -> Store:
        return self.members["a"].store

    def id(self, name: str) -> str:
        return self.members[name].member_id

    def decide(self, name: str) -> Any:
        member = self.members[name]
        return self.rules[name].decide(member.look(1))

    def fail(self, *, votes: dict[str, str], testify: str = NAMES, evidence: Evidence = ALL_CAME) -> None:
        """The current plan comes to nothing, and these members say what they saw."""
        for name, digest in votes.items():
            self.members[name].vote(self.plan, digest, {})
        self.store.report_failure(self.plan, "the members hold different results")
        for name in testify:
            self.members[name].testify(self.plan, evidence)

    def take_away(self, name: str) -> None:
        """Remove what a member testified on the current plan."""
        if isinstance(self.store, MemoryStore):
            del self.store.record.evidence[self.plan][self.id(name)]
        else:
            assert isinstance(self.store, RedisStore) and self.client is not None
            assert self.client.hdel(self.store.keys.attempt(self.plan.id), f"said {self.id(name)}")

    def testify_all(self, plan: RoundPlan) -> None:
        """All members of a refused plan say that they saw nothing."""
        for name in NAMES:
            if self.id(name) in plan.members:
                self.members[name].testify(plan, Evidence())

    def next_by(self, name: str) -> RoundPlan:
        """What this member proposes."""
        before = self.store.view(1).plan
        self.decide(name)
        plan = self.store.view(1).plan
        assert plan is not None and plan != before, "nothing was proposed"
        return plan

    def forge(
        self, name: str, monkeypatch: pytest.MonkeyPatch, change: Callable[[RoundPlan], dict[str, Any]]
    ) -> RoundPlan:
        """This member proposes something else than the rules say, and the store takes it."""
        propose = self.store.propose_plan

        def altered(plan: RoundPlan, **more: Any) -> bool:
            forged = replace(plan, network=LinkTable(), **change(plan))
            return propose(self.store.signed(forged, plan.proposer), **more)

        with monkeypatch.context() as patch:
            patch.setattr(self.store, "propose_plan", altered)
            return self.next_by(name)

    def refused(self) -> dict[str, str]:
        """Who refused a plan, and why."""
        return {name: event["reason"] for name, kind, event in self.events if kind == "plan_refused"}

    def blamed(self) -> set[tuple[str, ...]]:
        return {tuple(event["member_ids"]) for _, kind, event in self.events if kind == "blamed"}


def to(plan: RoundPlan, *members: str) -> dict[str, Any]:
    """The lists of a plan to these members, who all said the same."""
    lists = ("weights", "steps", "steps_requested")
    return {"members": members, **{name: (getattr(plan, name)[0],) * len(members) for name in lists}}


def begin(members: dict[str, Member], number: int) -> tuple[dict[str, Rule[Any]], RoundPlan]:
    """Open a round to all members."""
    for member in members.values():
        member.announce_ready(Ready(number, 10 * number, "s", 4 * number, 4))
    rules = {n: m.turn_rule(number, Rules(), is_member=True, start_deadline_s=-1.0) for n, m in members.items()}
    plan = rules["a"].decide(members["a"].look(number))
    assert isinstance(plan, RoundPlan) and len(plan.members) == 4
    assert all(rules[name].decide(members[name].look(number)) == plan for name in NAMES)
    return rules, plan


@pytest.fixture(params=["redis", "memory"])
def round(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Round]:
    store: Store = MemoryStore(MemoryRecord()) if request.param == "memory" else request.getfixturevalue("store")
    now_s, events, members = [0.0], list[tuple[str, str, dict[str, Any]]](), dict[str, Member]()
    shared = store.found_or_match({"model.d_model": "256"})

    def event_of(name: str) -> Callable[..., None]:
        return lambda kind, **fields: events.append((name, kind, fields))

    with ExitStack() as stack:
        for name in NAMES:
            flags = stack.enter_context(closing(SharedFlags(tmp_path / f"flags-{name}", create=True)))
            how: Any = {"shared": shared, "clock": lambda: now_s[0], "on_event": event_of(name)}
            members[name] = stack.enter_context(closing(a_member(store, f"{name}#1", flags, **how)))
        _, founding = begin(members, 0)
        for member in members.values():
            member.vote(founding, "d", {})
        for member in members.values():
            member.await_verdict(founding, {})
        rules, plan = begin(members, 1)
        client = None if request.param == "memory" else request.getfixturevalue("redis_client")
        yield Round(members, plan, now_s, rules, events, client)


SAME, ODD = dict.fromkeys(NAMES, "x"), {"a": "x", "b": "x", "c": "x", "d": "odd"}


def test_who_lies_is_put_out_whoever_of_the_others_proposes(round: Round) -> None:
    round.fail(votes=ODD)
    plan = round.next_by("b")
    assert [b.members for b in plan.blames] == [(round.id("d"),)] and plan.before == round.plan.id
    assert {name: round.decide(name) for name in "abc"} == dict.fromkeys("abc", plan)
    assert round.refused() == {} and round.blamed() == {(round.id("d"),)}


def test_finding_that_the_proposer_makes_up_puts_nobody_out(round: Round, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the one that it is about believes it."""
    round.fail(votes=SAME, evidence=Evidence())
    a, b, c, d = map(round.id, NAMES)
    lie = Blame((b,), "it sent two different parts", is_lie=True, consequence="out", round=1)
    forged = round.forge("d", monkeypatch, lambda o: {"blames": (lie,), **to(o, a, c, d)})
    assert b not in forged.members and isinstance(round.decide("b"), Wait), "it neither leaves nor ends"
    assert isinstance(round.decide("a"), Wait) and "it says that b#1 (out)" in round.refused()["a"]
    round.testify_all(forged)
    again = round.next_by("c")
    assert (again.blames, again.members, again.retries) == ((), (a, b, c, d), 2)
    assert round.decide("a") == round.decide("b") == again and round.blamed() == set()


def test_liar_that_leaves_its_own_lie_away_is_put_out_by_the_next_proposer(
    round: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    round.fail(votes=ODD)
    forged = round.forge("d", monkeypatch, lambda o: {"blames": (), **to(o, *round.plan.members)})
    assert isinstance(round.decide("a"), Wait) and "it leaves out that d#1 (out)" in round.refused()["a"]
    round.testify_all(forged)
    again = round.next_by("b")
    assert again.members == tuple(map(round.id, "abc")) and again.blames[0].members == (round.id("d"),)
    assert round.decide("a") == again


def test_member_is_called_silent_only_after_the_time_that_all_have(round: Round) -> None:
    round.fail(votes={}, testify="acd", evidence=Evidence())
    attempt, b, d = round.store.attempt(round.plan.id), round.id("b"), round.id("d")
    assert attempt is not None
    found = findings_after(Findings(), attempt, 1, [b])
    early = replace(round.plan, version=3, before=round.plan.id, **vars(found))
    assert round.store.propose_plan(round.store.signed(early, d), current=round.plan)
    round.now_s[0] += 0.1
    assert isinstance(round.decide("a"), Wait) and "it calls b#1 silent after 0.10 s" in round.refused()["a"]


def test_member_that_says_nothing_for_long_enough_is_called_silent(round: Round) -> None:
    round.fail(votes={}, testify="acd", evidence=Evidence())
    assert isinstance(round.decide("a"), Wait)
    round.now_s[0] += LIMIT_S + 0.1
    plan = round.next_by("a")
    assert plan.silent == (round.id("b"),) and plan.blames[0].members == (round.id("b"),)
    assert round.decide("c") == plan and round.refused() == {}


def test_word_that_comes_behind_the_next_plan_does_not_count(round: Round) -> None:
    round.fail(votes={}, testify="acd", evidence=Evidence())
    round.decide("a")
    round.now_s[0] += LIMIT_S + 0.1
    plan = round.next_by("a")
    round.members["b"].testify(round.plan, Evidence(lacks=(round.id("a"),)))
    assert round.decide("c") == round.decide("b") == plan and round.refused() == {}


def test_proposal_that_knows_less_than_the_store_is_not_taken(round: Round) -> None:
    round.fail(votes={}, testify="acd", evidence=Evidence())
    heard = round.store.attempt(round.plan.id)
    assert heard is not None and heard.evidence.keys() == {round.id(name) for name in "acd"}
    round.members["b"].testify(round.plan, Evidence())
    following = replace(round.plan, version=round.plan.version + 1, before=round.plan.id)
    assert not round.store.propose_plan(following, current=round.plan, heard=heard)
    assert round.store.propose_plan(following, current=round.plan, heard=round.store.attempt(round.plan.id))


def test_word_that_somebody_took_away_is_brought_back_and_counts_in_the_next_plan(round: Round) -> None:
    round.fail(votes=ODD)
    round.take_away("a")
    round.now_s[0] += LIMIT_S + 0.1
    round.decide("d")
    round.now_s[0] += LIMIT_S + 0.1
    robbed = round.next_by("d")
    assert robbed.silent == (round.id("a"),)
    assert isinstance(round.decide("a"), Wait) and "is not there any more" in round.refused()["a"]
    round.testify_all(robbed)
    again = round.next_by("b")
    assert [b.members for b in again.blames] == [(round.id("d"),)] and round.decide("a") == again

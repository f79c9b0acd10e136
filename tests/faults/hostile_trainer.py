"""A trainer whose node may be told to attack: it has the token, and writes what no honest member writes.

HOSTILE_NODE names the node, HOSTILE_PLAN its attacks in their order. Each is made once, in a life of this node in which
it contributes; an attack on a record lasts until the others go on without this member.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zeroband.elastic.membership.records import Blame, Ready, RoundPlan
from zeroband.elastic.membership.topology import LinkTable
from zeroband.elastic.rounds import member as rounds
from zeroband.elastic.rounds.member import Member
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.engine import Engine, Operation, Running
from zeroband.elastic.transport.shape import Shape
from zeroband.train import main

READY: dict[str, Callable[[Ready], Ready]] = {
    "negative weight": lambda ready: replace(ready, weight=-300),
    "weight 1e12": lambda ready: replace(ready, weight=10**12),
    "weight 10^400": lambda ready: replace(ready, weight=10**400),
    "steps x 1000": lambda ready: replace(ready, steps=1000 * ready.steps),
}


def altered(plan: RoundPlan, **fields: object) -> RoundPlan:
    """A plan that no rule gives, past the checks of its type."""
    copy = replace(plan)
    for name, value in fields.items():
        object.__setattr__(copy, name, value)
    return copy


def to_itself(plan: RoundPlan) -> RoundPlan:
    """The plan without any other member."""
    place = plan.members.index(plan.proposer)
    lists = ("members", "weights", "steps", "steps_requested", "trust", "phase_fraction", "corpora", "largest")
    kept = {name: (getattr(plan, name)[place],) for name in lists if getattr(plan, name)}
    return replace(plan, sites=(), gains=(), network=LinkTable(), **kept)


def with_made_up_finding(plan: RoundPlan) -> RoundPlan:
    """The plan, by which the last other member lied and is put out."""
    other = next(m for m in reversed(plan.members) if m != plan.proposer)
    lie = Blame((other,), "it sent two different parts", is_lie=True, consequence="out", round=plan.round)
    return replace(plan, blames=(*plan.blames, lie))


PLANS: dict[str, Callable[[RedisStore, RoundPlan], RoundPlan]] = {
    "sites out of range": lambda _, plan: altered(plan, sites=(9,) * len(plan.members)),
    "other weights": lambda store, plan: store.signed(
        replace(plan, weights=tuple(1 + weight for weight in plan.weights)), plan.proposer
    ),
    "made-up finding": lambda store, plan: store.signed(with_made_up_finding(plan), plan.proposer),
    "alone": lambda store, plan: store.signed(to_itself(plan), plan.proposer),
}


class Attacker:
    """Makes the attacks of a plan, one after the other."""

    def __init__(self, plan: list[str]) -> None:
        self._plan = plan
        self._attacked_as = ""
        self._falsify = list[Callable[[Ready], Ready]]()

    def install(self) -> None:
        announce, propose, start = Member.announce_ready, RedisStore.propose_plan, Engine.start

        def announce_ready(member: Member, ready: Ready, *rest: Any, **more: Any) -> None:
            if ready.weight > 0 and member.member_id != self._attacked_as and self._is_next(*READY):
                self._attacked_as, self._falsify = member.member_id, [READY[self._plan.pop(0)]] * 3
            if ready.weight > 0 and self._falsify:  # more than once, as a joiner's first round may go without it
                ready = self._falsify.pop()(ready)
            announce(member, ready, *rest, **more)

        def propose_plan(store: RedisStore, plan: RoundPlan, **more: Any) -> bool:
            is_next = plan.total_weight > 0 and self._is_next(*PLANS)
            is_first = propose(store, PLANS[self._plan[0]](store, plan) if is_next else plan, **more)
            if is_next and is_first:
                self._plan.pop(0)
            return is_first

        def reduce(engine: Engine, of: Operation, shape: Shape, at: int, *rest: Any, **more: Any) -> Running:
            links, source, *result = rest
            if shape.shares[at] > 0 and self._is_next("values x 1e20"):
                self._plan.pop(0)
                source = source * 1e20
            return start(engine, of, shape, at, links, source, *result, **more)

        rounds.follows = lambda *_: None  # it takes its own forgery for good
        rounds.FaultInquiry.objection = lambda *_: None  # type: ignore[method-assign]
        Member.announce_ready = announce_ready  # type: ignore[method-assign]
        RedisStore.propose_plan = propose_plan  # type: ignore[method-assign]
        Engine.start = reduce  # type: ignore[method-assign]

    def _is_next(self, *attacks: str) -> bool:
        return bool(self._plan) and self._plan[0] in attacks


if os.environ.get("HOSTILE_NODE") == os.environ["ZERO_BAND_NODE__ID"]:
    Attacker(os.environ["HOSTILE_PLAN"].split(",")).install()
sys.exit(main())

"""How long a member waits: for its node's earlier lease, stragglers, members that seem gone, votes, and operators."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from zeroband.elastic.membership.ballots import Present, left_by_one, may_leave_out
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, RoundPlan, View, Wait
from zeroband.elastic.membership.resume_rules import restarts_with
from zeroband.elastic.membership.round_rules import Rules, has_quorum
from zeroband.elastic.store.interface import Store
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

_log = get_logger(__name__)


class StragglerTimer:
    """How long members at the boundary wait for stragglers; the wait starts when a quorum is there.

    `settled_at_s`: when the current phase began; None: not known.
    """

    def __init__(self, rules: Rules, settled_at_s: float | None) -> None:
        self._rules = rules
        self._settled_at_s = settled_at_s
        self._since_s: float | None = None

    @property
    def phase_s(self) -> float:
        """Length of the phase up to the quorum; 0: not known."""
        return 0.0 if self._settled_at_s is None or self._since_s is None else self._since_s - self._settled_at_s

    def are_late(self, view: View, now_s: float) -> bool:
        if self._since_s is None and has_quorum(view, self._rules):
            self._since_s = now_s
        return self.left_s(now_s) <= 0

    def left_s(self, now_s: float) -> float:
        return math.inf if self._since_s is None else self._since_s + self._rules.straggler_wait_s(self.phase_s) - now_s


class AloneTimer:
    """Delays a plan with which at most one member of the previous round continues.

    The wait lasts a lease, and longer while living members would refuse the plan. If a damaged store lost leases,
    guardians renew them within a fraction of a lease. Without the wait, that member would commit a history that all
    others reject (`ballots.may_leave_out`), and the run would stand still.
    """

    def __init__(self, clock: Callable[[], float], lease_s: float, quorum: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._quorum = quorum
        self._since_s: float | None = None

    def check(self, plan: RoundPlan, view: View) -> Wait | None:
        """What such a plan waits for, with the members that would refuse it; None: nothing."""
        before = view.committed
        others = () if before is None or restarts_with(view, plan.round) else left_by_one(plan, before)
        if before is None or not others:
            self._since_s = None
            return None
        here, now_s = Present(view.alive, view.peers, view.ready, self._quorum), self._clock()
        refusing = tuple(m for m in others if may_leave_out(plan, before, m, here, view.alive) is False)
        if refusing:
            self._since_s = now_s
            return Wait(f"round {plan.round} would leave {len(refusing)} living members behind", refusing)
        if self._since_s is None:
            self._since_s, fields = now_s, {"round": plan.round, "waits_s": self._lease_s}
            _log.warning("all others of the last round seem to be gone", extra={"fields": fields})
        if now_s - self._since_s < self._lease_s:
            return Wait(f"{len(others)} members of the last round have a lease to show that they are alive")
        return None


class VoteTimer:
    """Detects that more than half of the members have voted and no other member has for `limit_s`."""

    def __init__(self, plan: RoundPlan, clock: Callable[[], float], limit_s: float) -> None:
        self._all = len(plan.members)
        self._clock = clock
        self._limit_s = limit_s
        self._voted, self._since_s = 0, clock()

    def stand_still(self, view: View) -> bool:
        now_s = self._clock()
        if view.voted != self._voted:
            self._voted, self._since_s = view.voted, now_s
        return self._all < 2 * view.voted < 2 * self._all and now_s - self._since_s > self._limit_s


class PauseReporter:
    """Reports when an operator's order pauses the run at a boundary, and when the run resumes."""

    def __init__(self, round: int, on_event: Callable[..., object]) -> None:
        self._round = round
        self._on_event = on_event
        self._since_s: float | None = None

    def look(self, orders: Orders, now_s: float) -> None:
        if orders.is_paused and self._since_s is None:
            self._since_s = now_s
            self._on_event("paused", round=self._round)
        elif not orders.is_paused and self._since_s is not None:
            self._on_event("resumed", round=self._round, paused_s=round(now_s - self._since_s, 3))
            self._since_s = None


def outlast_duplicates(store: Store, member_id: str, node_id: str, *, look_s: float) -> None:
    """Wait until no other member of this node holds a lease: that of a killed process is not renewed.

    If it is renewed, another machine has this node's id, and the two would spoil each other's files. The machine that
    is in the run stays; if neither is yet, the one whose member id sorts first.

    Call it only while this member's own lease is renewed: the store's clock stands still if none is. `look_s`: polling
    interval, well below half a lease. Raises ConfigError if another machine has this name.
    """
    before_ms: Mapping[str, int] = {}
    while True:
        view, ends_ms = store.view(BOOTSTRAP_ROUND), store.lease_ends_ms()
        others = {m: p for m, p in view.peers.items() if m in view.alive and m != member_id and p.node_id == node_id}
        for other, peer in others.items():
            is_alive = store.is_renewed(before_ms.get(other, 0), ends_ms.get(other, 0))
            if is_alive and (other < member_id or _is_in_run(view, other)):
                raise ConfigError(
                    f"node.id={node_id!r} is in this run already, at {peer.host}:{peer.port}; give one of the two "
                    "machines another node.id, which is the host name where it is not set"
                )
        if not others:
            return
        if not before_ms:
            _log.info("waiting for this node's earlier lease to expire", extra={"fields": {"held_by": sorted(others)}})
        before_ms = ends_ms
        time.sleep(look_s)


def _is_in_run(view: View, member_id: str) -> bool:
    committed = None if view.committed is None else view.committed.plan
    return any(member_id in plan.members for plan in (view.plan, committed) if plan is not None)

"""What a member remembers of its run, so that a store which lost its record gets it back. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import Ready, RoundPlan, StoreTerm, Verdict, View
from zeroband.elastic.membership.succession import MemberReport


@dataclass(frozen=True)
class StoreBackup:
    """What a member knows of its run, enough to bring it back into a store that lost it."""

    member_id: str
    run: Mapping[str, str] = field(default_factory=dict[str, str])
    """What all nodes must share."""
    plan: RoundPlan | None = None
    committed: Verdict | None = None
    ready: Ready | None = None
    """The last that it announced."""
    vote: tuple[RoundPlan, str] | None = None
    """The last that it gave, behind its plan."""
    orders: Orders = field(default_factory=Orders)
    generation: StoreTerm | None = None
    """The one that it is from, in a run of several stores: a store that is in another one takes none of it."""

    @property
    def own_words(self) -> StoreBackup:
        """What this member said itself."""
        return StoreBackup(self.member_id, self.run, ready=self.ready, vote=self.vote)

    @property
    def is_of_a_joiner(self) -> bool:
        """Whether the run has rounds and none lists this member, which so far only believes what it saw of them."""
        plans = [self.plan, None if self.committed is None else self.committed.plan]
        listed = [m for plan in plans if plan is not None for m in (*plan.members, *plan.late)]
        return self.committed is not None and self.member_id not in listed


class LiveBackup:
    """The newest that this member saw and said."""

    def __init__(self, member_id: str, run: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._known = StoreBackup(member_id, run)
        self._failed: tuple[RoundPlan, str] | None = None
        self._record: Mapping[str, Any] | None = None
        """What the verdict on the newest vote would say."""
        self.generation: StoreTerm | None = None
        """The generation of the store in use, in a run of several."""
        self._promises: tuple[StoreTerm, ...] = ()
        """The generation in use, then those that were promised since."""
        self._is_saying = False

    @contextmanager
    def saying(self) -> Generator[None]:
        """What this member says meanwhile is on its way: a store that does not show it has not lost it."""
        self._is_saying = True
        try:
            yield
        finally:
            self._is_saying = False

    @property
    def known(self) -> StoreBackup:
        with self._lock:
            return self._known

    def announced(self, ready: Ready) -> None:
        with self._lock:
            self._known = replace(self._known, ready=ready)

    def voted(self, plan: RoundPlan, vote: str, record: Mapping[str, Any]) -> StoreTerm | None:
        """This member votes; returns the generation in which alone that counts. `record`: what it would commit."""
        with self._lock:
            self._known = replace(self._known, plan=plan, vote=(plan, vote))
            self._record = record
            return self._promises[-1] if self._promises else None

    # -- in a run of several stores -----------------------------------------------------------------------------

    @property
    def to_restore(self) -> StoreBackup:
        """What a store that lost it gets back: a member's own words and the rounds that it was in.

        One of several stores gets this member's words: the rest begins with it.
        """
        known = self.known
        if self.generation is not None:
            return replace(known.own_words, generation=self.generation)
        return known.own_words if known.is_of_a_joiner else known

    def member_report(self) -> MemberReport:
        """Report everything that this member knows."""
        with self._lock:
            known, generation, promises = self._known, self.generation, self._promises
            assert generation is not None
            vote = known.vote[1] if known.vote is not None and known.vote[0] == known.plan else None
            record = self._record if vote is not None else None
            return MemberReport(
                promises, generation, known.committed, known.plan, vote, record, known.orders, dict(known.run)
            )

    def promise(self, generation: StoreTerm) -> None:
        """Vote in no older generation from now on."""
        with self._lock:
            if generation not in self._promises:
                self._promises = (*self._promises, generation)

    def enter(self, generation: StoreTerm, plan: RoundPlan | None) -> None:
        """Enter a generation with its current plan; votes and failures from the older one no longer count."""
        with self._lock:
            if generation != self.generation:
                vote = self._known.vote if self._known.vote is not None and self._known.vote[0] == plan else None
                self._known = replace(self._known, plan=plan, vote=vote)
                self._failed = None
            self.generation, self._promises = generation, (generation,)

    def committed(self, verdict: Verdict) -> None:
        """Note a verdict that this member wrote."""
        with self._lock:
            self._known = replace(self._known, committed=verdict)

    def failed(self, plan: RoundPlan, reason: str) -> None:
        """This member has left the groups of a plan: it must not be finished."""
        with self._lock:
            self._failed = (plan, reason)

    def failure_unknown_to(self, view: View) -> tuple[RoundPlan, str] | None:
        """The failure that this member reported and that the store has lost."""
        with self._lock:
            is_lost = self._failed is not None and self._failed[0] == view.plan and view.failed is None
            return self._failed if is_lost else None

    def learn(self, view: View) -> None:
        """Take over what a view shows that is newer; all of it in a joiner, and where the run is in another session."""
        with self._lock:
            known = self._known
            plan, committed, orders = known.plan, known.committed, known.orders
            if _is_of_another_session(view, known) or (known.is_of_a_joiner and view.is_known):
                plan, committed, orders = view.plan, view.committed, view.orders
            if view.plan is not None and (plan is None or view.plan.version >= plan.version):
                plan = view.plan
            if view.committed is not None and (committed is None or view.committed.round >= committed.round):
                committed = view.committed
            orders = max(orders, view.orders, key=lambda orders: orders.version)
            self._known = replace(known, plan=plan, committed=committed, orders=orders)

    def is_more_than(self, view: View, round: int) -> bool:
        """Whether the store, looked at for `round`, has lost something of what this member saw or said.

        Of what is said by now: it may also be that the look is older.
        """
        known = self.to_restore
        if _is_of_another_session(view, known):
            return False  # it is learned first; rounds of two sessions are not compared
        if not view.is_known or _is_behind(view, known):
            return True
        if self._is_saying:
            return False
        if known.ready is not None and known.ready.round == round and known.member_id not in view.ready:
            return True
        return known.vote is not None and known.vote[0] == view.plan and known.member_id not in view.votes


def _is_of_another_session(view: View, known: StoreBackup) -> bool:
    """Whether the store shows a session that follows on the known one, or this member is in none yet."""
    shown, ours = view.committed, known.committed
    return shown is not None and ours is not None and shown.session != ours.session


def _is_behind(view: View, known: StoreBackup) -> bool:
    if view.orders.version < known.orders.version:
        return True
    if known.plan is not None and (view.plan is None or view.plan.version < known.plan.version):
        return True
    return known.committed is not None and (view.committed is None or view.committed.round < known.committed.round)

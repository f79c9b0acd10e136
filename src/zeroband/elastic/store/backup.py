"""A member's backup of its run's records, from which it restores a store that lost them. Any thread."""

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
    """The newest records that a member has read and written."""

    member_id: str
    run: Mapping[str, str] = field(default_factory=dict[str, str])
    """The settings that all nodes must share."""
    plan: RoundPlan | None = None
    committed: Verdict | None = None
    ready: Ready | None = None
    """The last one that it announced."""
    vote: tuple[RoundPlan, str] | None = None
    """Plan and digest of its last vote."""
    orders: Orders = field(default_factory=Orders)
    generation: StoreTerm | None = None
    """With several stores, the generation of these records; a store in another one ignores them."""

    @property
    def own_records(self) -> StoreBackup:
        """The records that this member wrote about itself."""
        return StoreBackup(self.member_id, self.run, ready=self.ready, vote=self.vote)

    @property
    def is_of_a_joiner(self) -> bool:
        """Whether no round lists this member yet, so that it cannot vouch for the rounds that it has read."""
        plans = [self.plan, None if self.committed is None else self.committed.plan]
        listed = [m for plan in plans if plan is not None for m in plan.listed]
        return self.committed is not None and self.member_id not in listed


class LiveBackup:
    """A member's current `StoreBackup`, and what it promised in a run of several stores."""

    def __init__(self, member_id: str, run: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._known = StoreBackup(member_id, run)
        self._failed: tuple[RoundPlan, str] | None = None
        self._refused = ""
        """Id of a plan that the others refuse: restoring it over theirs would go on for ever."""
        self._record: Mapping[str, Any] | None = None
        """The record that this member would commit with its newest vote."""
        self.generation: StoreTerm | None = None
        """With several stores, the generation of the one in use."""
        self._promises: tuple[StoreTerm, ...] = ()
        """The generation in use, then those promised since."""
        self._is_writing = False

    @contextmanager
    def writing(self) -> Generator[None]:
        """Mark this member's own records as in flight: a store that does not show them yet has not lost them."""
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False

    @property
    def known(self) -> StoreBackup:
        with self._lock:
            return self._known

    def announced(self, ready: Ready) -> None:
        with self._lock:
            self._known = replace(self._known, ready=ready)

    def voted(self, plan: RoundPlan, vote: str, record: Mapping[str, Any]) -> StoreTerm | None:
        """Note this member's vote. Returns the only generation in which it counts. `record`: what it would commit."""
        with self._lock:
            self._known = replace(self._known, plan=plan, vote=(plan, vote))
            self._record = record
            return self._promises[-1] if self._promises else None

    # -- in a run of several stores -----------------------------------------------------------------------------

    @property
    def to_restore(self) -> StoreBackup:
        """The records to restore: the member's own, and the rounds that it was in.

        With several stores only its own: the rest came with the store's generation. After the promise of a later one
        no vote: the store refuses it, and a restored one would commit in a generation that has been handed over.
        """
        known = self.known
        if self.generation is not None:
            own = replace(known.own_records, generation=self.generation)
            return own if self._promises[-1:] in ((), (self.generation,)) else replace(own, vote=None)
        return known.own_records if known.is_of_a_joiner else known

    def member_report(self) -> MemberReport:
        """Return the report for stores to which the run may switch."""
        with self._lock:
            known, generation, promises = self._known, self.generation, self._promises
            assert generation is not None
            vote = known.vote[1] if known.vote is not None and known.vote[0] == known.plan else None
            record = self._record if vote is not None else None
            return MemberReport(
                promises, generation, known.committed, known.plan, vote, record, known.orders, dict(known.run)
            )

    def promise(self, generation: StoreTerm) -> None:
        """Promise a generation: vote in no older one from now on."""
        with self._lock:
            if generation not in self._promises:
                self._promises = (*self._promises, generation)

    def enter(self, generation: StoreTerm, plan: RoundPlan | None) -> None:
        """Enter a generation with its current plan; votes and failures of the older one are void."""
        with self._lock:
            if generation != self.generation:
                vote = self._known.vote if self._known.vote is not None and self._known.vote[0] == plan else None
                self._known = replace(self._known, plan=plan, vote=vote)
                self._failed = None
            self.generation, self._promises = generation, (generation,)

    @property
    def newest_round(self) -> int | None:
        """Newest committed round that this member knows of."""
        with self._lock:
            return None if self._known.committed is None else self._known.committed.round

    def committed(self, verdict: Verdict) -> None:
        """Note a verdict that this member wrote."""
        with self._lock:
            self._known = replace(self._known, committed=verdict)

    def failed(self, plan: RoundPlan, reason: str) -> None:
        """Note that this member discarded a plan's result: the plan must not be committed. The first reason counts."""
        with self._lock:
            if self._failed is None or self._failed[0] != plan:
                self._failed = (plan, reason)

    def refuse(self, plan: RoundPlan) -> None:
        """Neither restore nor learn this plan any more, unless this member votes on it."""
        with self._lock:
            self._refused = plan.id
            if self._known.plan == plan:
                committed = self._known.committed
                self._known = replace(self._known, plan=None if committed is None else committed.plan)

    def failure_unknown_to(self, view: View) -> tuple[RoundPlan, str] | None:
        """Return a failure that this member reported and the store has lost."""
        with self._lock:
            is_lost = self._failed is not None and self._failed[0] == view.plan and view.failed is None
            return self._failed if is_lost else None

    def learn(self, view: View) -> None:
        """Take over newer records of a view; all of them as a joiner, and if the run is in another session."""
        with self._lock:
            known = self._known
            plan, committed, orders = known.plan, known.committed, known.orders
            if _is_of_another_session(view, known) or (known.is_of_a_joiner and view.is_known):
                plan, committed, orders = view.plan, view.committed, view.orders
            shown = None if view.plan is None or view.plan.id == self._refused else view.plan
            if shown is not None and (plan is None or shown.version >= plan.version):
                plan = shown
            if view.committed is not None and (committed is None or view.committed.round >= committed.round):
                committed = view.committed
            orders = max(orders, view.orders, key=lambda orders: orders.version)
            self._known = replace(known, plan=plan, committed=committed, orders=orders)

    def is_ahead_of(self, view: View, round: int) -> bool:
        """Whether the store lost a record that this member has, by a view of `round`, unless that view is older."""
        known = self.to_restore
        if _is_of_another_session(view, known):
            return False  # rounds of two sessions cannot be compared; `learn` takes over the new one
        if not view.is_known or _is_behind(view, known):
            return True
        if self._is_writing:
            return False
        if known.ready is not None and known.ready.round == round and known.member_id not in view.ready:
            return True
        return known.vote is not None and known.vote[0] == view.plan and known.member_id not in view.votes


def _is_of_another_session(view: View, known: StoreBackup) -> bool:
    shown, ours = view.committed, known.committed
    return shown is not None and ours is not None and shown.session != ours.session


def _is_behind(view: View, known: StoreBackup) -> bool:
    if view.orders.version < known.orders.version:
        return True
    if known.plan is not None and (view.plan is None or view.plan.version < known.plan.version):
        return True
    return known.committed is not None and (view.committed is None or view.committed.round < known.committed.round)

"""What a member remembers of its run, so that a store which lost its record gets it back. Any thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import Opening, Ready, Verdict, View


@dataclass(frozen=True)
class StoreBackup:
    """What a member knows of its run, enough to bring it back into a store that lost it."""

    member_id: str
    run: Mapping[str, str] = field(default_factory=dict[str, str])
    """What all nodes must share."""
    opening: Opening | None = None
    committed: Verdict | None = None
    ready: Ready | None = None
    """The last that it announced."""
    vote: tuple[Opening, str] | None = None
    """The last that it gave."""
    orders: Orders = field(default_factory=Orders)


class LiveBackup:
    """The newest that this member saw and said."""

    def __init__(self, member_id: str, run: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._known = StoreBackup(member_id, run)
        self._failed: tuple[Opening, str] | None = None

    @property
    def known(self) -> StoreBackup:
        with self._lock:
            return self._known

    def announced(self, ready: Ready) -> None:
        with self._lock:
            self._known = replace(self._known, ready=ready)

    def voted(self, opening: Opening, digest: str) -> None:
        with self._lock:
            self._known = replace(self._known, opening=opening, vote=(opening, digest))

    def committed(self, verdict: Verdict) -> None:
        """This member wrote the verdict."""
        with self._lock:
            self._known = replace(self._known, committed=verdict)

    def failed(self, opening: Opening, reason: str) -> None:
        """This member has left the groups of an opening: it must not be finished."""
        with self._lock:
            self._failed = (opening, reason)

    def failure_unknown_to(self, view: View) -> tuple[Opening, str] | None:
        """The failure that this member reported and that the store has lost."""
        with self._lock:
            is_lost = self._failed is not None and self._failed[0] == view.opening and view.failed is None
            return self._failed if is_lost else None

    def learn(self, view: View) -> None:
        """Take over what a view shows that is newer, and all of it where the run goes on in another session."""
        with self._lock:
            known = self._known
            opening, committed, orders = known.opening, known.committed, known.orders
            if _is_of_another_session(view, known):
                opening, committed, orders = view.opening, view.committed, view.orders
            if view.opening is not None and (opening is None or view.opening.version >= opening.version):
                opening = view.opening
            if view.committed is not None and (committed is None or view.committed.round >= committed.round):
                committed = view.committed
            orders = max(orders, view.orders, key=lambda orders: orders.version)
            self._known = replace(known, opening=opening, committed=committed, orders=orders)

    def is_more_than(self, view: View, round: int) -> bool:
        """Whether the store, looked at for `round`, has lost something of what this member saw or said."""
        known = self.known
        if _is_of_another_session(view, known):
            return False  # it is learned first; rounds of two sessions are not compared
        if not view.is_known or _is_behind(view, known):
            return True
        if known.ready is not None and known.ready.round == round and known.member_id not in view.ready:
            return True
        return known.vote is not None and known.vote[0] == view.opening and known.member_id not in view.votes


def _is_of_another_session(view: View, known: StoreBackup) -> bool:
    """Whether the store shows a session that follows on the known one, or this member is in none yet."""
    shown, ours = view.committed, known.committed
    return shown is not None and ours is not None and shown.session != ours.session


def _is_behind(view: View, known: StoreBackup) -> bool:
    if view.orders.version < known.orders.version:
        return True
    if known.opening is not None and (view.opening is None or view.opening.version < known.opening.version):
        return True
    return known.committed is not None and (view.committed is None or view.committed.round < known.committed.round)

"""Real memberships without a process beside them: this one takes the lease, and gives it back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from zeroband.config.time_outs import TimeOuts
from zeroband.data.ledger import SHARED
from zeroband.elastic.guardian.process import GuardianOrder, ListenAddress
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.records import Peer
from zeroband.elastic.rounds.member import Member, NodeIdentity, RunAccess
from zeroband.elastic.store.interface import Store
from zeroband.elastic.transport.handover import Inbox
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import noop

NEVER_S = 1e6
UNWATCHED = TimeOuts(
    5.0, 5.0, renew_s=NEVER_S, watch_s=NEVER_S, hung_s=NEVER_S, gloo_timeout_s=NEVER_S, store_s=NEVER_S
)
"""The watcher never looks: what is to happen happens at a step of the test."""


class LeaseInMemory:
    """Holds a member's lease as a guardian does; ends when it is told to."""

    pid = 0

    def __init__(self, store: Store, order: GuardianOrder) -> None:
        self.order = order
        self.is_dead = False
        self._store = store
        store.renew_lease(order.member_id, Peer(order.node_id, order.listen.host, 1, False), first=order.is_first)

    def is_running(self) -> bool:
        return not self.is_dead

    def close(self) -> None:
        self._store.release_lease(self.order.member_id)


class NoLease:
    """The test takes and renews the lease."""

    pid = 0

    def is_running(self) -> bool:
        return True

    def close(self) -> None:
        """Leave the lease to the test."""


def a_member(
    store: Store,
    name: str,
    flags: SharedFlags,
    *,
    shared: Mapping[str, str],
    has_lease: bool = True,
    time_outs: TimeOuts = UNWATCHED,
    departure: Departure | None = None,
    clock: Callable[[], float] = time.monotonic,
    corpus: str = SHARED,
    on_event: Callable[..., object] = noop,
) -> Member:
    """A membership of exactly this id, whose node is named by what stands before the `#`."""

    def start_guardian(order: GuardianOrder, inbox: Inbox | None) -> LeaseInMemory | NoLease:
        return LeaseInMemory(store, order) if has_lease else NoLease()

    access = RunAccess(
        *(store, "unused", "run", shared),
        on_event=on_event,
        start_guardian=start_guardian,
        name_member=lambda _: name,
        clock=clock,
    )
    identity = NodeIdentity(
        name.partition("#")[0], ListenAddress("host"), (), 0, Path(flags.path).parent, corpus=corpus
    )
    return Member(access, identity, flags, time_outs, departure or Departure(NEVER_S))


def hold_leases_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have whole nodes of a test hold their leases in its process: starting a guardian for each takes a second.

    Set `fault.detect_s` so that no test outlasts a lease: nobody renews it.
    """

    def access(*, store: Any, **rest: Any) -> RunAccess:
        return RunAccess(store=store, start_guardian=lambda order, inbox: LeaseInMemory(store, order), **rest)

    monkeypatch.setattr("zeroband.runtime.node_membership.RunAccess", access)

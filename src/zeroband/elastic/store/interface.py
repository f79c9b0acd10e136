"""The interface of the store that a run's nodes share. `RedisStore` implements it for real runs.

Proposals are compare-and-set on what they build on, so the first of two competitors counts. Leases expire by the
store's own clock. Any thread; an unreachable store raises StoreLost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import (
    Attempt,
    Claim,
    Evidence,
    LinkRates,
    Peer,
    Ready,
    RestartPoint,
    RoundPlan,
    StoreTerm,
    Verdict,
    View,
)
from zeroband.elastic.store.backup import StoreBackup
from zeroband.errors import JoinRefused

PROTOCOL = 24
"""Version of the protocol between nodes: records, contributions, journals and states.

A node with another version is refused at join.
"""

REMARK = "remark: "
"""Prefix of a key with a remark on another key's value, shown if nodes differ in that value. Remarks may differ."""


def record_of(shared: Mapping[str, str]) -> dict[str, str]:
    """The run's record: the settings that its nodes must share, and the protocol."""
    return {"protocol": str(PROTOCOL), **shared}


def require_equal(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise JoinRefused with the first key that differs, and the remarks on it."""
    for key in dict.fromkeys([*ours, *theirs]):
        if not key.startswith(REMARK) and theirs.get(key) != ours.get(key):
            raise JoinRefused(key, *(_remarked(record, key) for record in (theirs, ours)))


def _remarked(record: Mapping[str, str], key: str) -> str:
    value, remark = record.get(key, "absent"), record.get(f"{REMARK}{key}")
    return f"{value} ({remark})" if remark else value


class Store(Protocol):
    """The store of one run, as one node uses it."""

    @property
    def session(self) -> str:
        """Session of the run that this node is in; records of another one are invalid. Empty: none yet."""
        ...

    @session.setter
    def session(self, session: str) -> None: ...

    # -- the run ------------------------------------------------------------------------------------------------

    def found_or_match(self, shared: Mapping[str, str]) -> dict[str, str]:
        """Write the settings that the run's nodes must share, or compare them with those of the first node.

        Living nodes get the time of a lease to restore a lost record. Returns the record, for a `StoreBackup`. Raises
        JoinRefused.
        """
        ...

    def forget_dead_run(self) -> bool:
        """Let nodes with other settings resume a dead run; its rounds stay. False: it may be alive.

        The first call extends every lease that was valid when the store was last used, so repeat the call for the time
        of a lease.
        """
        ...

    def propose_restart_point(self, restart_point: RestartPoint, view: View) -> bool:
        """Agree on a checkpoint from which to resume. False: the store has changed since this view."""
        ...

    def restore(self, known: StoreBackup) -> bool:
        """Restore what the store lost; newer records stay. True: a record of the run was lost."""
        ...

    def history(self) -> list[Verdict]:
        """Return the newest committed rounds, oldest first; of a round its last verdict."""
        ...

    # -- leases -------------------------------------------------------------------------------------------------

    def renew_lease(
        self, member_id: str, peer: Peer, *, first: bool = False, listed_version: int = 0
    ) -> dict[str, Peer] | None:
        """Renew a member's lease and publish its address. Returns the living members; None: the member is fenced.

        `first`: acquire a first lease. `listed_version`: version of the newest plan that lists the member; an older one
        cannot fence it, since a store that returned with older data shows such plans.
        """
        ...

    def release_lease(self, member_id: str) -> None:
        """End a lease that its holder gives up, and forget the member."""
        ...

    def expire_lease(self, member_id: str) -> None:
        """End a member's lease because its guardian is gone. The member may acquire it again."""
        ...

    def lease_ends_ms(self) -> dict[str, int]:
        """Return the ends of the leases by the store's clock, also of expired ones."""
        ...

    def is_renewed(self, before_ms: int, end_ms: int) -> bool:
        """Whether its holder renewed a lease between two reads of its end.

        The store extends leases only after an outage, and so by more than a renewal does.
        """
        ...

    def announce_leaving(self, member_id: str) -> frozenset[str]:
        """Announce that a member leaves. Returns the living ones that stay; the last of several leavers sees none."""
        ...

    # -- rounds -------------------------------------------------------------------------------------------------

    def view(self, round: int) -> View:
        """Read all that the rules need for `round`, at one instant, with every signature verified."""
        ...

    def await_change(
        self, round: int, seen: View | None, *, within_s: float, whole: bool = True, ends_with: RoundPlan | None = None
    ) -> View:
        """Wait until something may have changed that matters for `round`, at most `within_s`, and read a view.

        `seen`: the thread's last view; None: do not wait. `whole`: the view has all `Ready` records and votes.
        `ends_with`: plan whose verdict ends the wait; the view need not have that verdict unless it is expected.
        """
        ...

    def announce_ready(self, member_id: str, ready: Ready, *, enough: int | None = None) -> View:
        """Announce that a member is at the boundary of a round, and return a view. Its first record counts.

        `enough`: the view may omit the other members' records until there are this many; None: it has all.
        """
        ...

    def claim_samples(self, member_id: str, choose: Callable[[Mapping[str, Claim]], Claim]) -> Claim:
        """Claim the samples that `choose` picks from others' claims; called again if another joiner was faster."""
        ...

    def claims(self) -> Mapping[str, Claim]:
        """Return all claims, also of joiners that are in rounds by now or gone."""
        ...

    def publish_links(self, member_id: str, links: LinkRates) -> None:
        """Publish a member's link measurements for the proposer of a plan."""
        ...

    def acquire_measuring(self, member_id: str) -> bool:
        """Acquire one of the run's few slots for measuring a link. False: none is free."""
        ...

    def release_measuring(self, member_id: str) -> None:
        """Release a member's slot."""
        ...

    def links(self) -> Mapping[str, LinkRates]:
        """Return the members' link measurements as of this node's last read."""
        ...

    def signed(self, plan: RoundPlan, member_id: str) -> RoundPlan:
        """Return the plan with this member as its proposer and with its signature, which nodes require."""
        ...

    def propose_plan(
        self,
        plan: RoundPlan,
        *,
        current: RoundPlan | None,
        generation: StoreTerm | None = None,
        heard: Attempt | None = None,
    ) -> bool:
        """Replace the current plan. False: another proposal was first.

        `heard`: records of the current attempt that the proposal is based on; False if there are more by now. They are
        kept, so that every member can check the proposal's findings.
        """
        ...

    def report_failure(self, plan: RoundPlan, reason: str) -> bool:
        """Mark a plan as failed, so that the round is retried. False: it is committed."""
        ...

    def vote(self, plan: RoundPlan, member_id: str, digest: str, *, generation: StoreTerm | None = None) -> View:
        """Vote with the digest of a member's result under a plan, and return a view. Its first vote counts.

        `generation`: with several stores, the one that it counts in; a store in another one ignores it. The view may
        omit the other members' votes until all members of the plan have voted.
        """
        ...

    def testify(self, plan: RoundPlan, member_id: str, evidence: Evidence, *, again: bool = False) -> bool:
        """Publish a member's evidence on a failed plan. Its first evidence counts.

        False: too late, the next plan is open. `again`: restore evidence that was stored before and deleted.
        """
        ...

    def attempt(self, plan_id: str) -> Attempt | None:
        """Return a current or past plan with everything that its members signed on it; None: no valid one is stored."""
        ...

    def expect_verdict(self, verdict: Verdict) -> None:
        """Recognize this verdict, which the node could write itself, by its tag instead of transferring it."""
        ...

    def propose_verdict(self, verdict: Verdict, *, generation: StoreTerm | None = None) -> bool:
        """Commit a round if its plan is the current one and has not failed. False: it was decided already.

        A verdict that begins a session also writes the run's record for it, if this node has compared that.
        """
        ...

    def give_orders(self, change: Callable[[Orders], Orders]) -> Orders:
        """Change the operators' orders; `change` is called again if another writer was faster. Returns the result."""
        ...

"""What nodes need of the store between them: the one record of a run, in which the first to decide something is right.

`RedisStore` keeps it in Redis, for real runs. Every proposal is compared and set with what it builds on, and leases end
by the store's own clock. May be called from any thread; an implementation out of reach raises StoreLost.
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

PROTOCOL = 22
"""Version of what nodes tell one another: their records, and what contributions, journals and states mean.

Nodes with another one are refused at join.
"""

REMARK = "remark: "
"""Begins the key of a remark on another key's value, shown where nodes differ in that one. Remarks may differ."""


def record_of(shared: Mapping[str, str]) -> dict[str, str]:
    """What a run's nodes must share, as its record keeps it."""
    return {"protocol": str(PROTOCOL), **shared}


def require_equal(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise JoinRefused with the first key that differs, and what is remarked on it."""
    for key in dict.fromkeys([*ours, *theirs]):
        if not key.startswith(REMARK) and theirs.get(key) != ours.get(key):
            raise JoinRefused(key, *(_remarked(record, key) for record in (theirs, ours)))


def _remarked(record: Mapping[str, str], key: str) -> str:
    value, remark = record.get(key, "absent"), record.get(f"{REMARK}{key}")
    return f"{value} ({remark})" if remark else value


class Store(Protocol):
    """The record of one run, as one node reads and writes it."""

    @property
    def session(self) -> str:
        """Session of the run that this node is in; records of another one do not count. Empty: it is in none yet."""
        ...

    @session.setter
    def session(self, session: str) -> None: ...

    # -- the run ------------------------------------------------------------------------------------------------

    def found_or_match(self, shared: Mapping[str, str]) -> dict[str, str]:
        """Write what the run's nodes must share, or compare with what the first node wrote.

        Where nodes are alive, it is left to them for the time of a lease to bring back a record that was lost.
        Returns the record, for a `StoreBackup`. Raises JoinRefused.
        """
        ...

    def forget_dead_run(self) -> bool:
        """Have nodes that differ from those of a dead run go on with it; its rounds stay. False: it may still live.

        A lease that held when the store was last spoken to counts for another one from the first call on, so ask again
        during that time.
        """
        ...

    def propose_restart_point(self, restart_point: RestartPoint, view: View) -> bool:
        """Agree on a checkpoint to begin again with. False: something has changed since this view."""
        ...

    def restore(self, known: StoreBackup) -> bool:
        """Bring back what the store lost of the run; what it has that is newer stays. True: it had lost something."""
        ...

    def history(self) -> list[Verdict]:
        """The newest committed rounds, oldest first; each once, as members wrote it last."""
        ...

    # -- leases -------------------------------------------------------------------------------------------------

    def renew_lease(
        self, member_id: str, peer: Peer, *, first: bool = False, listed_version: int = 0
    ) -> dict[str, Peer] | None:
        """Keep a member counted alive for another lease, and publish where it is.

        `listed_version`: version of the newest plan that lists it. One that is no newer says nothing against it: a
        store that came back with an earlier file shows such. Returns the living members. None: the run went on without
        it (the member is fenced).
        """
        ...

    def release_lease(self, member_id: str) -> None:
        """Leave at once instead of by expiry."""
        ...

    def expire_lease(self, member_id: str) -> None:
        """Have a member's lease run out now: its guardian is known to be gone."""
        ...

    def lease_ends_ms(self) -> dict[str, int]:
        """When the members' leases end, by the store's clock; also of those that ran out."""
        ...

    def is_renewed(self, before_ms: int, end_ms: int) -> bool:
        """Whether a lease that ended at the first time, and ends at the second one now, was renewed by its holder.

        The store by itself prolongs leases only after a silence, and so by more than that.
        """
        ...

    def say_leaving(self, member_id: str) -> frozenset[str]:
        """Note that a member is about to leave; the living ones that stay. Of several at once, the last sees none."""
        ...

    # -- rounds -------------------------------------------------------------------------------------------------

    def view(self, round: int) -> View:
        """All that the rules need for `round`, read at one instant, with every signature of it verified."""
        ...

    def await_change(
        self, round: int, seen: View | None, *, within_s: float, whole: bool = True, ends_with: RoundPlan | None = None
    ) -> View:
        """Wait until `round` may show something that decides, and look; or until the time is over, at the latest.

        `seen`: what the same thread saw last; None: nothing. `whole`: the view has all who are ready, and all votes.
        `ends_with`: this plan ends the wait with its verdict, which the view need not show unless it is expected.
        """
        ...

    def announce_ready(self, member_id: str, ready: Ready, *, enough: int | None = None) -> View:
        """Announce that a member stands at the boundary of a round, and return a view; only its first record counts.

        `enough`: the view may omit the other members' records until this many are there; None: it has all.
        """
        ...

    def claim_samples(self, member_id: str, choose: Callable[[Mapping[str, Claim]], Claim]) -> Claim:
        """Claim what `choose` picks, given the claims of others; it is asked again if another joiner was faster."""
        ...

    def claims(self) -> Mapping[str, Claim]:
        """Return all claims, also of joiners that are in rounds by now, or gone."""
        ...

    def tell_links(self, member_id: str, links: LinkRates) -> None:
        """Publish a member's link measurements for the proposer of a plan."""
        ...

    def may_measure(self, member_id: str) -> bool:
        """Whether a member may measure one of its links now: only a few members of a run do at a time."""
        ...

    def has_measured(self, member_id: str) -> None:
        """Let another member measure."""
        ...

    def links(self) -> Mapping[str, LinkRates]:
        """What the members know of their links, as of this node's last look."""
        ...

    def signed(self, plan: RoundPlan, member_id: str) -> RoundPlan:
        """A plan with this member as its proposer, and its signature: nodes take none without."""
        ...

    def propose_plan(
        self,
        plan: RoundPlan,
        *,
        current: RoundPlan | None,
        generation: StoreTerm | None = None,
        heard: Attempt | None = None,
    ) -> bool:
        """Make this the plan that follows the current one. False: another proposal was first.

        `heard`: what is known of the current one, as this one is made of it; False where more is known by now. From
        here on it stays as it is, for those who check what follows from it.
        """
        ...

    def report_failure(self, plan: RoundPlan, reason: str) -> bool:
        """Have a plan fail for everybody, so that the round is opened again. False: it was committed already."""
        ...

    def vote(self, plan: RoundPlan, member_id: str, digest: str, *, generation: StoreTerm | None = None) -> View:
        """Say which result a member holds for a plan, and look; the first word counts.

        `generation`: in a run of several stores, the one that it counts in; a store that is in another takes no vote.

        The view need have the others' votes only if all members of the plan have voted.
        """
        ...

    def testify(self, plan: RoundPlan, member_id: str, evidence: Evidence, *, again: bool = False) -> bool:
        """Say what a member saw of a plan that failed; the first word counts.

        False: another plan follows already, so it comes too late. `again`: it was there once, and counts then, too.
        """
        ...

    def attempt(self, plan_id: str) -> Attempt | None:
        """The current plan, or one that another one has followed, with all that its members signed on it.

        None: the store has no such plan that counts.
        """
        ...

    def expect_verdict(self, verdict: Verdict) -> None:
        """Have the verdict that this node could write itself be recognized, rather than told, when it comes."""
        ...

    def propose_verdict(self, verdict: Verdict, *, generation: StoreTerm | None = None) -> bool:
        """Commit a round if its plan is the current one and did not fail. False: it was settled already.

        What all nodes share is of the session that begins with a verdict, where this node has compared it.
        """
        ...

    def give_orders(self, change: Callable[[Orders], Orders]) -> Orders:
        """Change what operators want of the run, by a rule that is asked again when another was faster. Its result."""
        ...

"""The rules of membership as pure functions of a view: who takes part in a round, and when its result counts.

Owns the records that members exchange and the three decisions about them. Reads no clock and no store: time is an
argument, and the same functions run in production, in tests and in simulations.

A round goes: every member announces `Ready`; any member proposes an `Opening` (the store takes the first); the listed
members reduce, and vote for the digest of what they got; any member proposes the `Verdict`. Both proposals carry the
version of the opening that they build on, so of two competing ones the store refuses the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FOUNDING_ROUND = 0
"""The round that starts a run: nothing is reduced, the founders only agree on their initial state."""


@dataclass(frozen=True)
class Ready:
    """A member has arrived at the boundary of `round`. Written once for each member and round."""

    round: int
    weight: int
    """Tokens it contributes; 0 for a joiner, and for a node whose update was not finite."""
    state: str
    """Digest of the outer state that it holds; only members with the same state reduce together."""


@dataclass(frozen=True)
class Opening:
    """Round `round` is open to exactly these members, in the order of their node ranks."""

    version: int
    """Grows by one with every opening of the run; fences everything that refers to an older one."""
    epoch: int
    """Number of the membership; grows whenever the groups between the nodes must be built anew."""
    round: int
    members: tuple[str, ...]
    weights: tuple[int, ...]

    @property
    def total_weight(self) -> int:
        return sum(self.weights)

    def share(self, member_id: str) -> float:
        """Weight of a member in the mean of this round, in 0..1."""
        return self.weights[self.members.index(member_id)] / self.total_weight if self.total_weight else 0.0

    def contributors(self) -> tuple[str, ...]:
        return tuple(m for m, w in zip(self.members, self.weights, strict=True) if w > 0)


@dataclass(frozen=True)
class Verdict:
    """Round `round` is committed: the members of `epoch` hold the same result. Written once for each round."""

    round: int
    version: int
    epoch: int
    members: tuple[str, ...]
    weights: tuple[int, ...]
    digest: str
    """Digest of the reduced result."""
    payload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the round fixed for everybody: data ledger, progress, norm of the mean gradient."""


@dataclass(frozen=True)
class View:
    """What one look at the store showed, all of it at one instant."""

    opening: Opening | None
    committed: Verdict | None
    """The newest verdict of the run."""
    alive: frozenset[str]
    """Members whose lease holds."""
    ready: Mapping[str, Ready]
    """Those at the boundary of the round that was asked for."""
    votes: Mapping[str, str]
    """Digests voted for the current opening."""
    failed: str | None
    """Why the current opening cannot be finished, if a member said so."""


@dataclass(frozen=True)
class Wait:
    """Nothing to decide yet."""

    reason: str
    waiting_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Excluded:
    """The run goes on without the asking member, which must come back by the join path."""

    reason: str


def next_opening(view: View, round: int, *, min_nodes: int, start_nodes: int, start_timed_out: bool) -> Opening | Wait:
    """The opening of `round` that this view calls for, or what it still waits for.

    Returns the current opening itself where it is for this round and can still be finished.
    """
    current = view.opening
    if current is not None and current.round == round and _can_finish(current, view):
        return current
    expected = view.committed.members if view.committed is not None else ()
    late = tuple(m for m in expected if m in view.alive and m not in view.ready)
    if late:
        return Wait(f"{len(late)} of {len(expected)} members have not reached round {round}", late)
    states = {m: r.state for m, r in view.ready.items() if m in view.alive}
    members = _same_state(states, expected)
    if round == FOUNDING_ROUND and len(members) < start_nodes and not start_timed_out:
        return Wait(f"{len(members)} of {start_nodes} nodes are here (elastic.start_nodes)")
    if len(members) < min_nodes:
        return Wait(f"{len(members)} of at least {min_nodes} nodes are alive (elastic.min_nodes)")
    keeps_groups = current is not None and members == current.members and current.round != round
    return Opening(
        version=1 if current is None else current.version + 1,
        epoch=1 if current is None else current.epoch + (not keeps_groups),
        round=round,
        members=members,
        weights=tuple(view.ready[m].weight for m in members),
    )


def _can_finish(opening: Opening, view: View) -> bool:
    return view.failed is None and all(m in view.alive or m in view.votes for m in opening.members)


def _same_state(states: Mapping[str, str], expected: tuple[str, ...]) -> tuple[str, ...]:
    """The largest set of members that hold one state; members of the last round outweigh joiners."""
    by_state: dict[str, list[str]] = {}
    for member, state in sorted(states.items()):
        by_state.setdefault(state, []).append(member)
    if not by_state:
        return ()

    def rank(state: str) -> tuple[int, int, str]:
        group = by_state[state]
        return (-sum(m in expected for m in group), -len(group), group[0])

    return tuple(by_state[min(by_state, key=rank)])


def next_verdict(view: View, opening: Opening, payload: Mapping[str, Any]) -> Verdict | Wait | None:
    """The verdict that the votes call for; None where they contradict each other and the round must be opened again."""
    missing = tuple(m for m in opening.members if m not in view.votes)
    if missing:
        reason = f"{len(missing)} of {len(opening.members)} members have not voted on round {opening.round}"
        return Wait(reason, missing)
    digests = {view.votes[m] for m in opening.members}
    if len(digests) > 1:
        return None
    return Verdict(
        opening.round, opening.version, opening.epoch, opening.members, opening.weights, digests.pop(), dict(payload)
    )


def must_leave(view: View, member_id: str, round: int) -> Excluded | None:
    """Whether the run has gone on without this member, which stands at the boundary of `round`."""
    if view.committed is not None and view.committed.round >= round:
        return Excluded(f"round {view.committed.round} was committed while {member_id} stood before round {round}")
    opening = view.opening
    if opening is not None and opening.round == round and member_id in view.ready and member_id not in opening.members:
        expected = view.committed.members if view.committed is not None else ()
        if member_id in expected and member_id in view.alive:
            return Excluded(f"round {round} was opened without {member_id}: it was away, or its outer state differs")
    return None


def to_record(value: Ready | Opening | Verdict) -> dict[str, Any]:
    """A record as JSON-ready values."""
    return asdict(value)


def opening_from(record: Mapping[str, Any]) -> Opening:
    """The inverse of `to_record`."""
    return Opening(
        record["version"], record["epoch"], record["round"], tuple(record["members"]), tuple(record["weights"])
    )


def verdict_from(record: Mapping[str, Any]) -> Verdict:
    """The inverse of `to_record`."""
    return Verdict(
        record["round"],
        record["version"],
        record["epoch"],
        tuple(record["members"]),
        tuple(record["weights"]),
        record["digest"],
        record["payload"],
    )


def ready_from(record: Mapping[str, Any]) -> Ready:
    """The inverse of `to_record`."""
    return Ready(record["round"], record["weight"], record["state"])

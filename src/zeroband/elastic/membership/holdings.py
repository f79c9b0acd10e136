"""What each node has at its ckpt.path, as the nodes tell each other on their way into a run. Pure rules.

Two things follow: on which checkpoint those who resume begin, and which nodes see one folder, so that they write one
checkpoint between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from zeroband.config.ranges import Count, EachMember, Id, Number, Text
from zeroband.elastic.membership.records import Wait
from zeroband.errors import ConfigError
from zeroband.observe.view import node_id_of_member


@dataclass(frozen=True)
class Held:
    """A checkpoint that a node could begin with, as its manifest describes it."""

    step: Count
    round: Number
    state_digest: Id
    line: Id
    """The line of rounds that it is of, as `Progress.founding`."""
    after: Id = ""
    """The line whose state that one began with; empty: it began with the initial one."""
    is_own: bool = True
    """This run saved it; False: it is of the run that resume.path names."""


@dataclass(frozen=True)
class Holding:
    """What a node tells of itself."""

    resumes: bool = False
    """It may begin the run again on a checkpoint, and with it the others that are there."""
    held: Held | None = None
    """The newest one that it can read, or the one that was asked for."""
    problem: Text = ""
    """Why what it has cannot be taken, where that is all."""
    ordered: Count | None = None
    """The inner step that it was told to go on from; None: the newest."""
    mark: Id = ""
    """Name of a file that it has just made at its ckpt.path; empty: it has none, or cannot write there."""
    sees: EachMember[Id] = ()
    """Marks of other nodes that it found there, sorted."""


def newest(candidates: Iterable[Held]) -> Held | None:
    """Return the checkpoint from which the fewest rounds are lost; None where there is none.

    A line of rounds supersedes the one whose state it began with: what that one made later was left behind.
    """
    found = list(candidates)
    left_behind = {held.after for held in found if held.after != held.line}
    kept = [held for held in found if held.line not in left_behind] or found
    return max(kept, key=lambda held: (held.round, held.step, held.state_digest), default=None)


def ordered_step(told: Mapping[str, Holding]) -> int | None:
    """Return the step that a person named. Raises ConfigError where nodes were told different ones."""
    orders = {member: said.ordered for member, said in sorted(told.items()) if said.ordered is not None}
    if len(set(orders.values())) > 1:
        named = ", ".join(f"{node_id_of_member(member)} with step {step}" for member, step in orders.items())
        raise ConfigError(f"the nodes are told to resume differently: {named}; give all of them one --resume.step")
    return next(iter(orders.values()), None)


def choose(
    told: Mapping[str, Holding], alive: Collection[str], *, start_nodes: int, is_start_over: bool
) -> Held | Wait | None:
    """Return the checkpoint to begin the run on; None: no node has one that it can read.

    Every node that is there is heard first, and `start_nodes` of them; `is_start_over`: that took too long. The step
    that a person named comes first, then what this run saved, then the newest. Raises ConfigError as `ordered_step`.
    """
    heard = {member: said for member, said in told.items() if member in alive}
    silent = tuple(sorted(set(alive) - heard.keys()))
    if not is_start_over:
        if silent:
            return Wait(f"{len(silent)} of {len(alive)} nodes have not said which checkpoints they have", silent)
        if len(heard) < start_nodes:
            return Wait(f"{len(heard)} of {start_nodes} nodes are here (elastic.start_nodes)")
    step = ordered_step(heard)
    held = [said.held for said in heard.values() if said.held is not None]
    if step is not None:
        return newest(one for one in held if one.step == step)
    return newest(one for one in held if one.is_own) or newest(held)


def holders(told: Mapping[str, Holding], held: Held) -> tuple[str, ...]:
    """Return the members that have this checkpoint."""
    return tuple(sorted(m for m, said in told.items() if said.held is not None and is_same(said.held, held)))


def is_same(one: Held, other: Held) -> bool:
    """Whether two nodes have the same state, though perhaps files of their own."""
    return (one.step, one.state_digest) == (other.step, other.state_digest)


def why_none(told: Mapping[str, Holding]) -> str:
    """Say why no checkpoint can be taken; empty where no node has any, so that a new run may begin."""
    step, said = ordered_step(told), dict(sorted(told.items()))
    problems = [f"{node_id_of_member(member)}: {of.problem}" for member, of in said.items() if of.problem]
    if step is not None:
        return "; ".join([f"no node has a checkpoint of step {step} that can be taken (--resume.step)", *problems])
    return f"no node has a checkpoint that can be taken: {'; '.join(problems)}" if problems else ""


def together(own: str, told: Mapping[str, Holding]) -> frozenset[str]:
    """Return the members that see the same folder as this one, itself included.

    Of two, the one that looked later has seen the other's mark.
    """
    mine = told.get(own, Holding())
    others = {member: said for member, said in told.items() if said.mark and mine.mark}
    return frozenset({own, *(m for m, said in others.items() if said.mark in mine.sees or mine.mark in said.sees)})


def apart(own: str, told: Mapping[str, Holding]) -> frozenset[str]:
    """Return the members whose ckpt.path is another folder than this one's."""
    if not told.get(own, Holding()).mark:
        return frozenset()
    return frozenset(member for member, said in told.items() if said.mark) - together(own, told)

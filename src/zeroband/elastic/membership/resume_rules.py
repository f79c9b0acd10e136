"""How an abandoned run, or a joining node, starts from a checkpoint. Pure rules.

Nodes that resume at the same time must found one run, not several: the first names the checkpoint and the round, and
the store accepts no other proposal. Round numbers continue, so records of earlier rounds stay fenced. If a member of
the dead run turns out to be alive, the plan rules prefer it: its state is newer than any checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from zeroband.config.ranges import Count, EachMember, Id, Number, Text
from zeroband.elastic.membership.join_states import JoinEvent
from zeroband.elastic.membership.records import RestartPoint, View, Wait
from zeroband.errors import ConfigError
from zeroband.observe.view import node_id_of_member


def pending_restart(view: View) -> RestartPoint | None:
    """The agreement on a founding that is not committed yet; None while a member of the newest round lives.

    So a single member with the run's token cannot restart a living run.
    """
    point, committed = view.restart_point, view.committed
    if point is None or committed is None:
        return point
    is_newer = point.round > committed.round
    return point if is_newer and view.alive.isdisjoint(committed.members) else None


def restarts_with(view: View, round: int) -> bool:
    """Whether this round founds the run from a checkpoint."""
    restart_point = pending_restart(view)
    return restart_point is not None and restart_point.round == round


def members_of(view: View) -> frozenset[str]:
    """The members that could go on with the run, if they live."""
    plans = [view.plan] if view.committed is None else [view.plan, view.committed.plan]
    return frozenset(m for plan in plans if plan is not None for m in (*plan.members, *plan.late))


def is_abandoned(view: View) -> bool:
    """Whether no member that could go on with the run holds a lease."""
    return not members_of(view) & view.alive


def way_in(view: View, *, resumes: bool) -> JoinEvent | RestartPoint:
    """How a node that holds no state comes into the run: FOUND, JOIN, BEGIN or WAIT.

    A RestartPoint is one to take part in. `resumes`: the node may begin again on a checkpoint.
    """
    if view.is_settling:
        return JoinEvent.WAIT
    agreed = pending_restart(view)
    if agreed is not None and (agreed.member in view.alive or not resumes):
        return agreed if resumes else JoinEvent.JOIN
    if view.committed is None and view.plan is not None and view.plan.round > 0 and not is_abandoned(view):
        return JoinEvent.WAIT  # the store lost the newest verdict, and who holds it is there
    if view.committed is None:
        return JoinEvent.BEGIN if resumes else JoinEvent.FOUND
    return JoinEvent.BEGIN if resumes and is_abandoned(view) else JoinEvent.JOIN


def rounds_since(view: View, *, session: str, round: int) -> int | None:
    """How many rounds a joiner has to replay after a checkpoint of this session and round.

    None where they do not lead on from it: it is of another line of rounds, or no verdict is known.
    """
    committed = view.committed
    if committed is None or committed.session != session or committed.round < round:
        return None
    return committed.round - round


def begins_on_checkpoint(missed: int, *, entry_bytes: int, state_bytes: int) -> bool:
    """Whether a joiner fetches less with the newest checkpoint: the rounds since instead of the state.

    `entry_bytes`: of one of these rounds in the journal.
    """
    return missed * entry_bytes < state_bytes


def propose_restart(view: View, *, round: int, step: int, state_digest: str, member: str) -> RestartPoint:
    """The proposal to begin on a checkpoint that was saved after this round."""
    newest_checkpoint = -1 if view.committed is None else view.committed.round
    sessions = () if view.committed is None else view.committed.sessions
    return RestartPoint(max(newest_checkpoint, round) + 1, step, state_digest, member, sessions)


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


def newest_checkpoint(candidates: Iterable[Held]) -> Held | None:
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


def choose_checkpoint(
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
        return newest_checkpoint(one for one in held if one.step == step)
    return newest_checkpoint(one for one in held if one.is_own) or newest_checkpoint(held)


def holders(told: Mapping[str, Holding], held: Held) -> tuple[str, ...]:
    """Return the members that have this checkpoint."""
    return tuple(sorted(m for m, said in told.items() if said.held is not None and is_same_state(said.held, held)))


def is_same_state(one: Held, other: Held) -> bool:
    """Whether two nodes have the same state, though perhaps files of their own."""
    return (one.step, one.state_digest) == (other.step, other.state_digest)


def no_checkpoint_reason(told: Mapping[str, Holding]) -> str:
    """Say why no checkpoint can be taken; empty where no node has any, so that a new run may begin."""
    step, said = ordered_step(told), dict(sorted(told.items()))
    problems = [f"{node_id_of_member(member)}: {of.problem}" for member, of in said.items() if of.problem]
    if step is not None:
        return "; ".join([f"no node has a checkpoint of step {step} that can be taken (--resume.step)", *problems])
    return f"no node has a checkpoint that can be taken: {'; '.join(problems)}" if problems else ""


def same_folder(own: str, told: Mapping[str, Holding]) -> frozenset[str]:
    """Return the members that see the same folder as this one, itself included.

    Of two, the one that looked later has seen the other's mark.
    """
    mine = told.get(own, Holding())
    others = {member: said for member, said in told.items() if said.mark and mine.mark}
    return frozenset({own, *(m for m, said in others.items() if said.mark in mine.sees or mine.mark in said.sees)})


def other_folders(own: str, told: Mapping[str, Holding]) -> frozenset[str]:
    """Return the members whose ckpt.path is another folder than this one's."""
    if not told.get(own, Holding()).mark:
        return frozenset()
    return frozenset(member for member, said in told.items() if said.mark) - same_folder(own, told)

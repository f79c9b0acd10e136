"""How a run, or a joining node, starts from a checkpoint, and which nodes share a checkpoint folder. Pure rules.

Nodes that resume at the same time must bootstrap one run, not several: the first names the checkpoint and the round,
and the store accepts no other proposal. Round numbers continue, so records of earlier rounds stay fenced. If a member
of the dead run turns out to be alive, the plan rules prefer it: its state is newer than any checkpoint.

Joining nodes exchange reports on their `ckpt.path` (`Holding`). From these follow the checkpoint to resume from, and
which nodes share a folder and so write one checkpoint together.
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
    """Return the uncommitted agreement on a restart; None while a member of the newest round lives.

    Thus a single member with the run's token cannot restart a living run.
    """
    point, committed = view.restart_point, view.committed
    if point is None or committed is None:
        return point
    is_newer = point.round > committed.round
    return point if is_newer and view.alive.isdisjoint(committed.members) else None


def restarts_with(view: View, round: int) -> bool:
    """Whether this round bootstraps the run from a checkpoint."""
    restart_point = pending_restart(view)
    return restart_point is not None and restart_point.round == round


def members_of(view: View) -> frozenset[str]:
    """Return the members that could continue the run if they live."""
    plans = [view.plan] if view.committed is None else [view.plan, view.committed.plan]
    return frozenset(m for plan in plans if plan is not None for m in plan.listed)


def is_abandoned(view: View) -> bool:
    """Whether no member that could continue the run holds a lease."""
    return not members_of(view) & view.alive


def way_in(view: View, *, resumes: bool) -> JoinEvent | RestartPoint:
    """Choose how a node without state enters the run: FOUND, JOIN, BEGIN, WAIT, or a RestartPoint to take part in.

    `resumes`: the node may restart the run from a checkpoint.
    """
    if view.is_settling:
        return JoinEvent.WAIT
    agreed = pending_restart(view)
    if agreed is not None and (agreed.member in view.alive or not resumes):
        return agreed if resumes else JoinEvent.JOIN
    if view.committed is None and view.plan is not None and view.plan.round > 0 and not is_abandoned(view):
        return JoinEvent.WAIT  # the store lost the newest verdict; a living member will restore it
    if view.committed is None:
        return JoinEvent.BEGIN if resumes else JoinEvent.FOUND
    return JoinEvent.BEGIN if resumes and is_abandoned(view) else JoinEvent.JOIN


def rounds_since(view: View, *, session: str, round: int) -> int | None:
    """Return how many rounds a joiner must replay after a checkpoint of this session and round.

    None: the checkpoint belongs to another line of rounds, or there is no verdict.
    """
    committed = view.committed
    if committed is None or committed.session != session or committed.round < round:
        return None
    return committed.round - round


def begins_on_checkpoint(missed: int, *, entry_bytes: int, state_bytes: int) -> bool:
    """Whether a joiner fetches fewer bytes by replaying the rounds since the newest checkpoint than with the state.

    `entry_bytes`: size of one round in the journal.
    """
    return missed * entry_bytes < state_bytes


def propose_restart(view: View, *, round: int, step: int, state_digest: str, member: str) -> RestartPoint:
    """Propose to restart from a checkpoint that was saved after this round."""
    newest_checkpoint = -1 if view.committed is None else view.committed.round
    sessions = () if view.committed is None else view.committed.sessions
    return RestartPoint(max(newest_checkpoint, round) + 1, step, state_digest, member, sessions)


@dataclass(frozen=True)
class Held:
    """A checkpoint that a node could start from, as described by its manifest."""

    step: Count
    round: Number
    state_digest: Id
    line: Id
    """Its line of rounds (`Progress.founding`)."""
    after: Id = ""
    """Line whose state that line began with; empty: the initial state."""
    is_own: bool = True
    """Saved by this run; False: by the run at `resume.path`."""


@dataclass(frozen=True)
class Holding:
    """A joining node's report on its checkpoints."""

    resumes: bool = False
    """The node may restart the run from a checkpoint, together with the others present."""
    held: Held | None = None
    """The newest checkpoint that it can read, or the requested one."""
    problem: Text = ""
    """Why none of its checkpoints can be loaded; empty: one can, or it has none."""
    ordered: Count | None = None
    """Inner step requested by its user; None: the newest."""
    mark: Id = ""
    """Name of a file that it just created in its `ckpt.path`; empty: no path, or not writable."""
    sees: EachMember[Id] = ()
    """Other nodes' marks that it found there, sorted."""


def newest_checkpoint(candidates: Iterable[Held]) -> Held | None:
    """Return the checkpoint that loses the fewest rounds; None: there is none.

    A line of rounds supersedes the one whose state it began with, whatever that one committed later.
    """
    found = list(candidates)
    left_behind = {held.after for held in found if held.after != held.line}
    kept = [held for held in found if held.line not in left_behind] or found
    return max(kept, key=lambda held: (held.round, held.step, held.state_digest), default=None)


def ordered_step(reports: Mapping[str, Holding]) -> int | None:
    """Return the step requested by users. Raises ConfigError if nodes were told different steps."""
    orders = {member: report.ordered for member, report in sorted(reports.items()) if report.ordered is not None}
    if len(set(orders.values())) > 1:
        named = ", ".join(f"{node_id_of_member(member)} with step {step}" for member, step in orders.items())
        raise ConfigError(f"the nodes are told to resume differently: {named}; give all of them one --resume.step")
    return next(iter(orders.values()), None)


def choose_checkpoint(
    reports: Mapping[str, Holding], alive: Collection[str], *, start_nodes: int, is_start_over: bool
) -> Held | Wait | None:
    """Return the checkpoint to start the run from; None: no node has a readable one.

    Waits for the reports of all living nodes and of `start_nodes`, unless `is_start_over`. A requested step comes
    first, then this run's own checkpoints, then the newest. Raises ConfigError like `ordered_step`.
    """
    living = {member: report for member, report in reports.items() if member in alive}
    silent = tuple(sorted(set(alive) - living.keys()))
    if not is_start_over:
        if silent:
            return Wait(f"{len(silent)} of {len(alive)} nodes have not said which checkpoints they have", silent)
        if len(living) < start_nodes:
            return Wait(f"{len(living)} of {start_nodes} nodes are here (elastic.start_nodes)")
    step = ordered_step(living)
    held = [report.held for report in living.values() if report.held is not None]
    if step is not None:
        return newest_checkpoint(one for one in held if one.step == step)
    return newest_checkpoint(one for one in held if one.is_own) or newest_checkpoint(held)


def holders(reports: Mapping[str, Holding], held: Held) -> tuple[str, ...]:
    """Return the members that have this checkpoint."""
    return tuple(
        sorted(m for m, report in reports.items() if report.held is not None and is_same_state(report.held, held))
    )


def is_same_state(one: Held, other: Held) -> bool:
    """Whether two checkpoints hold the same state."""
    return (one.step, one.state_digest) == (other.step, other.state_digest)


def no_checkpoint_reason(reports: Mapping[str, Holding]) -> str:
    """Explain why no checkpoint can be loaded; empty if no node has any, so that a new run may begin."""
    step, report = ordered_step(reports), dict(sorted(reports.items()))
    problems = [f"{node_id_of_member(member)}: {of.problem}" for member, of in report.items() if of.problem]
    if step is not None:
        return "; ".join([f"no node has a checkpoint of step {step} that can be taken (--resume.step)", *problems])
    return f"no node has a checkpoint that can be taken: {'; '.join(problems)}" if problems else ""


def same_folder(own: str, reports: Mapping[str, Holding]) -> frozenset[str]:
    """Return the members that share this one's folder, including itself.

    Of two nodes that share one, at least the node that looked later sees the other's mark.
    """
    mine = reports.get(own, Holding())
    others = {member: report for member, report in reports.items() if report.mark and mine.mark}
    return frozenset(
        {own, *(m for m, report in others.items() if report.mark in mine.sees or mine.mark in report.sees)}
    )


def other_folders(own: str, reports: Mapping[str, Holding]) -> frozenset[str]:
    """Return the members whose `ckpt.path` is a different folder."""
    if not reports.get(own, Holding()).mark:
        return frozenset()
    return frozenset(member for member, report in reports.items() if report.mark) - same_folder(own, reports)

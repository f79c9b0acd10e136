"""How an abandoned run, or a joining node, starts from a checkpoint. Pure rules.

Nodes that resume at the same time must found one run, not several: the first names the checkpoint and the round, and
the store accepts no other proposal. Round numbers continue, so records of earlier rounds stay fenced. If a member of
the dead run turns out to be alive, the plan rules prefer it: its state is newer than any checkpoint.
"""

from __future__ import annotations

from zeroband.elastic.membership.join_states import JoinEvent
from zeroband.elastic.membership.records import RestartPoint, View


def pending(view: View) -> RestartPoint | None:
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
    restart_point = pending(view)
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
    agreed = pending(view)
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


def restart_point_after(view: View, *, round: int, step: int, state_digest: str, member: str) -> RestartPoint:
    """The proposal to begin on a checkpoint that was saved after this round."""
    newest = -1 if view.committed is None else view.committed.round
    sessions = () if view.committed is None else view.committed.sessions
    return RestartPoint(max(newest, round) + 1, step, state_digest, member, sessions)

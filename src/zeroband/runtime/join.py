"""How a node gets into a run: one loop that looks up a table until it is a member (`membership/join_states.py`).

Training nodes never wait for a joiner: it fetches a committed state, replays the rounds committed meanwhile, and takes
part in the next one with weight 0, which hands it the same result as everybody. This is the one place that tries
again to get in: whatever fails on the way is an event of the table.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.join_states import HOLDS_NOTHING, PAUSES, TABLE, JoinEvent, JoinState, next_state
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import (
    ConfigError,
    Fenced,
    Leaving,
    RecoveryFailed,
    RoundsMissed,
    RunOver,
    StoreLost,
    ZerobandError,
)
from zeroband.node.mesh import LocalMesh, broadcast_json
from zeroband.observe.events import Events

_RETRY_S = 0.5

_EVENT_OF: Mapping[type[ZerobandError], JoinEvent] = {
    RolledBack: JoinEvent.ROLLED_BACK,
    RoundsMissed: JoinEvent.MISSED,
    RecoveryFailed: JoinEvent.FAILED,
    RunOver: JoinEvent.RUN_OVER,
    Leaving: JoinEvent.LEAVING,
    ConfigError: JoinEvent.REFUSED,
    StoreLost: JoinEvent.STORE_LOST,
}


@dataclass(frozen=True)
class Outcome:
    """What came of a step on the way in."""

    event: JoinEvent
    cause: ZerobandError | None = None
    """What was raised, where that is the event."""
    rounds: Sequence[RoundReport] = ()
    """With which this node became a member; none where it has no others."""


class JoinSteps(Protocol):
    """What a node does on its way in. All local ranks call the methods together."""

    def take(self, state: JoinState, cause: ZerobandError | None) -> Outcome:
        """Do what a node does in this state. `cause`: the error that led to it, if one did. Raises ZerobandError."""
        ...

    def is_fenced(self) -> bool:
        """Whether the run went on without this node, so that its membership has ended."""
        ...


class Joiner:
    """Brings a node into its run, and back into it. All local ranks call the methods together."""

    def __init__(self, steps: JoinSteps, local: LocalMesh, departure: Departure, events: Events) -> None:
        self._steps = steps
        self._local = local
        self._departure = departure
        self._events = events
        self._since = ""
        self._said: dict[JoinState, str] = {}
        self._newest: tuple[JoinState, bool] | None = None
        """The state that was looked at last, and whether it was new."""

    def enter(self) -> Sequence[RoundReport]:
        """Found the run, or join it where others did. Returns the round with which this node became a member.

        That is none where a node trains without others. Raises ConfigError where another machine is in the run under
        this node's name, RecoveryFailed where it came no nearer to a state for too long, RunOver, Leaving, StoreLost.
        """
        return self._go(JoinState.OUTSIDE, Outcome(JoinEvent.STARTED))

    def come_back(self, why: Fenced | RolledBack) -> Sequence[RoundReport]:
        """Become a member again: the run went on without this node, or went back to a checkpoint. As `enter`."""
        event = JoinEvent.FENCED if isinstance(why, Fenced) else JoinEvent.ROLLED_BACK
        return self._go(JoinState.MEMBER, Outcome(event, why))

    def _go(self, state: JoinState, outcome: Outcome) -> Sequence[RoundReport]:
        self._since, self._said = f"{datetime.now(UTC):%H:%M:%SZ}", {}
        while True:
            state = next_state(state, outcome.event)
            self._say(state, outcome)
            if state is JoinState.MEMBER:
                return outcome.rounds
            if state is JoinState.ENDED:
                assert outcome.cause is not None, f"{outcome.event} without an error"
                raise outcome.cause
            if outcome.event in PAUSES:
                time.sleep(_RETRY_S)
            outcome = self._step(state, outcome.cause)

    def _step(self, state: JoinState, cause: ZerobandError | None) -> Outcome:
        """Take a step; what it raises is an outcome, too."""
        if state in HOLDS_NOTHING and broadcast_json(self._departure.is_asked, self._local):
            return Outcome(JoinEvent.LEAVING, Leaving("left as asked, before it was a member"))
        try:
            return self._steps.take(state, cause)
        except Fenced as fence:
            is_passed_over = JoinEvent.PASSED_OVER in TABLE[state] and not self._steps.is_fenced()
            return Outcome(JoinEvent.PASSED_OVER if is_passed_over else JoinEvent.FENCED, fence)
        except tuple(_EVENT_OF) as error:
            return Outcome(next(event for kind, event in _EVENT_OF.items() if isinstance(error, kind)), error)

    def _say(self, state: JoinState, outcome: Outcome) -> None:
        """Write an event for what is new, and for the state after it, so that the newest one is where the node stands.

        A state is new where it comes for the first time, or for another reason than at the last time.
        """
        why = f"{outcome.event}: {outcome.cause}" if outcome.cause is not None else str(outcome.event)
        is_new, before = self._said.get(state) != why, self._newest
        self._newest = state, is_new
        if is_new or (before is not None and before[1] and before[0] is not state):
            self._said[state] = why
            self._events.emit("join_state", state=str(state), why=why, since=self._since)

"""State machine of a joining node, as a table (state, event -> next state). Pure.

`runtime/join.py` does the work of each state. `python -m zeroband.elastic.membership.join_states` prints the diagram in
docs/architecture.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from enum import StrEnum


class JoinState(StrEnum):
    """State of a joining node."""

    OUTSIDE = "outside"
    WAIT_OLD_LEASE = "wait_old_lease"
    RESTORE_LOCAL = "restore_local"
    DISCOVER = "discover"
    PICK_CHECKPOINT = "pick_checkpoint"
    FOUNDING = "founding"
    FETCHING = "fetching"
    ANNOUNCING = "announcing"
    CATCHING_UP = "catching_up"
    REJOIN = "rejoin"
    ROLL_BACK = "roll_back"
    MEMBER = "member"
    ENDED = "ended"


DESCRIPTIONS: Mapping[JoinState, str] = {
    JoinState.OUTSIDE: "has not started",
    JoinState.WAIT_OLD_LEASE: "waits for the lease of an earlier process of this node to expire, if there is one",
    JoinState.RESTORE_LOCAL: "restores the state that a crashed trainer process left in shared memory",
    JoinState.DISCOVER: "reads the store to find out how to enter the run",
    JoinState.PICK_CHECKPOINT: "agrees with the other resuming nodes on one checkpoint, and loads it",
    JoinState.FOUNDING: "bootstraps the run: agrees with the other first nodes on the initial state",
    JoinState.FETCHING: "fetches a committed state from several members",
    JoinState.ANNOUNCING: "claims samples to train on; where every step is a round, takes part in the next one first",
    JoinState.CATCHING_UP: "replays the missed rounds from the members' journals",
    JoinState.REJOIN: "gives up its membership and becomes a new member",
    JoinState.ROLL_BACK: "loads the checkpoint that the members voted for",
    JoinState.MEMBER: "trains",
    JoinState.ENDED: "leaves the run, with the reason",
}
"""What a node does in each state."""


class JoinEvent(StrEnum):
    """Outcome of a state."""

    STARTED = "started"
    FREE = "no other lease"
    NOTHING = "there is none"
    RECALLED = "recalled"
    WAIT = "wait"
    AGAIN = "look again"
    FOUND = "found"
    JOIN = "join"
    FOLLOW = "follow"
    BEGIN = "begin"
    AGREED = "agreed"
    FOUNDED = "founded"
    PASSED_OVER = "others founded it"
    FETCHED = "fetched"
    ADMITTED = "admitted"
    MISSED = "rounds missed"
    CAUGHT_UP = "caught up"
    FENCED = "fenced"
    RETURNED = "another member"
    ROLLED_BACK = "the run goes back"
    GONE_BACK = "gone back"
    IDLE = "gone back, without samples"
    FAILED = "failed"
    RUN_OVER = "run over"
    LEAVING = "asked to leave"
    REFUSED = "refused"
    STORE_LOST = "store lost"


_S, _E = JoinState, JoinEvent

ENDINGS = frozenset({_E.RUN_OVER, _E.LEAVING, _E.REFUSED, _E.STORE_LOST})
"""Events that end the join from any of its states."""

_TABLE: Mapping[JoinState, Mapping[JoinEvent, JoinState]] = {
    _S.OUTSIDE: {_E.STARTED: _S.WAIT_OLD_LEASE},
    _S.WAIT_OLD_LEASE: {_E.FREE: _S.RESTORE_LOCAL},
    _S.RESTORE_LOCAL: {_E.NOTHING: _S.DISCOVER, _E.RECALLED: _S.ANNOUNCING, _E.FAILED: _S.DISCOVER},
    _S.DISCOVER: {
        _E.WAIT: _S.DISCOVER,
        _E.FOUND: _S.FOUNDING,
        _E.BEGIN: _S.PICK_CHECKPOINT,
        _E.JOIN: _S.FETCHING,
        _E.FOLLOW: _S.FETCHING,
        _E.FAILED: _S.ENDED,
    },
    _S.PICK_CHECKPOINT: {
        _E.WAIT: _S.PICK_CHECKPOINT,
        _E.AGAIN: _S.PICK_CHECKPOINT,
        _E.AGREED: _S.FOUNDING,
        _E.NOTHING: _S.FOUNDING,
        _E.JOIN: _S.FETCHING,
        _E.FAILED: _S.ENDED,
    },
    _S.FOUNDING: {_E.FOUNDED: _S.MEMBER, _E.PASSED_OVER: _S.FETCHING, _E.FENCED: _S.REJOIN},
    _S.FETCHING: {_E.FETCHED: _S.ANNOUNCING, _E.FAILED: _S.DISCOVER},
    _S.ANNOUNCING: {
        _E.ADMITTED: _S.MEMBER,
        _E.WAIT: _S.ANNOUNCING,
        _E.MISSED: _S.CATCHING_UP,
        _E.FENCED: _S.REJOIN,
        _E.ROLLED_BACK: _S.ROLL_BACK,
    },
    _S.CATCHING_UP: {_E.CAUGHT_UP: _S.ANNOUNCING, _E.FAILED: _S.DISCOVER},
    _S.REJOIN: {_E.RETURNED: _S.WAIT_OLD_LEASE},
    _S.ROLL_BACK: {_E.GONE_BACK: _S.MEMBER, _E.IDLE: _S.ANNOUNCING, _E.FAILED: _S.DISCOVER},
    _S.MEMBER: {_E.FENCED: _S.REJOIN, _E.ROLLED_BACK: _S.ROLL_BACK},
    _S.ENDED: {},
}

_NOT_JOINING = frozenset({_S.OUTSIDE, _S.MEMBER, _S.ENDED})

TABLE: Mapping[JoinState, Mapping[JoinEvent, JoinState]] = {
    state: dict(row) if state in _NOT_JOINING else row | dict.fromkeys(sorted(ENDINGS), _S.ENDED)
    for state, row in _TABLE.items()
}
"""Next state for every state and event; other pairs cannot happen."""

PAUSES = frozenset({_E.WAIT, _E.FAILED})
"""Events after which a node pauses before it retries."""

STATELESS = frozenset({_S.DISCOVER, _S.PICK_CHECKPOINT, _S.FETCHING})
"""States in which a node holds nothing that the run needs: asked to leave, it leaves at once."""


def next_state(state: JoinState, event: JoinEvent) -> JoinState:
    """Look up the next state. Raises KeyError for an event that cannot happen in this one."""
    row = TABLE[state]
    if event not in row:
        raise KeyError(f"`{event}` cannot happen to a node that is {state}")
    return row[event]


class JoinTimeouts:
    """Deadline of a join that fails without progress. Times are monotonic seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._failing_since_s = math.inf

    def progressed(self) -> None:
        """Reset the deadline after progress."""
        self._failing_since_s = math.inf

    def failed(self, now_s: float) -> None:
        """Start the deadline at the first failure since the last progress."""
        self._failing_since_s = min(self._failing_since_s, now_s)

    def left_s(self, now_s: float) -> float:
        """Remaining time; 0 or less: give up."""
        return min(self._failing_since_s + self.timeout_s - now_s, self.timeout_s)


def diagram() -> str:
    """Render the states as a Mermaid diagram and a table."""
    inside, outside = list[str](), [f"way --> {_S.ENDED}: {', '.join(sorted(ENDINGS))}"]
    for state, row in _TABLE.items():
        for follower in dict.fromkeys(row.values()):
            events = ", ".join(event for event, after in row.items() if after is follower)
            arrow = f"{'[*]' if state is _S.OUTSIDE else state} --> {follower}: {events}"
            is_inside = follower not in _NOT_JOINING and state is not _S.MEMBER
            inside += [arrow] if is_inside else []
            outside += [] if is_inside else [arrow]
    chart = ['state "on its way in" as way {', *(f"  {line}" for line in inside), "}", *outside]
    table = [f"| {state} | {text} |" for state, text in DESCRIPTIONS.items() if state is not _S.OUTSIDE]
    head = ["", "| state | what the node does |", "|---|---|"]
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"  {line}" for line in chart), "```", *head, *table]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(diagram())

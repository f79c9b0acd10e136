"""The loop that gets a node into its run: what becomes of each outcome, what is said, when it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.join_states import JoinEvent, JoinState
from zeroband.elastic.rounds.rollback import RolledBack
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
from zeroband.node.mesh import LocalMesh
from zeroband.runtime.join import Joiner, JoinOutcome

S, E = JoinState, JoinEvent
REPORT: Any = SimpleNamespace(round=7)
ADMITTED = JoinOutcome(E.ADMITTED, rounds=(REPORT,))
ENTERS = [
    (S.WAIT_OLD_LEASE, JoinOutcome(E.FREE)),
    (S.RESTORE_LOCAL, JoinOutcome(E.NOTHING)),
    (S.DISCOVER, JoinOutcome(E.JOIN)),
]
FETCHES = [(S.FETCHING, JoinOutcome(E.FETCHED)), (S.ANNOUNCING, ADMITTED)]


class Script:
    """Steps that come to what was written down, in this order."""

    def __init__(self, *acts: tuple[JoinState, JoinOutcome | ZerobandError], is_fenced: bool = False) -> None:
        self._acts = list(acts)
        self._is_fenced = is_fenced
        self.causes: list[str] = []

    def take(self, state: JoinState, cause: ZerobandError | None) -> JoinOutcome:
        expected, came = self._acts.pop(0)
        assert state is expected
        self.causes.append(str(cause) if cause else "")
        if isinstance(came, ZerobandError):
            raise came
        return came

    def is_fenced(self) -> bool:
        return self._is_fenced


class Way:
    """A joiner with such steps, on fake time."""

    def __init__(self, local: LocalMesh, steps: Any) -> None:
        self.departure = Departure(1.0)
        self.told: list[dict[str, Any]] = []
        events: Any = SimpleNamespace(emit=lambda kind, **fields: self.told.append({"kind": kind, **fields}))
        self.joiner = Joiner(steps, local, self.departure, events)

    @property
    def states(self) -> list[str]:
        return [event["state"] for event in self.told]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr("zeroband.runtime.join.time", SimpleNamespace(sleep=slept.append))
    return slept


def test_node_that_joins_goes_from_state_to_state_and_says_each(local: LocalMesh, pauses: list[float]) -> None:
    way = Way(local, Script(*ENTERS, *FETCHES))
    assert way.joiner.enter() == (REPORT,)
    assert way.states == ["wait_old_lease", "restore_local", "discover", "fetching", "announcing", "member"]
    assert [event["why"] for event in way.told][3:] == ["join", "fetched", "admitted"]
    assert len({event["since"] for event in way.told}) == 1 and pauses == []


def test_node_waits_where_there_is_nothing_to_do_yet_and_says_so_once(local: LocalMesh, pauses: list[float]) -> None:
    waits = [(S.DISCOVER, JoinOutcome(E.WAIT))] * 3
    founds = [(S.DISCOVER, JoinOutcome(E.FOUND)), (S.FOUNDING, JoinOutcome(E.FOUNDED))]
    way = Way(local, Script(*ENTERS[:2], *waits, *founds))
    assert way.joiner.enter() == ()
    assert pauses == [0.5] * 3
    assert way.states == ["wait_old_lease", "restore_local", "discover", "discover", "founding", "member"]


def test_rounds_that_were_missed_are_caught_up_with_and_the_node_announces_itself_again(local: LocalMesh) -> None:
    missed = [(S.ANNOUNCING, RoundsMissed(9)), (S.CATCHING_UP, JoinOutcome(E.CAUGHT_UP)), (S.ANNOUNCING, ADMITTED)]
    steps = Script(*ENTERS, FETCHES[0], *missed)
    assert Way(local, steps).joiner.enter() == (REPORT,)
    assert steps.causes[-2:] == ["round 9 was committed without this node", ""]


def test_state_is_fetched_again_where_nobody_keeps_the_missed_rounds(local: LocalMesh, pauses: list[float]) -> None:
    missed = [(S.ANNOUNCING, RoundsMissed(9)), (S.CATCHING_UP, RecoveryFailed("nobody keeps round 8"))]
    steps = Script(*ENTERS, FETCHES[0], *missed, ENTERS[2], *FETCHES)
    assert Way(local, steps).joiner.enter() == (REPORT,)
    assert steps.causes[6] == "nobody keeps round 8" and pauses == [0.5]


def test_failure_that_comes_again_and_again_is_said_once(local: LocalMesh) -> None:
    fails = [ENTERS[2], (S.FETCHING, RecoveryFailed("no member is alive"))]
    way = Way(local, Script(*ENTERS[:2], *fails, *fails, *fails, ENTERS[2], *FETCHES))
    way.joiner.enter()
    assert way.states[2:] == ["discover", "fetching", "discover", "fetching", "announcing", "member"]
    assert way.told[4]["why"] == "failed: no member is alive"


@pytest.mark.parametrize("is_fenced", [True, False])
def test_founder_without_whom_the_run_began_joins_it_or_comes_back(local: LocalMesh, is_fenced: bool) -> None:
    founds = [(S.DISCOVER, JoinOutcome(E.FOUND)), (S.FOUNDING, Fenced("2 others founded the run"))]
    back = [(S.REJOIN, JoinOutcome(E.RETURNED)), *ENTERS] if is_fenced else []
    way = Way(local, Script(*ENTERS[:2], *founds, *back, *FETCHES, is_fenced=is_fenced))
    assert way.joiner.enter() == (REPORT,)
    assert ("rejoin" in way.states) == is_fenced


def test_joiner_that_is_left_behind_in_the_rounds_it_closes_with_comes_back(local: LocalMesh) -> None:
    """It was admitted, and late for a closing round that nobody keeps; its lease is still its own."""
    late = (S.ANNOUNCING, Fenced("this node was late and cannot catch up"))
    steps = Script(*ENTERS, FETCHES[0], late, (S.REJOIN, JoinOutcome(E.RETURNED)), *ENTERS, *FETCHES)
    assert Way(local, steps).joiner.enter() == (REPORT,)


def test_member_that_was_fenced_becomes_another_one(local: LocalMesh) -> None:
    steps = Script((S.REJOIN, JoinOutcome(E.RETURNED)), *ENTERS, *FETCHES)
    assert Way(local, steps).joiner.rejoin(Fenced("its lease ran out")) == (REPORT,)
    assert steps.causes[0] == "its lease ran out"


@pytest.mark.parametrize("is_idle", [True, False])
def test_member_goes_back_with_the_run_and_joins_a_round_where_it_has_no_samples(
    local: LocalMesh, is_idle: bool
) -> None:
    announces = [(S.ROLL_BACK, JoinOutcome(E.IDLE)), (S.ANNOUNCING, ADMITTED)]
    trains_on = [(S.ROLL_BACK, JoinOutcome(E.GONE_BACK, rounds=(REPORT,)))]
    steps = Script(*(announces if is_idle else trains_on))
    assert Way(local, steps).joiner.rejoin(RolledBack(4, REPORT, {})) == (REPORT,)


def test_joiner_goes_back_with_the_run_that_it_is_about_to_enter(local: LocalMesh) -> None:
    goes_back = [(S.ANNOUNCING, RolledBack(4, REPORT, {})), (S.ROLL_BACK, JoinOutcome(E.GONE_BACK, rounds=(REPORT,)))]
    assert Way(local, Script(*ENTERS, FETCHES[0], *goes_back)).joiner.enter() == (REPORT,)


@pytest.mark.parametrize(
    "error",
    [ConfigError("another machine has this name"), RunOver("over"), StoreLost("silent"), Leaving("asked to leave")],
)
def test_way_ends_with_the_error_that_nobody_can_do_anything_about(local: LocalMesh, error: ZerobandError) -> None:
    way = Way(local, Script((S.WAIT_OLD_LEASE, error)))
    with pytest.raises(type(error), match=str(error)):
        way.joiner.enter()
    assert way.states == ["wait_old_lease", "ended"]


def test_way_ends_where_looking_for_another_one_fails(local: LocalMesh) -> None:
    with pytest.raises(RecoveryFailed, match="came no further"):
        Way(local, Script(*ENTERS[:2], (S.DISCOVER, RecoveryFailed("came no further")))).joiner.enter()


def test_joiner_that_is_asked_to_leave_does_so_before_it_fetches(local: LocalMesh) -> None:
    way = Way(local, Script(*ENTERS))
    way.departure.drain()
    with pytest.raises(Leaving, match="before it was a member"):
        way.joiner.enter()
    assert way.states == ["wait_old_lease", "restore_local", "discover", "ended"]


def test_node_that_holds_a_state_enters_with_it_although_it_is_asked_to_leave(local: LocalMesh) -> None:
    way = Way(local, Script(ENTERS[0], (S.RESTORE_LOCAL, JoinOutcome(E.RECALLED)), (S.ANNOUNCING, ADMITTED)))
    way.departure.drain()
    assert way.joiner.enter() == (REPORT,)


def test_error_of_our_own_making_is_not_taken_for_an_outcome(local: LocalMesh) -> None:
    with pytest.raises(KeyError, match="`rounds missed` cannot happen to a node that is wait_old_lease"):
        Way(local, Script((S.WAIT_OLD_LEASE, RoundsMissed(1)))).joiner.enter()

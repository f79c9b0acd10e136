from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.data.ledger import Ledger, Range, holes
from zeroband.elastic.membership.records import to_record
from zeroband.observe.events import EventLog
from zeroband.tools.data.audit import AuditedRound, audit, main

A, B, C = "a#1", "b#1", "c#1"


def run_of(
    deaths: Mapping[int, str],
    rounds: int = 6,
    each: int = 10,
    late: Mapping[int, str] = MappingProxyType({}),
    unused: Mapping[int, int] = MappingProxyType({}),
) -> list[AuditedRound]:
    """Rounds of two members as the rules make them.

    `deaths[r]` does not contribute to round r; `late[r]` neither, but keeps its samples; `unused[r]`: samples that each
    member did not come to in round r.
    """
    assigned, ledger = Ledger().allocate({A: each, B: each})
    history = [AuditedRound(0, {}, ledger, assigned)]
    for number in range(1, rounds):
        absent = (deaths.get(number), late.get(number))
        used = {member: each - unused.get(number, 0) for member in (A, B) if member not in absent}
        kept = {member: spans for member, spans in assigned.items() if member == late.get(number)}
        ledger = ledger.settle(assigned, used, kept)
        dealt, ledger = ledger.allocate({member: each for member in (A, B) if member not in kept})
        assigned = {**dealt, **kept}
        history.append(AuditedRound(number, used, ledger, assigned))
    return history


def test_audit_is_exact_where_nobody_is_lost() -> None:
    result = audit(run_of({}))
    assert result.is_exact
    assert (result.trained, result.owed) == (100, 20)


def test_audit_is_exact_where_a_lost_node_s_samples_are_trained_by_others() -> None:
    result = audit(run_of({2: A, 4: B}))
    assert result.is_exact
    assert (result.trained, result.owed) == (80, 20)


def test_audit_is_exact_where_a_member_contributes_that_was_dealt_nothing() -> None:
    rounds = run_of({})
    rounds[3] = replace(rounds[3], used={**rounds[3].used, C: 10})
    assert audit(rounds) == audit(run_of({}))


def test_audit_is_exact_where_members_use_a_part_of_their_samples() -> None:
    result = audit(run_of({3: B}, unused={1: 3, 2: 9, 3: 10}))
    assert result.is_exact
    assert (result.trained, result.owed) == (14 + 2 + 0 + 20 + 20, 20)


def test_audit_is_exact_where_a_late_member_contributes_later() -> None:
    history = run_of({}, late={2: B, 3: B})
    assert history[4].used == {A: 10, B: 10} and history[3].assigned[B] == history[1].assigned[B]
    result = audit(history)
    assert result.is_exact
    assert (result.trained, result.owed) == (80, 20)


def test_audit_is_exact_where_a_late_member_never_came() -> None:
    result = audit(run_of({4: B, 5: B}, late={2: B, 3: B}))
    assert result.is_exact
    assert (result.trained, result.owed) == (60, 20)


def test_audit_names_samples_that_were_dealt_to_others_while_a_late_member_kept_them() -> None:
    history = run_of({}, late={2: B})
    history[2] = replace(history[2], assigned={**history[2].assigned, A: history[2].assigned[B]})
    result = audit(history)
    assert result.repeated == ((30, 40),)
    assert result.skipped == ((40, 50),)


def test_audit_names_samples_that_were_not_used_and_not_returned() -> None:
    history = run_of({})
    history[2] = replace(history[2], used={A: 10, B: 4})
    result = audit(history)
    assert result.skipped == ((34, 40),)
    assert not result.is_exact


def test_audit_names_samples_that_were_handed_out_twice() -> None:
    history = run_of({})
    stolen: dict[str, tuple[Range, ...]] = {A: ((0, 10),), B: history[2].assigned[B]}
    history[2] = replace(history[2], assigned=stolen)
    result = audit(history)
    assert result.repeated == ((0, 10),)
    assert result.skipped == ((40, 50),)
    assert not result.is_exact


def test_audit_names_rounds_that_nobody_recorded() -> None:
    history = run_of({})
    result = audit([record for record in history if record.round != 3])
    assert result.missing_rounds == (3,)
    assert not result.is_exact


def emit(log: EventLog, record: AuditedRound) -> None:
    progress = {
        "ledger": to_record(record.ledger),
        "assigned": {member: [list(span) for span in spans] for member, spans in record.assigned.items()},
    }
    log.emit(
        "round_committed",
        round=record.round,
        epoch=1,
        members=[A, B],
        digest="d",
        weights=[int(member in record.used) for member in (A, B)],
        samples=[record.used.get(member, 10) for member in (A, B)],  # whether or not its update counted
        late=[],
        progress=progress,
    )


def test_command_reads_what_several_nodes_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = EventLog(tmp_path / "run" / "a"), EventLog(tmp_path / "run" / "b")
    for record in run_of({3: B}, unused={2: 4}):
        if record.round < 4:
            emit(first, record)
        if record.round > 1:
            emit(second, record)
    assert main(["audit", str(tmp_path / "run")]) == 0
    assert "samples repeated   0" in capsys.readouterr().out


def test_command_refuses_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_command_fails_where_no_sample_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emit(EventLog(tmp_path / "run" / "a"), run_of({})[0])
    assert main(["audit", str(tmp_path / "run")]) == 2
    assert "trained no samples, so there is nothing to audit" in capsys.readouterr().err


# -- runs that began again --------------------------------------------------------------------------------------------


def again(history: list[AuditedRound], after: int, *, gap: int = 0, name: str = "again") -> list[AuditedRound]:
    """Three rounds of one member, on the state of a round of this history; `gap`: numbers that nobody used."""
    start, begin = history[after], history[-1].round + 1 + gap
    ledger = start.ledger.settle(start.assigned, {})
    assigned, ledger = ledger.allocate({C: 20})
    line = [AuditedRound(begin, {}, ledger, assigned)]
    for number in range(begin + 1, begin + 3):
        ledger = ledger.settle(assigned, {C: 15})
        assigned, ledger = ledger.allocate({C: 20})
        line.append(AuditedRound(number, {C: 15}, ledger, assigned))
    follows = (start.founding, after)
    return [replace(r, founding=name, follows=follows, at_s=1.0 + r.round) for r in line]


@pytest.mark.parametrize("after", [0, 2, 5])
@pytest.mark.parametrize("gap", [0, 3])
def test_audit_is_exact_where_a_run_began_again_on_an_earlier_state(after: int, gap: int) -> None:
    history = run_of({2: A})
    result = audit([*history, *again(history, after, gap=gap)])
    assert result.is_exact, result
    assert result.trained == sum(sum(r.used.values()) for r in history[: after + 1]) + 30


def test_audit_takes_the_newest_of_two_lines_on_one_state() -> None:
    history = run_of({})
    dead = again(history, 3, name="dead")
    newest = [replace(r, at_s=100.0 + r.round) for r in again(history, 3, gap=1, name="newest")]
    result = audit([*newest, *dead, *history])
    assert result.is_exact and result.trained == 60 + 30


def test_audit_of_a_run_that_began_on_the_state_of_another_trusts_that_one() -> None:
    result = audit(again(run_of({}), 3))
    assert result.is_exact and result.trained == 60 + 30


def test_audit_shows_a_line_that_repeats_what_it_inherited() -> None:
    history = run_of({})
    line = again(history, 3)
    line[0] = replace(line[0], assigned={C: ((0, 20),)}, ledger=Ledger(80, ((60, 80),)))
    assert not audit([*history, *line]).is_exact


def test_audit_names_rounds_of_an_earlier_line_that_nobody_recorded() -> None:
    history = run_of({})
    result = audit([*(r for r in history if r.round != 2), *again(history, 3)])
    assert result.missing_rounds == (2,)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8), st.integers(0, 30))
def test_holes_are_what_the_ranges_leave(spans: list[tuple[int, int]], end: int) -> None:
    ranges = [(start, start + length) for start, length in spans if length]
    found = holes(ranges, end)
    left = set(range(end)) - {n for start, stop in ranges for n in range(start, stop)}
    assert [n for start, stop in found for n in range(start, stop)] == sorted(left)
    assert all(start < stop for start, stop in found)
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))


def test_samples_that_a_rollback_left_out_on_purpose_are_not_skipped() -> None:
    history = run_of({})
    last = replace(history[-1], ledger=Ledger(200, history[-1].ledger.returned))
    assert audit([*history[:-1], last]).skipped == ((120, 200),)
    assert audit([*history[:-1], last], [(120, 200)]).is_exact
    assert audit([*history[:-1], last], [(130, 180)]).skipped == ((120, 130), (180, 200))

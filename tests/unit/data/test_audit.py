from pathlib import Path

import pytest

from zeroband.data.audit import CommittedRound, audit, main
from zeroband.data.ledger import Ledger, Range
from zeroband.observe.events import EventLog

A, B = "a#1", "b#1"


def run_of(deaths: dict[int, str], rounds: int = 6, each: int = 10) -> list[CommittedRound]:
    """Rounds of two members as the rules make them; `deaths[r]` does not contribute to round r."""
    assigned, ledger = Ledger().allocate((A, B), each)
    history = [CommittedRound(0, frozenset(), ledger, assigned)]
    for number in range(1, rounds):
        contributors = frozenset({A, B} - {deaths.get(number, "")})
        assigned, ledger = ledger.settle(assigned, contributors).allocate((A, B), each)
        history.append(CommittedRound(number, contributors, ledger, assigned))
    return history


def test_audit_is_exact_where_nobody_is_lost() -> None:
    result = audit(run_of({}))
    assert result.is_exact
    assert (result.trained, result.owed) == (100, 20)


def test_audit_is_exact_where_a_lost_node_s_samples_are_trained_by_others() -> None:
    result = audit(run_of({2: A, 4: B}))
    assert result.is_exact
    assert (result.trained, result.owed) == (80, 20)


def test_audit_names_samples_that_were_handed_out_twice() -> None:
    history = run_of({})
    stolen: dict[str, tuple[Range, ...]] = {A: ((0, 10),), B: history[2].assigned[B]}
    history[2] = CommittedRound(2, history[2].contributors, history[2].ledger, stolen)
    result = audit(history)
    assert result.repeated == ((0, 10),)
    assert result.skipped == ((40, 50),)
    assert not result.is_exact


def test_audit_names_rounds_that_nobody_recorded() -> None:
    history = run_of({})
    result = audit([record for record in history if record.round != 3])
    assert result.missing_rounds == (3,)
    assert not result.is_exact


def emit(log: EventLog, record: CommittedRound) -> None:
    progress = {
        "ledger": record.ledger.to_json(),
        "assigned": {member: [list(span) for span in spans] for member, spans in record.assigned.items()},
    }
    weights = [int(member in record.contributors) for member in (A, B)]
    log.emit(
        "round_committed",
        round=record.round,
        epoch=1,
        members=[A, B],
        digest="d",
        weights=weights,
        progress=progress,
    )


def test_command_reads_what_several_nodes_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = EventLog(tmp_path / "run" / "a"), EventLog(tmp_path / "run" / "b")
    for record in run_of({3: B}):
        if record.round < 4:
            emit(first, record)
        if record.round > 1:
            emit(second, record)
    assert main(["audit", str(tmp_path / "run")]) == 0
    assert "samples repeated   0" in capsys.readouterr().out


def test_command_refuses_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err

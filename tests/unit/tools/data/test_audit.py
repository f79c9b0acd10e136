from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.data.ledger import SHARED, allocate, holes, settle
from zeroband.elastic.membership.records import to_record
from zeroband.observe.events import EventLog
from zeroband.tools.data import command
from zeroband.tools.data.audit import Account, AuditedRound, audit, main, read_left_out, read_rounds

A, B, C = "a#1", "b#1", "c#1"
COMMON = {A: SHARED, B: SHARED, C: SHARED}
OWN = {A: "a/1", B: "b/2", C: "c/3"}
"""The corpus of each member, where all share one, and where each has its own."""


def run_of(
    deaths: Mapping[int, str],
    rounds: int = 6,
    each: int = 10,
    late: Mapping[int, str] = MappingProxyType({}),
    unused: Mapping[int, int] = MappingProxyType({}),
    corpora: Mapping[str, str] = MappingProxyType(COMMON),
) -> list[AuditedRound]:
    """Rounds of two members as the rules make them.

    `deaths[r]` does not contribute to round r; `late[r]` neither, but keeps its samples; `unused[r]`: samples that each
    member did not come to in round r.
    """
    ledgers = allocate({}, {A: each, B: each}, corpora)
    history = [AuditedRound(0, {}, ledgers)]
    for number in range(1, rounds):
        absent = (deaths.get(number), late.get(number))
        used = {member: each - unused.get(number, 0) for member in (A, B) if member not in absent}
        held = history[-1].ledgers.values()
        kept = {m: spans for ledger in held for m, spans in ledger.assigned.items() if m == late.get(number)}
        wanted = {member: each for member in (A, B) if member not in kept}
        ledgers = allocate(settle(ledgers, used, kept), wanted, corpora)
        history.append(AuditedRound(number, used, ledgers))
    return history


def having(record: AuditedRound, corpus: str = SHARED, **changes: object) -> AuditedRound:
    """The round as if the ledger of a corpus had been another."""
    changed: Any = copy(record.ledgers[corpus])
    for name, value in changes.items():
        object.__setattr__(changed, name, value)  # past its own checks, as in a file that was damaged
    return replace(record, ledgers={**record.ledgers, corpus: changed})


EXACT = {
    "no member is lost": (run_of({}), 100),
    "others train what a lost node had": (run_of({2: A, 4: B}), 80),
    "members use a part of their samples": (run_of({3: B}, unused={1: 3, 2: 9, 3: 10}), 14 + 2 + 0 + 20 + 20),
    "a late member contributes later": (run_of({}, late={2: B, 3: B}), 80),
    "a late member never came": (run_of({4: B, 5: B}, late={2: B, 3: B}), 60),
}


@pytest.mark.parametrize("case", EXACT)
def test_audit_is_exact_where(case: str) -> None:
    rounds, trained = EXACT[case]
    result = audit(rounds)
    assert result.is_exact and result.accounts == {SHARED: Account(trained=trained, owed=20)}
    assert result.rounds == 5  # of numbers 0 to 5: the founding trains nothing
    dealt_nothing = [*rounds[:3], replace(rounds[3], used={**rounds[3].used, C: 10}), *rounds[4:]]
    assert audit(dealt_nothing) == result, "a member that was dealt nothing contributes"


def test_late_member_keeps_its_samples() -> None:
    history, _ = EXACT["a late member contributes later"]
    assert history[4].used == {A: 10, B: 10}
    assert history[3].ledgers[SHARED].assigned[B] == history[1].ledgers[SHARED].assigned[B]


def test_audit_names_what_is_repeated_skipped_and_unknown() -> None:
    history, late = run_of({}), run_of({}, late={2: B})
    held, dealt = late[2].ledgers[SHARED].assigned, history[2].ledgers[SHARED].assigned
    for rounds, changed, repeated, skipped in (
        (late, having(late[2], assigned={**held, A: held[B]}), ((30, 40),), ((40, 50),)),  # dealt on while it was kept
        (history, replace(history[2], used={A: 10, B: 4}), (), ((34, 40),)),  # neither used nor returned
        (history, having(history[2], assigned={A: ((0, 10),), B: dealt[B]}), ((0, 10),), ((40, 50),)),  # dealt twice
    ):
        result = audit([*rounds[:2], changed, *rounds[3:]])
        assert (result.accounts[SHARED].repeated, result.accounts[SHARED].skipped) == (repeated, skipped)
        assert not result.is_exact
    result = audit([record for record in history if record.round != 3])
    assert result.missing_rounds == (3,) and not result.is_exact


def emit(log: EventLog, record: AuditedRound, progress: object = None) -> None:
    progress = progress or {"ledgers": {corpus: to_record(ledger) for corpus, ledger in record.ledgers.items()}}
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
    assert command.main(["audit", str(tmp_path / "run")]) == 0
    assert "samples repeated   0" in capsys.readouterr().out


def test_command_refuses_a_folder_without_a_run_or_a_trained_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    emit(EventLog(tmp_path / "run" / "a"), run_of({})[0])
    assert main([str(tmp_path / "run")]) == 2
    assert "trained no samples, so there is nothing to audit" in capsys.readouterr().err


# -- runs that began again --------------------------------------------------------------------------------------------


def again(
    history: list[AuditedRound],
    after: int,
    *,
    gap: int = 0,
    name: str = "again",
    corpora: Mapping[str, str] = MappingProxyType(COMMON),
) -> list[AuditedRound]:
    """Three rounds of one member, on the state of a round of this history; `gap`: numbers that nobody used."""
    start, begin = history[after], history[-1].round + 1 + gap
    ledgers = allocate(settle(start.ledgers, {}, {}), {C: 20}, corpora)
    line = [AuditedRound(begin, {}, ledgers)]
    for number in range(begin + 1, begin + 3):
        ledgers = allocate(settle(ledgers, {C: 15}, {}), {C: 20}, corpora)
        line.append(AuditedRound(number, {C: 15}, ledgers))
    follows = (start.founding, after)
    return [replace(r, founding=name, follows=follows, at_s=1.0 + r.round) for r in line]


@pytest.mark.parametrize("after", [0, 2, 5])
@pytest.mark.parametrize("gap", [0, 3])
def test_audit_is_exact_where_a_run_began_again_on_an_earlier_state(after: int, gap: int) -> None:
    history = run_of({2: A})
    result = audit([*history, *again(history, after, gap=gap)])
    assert result.is_exact, result
    assert result.trained == sum(sum(r.used.values()) for r in history[: after + 1]) + 30


def test_audit_follows_the_newest_line_and_what_it_inherited() -> None:
    history = run_of({})
    newest = [replace(r, at_s=100.0 + r.round) for r in again(history, 3, gap=1, name="newest")]
    for rounds in (
        [*newest, *again(history, 3, name="dead"), *history],
        again(history, 3),  # on the state of another run, of which nothing is recorded
    ):
        result = audit(rounds)
        assert result.is_exact and result.trained == 60 + 30
    line = again(history, 3)
    line[0] = having(line[0], next=80, returned=((60, 80),), assigned={C: ((0, 20),)})
    assert not audit([*history, *line]).is_exact, "it repeats what it inherited"
    assert audit([*(r for r in history if r.round != 2), *again(history, 3)]).missing_rounds == (2,)


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
    rounds = [*history[:-1], having(history[-1], next=200)]
    assert audit(rounds).accounts[SHARED].skipped == ((120, 200),)
    assert audit(rounds, {SHARED: [(120, 200)]}).is_exact
    assert audit(rounds, {SHARED: [(130, 180)]}).accounts[SHARED].skipped == ((120, 130), (180, 200))


# -- private data -----------------------------------------------------------------------------------------------------


def test_audit_counts_the_documents_of_each_node_by_themselves() -> None:
    result = audit(run_of({2: A, 4: B}, unused={5: 4}, corpora=OWN))
    assert result.is_exact and result.trained == 72
    assert result.accounts == {"a/1": Account(trained=36, owed=10), "b/2": Account(trained=36, owed=10)}


def test_audit_shows_what_a_node_owes_that_never_came_back() -> None:
    history = run_of({}, rounds=3, corpora=OWN)
    ledgers = settle(history[-1].ledgers, {A: 10}, {})
    result = audit([*history, AuditedRound(3, {A: 10}, allocate(ledgers, {A: 10}, OWN))])
    assert result.is_exact and result.accounts["b/2"] == Account(trained=20, owed=10)


def test_audit_names_the_node_whose_samples_were_dealt_to_it_twice() -> None:
    history = run_of({}, corpora=OWN)
    history[2] = having(history[2], "b/2", assigned={B: ((0, 10),)})
    result = audit(history)
    assert result.accounts["b/2"] == Account(50, 10, repeated=((0, 10),), skipped=((20, 30),))
    assert result.accounts["a/1"].is_exact and not result.is_exact


def test_audit_is_exact_where_equal_indices_are_of_other_nodes() -> None:
    history = run_of({}, corpora=OWN)
    assert history[3].ledgers["a/1"].assigned[A] == history[3].ledgers["b/2"].assigned[B]
    assert audit(history).is_exact


@pytest.mark.parametrize("after", [0, 2, 5])
def test_audit_keeps_the_accounts_of_nodes_that_are_gone_where_a_run_began_again(after: int) -> None:
    history = run_of({2: A}, corpora=OWN)
    result = audit([*history, *again(history, after, corpora=OWN)])
    assert result.is_exact and result.accounts["c/3"] == Account(trained=30, owed=20)
    assert result.accounts["b/2"].trained == 10 * after
    assert audit(again(history, after, corpora=OWN)).accounts == result.accounts


def test_audit_of_a_run_that_went_from_common_to_private_data_keeps_both() -> None:
    history = run_of({})
    result = audit([*history, *again(history, 5, corpora=OWN)])
    assert result.is_exact
    assert result.accounts == {SHARED: Account(trained=100, owed=20), "c/3": Account(trained=30, owed=20)}


def test_command_shows_each_node_s_samples_and_fails_where_a_range_is_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [EventLog(tmp_path / name / "n") for name in ("good", "bad")]
    history = run_of({3: B}, corpora=OWN)
    for record in history:
        emit(logs[0], record)
        emit(logs[1], having(record, "b/2", assigned={B: ((5, 15),)}) if record.round == 1 else record)
    assert main([str(tmp_path / "good")]) == 0
    out = capsys.readouterr().out
    assert out.index("documents of a/1") < out.index("samples trained    50") < out.index("documents of b/2")
    assert "samples trained    40\nsamples owed       10\nsamples repeated   0" in out
    assert main([str(tmp_path / "bad")]) == 3
    assert "samples repeated   5 (5..9)" in capsys.readouterr().out


def test_command_reads_the_events_of_earlier_versions(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a")
    for record in run_of({}):
        ledger = to_record(record.ledgers[SHARED])
        emit(log, record, progress={"assigned": ledger.pop("assigned"), "ledger": ledger})
    log.emit("rolled_back", round=9, step=1, digest="d", has_inner=True, skipped=[[4, 8]])
    assert read_left_out(tmp_path) == {SHARED: [(4, 8)]}
    assert audit(read_rounds(tmp_path)) == audit(run_of({}))

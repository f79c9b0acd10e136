"""What a soak must have seen before it may say that all held, what it cost, and its report."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from zeroband.tools.chaos.judgement import Judgement
from zeroband.tools.chaos.options import ChaosOptions
from zeroband.tools.chaos.plan import InjectedFault, Kind, PlannedFault
from zeroband.tools.chaos.soak_report import PhaseComparison, compare, percentile, render, round_costs, rows_of

ENOUGH = Judgement("runs/x", 9, 400, 8, 4, 60.0, 5, 4, later_rounds=7, restart_cpu_s=(5.0, 7.0))
CALM, END_S = (0.0, 30.0), 60.0


def page(comparison: PhaseComparison, seen: Judgement = ENOUGH) -> str:
    about = {"machine": "2 cores", "config": "outer.type diloco", "left out": ""}
    return render(ChaosOptions(()), about, [], comparison, seen)


def event(kind: str, at_s: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "at_s": at_s, **fields}


def ended(round: int, at_s: float, blocked_s: float) -> list[dict[str, Any]]:
    """The two lines that a node writes at the end of a round."""
    metrics = {
        "at_s": at_s,
        "outer/round": round,
        "outer/blocked_s": blocked_s,
        "outer/weight": 100,
        "outer/retries": 0,
    }
    return [event("round_committed", at_s, round=round), metrics]


def struck(
    kind: Kind, at_s: float, node: str, undone_s: float, over_s: float, detected_s: float | None
) -> InjectedFault:
    fault = PlannedFault(1, at_s, kind, (node,), undone_s - at_s)
    return InjectedFault(fault, at_s, undone_s, detected_s, {node: over_s})


def rounds_of(node: str, blocked_s: list[float]) -> list[dict[str, Any]]:
    """A node that joins at 0 and ends a round every 10 s."""
    records = [event("joined", 0.0, round=0), event("round_committed", 0.0, round=0)]
    for number, value in enumerate(blocked_s, start=1):
        records += ended(number, 10.0 * number, value)
    return records


def ways(records: list[dict[str, Any]]) -> list[tuple[float, float, bool]]:
    """From, to, and whether the run went on without the node."""
    return [(*cost.span, cost.is_fenced) for cost in round_costs("node0", records)]


ONE = rounds_of("node0", [0.5])
LATER = [event("round_committed", 24.0, round=3), *ended(4, 34.0, 0.5)]


@pytest.mark.parametrize(
    ("records", "costs"),
    [
        pytest.param(
            rounds_of("node0", [0.5, 1.5]), [(0.0, 10.0, False), (10.0, 20.0, False)],
            id="a round reaches from the end of the one before to its own",
        ),
        pytest.param(
            [*ONE, event("node_started", 15.0), event("joined", 24.0), *LATER],
            [(0.0, 10.0, False), (24.0, 34.0, False)],
            id="the gap of a node that was started again is left out",
        ),
        pytest.param(
            [*ONE, event("fenced", 19.0), event("fenced", 21.0), event("joined", 24.0), *LATER],
            [(0.0, 10.0, False), (10.0, 24.0, True), (24.0, 34.0, False)],
            id="a fence reaches from the last round until the node is a member again",
        ),
        pytest.param(
            [*ONE, event("fenced", 19.0), event("node_started", 50.0), event("joined", 60.0)], [(0.0, 10.0, False)],
            id="one of a node that ended before it was back is none",
        ),
        pytest.param(
            [*ONE, event("round_committed", 30.0, round=2), *ended(3, 30.0, 0.5), *ended(4, 40.0, 0.5)],
            [(0.0, 10.0, False), (10.0, 30.0, False), (30.0, 40.0, False)],
            id="a round that a late node replays counts with the one in which it was",
        ),
    ],
)  # fmt: skip
def test_costs_of_rounds_and_fences(records: list[dict[str, Any]], costs: list[tuple[float, float, bool]]) -> None:
    assert ways(records) == costs


def test_survivors_lose_what_a_round_with_a_fault_waited_beyond_the_undisturbed_median() -> None:
    costs = round_costs("node0", rounds_of("node0", [0.5, 0.5, 0.5, 0.5, 4.5, 2.5]))
    fault = struck(Kind.MACHINE_KILLED, 41.0, "node1", 44.0, 49.0, 42.0)
    result = compare(costs, [fault], CALM, END_S)
    assert result.usual_s == 0.5
    assert result.survivors.rounds == 3
    assert result.survivors.lost == pytest.approx(4.0 / 30.0)  # the round from 50 s on overlaps no fault
    assert result.survivors.tokens_per_s == result.undisturbed.tokens_per_s == 10.0
    assert result.undisturbed.lost == 0.0 and result.store_healthy == result.survivors


def test_rounds_during_a_fault_of_the_store_are_told_apart() -> None:
    costs = round_costs("node0", rounds_of("node0", [0.5, 0.5, 0.5, 8.5, 0.5, 2.5]))
    away = InjectedFault(PlannedFault(1, 31.0, Kind.STORE_PAUSED, (), 8.0), 31.0, 39.0, None, {"store": 39.5})
    other = struck(Kind.MACHINE_KILLED, 55.0, "node1", 58.0, 59.0, 56.0)
    result = compare(costs, [away, other], CALM, END_S)
    assert (result.survivors.rounds, result.store_healthy.rounds) == (3, 2)
    assert result.survivors.lost == pytest.approx(10.0 / 30.0) and result.store_healthy.lost == pytest.approx(
        2.0 / 20.0
    )
    assert "33.33% of their time because of faults, 10.00% in rounds without a fault of the store" in page(result)


def test_survivors_do_not_include_the_node_that_was_struck_until_it_is_back() -> None:
    costs = round_costs("node0", rounds_of("node0", [0.5, 0.5, 0.5, 9.5, 9.5, 0.5]))
    fault = struck(Kind.MACHINE_FROZEN, 31.0, "node0", 35.0, 50.0, None)
    result = compare(costs, [fault], CALM, END_S)
    assert (result.survivors.rounds, result.survivors.lost) == (1, 0.0)


def test_survivors_lose_the_whole_round_in_which_a_healthy_node_was_left_out() -> None:
    records = [*rounds_of("node0", [0.5, 0.5, 0.5]), event("fenced", 36.0), event("joined", 40.0)]
    costs = round_costs("node0", [*records, event("round_committed", 40.0, round=4), *ended(5, 50.0, 0.5)])
    result = compare(costs, [], CALM, END_S)
    assert (result.fenced, result.survivors.rounds) == (1, 1)
    assert result.survivors.lost == pytest.approx(0.5)


def test_survivors_of_a_soak_without_rounds_are_unknown() -> None:
    result = compare([], [], CALM, END_S)
    assert math.isnan(result.survivors.lost)
    assert "unknown" in page(result)


def test_rows_have_the_times_of_each_kind_and_none_of_faults_that_the_next_one_superseded() -> None:
    first = struck(Kind.MACHINE_FROZEN, 10.0, "node0", 15.0, 22.0, 13.0)
    second = struck(Kind.MACHINE_FROZEN, 30.0, "node0", 31.0, 32.0, None)
    second.superseded.add("node0")
    other = struck(Kind.CUT_OFF, 40.0, "node1", 50.0, 55.0, 42.5)
    rows = {row.kind: row for row in rows_of([first, second, other])}
    assert rows[Kind.MACHINE_FROZEN].count == 2
    assert rows[Kind.MACHINE_FROZEN].detected_s == (3.0,)
    assert rows[Kind.MACHINE_FROZEN].recovered_s == (7.0,)
    assert rows[Kind.CUT_OFF].detected_s == (2.5,)


def test_fault_of_two_nodes_is_over_when_both_have_recovered() -> None:
    one = InjectedFault(
        PlannedFault(1, 5.0, Kind.PAIR_CUT, ("node0", "node1"), 3.0), 5.0, undone_s=8.0, over_s={"node0": 9.0}
    )
    assert not one.is_over
    assert one.span(60.0) == (5.0, 60.0)
    one.over_s["node1"] = 12.0
    assert one.is_over
    assert one.span(60.0) == (5.0, 12.0)


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.99, 4.0), (1.0, 4.0), (0.25, 1.0)])
def test_percentile_is_a_value_that_the_share_is_not_above(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value


def test_report_says_first_whether_all_held_and_lists_what_did_not() -> None:
    result = compare([], [], CALM, END_S)
    assert page(result).startswith("# Chaos soak: all invariants held\n")
    broken = page(result, replace(ENOUGH, violations=["round 4: digest differs\n  context"]))
    assert broken.startswith("# Chaos soak: 1 VIOLATION")
    assert "- VIOLATION: round 4: digest differs\n" in broken


# -- what may be concluded --------------------------------------------------------------------------------------


def test_enough_evidence_lacks_nothing_and_all_held() -> None:
    assert (ENOUGH.headline, ENOUGH.exit_code, ENOUGH.lines) == ("all invariants held", 0, [])


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"rounds": 0, "compared": 0}, "no node recorded a round in runs/x"),
        ({"compared": 0}, "no results were compared"),
        ({"samples": 0}, "no sample was trained"),
        ({"calm_rounds": 0}, "no baseline: no whole round within the 60 s without faults; raise --baseline-minutes"),
        ({"struck": 0}, "none of 5 planned faults was injected"),
        ({"unseen": ("store lost",)}, "no fault of store lost was injected: raise --minutes"),
        ({"later_rounds": 0}, "no round was committed after the first fault"),
        ({"complete_s": 37.2}, "the run was complete at 37 s, before the end of the soak: raise train.total_steps"),
    ],
)
def test_each_missing_evidence_is_said_and_keeps_all_from_having_held(missing: dict[str, Any], said: str) -> None:
    judgement = replace(ENOUGH, **missing)
    (lacking,) = judgement.lacking
    assert said in lacking
    assert (judgement.headline, judgement.exit_code) == ("NO EVIDENCE, no conclusion", 3)


def test_violation_is_one_whatever_else_was_found() -> None:
    found = {"violations": ["digest differs\n  context"], "calm_rounds": 0, "starved": ["node1"]}
    judgement = replace(ENOUGH, **found, is_interrupted=True)
    assert (judgement.headline, judgement.exit_code) == ("1 VIOLATION", 1)
    first, second, third = judgement.lines
    assert (first, third) == ("VIOLATION: digest differs", "STARVED: node1")
    assert second.startswith("NO EVIDENCE: no baseline")

from __future__ import annotations

import math
from typing import Any

import pytest

from zeroband.tools.chaos.fault_costs import InjectedFault, compare, percentile, round_costs, rows_of
from zeroband.tools.chaos.judgement import Evidence, Judgement
from zeroband.tools.chaos.options import ChaosOptions
from zeroband.tools.chaos.plan import Kind, PlannedFault
from zeroband.tools.chaos.soak_report import SoakSetting, render

SETTING = SoakSetting(ChaosOptions(()), "2 cores", "outer.type diloco")
SEEN = Evidence("runs/x", 9, 9, 8, 4, 60.0, 4, 3, later_rounds=7, audit="9 samples trained", restart_cpu_s=(5.0, 7.0))


def event(kind: str, at_s: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "at_s": at_s, **fields}


def ended(round: int, at_s: float, blocked_s: float) -> list[dict[str, Any]]:
    """The two lines that a node writes at the end of a round."""
    metrics = {
        "at_s": at_s,
        "outer/round": round,
        "outer/wait_s": blocked_s - 0.25,
        "outer/transfer_s": 0.25,
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


def test_round_costs_reach_from_the_end_of_the_round_before_to_their_own() -> None:
    costs, fences = round_costs("node0", rounds_of("node0", [0.5, 1.5]))
    assert [(cost.round, cost.span, cost.blocked_s) for cost in costs] == [
        (1, (0.0, 10.0), 0.5),
        (2, (10.0, 20.0), 1.5),
    ]
    assert fences == []


def test_round_costs_leave_out_the_gap_of_a_node_that_was_started_again() -> None:
    records = [*rounds_of("node0", [0.5]), event("node_started", 60.0), event("joined", 70.0, round=6)]
    records += [event("round_committed", 70.0, round=6), *ended(7, 80.0, 0.5)]
    costs, fences = round_costs("node0", records)
    assert [cost.span for cost in costs] == [(0.0, 10.0), (70.0, 80.0)]
    assert fences == []


def test_fence_reaches_from_the_last_round_until_the_node_is_a_member_again() -> None:
    records = [*rounds_of("node0", [0.5]), event("fenced", 19.0), event("fenced", 21.0), event("joined", 24.0)]
    records += [event("round_committed", 24.0, round=3), *ended(4, 34.0, 0.5)]
    costs, fences = round_costs("node0", records)
    assert [fence.span for fence in fences] == [(10.0, 24.0)]
    assert [cost.span for cost in costs] == [(0.0, 10.0), (24.0, 34.0)]


def test_fence_of_a_node_that_ended_before_it_was_back_is_no_fence() -> None:
    records = [*rounds_of("node0", [0.5]), event("fenced", 19.0), event("node_started", 50.0), event("joined", 60.0)]
    assert round_costs("node0", records)[1] == []


def test_survivors_lose_what_a_round_with_a_fault_waited_beyond_the_undisturbed_median() -> None:
    costs, _ = round_costs("node0", rounds_of("node0", [0.5, 0.5, 0.5, 0.5, 4.5, 2.5]))
    fault = struck(Kind.MACHINE_KILLED, 41.0, "node1", 44.0, 49.0, 42.0)
    result = compare(costs, [], [fault], calm=(0.0, 30.0), end_s=60.0)
    assert result.usual_s == 0.5
    assert result.survivors.rounds == 3
    assert result.survivors.lost == pytest.approx(4.0 / 30.0)  # the round from 50 s on overlaps no fault
    assert result.survivors.tokens_per_s == result.undisturbed.tokens_per_s == 10.0
    assert result.undisturbed.lost == 0.0


def test_survivors_do_not_include_the_node_that_was_struck_until_it_is_back() -> None:
    costs, _ = round_costs("node0", rounds_of("node0", [0.5, 0.5, 0.5, 9.5, 9.5, 0.5]))
    fault = struck(Kind.MACHINE_FROZEN, 31.0, "node0", 35.0, 50.0, None)
    result = compare(costs, [], [fault], calm=(0.0, 30.0), end_s=60.0)
    assert result.survivors.rounds == 1
    assert result.survivors.lost == 0.0


def test_survivors_lose_the_whole_round_in_which_a_healthy_node_was_left_out() -> None:
    records = [*rounds_of("node0", [0.5, 0.5, 0.5]), event("fenced", 36.0), event("joined", 40.0)]
    costs, fences = round_costs("node0", [*records, event("round_committed", 40.0, round=4), *ended(5, 50.0, 0.5)])
    result = compare(costs, fences, [], calm=(0.0, 30.0), end_s=60.0)
    assert result.fenced == 1
    assert result.survivors.lost == pytest.approx(0.5)


def test_survivors_of_a_soak_without_rounds_are_unknown() -> None:
    result = compare([], [], [], calm=(0.0, 30.0), end_s=60.0)
    assert math.isnan(result.survivors.lost)
    assert "unknown" in render(SETTING, [], result, SEEN, Judgement())


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
    result = compare([], [], [], calm=(0.0, 30.0), end_s=60.0)
    assert render(SETTING, [], result, SEEN, Judgement()).startswith("# Chaos soak: all invariants held\n")
    broken = render(SETTING, [], result, SEEN, Judgement(["round 4: digest differs\n  context"]))
    assert broken.startswith("# Chaos soak: 1 VIOLATION")
    assert "- VIOLATION: round 4: digest differs\n" in broken

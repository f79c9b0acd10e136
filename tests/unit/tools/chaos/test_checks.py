"""The checks of a soak must see what they are for: each is shown a run that is right, and one that is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.records import RoundPlan, Verdict
from zeroband.tools.chaos.checks import Agreement, CommittedLine, Pulse, audit_violations
from zeroband.tools.data.audit import Account, Audit

AUDIT = Audit(rounds=3, accounts={SHARED: Account(trained=30)}, missing_rounds=())


def committed(round: int, **changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = {
        "kind": "round_committed",
        "at_s": 10.0 * round,
        "round": round,
        "epoch": 1,
        "members": ["node0#a", "node1#a"],
        "weights": [128, 128],
        "digest": f"state{round}",
        "progress": {"inner_step": 4 * round},
    }
    return event | changes


def verdict(round: int, *, version: int | None = None, **changes: Any) -> Verdict:
    plan = RoundPlan(version or round + 1, 1, round, ("node0#a", "node1#a"), (128, 128), (4, 4), (4, 4))
    payload: Mapping[str, Any] = {"state_before": f"state{round - 1}"}
    return replace(Verdict(plan, f"result{round}", payload), **changes)


def test_agreement_finds_nothing_where_all_nodes_recorded_the_same() -> None:
    agreement = Agreement()
    wrong = [agreement.add(node, committed(round)) for round in range(3) for node in ("node0", "node1")]
    wrong.append(agreement.add("node2", {"kind": "recovered", "round": 2, "digest": "state2"}))
    assert not any(wrong)
    assert agreement.mismatches == 0


@pytest.mark.parametrize("field", ["digest", "epoch", "members", "weights", "progress"])
def test_agreement_names_the_nodes_that_differ_after_a_round_and_counts_mismatches_of_digests(field: str) -> None:
    agreement = Agreement()
    agreement.add("node0", committed(4))
    (wrong,) = agreement.add("node1", committed(4, **{field: "other"}))
    assert wrong == f"round 4: {field} is other on node1 and {committed(4)[field]} on node0"
    assert agreement.mismatches == (field == "digest")


def test_agreement_compares_a_fetched_state_with_a_round_that_is_recorded_later() -> None:
    agreement = Agreement()
    assert agreement.add("node2", {"kind": "recovered", "round": 5, "digest": "other"}) == []
    (wrong,) = agreement.add("node0", committed(5))
    assert wrong == "round 5: node2 fetched a state with digest other, others hold state5"
    assert agreement.add("node0", committed(6)) == []


def test_line_of_rounds_that_are_seen_again_is_right() -> None:
    line = CommittedLine()
    assert line.add([verdict(0), verdict(1)]) == []
    assert line.add([verdict(0), verdict(1), verdict(2, version=9)]) == []
    assert sorted(line.rounds) == [0, 1, 2]


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([verdict(1), verdict(1, digest="other")], "round 1 was committed twice: version 2 with result result1"),
        ([verdict(1), verdict(1, version=7)], "round 1 was committed twice: version 2"),
        ([verdict(1, version=5), verdict(2, version=5)], "round 2 was opened before round 1"),
    ],
)
def test_line_sees_a_round_that_was_committed_twice_or_opened_before_the_one_before(
    seen: list[Verdict], said: str
) -> None:
    line = CommittedLine()
    wrong = [one for verdict in seen for one in line.add([verdict])]
    assert len(wrong) == 1 and wrong[0].startswith(said)
    assert ("other" in wrong[0]) == (seen[-1].digest == "other")


def test_line_sees_a_round_that_builds_on_a_state_that_nobody_recorded() -> None:
    line, agreement = CommittedLine(), Agreement()
    line.add([verdict(1), verdict(2)])
    agreement.add("node0", committed(0))
    agreement.add("node0", committed(1))
    assert line.misfits(agreement) == []
    line.add([verdict(3)])
    agreement.add("node0", committed(2, digest="other"))
    assert line.misfits(agreement) == ["round 3 builds on state state2, nodes recorded other after round 2"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("accounts", {SHARED: Account(repeated=((3, 7),))}, "samples trained twice: (3, 7)"),
        ("accounts", {SHARED: Account(skipped=((8, 9),))}, "samples skipped: (8, 9)"),
        ("accounts", {"a/1": Account(), "b/2": Account(skipped=((8, 9),))}, "samples of b/2 skipped: (8, 9)"),
        ("missing_rounds", (2,), "rounds that no node recorded: 2"),
        ("missing_rounds", (), None),
    ],
)
def test_audit_says_what_is_wrong_with_the_data(field: str, value: Any, said: str | None) -> None:
    assert audit_violations(replace(AUDIT, **{field: value})) == ([] if said is None else [said])


def test_pulse_finds_a_healthy_node_that_is_over_its_bound_which_grows_with_each_fault_of_the_round() -> None:
    pulse = Pulse(round_s=10.0, detect_s=3.0, slack_s=5.0)
    pulse.advanced("node0", 100.0)
    pulse.advanced("node1", 110.0)
    assert pulse.hung(["node0", "node1"], 118.0) == {}
    assert pulse.hung(["node0", "node1"], 118.5) == {"node0": 18.5}
    assert pulse.hung(["node1"], 118.5) == {}
    bounds_s: list[float] = []
    for act in (pulse.struck, pulse.struck, lambda: pulse.advanced("node0", 120.0)):
        act()
        bounds_s.append(pulse.bound_s("node0"))
    assert bounds_s == [18.0, 26.0, 18.0]


def test_pulse_gives_a_node_that_joined_the_time_of_two_rounds_for_its_first() -> None:
    pulse = Pulse(round_s=10.0, detect_s=3.0, slack_s=5.0)
    bounds_s: list[float] = []
    for kind in ("joined", "epoch_changed", "round_committed"):
        pulse.note("node0", kind, 100.0)
        bounds_s.append(pulse.bound_s("node0"))
    assert bounds_s == [28.0, 28.0, 18.0]

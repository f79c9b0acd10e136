from __future__ import annotations

from dataclasses import replace

import pytest

from zeroband.tools.chaos.plan import OF_NETWORK, OF_STORE, PLANNED, Kind, PlanRules, plan, targets_of

NODES = tuple(f"node{number}" for number in range(5))
RULES = PlanRules(nodes=NODES, duration_s=3600.0, mtbf_s=20.0, kinds=PLANNED, detect_s=3.0)


def test_plan_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert plan(RULES, seed=7) == plan(RULES, seed=7)
    assert plan(RULES, seed=7) != plan(RULES, seed=8)


def test_gaps_of_a_plan_have_the_mean_that_was_asked_for_where_nobody_must_wait() -> None:
    rules = replace(RULES, kinds=(Kind.MACHINE_FROZEN,), nodes=tuple(map(str, range(100))), duration_s=30_000.0)
    faults = plan(rules, seed=1)
    assert faults[-1].at_s / len(faults) == pytest.approx(rules.mtbf_s, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_plan_leaves_enough_nodes_undisturbed_at_every_time(seed: int, keep: int) -> None:
    rules = replace(RULES, keep_undisturbed=keep, mtbf_s=5.0)
    faults = plan(rules, seed)
    assert len(faults) > 50
    for fault in faults:
        disturbed = {
            node
            for other in faults
            if other.at_s <= fault.at_s < other.at_s + other.lasts_s + rules.recovery_s
            for node in other.nodes
        }
        assert len(NODES) - len(disturbed) >= keep


@pytest.mark.parametrize("seed", range(10))
def test_plan_strikes_no_node_and_no_store_whose_last_fault_lasts(seed: int) -> None:
    faults = plan(replace(RULES, mtbf_s=3.0), seed)
    ends_s: dict[str, float] = {}
    for fault in faults:
        for name in fault.nodes or ("store",):
            assert fault.at_s >= ends_s.get(name, 0.0)
            ends_s[name] = fault.at_s + fault.lasts_s


def test_plan_holds_every_kind_as_often_as_any_other() -> None:
    counts = dict.fromkeys(PLANNED, 0)
    for fault in plan(RULES, seed=3):
        counts[fault.kind] += 1
        assert len(fault.nodes) == targets_of(fault.kind)
    assert min(counts.values()) > 0
    assert max(counts.values()) - min(counts.values()) <= 1


def test_plan_strikes_nodes_that_are_still_recovering() -> None:
    faults = plan(replace(RULES, mtbf_s=3.0), seed=1)
    undone_s = dict.fromkeys(NODES, 0.0)
    early = 0
    for fault in faults:
        early += sum(0 < fault.at_s - undone_s[node] < RULES.recovery_s for node in fault.nodes if undone_s[node])
        undone_s |= dict.fromkeys(fault.nodes, fault.at_s + fault.lasts_s)
    assert early > 0


def test_faults_that_would_leave_too_few_nodes_are_not_possible() -> None:
    three = replace(RULES, nodes=NODES[:3])
    assert Kind.PAIR_CUT in RULES.possible_kinds()
    assert set(PLANNED) - set(three.possible_kinds()) == {Kind.PAIR_CUT}
    assert set(replace(RULES, nodes=NODES[:2]).possible_kinds()) == set(OF_STORE)


def test_plan_without_possible_faults_is_empty() -> None:
    assert plan(replace(RULES, nodes=NODES[:2], kinds=OF_NETWORK), seed=1) == ()

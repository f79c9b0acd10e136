from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from zeroband.tools.chaos.plan import (
    OF_NETWORK,
    OF_ONE_STORE,
    OF_SEVERAL_STORES,
    PLANNED,
    Kind,
    PlannedFault,
    PlanRules,
    kinds_of,
    leaves_enough,
    plan,
    targets_of,
)

NODES = tuple(f"node{number}" for number in range(5))
KINDS = kinds_of(stores=1, dial_out_only=2)
RULES = PlanRules(nodes=NODES, duration_s=3600.0, mtbf_s=20.0, kinds=KINDS, detect_s=3.0)
DIAL_OUT_ONLY = replace(RULES, kinds=kinds_of(stores=2, dial_out_only=2), dial_out_only=NODES[3:])


def test_plan_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert plan(RULES, seed=7) == plan(RULES, seed=7)
    assert plan(RULES, seed=7) != plan(RULES, seed=8)


def test_gaps_of_a_plan_have_the_mean_that_was_asked_for_where_nobody_must_wait() -> None:
    rules = replace(RULES, kinds=(Kind.MACHINE_FROZEN,), nodes=tuple(map(str, range(100))), duration_s=15_000.0)
    faults = plan(rules, seed=1)
    assert faults[-1].at_s / len(faults) == pytest.approx(rules.mtbf_s, rel=0.1)


def in_peace_at(at_s: float, rules: PlanRules, faults: Sequence[PlannedFault]) -> set[str]:
    """Nodes that no fault disturbs at a time."""
    struck = [fault for fault in faults if fault.at_s <= at_s < fault.at_s + fault.lasts_s + rules.recovery_s]
    return {*rules.nodes} - {node for fault in struck for node in fault.nodes}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("rules", "keep"), [*((RULES, keep) for keep in (1, 2, 4)), *((DIAL_OUT_ONLY, keep) for keep in (1, 3))]
)
def test_plan_leaves_enough_in_peace_at_every_time_and_one_through_which_two_talk_that_cannot_be_dialled(
    seed: int, rules: PlanRules, keep: int
) -> None:
    rules = replace(rules, keep_undisturbed=keep, mtbf_s=5.0)
    faults = plan(rules, seed)
    assert len(faults) > 50 and {fault.kind for fault in faults} == set(rules.possible_kinds())
    for fault in faults:
        assert leaves_enough(in_peace_at(fault.at_s, rules, faults), keep, rules.dial_out_only), fault
        assert fault.kind is not Kind.RELAY_KILLED or fault.nodes[0] not in rules.dial_out_only


@pytest.mark.parametrize("seed", range(4))
def test_plan_strikes_no_node_and_no_store_whose_last_fault_lasts(seed: int) -> None:
    faults = plan(replace(RULES, mtbf_s=3.0), seed)
    ends_s: dict[str, float] = {}
    for fault in faults:
        for name in fault.nodes or ("store",):
            assert fault.at_s >= ends_s.get(name, 0.0)
            ends_s[name] = fault.at_s + fault.lasts_s


def test_plan_holds_every_kind_as_often_as_any_other() -> None:
    counts = dict.fromkeys(KINDS, 0)
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


def test_faults_that_would_leave_too_few_nodes_are_not_possible_and_a_plan_without_any_is_empty() -> None:
    three, two = (replace(RULES, nodes=NODES[:number]) for number in (3, 2))
    assert Kind.PAIR_CUT in RULES.possible_kinds()
    assert set(KINDS) - set(three.possible_kinds()) == {Kind.PAIR_CUT}
    assert set(two.possible_kinds()) == set(OF_ONE_STORE)
    assert plan(replace(two, kinds=OF_NETWORK), seed=1) == ()


def test_kinds_are_those_that_can_happen_to_the_stores_and_nodes_of_a_run() -> None:
    plain, several, dial_out_only = (
        kinds_of(stores=1, dial_out_only=0),
        kinds_of(stores=2, dial_out_only=1),
        kinds_of(stores=1, dial_out_only=2),
    )
    assert set(PLANNED) - {*plain} == {*OF_SEVERAL_STORES, Kind.RELAY_KILLED, Kind.HOLDER_KILLED}
    assert set(PLANNED) - {*several} == {*OF_ONE_STORE, Kind.RELAY_KILLED, Kind.HOLDER_KILLED}
    assert {*dial_out_only} - {*plain} == {Kind.RELAY_KILLED}


def test_relay_is_not_killed_where_no_other_one_could_take_over() -> None:
    one_is_open = replace(DIAL_OUT_ONLY, dial_out_only=NODES[1:], keep_undisturbed=1)
    assert Kind.RELAY_KILLED not in one_is_open.possible_kinds()
    assert {fault.nodes for fault in plan(one_is_open, 1)}.isdisjoint({(NODES[0],)})


def test_way_between_two_that_cannot_be_dialled_is_asked_for_only_where_there_are_two() -> None:
    assert leaves_enough(["a", "b"], 2, dial_out_only=["a"])
    assert not leaves_enough(["a", "b"], 2, dial_out_only=["a", "b"])
    assert not leaves_enough(["a"], 2, dial_out_only=[])


def test_store_in_use_can_be_lost_with_its_node_where_nodes_hold_the_stores() -> None:
    held, one = set(kinds_of(stores=0, dial_out_only=0)), set(kinds_of(stores=1, dial_out_only=0))
    assert held - one == {Kind.HOLDER_KILLED, *OF_SEVERAL_STORES} and one - held == {*OF_ONE_STORE}
    assert Kind.HOLDER_KILLED not in kinds_of(stores=3, dial_out_only=2)

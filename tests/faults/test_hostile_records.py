"""A member that has the token writes records and sends values that no honest one does: the others go on and name it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroband.observe.view import node_id_of_member

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(300)]

HOSTILE, HONEST = "node0", ("node1", "node2")
RECORDS = ("negative weight", "steps x 1000")
PLAN = ("sites out of range", "other weights", "made-up finding", *RECORDS, *8 * ("values x 1e20",))
"""Values out of range come last, and as often as it takes: who sends them is put out for good."""
SCRIPT = Path(__file__).with_name("hostile_trainer.py")

RecordRun = Callable[..., Any]


def reasons(recorded: Any, kind: str) -> dict[str, list[str]]:
    """What the honest nodes' events of a kind say, by node."""
    return {node: [str(e["reason"]) for e in recorded.events[node] if e["kind"] == kind] for node in HONEST}


def attacked(record_run: RecordRun, plan: tuple[str, ...]) -> Any:
    """A run of three nodes, of which the first one attacks and comes back as often as its plan asks for."""

    def tell(story: Any) -> None:
        records = [attack for attack in plan if attack in (*RECORDS, "weight 1e12", "weight 10^400")]

        def has_been_refused() -> bool:
            told = [e for name in HONEST for e in story.node(name).events() if e["kind"] == "record_refused"]
            return len({e["member_id"] for e in told}) >= len(records)

        story.until(has_been_refused, f"{len(records)} records of {HOSTILE} are refused, each of another life")
        if "values x 1e20" in plan:
            story.until(lambda: not story.node(HOSTILE).is_running, f"{HOSTILE} is put out")
            story.until_contributing(*HONEST)
        else:
            story.until_contributing(HOSTILE, *HONEST)
        assert all(story.node(name).is_running for name in HONEST), story.cluster.describe()

    env = {"HOSTILE_NODE": HOSTILE, "HOSTILE_PLAN": ",".join(plan)}
    outer = ("diloco", "--outer.inner-steps", "4")
    return record_run(tell, outer=outer, ranks=(1, 1, 1), faults={}, steps_per_round=4, script=SCRIPT, env=env)


@pytest.fixture(scope="module")
def recorded(record_run: RecordRun) -> Any:
    return attacked(record_run, PLAN)


def test_records_out_of_range_are_refused_by_member_field_value_and_bound(recorded: Any) -> None:
    for node, said in reasons(recorded, "record_refused").items():
        assert any(text.startswith("weight=-300: ") and "greater than or equal to 0" in text for text in said), node
        assert any(text.startswith("steps=4000, but it was dealt samples for ") for text in said), node
    members = {e["member_id"] for node in HONEST for e in recorded.events[node] if e["kind"] == "record_refused"}
    assert {node_id_of_member(member) for member in members} == {HOSTILE} and len(members) == 2


def test_plan_with_other_numbers_is_refused_and_the_round_opened_again(recorded: Any) -> None:
    said = [text for texts in reasons(recorded, "plan_refused").values() for text in texts]
    assert said and all("its weights of " in text or "no signed evidence supports that" in text for text in said)


def test_member_that_a_made_up_finding_puts_out_stays(recorded: Any) -> None:
    said = [text for texts in reasons(recorded, "plan_refused").values() for text in texts]
    assert any("it sent two different parts; no signed evidence supports that" in text for text in said), said
    for node in HONEST:
        assert not [e for e in recorded.events[node] if e["kind"] in ("fenced", "left_behind", "rejoined")]
        assert not [e for e in recorded.events[node] if e["kind"] == "blamed" and "two different parts" in e["reason"]]


def test_member_that_sends_values_out_of_range_is_named(recorded: Any) -> None:
    said = [text for texts in reasons(recorded, "round_retried").values() for text in texts]
    assert any(f"with {HOSTILE}#" in text and "not finite, or larger than any" in text for text in said), said
    for node in HONEST:
        out = [e["member_ids"] for e in recorded.events[node] if e["kind"] == "blamed" and e["consequence"] == "out"]
        assert {node_id_of_member(member) for members in out for member in members} == {HOSTILE}


def test_nothing_of_it_counts(recorded: Any) -> None:
    """Weights and progress are those of honest members; every round has one result."""
    most = recorded.setup.tokens_per_round
    for verdict in recorded.history.values():
        assert all(0 <= weight <= most for weight in verdict.plan.weights)
        assert all(0 <= steps <= recorded.setup.steps_per_round for steps in verdict.plan.steps)
    newest = max(recorded.history)
    assert recorded.history[newest].record["progress"]["inner_step"] <= newest * recorded.setup.steps_per_round
    digests = {(e["round"], e["digest"]) for n in HONEST for e in recorded.events[n] if e["kind"] == "round_committed"}
    assert len(digests) == len({round for round, _ in digests}) > 3


def test_weights_that_take_the_whole_mean_or_no_float_holds_are_refused(record_run: RecordRun) -> None:
    recorded = attacked(record_run, ("weight 1e12", "weight 10^400"))
    for node, said in reasons(recorded, "record_refused").items():
        assert any(text.startswith("weight=1000000000000, but ") for text in said), (node, said)
        assert any(text.startswith("weight=10") and "less than or equal to" in text for text in said), (node, said)


def test_member_that_goes_on_alone_is_named_and_costs_the_others_no_step(record_run: RecordRun) -> None:
    """It opens a round to itself, votes and commits; the others write over that, and none has to come back."""
    reached = list[int]()

    def tell(story: Any) -> None:
        def is_refused() -> bool:
            return all(any(e["kind"] == "plan_refused" for e in story.node(n).events()) for n in HONEST)

        story.until(is_refused, "all others refuse the plan")
        seen = max(story.history)
        story.until(lambda: max(story.history) >= seen + 5, "the run goes on")
        reached.append(seen + 5)

    env = {"HOSTILE_NODE": HOSTILE, "HOSTILE_PLAN": "alone"}
    outer = ("diloco", "--outer.inner-steps", "4")
    recorded = record_run(tell, outer=outer, ranks=(1, 1, 1), faults={}, steps_per_round=4, script=SCRIPT, env=env)
    for node, said in reasons(recorded, "plan_refused").items():
        assert any(f"{HOSTILE}#" in text and "without most members" in text for text in said), said
        assert len(recorded.lives(node)) == 1
        assert not [e for e in recorded.events[node] if e["kind"] in ("fenced", "left_behind", "rejoined")]
    digests = {(e["round"], e["digest"]) for n in HONEST for e in recorded.events[n] if e["kind"] == "round_committed"}
    assert len(digests) == len({round for round, _ in digests})
    made = [verdict.plan.contributors() for round, verdict in recorded.history.items() if 0 < round <= reached[0]]
    assert made and all(
        steps == 4 for by in made for member, steps in by.items() if node_id_of_member(member) in HONEST
    )

"""Progress: what a committed round does to steps, tokens and samples."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zeroband.data.ledger import SHARED, Ledger, Range
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import RoundPlan

SHAPE = RunShape(total_steps=10, batch_size=5)
A, B, C = "a#1", "b#1", "c#1"


def a_plan(late: tuple[str, ...] = (), **words: tuple[int, int, int]) -> RoundPlan:
    """`a=(weight, steps, wants)` for each member."""
    members = tuple(f"{node}#1" for node in words)
    weights, steps, wants = zip(*words.values(), strict=True)
    return RoundPlan(1, 1, 1, members, weights, steps, wants, late)


def shared(next: int, *returned: Range, **assigned: Range) -> dict[str, Ledger]:
    """The ledgers of a run with one corpus; of each node the one range that it holds."""
    return {SHARED: Ledger(next, returned, {f"{node}#1": (span,) for node, span in assigned.items()})}


@pytest.fixture
def founded() -> Progress:
    return Progress.at_start().begin(a_plan(a=(0, 0, 4), b=(0, 0, 4)), SHAPE, after_round=None)


def test_founding_hands_out_work_and_counts_no_step(founded: Progress) -> None:
    plan = a_plan(a=(0, 0, 4), b=(0, 0, 4))
    assert founded == Progress(0, 0, shared(40, a=(0, 20), b=(20, 40)), founding=plan.id)


def test_round_counts_its_steps_once_and_the_tokens_of_all(founded: Progress) -> None:
    after = founded.after(a_plan(a=(100, 4, 4), b=(60, 4, 4)), SHAPE)
    assert (after.inner_step, after.tokens) == (4, 160)
    assert after.assigned == {A: ((40, 60),), B: ((60, 80),)}


def test_round_counts_the_steps_of_the_member_that_made_most(founded: Progress) -> None:
    assert founded.after(a_plan(a=(30, 1, 4), b=(90, 3, 4)), SHAPE).inner_step == 3


def test_members_get_what_they_ask_for(founded: Progress) -> None:
    after = founded.after(a_plan(a=(100, 4, 1), b=(100, 4, 3)), SHAPE)
    assert after.assigned == {A: ((40, 45),), B: ((45, 60),)}


def test_samples_that_a_member_did_not_come_to_go_to_the_next_round(founded: Progress) -> None:
    after = founded.after(a_plan(a=(25, 1, 4), b=(100, 4, 4)), SHAPE)
    assert after.assigned == {A: ((5, 20), (40, 45)), B: ((45, 65),)}


def test_lost_member_gives_its_samples_back_to_the_next_round(founded: Progress) -> None:
    after = founded.after(a_plan(b=(60, 4, 4)), SHAPE)
    assert after.ledgers == shared(40, b=(0, 20))


def test_late_member_keeps_its_samples_until_it_contributes(founded: Progress) -> None:
    while_late = founded.after(a_plan(late=(A,), b=(100, 4, 2)), SHAPE)
    assert while_late.assigned == {A: ((0, 20), (50, 60)), B: ((40, 50),)}
    after = while_late.after(a_plan(a=(100, 4, 1), b=(50, 2, 1)), SHAPE)
    assert after.assigned == {A: ((50, 60),), B: ((60, 65),)}


def test_late_member_that_is_lost_gives_its_samples_back(founded: Progress) -> None:
    while_late = founded.after(a_plan(late=(A,), b=(100, 4, 2)), SHAPE)
    assert while_late.after(a_plan(b=(50, 2, 2)), SHAPE).assigned == {B: ((0, 10),)}


def test_member_without_weight_gives_its_samples_back_and_gets_others(founded: Progress) -> None:
    after = founded.after(a_plan(a=(0, 4, 4), b=(60, 4, 4)), SHAPE)
    assert after.assigned == {A: ((0, 20),), B: ((40, 60),)}


def test_contribution_of_a_member_without_samples_uses_none_of_the_others(founded: Progress) -> None:
    after = founded.after(a_plan(a=(100, 4, 4), b=(60, 4, 4), c=(25, 1, 2)), SHAPE)
    assert after.tokens == 185
    assert after.ledgers == shared(90, a=(40, 60), b=(60, 80), c=(80, 90))


def test_joiner_without_an_assignment_gets_one(founded: Progress) -> None:
    after = founded.after(a_plan(a=(100, 4, 4), b=(60, 4, 4), c=(0, 0, 2)), SHAPE)
    assert after.assigned[C] == ((80, 90),)


def test_member_that_leaves_contributes_and_gets_nothing(founded: Progress) -> None:
    after = founded.after(a_plan(a=(50, 2, 0), b=(100, 4, 2)), SHAPE)
    assert (after.inner_step, after.tokens) == (4, 150)
    assert after.ledgers == shared(40, b=(10, 20))


def test_last_round_is_as_short_as_what_is_left(founded: Progress) -> None:
    work = a_plan(a=(1, 4, 4), b=(1, 4, 4))
    assert founded.after(work, SHAPE).after(work, SHAPE).assigned == {A: ((80, 90),), B: ((90, 100),)}


def test_complete_run_hands_out_no_more(founded: Progress) -> None:
    progress = founded
    for steps in (4, 4, 2):
        assert not progress.is_complete
        progress = progress.after(a_plan(a=(1, steps, 4), b=(1, steps, 4)), SHAPE)
    done = replace(founded, inner_step=10, tokens=6, ledgers=shared(100), is_complete=True, outer_step=3)
    assert progress == done


def test_run_that_ends_takes_back_what_a_late_member_holds(founded: Progress) -> None:
    """There is no round any more in which it could contribute."""
    progress = founded
    for steps in (4, 4, 2):
        progress = progress.after(a_plan(late=(A,), b=(1, steps, 4)), SHAPE)
    assert progress.is_complete and progress.ledgers == shared(80, (0, 20), (60, 70))


def test_line_that_begins_again_deals_out_anew_what_its_nodes_had(founded: Progress) -> None:
    before = founded.after(a_plan(a=(100, 4, 4), b=(60, 2, 4)), SHAPE)
    again = before.begin(a_plan(c=(0, 0, 3)), SHAPE, after_round=7)
    assert (again.inner_step, again.tokens, again.outer_step) == (4, 160, 1)
    assert again.ledgers == shared(70, (45, 70), c=(30, 45))
    assert again.follows == (founded.founding, 7) and again.founding != founded.founding


def test_same_nodes_that_begin_again_get_the_same_samples(founded: Progress) -> None:
    work = a_plan(a=(100, 4, 4), b=(60, 2, 4))
    before = founded.after(work, SHAPE)
    assert before.begin(replace(work, weights=(0, 0)), SHAPE, after_round=1).assigned == before.assigned


def test_contributions_of_a_plan_that_begins_a_line_do_not_count(founded: Progress) -> None:
    back = founded.begin(a_plan(a=(100, 4, 4), b=(60, 4, 4)), SHAPE, after_round=0)
    assert (back.inner_step, back.tokens, back.assigned) == (0, 0, founded.assigned)


def test_line_that_begins_at_the_end_of_the_run_is_complete(founded: Progress) -> None:
    at_end = replace(founded, inner_step=10)
    assert at_end.begin(a_plan(a=(0, 0, 4)), SHAPE, after_round=3).is_complete


def test_record_survives_json(founded: Progress) -> None:
    progress = founded.after(a_plan(b=(60, 4, 4)), SHAPE).begin(a_plan(a=(0, 0, 1)), SHAPE, after_round=1)
    assert Progress.from_record(json.loads(json.dumps(progress.to_record()))) == progress


def test_all_members_come_to_the_same_progress_from_the_record(founded: Progress) -> None:
    plan = a_plan(a=(3, 2, 4), b=(0, 4, 0), c=(0, 0, 2))
    copied = Progress.from_record(founded.to_record())
    assert copied.after(plan, SHAPE).to_record() == founded.after(plan, SHAPE).to_record()


# -- documents of one's own -------------------------------------------------------------------------------------------

OWN = {"a": "a/1", "b": "b/2", "c": "c/3"}


def own_plan(corpora: dict[str, str] = OWN, late: tuple[str, ...] = (), **words: tuple[int, int, int]) -> RoundPlan:
    return replace(a_plan(late, **words), corpora=tuple(corpora[node] for node in words))


def own(next: int, *returned: Range, **assigned: Range) -> Ledger:
    return shared(next, *returned, **assigned)[SHARED]


@pytest.fixture
def apart() -> Progress:
    return Progress.at_start().begin(own_plan(a=(0, 0, 4), b=(0, 0, 4)), SHAPE, after_round=None)


def test_founders_with_documents_of_their_own_all_begin_with_their_first(apart: Progress) -> None:
    assert apart.ledgers == {"a/1": own(20, a=(0, 20)), "b/2": own(20, b=(0, 20))}
    assert apart.assigned == {A: ((0, 20),), B: ((0, 20),)}


def test_what_a_lost_node_leaves_waits_for_it_whoever_joins(apart: Progress) -> None:
    after = apart.after(own_plan(a=(60, 4, 4), c=(0, 0, 2)), SHAPE)
    assert after.ledgers == {"a/1": own(40, a=(20, 40)), "b/2": own(20, (0, 20)), "c/3": own(10, c=(0, 10))}
    back = after.after(own_plan(a=(60, 4, 1), b=(0, 0, 5), c=(1, 2, 0)), SHAPE)
    assert back.ledgers == {"a/1": own(45, a=(40, 45)), "b/2": own(20, (10, 20), b=(0, 10)), "c/3": own(10)}


def test_late_node_keeps_samples_of_its_own_documents(apart: Progress) -> None:
    after = apart.after(own_plan(late=(B,), a=(60, 4, 4)), SHAPE)
    assert after.ledgers["b/2"] == Ledger(30, (), {B: ((0, 20), (20, 30))})
    after = after.after(own_plan(a=(60, 4, 4), b=(9, 1, 1)), SHAPE)
    assert after.ledgers["b/2"] == Ledger(30, (), {B: ((5, 20), (20, 30))})


@pytest.mark.parametrize(("reads_ahead", "asked"), [(False, 2), (True, 4)])
def test_late_member_is_dealt_the_samples_of_one_more_phase_with_each_round(
    founded: Progress, reads_ahead: bool, asked: int
) -> None:
    """It trains on while what it learned waits, and learns so much at most that no round has counted."""
    progress, dealt, shape = founded, list[int](), replace(SHAPE, reads_ahead=reads_ahead, total_steps=1000)
    for _ in range(6):
        progress = progress.after(a_plan(late=(A,), b=(100, 2, asked)), shape)
        dealt.append(sum(stop - start for start, stop in progress.assigned[A]))
    assert dealt == [30, 40, 40, 40, 40, 40]


def test_late_member_trains_on_what_it_holds_when_what_it_learned_counts(founded: Progress) -> None:
    progress = founded.after(a_plan(late=(A,), b=(100, 2, 3)), SHAPE)
    assert progress.assigned[A] == ((0, 20), (45, 60))
    assert progress.after(a_plan(a=(100, 4, 3), b=(60, 2, 3)), SHAPE).assigned[A] == ((45, 60),)


def test_contribution_of_several_phases_moves_the_run_on_by_the_longest(founded: Progress) -> None:
    late = founded.after(a_plan(late=(A,), b=(100, 2, 2)), SHAPE)
    plan = replace(a_plan(a=(150, 6, 2), b=(50, 2, 2)), phase_steps=(4, 2))
    assert late.after(plan, SHAPE).inner_step == late.inner_step + 4
    assert late.after(plan, SHAPE).tokens == late.tokens + 200


def test_nodes_that_read_ahead_hold_two_phases_of_their_own_documents() -> None:
    ahead = replace(SHAPE, reads_ahead=True)
    founded = Progress.at_start().begin(own_plan(a=(0, 0, 2), b=(0, 0, 2)), ahead, after_round=None)
    assert founded.assigned == {A: ((0, 10), (10, 20)), B: ((0, 10), (10, 20))}
    after = founded.after(own_plan(a=(20, 2, 4), b=(0, 2, 4)), ahead)
    assert after.assigned[A] == ((10, 20), (20, 30))
    assert after.ledgers["b/2"] == Ledger(20, (), {B: ((10, 20), (0, 10))})


def test_nodes_that_read_ahead_are_dealt_no_more_than_the_run_has_left() -> None:
    ahead = replace(SHAPE, reads_ahead=True)
    founded = Progress.at_start().begin(own_plan(a=(0, 0, 8), b=(0, 0, 4)), ahead, after_round=None)
    assert founded.assigned == {A: ((0, 40), (40, 50)), B: ((0, 20), (20, 40))}


def test_line_that_begins_again_keeps_what_absent_nodes_owe(apart: Progress) -> None:
    again = apart.begin(own_plan(a=(0, 0, 1), c=(0, 0, 1)), SHAPE, after_round=3)
    assert again.ledgers == {"a/1": own(20, (5, 20), a=(0, 5)), "b/2": own(20, (0, 20)), "c/3": own(5, c=(0, 5))}


@pytest.mark.parametrize(("before", "after"), [(dict.fromkeys(OWN, SHARED), OWN), (OWN, dict.fromkeys(OWN, SHARED))])
def test_run_that_goes_on_with_other_documents_keeps_the_ledgers_of_before(
    before: dict[str, str], after: dict[str, str]
) -> None:
    first = Progress.at_start().begin(own_plan(before, a=(0, 0, 4)), SHAPE, after_round=None)
    again = first.begin(own_plan(after, a=(0, 0, 1)), SHAPE, after_round=0)
    assert again.ledgers == {before["a"]: own(20, (0, 20)), after["a"]: own(5, a=(0, 5))}
    assert again.assigned == {A: ((0, 5),)}


def test_record_of_documents_of_one_s_own_survives_json(apart: Progress) -> None:
    progress = apart.after(own_plan(late=(B,), a=(60, 4, 4)), SHAPE)
    assert Progress.from_record(json.loads(json.dumps(progress.to_record()))) == progress

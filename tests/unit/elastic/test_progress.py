"""Progress: what a committed round does to steps, tokens and samples."""

from __future__ import annotations

import json

import pytest

from zeroband.data.ledger import Ledger
from zeroband.elastic.epoch import Opening
from zeroband.elastic.progress import Progress, RunShape

SHAPE = RunShape(total_steps=10, steps_per_round=4, batch_size=5)
A, B, C = "a#1", "b#1", "c#1"


def an_opening(**weights: int) -> Opening:
    return Opening(1, 1, 1, tuple(f"{node}#1" for node in weights), tuple(weights.values()))


@pytest.fixture
def founded() -> Progress:
    return Progress.at_start().after(an_opening(a=0, b=0), SHAPE)


def test_founding_hands_out_work_and_counts_no_step(founded: Progress) -> None:
    assert founded == Progress(0, 0, Ledger(40), {A: ((0, 20),), B: ((20, 40),)})


def test_round_counts_its_steps_once_and_the_tokens_of_all(founded: Progress) -> None:
    after = founded.after(an_opening(a=100, b=60), SHAPE)
    assert (after.inner_step, after.tokens) == (4, 160)
    assert after.assigned == {A: ((40, 60),), B: ((60, 80),)}


def test_lost_member_gives_its_samples_back_to_the_next_round(founded: Progress) -> None:
    after = founded.after(an_opening(b=60), SHAPE)
    assert after == Progress(4, 60, Ledger(40), {B: ((0, 20),)})


def test_member_without_weight_gives_its_samples_back_and_gets_new_ones(founded: Progress) -> None:
    after = founded.after(an_opening(a=0, b=60), SHAPE)
    assert after.assigned == {A: ((0, 20),), B: ((40, 60),)}


def test_joiner_without_an_assignment_gets_one(founded: Progress) -> None:
    after = founded.after(an_opening(a=100, b=60, c=0), SHAPE)
    assert after.assigned[C] == ((80, 100),)


def test_last_round_is_as_short_as_what_is_left(founded: Progress) -> None:
    late = founded.after(an_opening(a=1, b=1), SHAPE).after(an_opening(a=1, b=1), SHAPE)
    assert late.steps_in_next_round(SHAPE) == 2
    assert late.assigned == {A: ((80, 90),), B: ((90, 100),)}


def test_complete_run_hands_out_no_more(founded: Progress) -> None:
    progress = founded
    for _ in range(3):
        assert not progress.is_complete
        progress = progress.after(an_opening(a=1, b=1), SHAPE)
    assert progress == Progress(10, 6, Ledger(100), {}) and progress.is_complete


def test_record_survives_json(founded: Progress) -> None:
    progress = founded.after(an_opening(b=60), SHAPE)
    assert Progress.from_record(json.loads(json.dumps(progress.to_record()))) == progress


def test_all_members_come_to_the_same_progress_from_the_record(founded: Progress) -> None:
    opening = an_opening(a=3, b=0, c=0)
    copied = Progress.from_record(founded.to_record())
    assert copied.after(opening, SHAPE).to_record() == founded.after(opening, SHAPE).to_record()

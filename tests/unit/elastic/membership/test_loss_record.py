"""The loss of a round as the verdicts record it, and which rounds call for going back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.config.schema import RollbackConfig
from zeroband.elastic.membership.loss_record import LossRecord, loss_of, reason_to_go_back
from zeroband.elastic.membership.records import Ready, RoundPlan
from zeroband.elastic.membership.round_rules import mean_loss

ON = RollbackConfig(on_spike=2.0)
LOSSES = st.floats(0.01, 20.0)


def plan(losses: Sequence[float | None], weights: Sequence[int], steps: Sequence[int] | None = None) -> RoundPlan:
    members = tuple("abc"[: len(losses)])
    made = tuple(steps or [1] * len(losses))
    ready = [Ready(7, weight, "s", loss=loss) for weight, loss in zip(weights, losses, strict=True)]
    return RoundPlan(1, 1, 7, members, tuple(weights), made, made, loss=mean_loss(ready))


def after(losses: Sequence[float | None]) -> LossRecord:
    """The record of the last of rounds of one node with these losses; None: not finite."""
    record = LossRecord()
    for round, loss in enumerate(losses):
        record = record.after(plan([loss], [10]), from_step=10 * round)
    return record


@pytest.mark.parametrize(
    ("losses", "weights", "loss"),
    [
        ([2.0, 5.0], [30, 10], 2.75),
        ([2.0, 5.0], [30, 0], 2.0),
        ([2.0, None], [30, 10], 2.0),
    ],
)
def test_loss_of_a_round_is_the_mean_by_tokens_of_those_whose_update_counts(
    losses: list[float | None], weights: list[int], loss: float
) -> None:
    assert loss_of(plan(losses, weights)) == loss


@pytest.mark.parametrize(("losses", "weights"), [([None, None], [10, 10]), ([None, 3.0], [10, 0]), ([2.0], [0])])
def test_round_in_which_no_update_with_a_finite_loss_counts_has_none(
    losses: list[float | None], weights: list[int]
) -> None:
    loss = loss_of(plan(losses, weights))
    assert loss is not None and math.isnan(loss)


def test_round_in_which_nobody_learned_has_no_loss_to_judge() -> None:
    assert loss_of(plan([None, None], [0, 0], steps=[0, 0])) is None
    record = LossRecord(3.0, True, 3.0, 9).after(plan([None], [0], steps=[0]), from_step=100)
    assert (record.loss, record.is_finite, record.rounds) == (None, True, 10)
    assert reason_to_go_back(record, ON) == ""


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([3.0] * 5 + [6.1], "a loss of 6.1 after a mean of 3 (rollback.on_spike=2)"),
        ([3.0] * 5 + [5.9], ""),
        ([3.0] * 4 + [6.1], ""),
        ([3.0] * 5 + [6.1, 3.0], ""),
        ([None], "no node had a finite loss"),
        ([3.0] * 9 + [None], "no node had a finite loss"),
        ([3.0] * 5 + [None, 6.1], "a loss of 6.1 after a mean of 3 (rollback.on_spike=2)"),
    ],
)
def test_round_calls_for_going_back_where_its_loss_is_no_number_or_spikes(
    losses: list[float | None], reason: str
) -> None:
    assert reason_to_go_back(after(losses), ON) == reason


def test_what_is_switched_off_calls_for_nothing() -> None:
    spike, nothing = after([3.0] * 5 + [60.0]), after([None])
    assert reason_to_go_back(spike, RollbackConfig(on_spike=None)) == ""
    assert reason_to_go_back(nothing, RollbackConfig(on_non_finite=False)) == ""
    assert reason_to_go_back(spike, None) == reason_to_go_back(nothing, None) == ""


def test_record_names_the_step_with_which_its_round_began() -> None:
    assert after([3.0, 3.0, 3.0]).from_step == 20


@given(st.lists(LOSSES, min_size=1, max_size=40))
def test_mean_is_that_of_the_first_twenty_and_later_within_what_was_seen(losses: list[float]) -> None:
    record = after([*losses, 1.0])
    assert record.rounds == len(losses)
    assert min(losses) - 1e-9 <= record.mean <= max(losses) + 1e-9
    if len(losses) <= 20:
        assert record.mean == pytest.approx(sum(losses) / len(losses))


@given(st.lists(LOSSES | st.none(), max_size=30))
def test_record_comes_back_from_a_payload_and_is_carried_once(losses: list[float | None]) -> None:
    record = after(losses)
    assert LossRecord.of({"losses": record.to_record()}) == record
    assert record.carried().carried() == record.carried()
    assert reason_to_go_back(record.carried(), ON) == ""


@given(st.lists(st.floats(2.0, 3.9), min_size=1, max_size=40))
def test_noise_below_the_factor_never_calls_for_anything(losses: list[float]) -> None:
    assert all(reason_to_go_back(after(losses[:n]), ON) == "" for n in range(1, len(losses) + 1))

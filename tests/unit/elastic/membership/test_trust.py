"""What members count by how they agreed with the rounds before."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.membership.trust import scores_after, scores_of, trust_of, weight_of
from zeroband.kernels.codec import CODECS
from zeroband.kernels.robust import RobustRule, combine

A, B, C = "a#1", "b#2", "c#3"
RULES = [RobustRule("clip"), RobustRule("trimmed", trim=0.25), RobustRule("centered_clip", iterations=1)]


def plan(*members: str, late: tuple[str, ...] = ()) -> RoundPlan:
    return RoundPlan(1, 1, 1, members, (1,) * len(members), late=late, trust=(1.0,) * len(members))


def rounds(count: int, cosine: float, score: float = 0.0) -> float:
    for _ in range(count):
        score = scores_after({"agreement": {A: score}}, plan(A), {A: cosine})[A]
    return score


@pytest.mark.parametrize(
    ("score", "weight"),
    [(1.0, 1.0), (0.0, 1.0), (-0.05, 1.0), (-0.08, 0.7), (-0.101, 0.0), (-1.0, 0.0), (math.nan, 0.0)],
)
def test_weight_falls_with_the_score(score: float, weight: float) -> None:
    assert weight_of(score) == pytest.approx(weight)


def test_one_that_pulls_against_the_others_counts_nothing_after_a_few_rounds() -> None:
    assert [weight_of(rounds(count, -0.5)) for count in (1, 2, 3, 4)] == pytest.approx([1.0, 0.55, 0.0, 0.0], abs=0.01)
    assert weight_of(rounds(10, -0.5, score=1.0)) == 1.0, "it may have been honest for long"
    assert weight_of(rounds(14, -0.5, score=1.0)) == 0.0


def test_one_that_counts_nothing_is_tried_again() -> None:
    record, weights = {"agreement": {A: -0.17}}, list[float]()
    for _ in range(60):
        record = {"agreement": scores_after(record, plan(A, B), {B: 0.5})}
        weights.append(trust_of((A,), record)[0])
    assert weights[20] == 0.0 and 0.5 <= weights[-1] < 0.7


def test_members_that_left_are_forgotten_and_late_ones_are_not() -> None:
    record = {"agreement": {A: -0.3, B: -0.3, C: -0.3}}
    scores = scores_after(record, plan(A, late=(B,)), {A: -1.0})
    assert scores == pytest.approx({A: -0.37, B: -0.297})
    assert trust_of((A, C), {"agreement": scores}) == (0.0, 1.0)


def test_scores_stay_bounded_whatever_is_measured() -> None:
    assert rounds(1000, -1e9) == pytest.approx(-1.0) and rounds(1000, 1e9) == pytest.approx(1.0)


def test_records_without_scores_trust_everybody() -> None:
    assert scores_of({}) == {} and scores_of({"agreement": 3}) == {}
    assert trust_of((A, B), {}) == (1.0, 1.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_honest_members_of_unequal_data_and_speed_stay_trusted_for_200_rounds(rule: RobustRule) -> None:
    """Each has an optimum as far from the others' as all are from the start, and noise as large as what it learns.

    They do from 1 to 8 steps in a round, two join on the way, and near the end contributions are noise alone.
    """
    random, numel, codec = torch.Generator().manual_seed(3), 512, CODECS["int8"]

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(numel, generator=random)

    common = noise(1.0)
    optimum, steps = [common + noise(1.0) for _ in range(8)], [1, 2, 3, 4, 5, 6, 7, 8]
    state, record, least = torch.zeros(numel), dict[str, object](), 1.0
    for number in range(200):
        here = [m for m in range(8) if number >= 60 * max(0, m - 5)]
        members = tuple(f"m{m}" for m in here)
        trust = trust_of(members, record)
        least = min(least, *trust)
        deltas = [0.05 * steps[m] * (state - optimum[m]) + noise(0.1 * steps[m] ** 0.5) for m in here]
        made = RoundPlan(1, 1, number, members, tuple(10 * steps[m] for m in here), trust=trust)
        result, seen = combine(rule, codec, [codec.encode(delta) for delta in deltas], made.shares, numel)
        known = zip(members, seen.cosines(), strict=True)
        record = {"agreement": scores_after(record, made, {m: cosine for m, cosine in known if cosine is not None})}
        state = state - result
    assert least > 0.5


@given(st.lists(st.floats(-0.05, 1.0) | st.none(), max_size=200))
def test_member_whose_cosines_are_near_zero_or_above_counts_fully_for_ever(cosines: list[float | None]) -> None:
    """A score is a mean of what was measured and of 0, so it is never below both."""
    record: dict[str, object] = {}
    for cosine in cosines:
        record = {"agreement": scores_after(record, plan(A, B), {} if cosine is None else {A: cosine})}
        assert trust_of((A,), record) == (1.0,)


def disjoint(random: torch.Generator) -> list[Tensor]:
    """Each member trains parameters of its own, as those of letters that it alone has."""
    return [torch.randn(2048, generator=random) * (torch.arange(2048) % 5 == m) for m in range(5)]


def independent(random: torch.Generator) -> list[Tensor]:
    """No two have anything in common, in norms from 1 to 5."""
    return [(1 + m) * torch.randn(2048, generator=random) for m in range(5)]


def one_apart(random: torch.Generator) -> list[Tensor]:
    """Four have learned much the same, and one something else: none of it is theirs, and none is opposed to it."""
    shared = torch.randn(2048, generator=random)
    alike = [shared + 0.3 * torch.randn(2048, generator=random) for _ in range(4)]
    other = torch.randn(2048, generator=random)
    return [*alike, other - shared * (other @ shared) / (shared @ shared)]


@pytest.mark.parametrize("contributions", [disjoint, independent, one_apart], ids=lambda made: made.__name__)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_disagreement_alone_costs_no_trust(
    rule: RobustRule, contributions: Callable[[torch.Generator], list[Tensor]]
) -> None:
    """What a member sends moves the result towards it, never away from it: only who pulls against the others sinks."""
    random, members, codec = torch.Generator().manual_seed(5), tuple(f"m{m}" for m in range(5)), CODECS["int8"]
    record: dict[str, object] = {}
    for number in range(60):
        made = RoundPlan(1, 1, number, members, (1,) * 5, trust=trust_of(members, record))
        parts = [codec.encode(delta) for delta in contributions(random)]
        _, seen = combine(rule, codec, parts, made.shares, 2048)
        known = zip(members, seen.cosines(), strict=True)
        record = {"agreement": scores_after(record, made, {m: cosine for m, cosine in known if cosine is not None})}
        assert trust_of(members, record) == (1.0,) * 5

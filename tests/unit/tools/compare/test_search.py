"""Which learning rate counts, and when the best one is known to be one."""

from __future__ import annotations

import pytest

from zeroband.tools.compare.search import Losses, best_lr, is_bracketed, next_lr


@pytest.mark.parametrize(
    ("losses", "best", "bracketed"),
    [
        ({1e-3: 1.7, 2e-3: 1.6, 4e-3: 1.65}, 2e-3, True),
        ({1e-3: 1.7, 2e-3: 1.65, 4e-3: 1.6}, 4e-3, False),
        ({1e-3: 1.6, 2e-3: 1.65, 4e-3: 1.7}, 1e-3, False),
        ({1e-3: 1.7, 2e-3: 1.6, 4e-3: None}, 2e-3, True),
        ({1e-3: None, 2e-3: None}, None, False),
        ({2e-3: 1.6}, 2e-3, False),
    ],
)
def test_best_is_bracketed_when_a_worse_one_was_tried_on_each_side(
    losses: Losses, best: float | None, bracketed: bool
) -> None:
    assert (best_lr(losses), is_bracketed(losses)) == (best, bracketed)


@pytest.mark.parametrize(
    ("losses", "most", "following"),
    [
        ({1e-3: 1.7, 2e-3: 1.6, 4e-3: 1.65}, 9, None),
        ({1e-3: 1.7, 2e-3: 1.65, 4e-3: 1.6}, 9, 8e-3),
        ({1e-3: 1.6, 3e-3: 1.65}, 9, 3.33e-4),
        ({1e-3: 1.7, 2e-3: 1.65, 4e-3: 1.6}, 3, None),
        ({2e-3: 1.6}, 9, 4e-3),
        ({1e-3: None, 2e-3: None}, 9, 5e-4),
    ],
)
def test_next_one_lies_beyond_the_edge_where_the_best_is(losses: Losses, most: int, following: float | None) -> None:
    assert next_lr(losses, most=most) == following


def test_search_ends_with_a_bracket_or_with_its_tries() -> None:
    losses: dict[float, float | None] = {1e-3: 3.0, 2e-3: 2.9}
    while (lr := next_lr(losses, most=8)) is not None:
        losses[lr] = 1.0 + abs(lr - 0.016)
    assert is_bracketed(losses) and best_lr(losses) == 0.016
    endless: dict[float, float | None] = {1e-3: 3.0, 2e-3: 2.9}
    while (lr := next_lr(endless, most=5)) is not None:
        endless[lr] = -lr
    assert len(endless) == 5 and not is_bracketed(endless)

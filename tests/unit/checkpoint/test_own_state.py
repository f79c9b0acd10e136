"""What ranks draw follows from the seed."""

from __future__ import annotations

import torch

from zeroband.checkpoint.own_state import seed_random_state


def drawn(seed: int, node_id: str, local_rank: int) -> list[float]:
    seed_random_state(seed, node_id, local_rank)
    return torch.rand(4).tolist()


def test_each_rank_draws_numbers_of_its_own_that_follow_from_the_seed() -> None:
    ranks = [(0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0)]
    with torch.random.fork_rng(devices=[]):
        first = [drawn(*rank) for rank in ranks]
        assert [drawn(*rank) for rank in reversed(ranks)] == first[::-1]
    assert len({tuple(numbers) for numbers in first}) == len(ranks)

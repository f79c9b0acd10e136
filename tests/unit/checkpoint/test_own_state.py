"""What ranks draw follows from the seed; what they read of the inner optimizer is their rows."""

from __future__ import annotations

import io

import pytest
import torch
import xxhash

from zeroband.checkpoint import own_state
from zeroband.checkpoint.layout import inner_header
from zeroband.checkpoint.manifest import StoredFile
from zeroband.checkpoint.own_state import load_inner, seed_random_state
from zeroband.state.slot import Slot


def drawn(seed: int, node_id: str, local_rank: int) -> list[float]:
    seed_random_state(seed, node_id, local_rank)
    return torch.rand(4).tolist()


def test_each_rank_draws_numbers_of_its_own_that_follow_from_the_seed() -> None:
    ranks = [(0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0)]
    with torch.random.fork_rng(devices=[]):
        first = [drawn(*rank) for rank in ranks]
        assert [drawn(*rank) for rank in reversed(ranks)] == first[::-1]
    assert len({tuple(numbers) for numbers in first}) == len(ranks)


@pytest.mark.parametrize(
    ("rows", "shard"),
    [(slice(1, 2), torch.zeros(1, 3)), (slice(2, 2), torch.zeros(0))],
    ids=["some rows", "none, of which FSDP2 makes an empty vector"],
)
def test_rank_reads_its_rows(rows: slice, shard: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_state, "local_rows", lambda tensor: rows)
    monkeypatch.setattr(own_state, "local_part", lambda tensor: shard)
    whole = torch.arange(6.0).view(2, 3)
    data = inner_header((Slot("w", (2, 3), 0),), ("exp_avg",)) + whole.numpy().tobytes()
    expected = StoredFile(len(data), xxhash.xxh3_128_hexdigest(data))
    load_inner({"exp_avg.w": torch.zeros(2, 3)}, lambda: io.BytesIO(data), expected)
    assert shard.flatten().tolist() == whole[rows].flatten().tolist()

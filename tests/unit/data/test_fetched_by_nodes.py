"""What each node of a run fetches of prepared ids, beside what it trains on; `-s` prints it.

The order, what is dealt and what is foreseen are those of a run; nothing is read. Caches hold what is mixed at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from zeroband.data.index import BlockLayout, SampleIndex
from zeroband.data.ledger import Ledger, allocate, settle
from zeroband.data.loader import AssignmentForecast
from zeroband.data.shard_set import BLOCK_TOKENS

SEQ_LENGTH, MIXED = 1024, 64
STRETCH = MIXED * BLOCK_TOKENS // SEQ_LENGTH
"""Samples that are mixed at a time."""
STRETCHES = 16
CORPUS = [2 * STRETCHES * MIXED * BLOCK_TOKENS]


@pytest.fixture(scope="module")
def block_of() -> npt.NDArray[np.int64]:
    """The block of each sample, in their order."""
    index = SampleIndex(BlockLayout(CORPUS, BLOCK_TOKENS, SEQ_LENGTH), 0, 0.0, window=MIXED)
    return index.positions(np.arange(index.n_train)) * SEQ_LENGTH // BLOCK_TOKENS


def fetched(block_of: npt.NDArray[np.int64], nodes: int, per_round: int) -> float:
    """Tokens that the first node fetches for each that it trains on, where all train so many samples a round."""
    each = {f"node{number}": per_round for number in range(nodes)}
    corpora, forecast, blocks = dict.fromkeys(each, ""), AssignmentForecast(STRETCH // 8), set[int]()
    ledgers: dict[str, Ledger] = {}
    rounds = STRETCHES * STRETCH // (nodes * per_round)
    for _ in range(rounds):
        ledgers = allocate(ledgers, each, corpora)
        forecast.assign(dealt := ledgers[""].assigned["node0"])
        for start, stop in (*dealt, *forecast.upcoming()) if forecast.is_due else dealt:
            blocks |= set(block_of[start:stop].tolist())
        forecast.read(per_round)
        ledgers = settle(ledgers, each, {})
    ratio = len(blocks) * BLOCK_TOKENS / (rounds * per_round * SEQ_LENGTH)
    print(f"{nodes} nodes, {per_round / STRETCH:.3f} of a stretch in a round: {ratio:.2f}")
    return ratio


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_node_fetches_what_the_whole_run_trains_on_where_rounds_are_short(
    block_of: npt.NDArray[np.int64], nodes: int
) -> None:
    assert fetched(block_of, nodes, per_round=64) == pytest.approx(nodes, rel=0.1)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_node_fetches_little_more_than_its_own_where_a_round_is_two_stretches(
    block_of: npt.NDArray[np.int64], nodes: int
) -> None:
    assert 1.0 <= fetched(block_of, nodes, per_round=2 * STRETCH) < 1.1

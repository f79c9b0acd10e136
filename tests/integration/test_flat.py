"""The canonical flat state against what FSDP2 really gives to the ranks of a node: two and three gloo processes."""

import json
from importlib.util import find_spec
from typing import Any

import pytest
from tests.integration.ranks import run_ranks

RANKS = 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks found."""
    folder = tmp_path_factory.mktemp("flat")
    run_ranks("flat_worker", (folder, RANKS))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("world", ["two", "three"])
def test_shards_of_fsdp2_are_the_ranges_of_the_flat_state(seen: list[dict[str, Any]], world: str) -> None:
    found = [rank[world] for rank in seen if world in rank]
    assert len(found) == {"two": 2, "three": 3}[world]
    others = {"two": 3 if find_spec("torchao") else 0, "three": 4}[world]  # int8 moments; Muon's steps
    assert all(len(rank) == 6 + others for rank in found)
    assert [name for rank in found for name, holds in rank.items() if not holds] == []


def test_memory_that_is_too_small_ends_all_ranks_with_one_reason(seen: list[dict[str, Any]]) -> None:
    assert len({rank["refusal"] for rank in seen}) == 1
    assert "shared memory is too small" in seen[0]["refusal"]

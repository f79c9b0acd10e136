from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from zeroband.demo.ending import epilogue, final_digests, first_and_last_loss, is_one_state
from zeroband.observe.view import RunView

NODE_IDS = ("node0", "node1", "node2", "node3")


@pytest.fixture
def ended(run: RunView) -> RunView:
    """The run when node2 has come back and holds the same state."""
    back = replace(run.nodes[2], state="finished", digests=run.nodes[0].digests, loss_curve=(5.5, 2.9))
    return replace(run, nodes=(*run.nodes[:2], back, run.nodes[3]))


def test_final_digests_are_those_of_the_newest_round(ended: RunView) -> None:
    assert final_digests(ended, NODE_IDS) == dict.fromkeys(NODE_IDS, "0123456789abcdef")


def test_final_digests_are_missing_for_a_node_that_stayed_behind_or_never_wrote(run: RunView) -> None:
    digests = final_digests(run, (*NODE_IDS, "node4"))
    assert [node_id for node_id, digest in digests.items() if digest is None] == ["node2", "node4"]


@pytest.mark.parametrize(
    ("digests", "is_one"),
    [(("d", "d"), True), (("d", "e"), False), (("d", None), False), ((None, None), False)],
)
def test_is_one_state_needs_the_same_digest_everywhere(digests: tuple[str | None, ...], is_one: bool) -> None:
    assert is_one_state(dict(enumerate(digests))) == is_one  # pyright: ignore[reportArgumentType]


def test_first_and_last_loss_are_means_over_the_nodes_and_the_last_steps(ended: RunView) -> None:
    first, last = first_and_last_loss(ended)
    assert first == 5.5
    assert last == pytest.approx((3 * (5.5 + 4.0 + 3.0 + 2.5) / 4 + (5.5 + 2.9) / 2) / 4)


def test_first_and_last_loss_are_no_numbers_where_nobody_trained() -> None:
    assert all(math.isnan(loss) for loss in first_and_last_loss(RunView("demo")))


@pytest.mark.parametrize(
    "said",
    [
        "Done in 83 s.",
        "5.50 -> ",
        "sent         4 MB; per-step data parallel would have sent 80 MB, 20 times as much",
        "after outer step 4, equal on all 4 nodes",
        "node2  0123456789abcdef",
        "zeroband status runs/demo",
        "  | def main():\n  | \n  |     pass",
        "torchrun",
    ],
)
def test_epilogue_says_what_was_shown(ended: RunView, said: str) -> None:
    sample = "def main():\n\n    pass\n\n"
    text = epilogue(ended, NODE_IDS, run_dir=Path("runs/demo"), sample=sample, took_s=83.2)
    assert said in text


def test_epilogue_does_not_call_different_states_equal(run: RunView) -> None:
    text = epilogue(run, NODE_IDS, run_dir=Path("runs/demo"), sample=None, took_s=83.2)
    assert "DIFFERENT" in text
    assert "node2  does not hold it" in text
    assert "writes" not in text

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zeroband.observe.view import RunView
from zeroband.tools.demo.ending import epilogue, final_digests, is_one_state

NODE_IDS = ("node0", "node1", "node2", "node3")


@pytest.fixture
def ended(run: RunView) -> RunView:
    """The run when node2 has come back and holds the same state."""
    back = replace(run.nodes[2], state="finished", digest=run.nodes[0].digest, loss_curve=(5.5, 2.9))
    return replace(run, nodes=(*run.nodes[:2], back, run.nodes[3]))


def test_final_digests_are_those_that_the_nodes_held_at_last(ended: RunView) -> None:
    assert final_digests(ended, NODE_IDS) == dict.fromkeys(NODE_IDS, "0123456789abcdef")


def test_final_digests_show_who_stayed_behind_and_who_never_wrote(run: RunView) -> None:
    digests = final_digests(run, (*NODE_IDS, "node4"))
    assert (digests["node2"], digests["node4"]) == ("d3", None)
    assert not is_one_state(digests)


@pytest.mark.parametrize(
    ("digests", "is_one"),
    [(("d", "d"), True), (("d", "e"), False), (("d", None), False), ((None, None), False)],
)
def test_is_one_state_needs_the_same_digest_everywhere(digests: tuple[str | None, ...], is_one: bool) -> None:
    assert is_one_state(dict(enumerate(digests))) == is_one  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "said",
    [
        "Done in 83 s.",
        "5.500 -> ",
        "sent         4 MB by all nodes; per-step data parallel would have sent 80 MB, 20 times",
        "at the end, equal on all 4 nodes",
        "node2  0123456789abcdef",
        "zeroband status runs/demo",
        "  | def main():\n  | \n  |     pass",
        "zeroband launch",
    ],
)
def test_epilogue_says_what_was_shown(ended: RunView, said: str) -> None:
    sample = "def main():\n\n    pass\n\n"
    text = epilogue(ended, NODE_IDS, run_dir=Path("runs/demo"), sample=sample, took_s=83.2)
    assert said in text


def test_epilogue_puts_no_secret_on_a_command_line(run: RunView) -> None:
    text = epilogue(run, NODE_IDS, run_dir=Path("runs/demo"), sample=None, took_s=83.2)
    assert "report.html" not in text
    report = Path("runs/demo/report.html")
    told = epilogue(run, NODE_IDS, run_dir=report.parent, sample=None, took_s=83.2, report=report)
    assert "report       runs/demo/report.html" in told.splitlines()
    assert "zeroband store --host HOST --run-id first" in text and "token" not in text.rpartition("For real")[2]
    assert "--run.token" not in text and "SECRET" not in text


def test_epilogue_does_not_call_different_states_equal(run: RunView) -> None:
    text = epilogue(run, (*NODE_IDS, "node4"), run_dir=Path("runs/demo"), sample=None, took_s=83.2)
    assert "DIFFERENT" in text
    assert "node2  d3" in text
    assert "node4  never held one" in text
    assert "writes" not in text

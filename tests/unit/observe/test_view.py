"""The figures of a run as a whole: one for the loss, whoever shows it."""

from __future__ import annotations

from dataclasses import replace

from zeroband.observe.view import NodeView, RunView
from zeroband.tools.top.scene import Scene
from zeroband.tools.top.screen import progress_line, traffic

MEMBERS = ("a#1", "b#1")
A = NodeView("a", "finished", founding="f", epoch=2, members=MEMBERS, round=3, loss=1.5, first_loss=5.0, sent_bytes=10)
B = replace(A, node_id="b", loss=2.5, first_loss=7.0)
LOST = replace(A, node_id="c", state="lost", epoch=1, loss=9.0, first_loss=6.0)


def shown(*nodes: NodeView) -> Scene:
    run = RunView("r", nodes)
    return Scene("", run, 0.0, ("a", "b"), (), 0, "")


def test_loss_of_a_run_is_the_mean_of_its_members_newest_ones() -> None:
    run = RunView("r", (A, B, LOST))
    assert (run.first_loss, run.loss) == (6.0, 2.0)
    assert "loss 2.000" in progress_line(shown(A, B, LOST))
    assert RunView("r", (A, replace(B, loss=float("nan")))).loss == 1.5
    assert RunView("r", (LOST,)).loss == 9.0
    assert RunView("r").loss is None


def test_all_nodes_are_said_to_have_sent_when_each_has_made_a_round() -> None:
    ahead = replace(A, ddp_bytes=100)
    assert traffic(shown(ahead, replace(B, round=0, sent_bytes=0))) == "nothing sent yet"
    assert traffic(shown(ahead, B)).startswith("all nodes sent 20 B so far")

"""A run as its nodes' files show it, without files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zeroband.observe.view import NodeView, RunView
from zeroband.tools.top.scene import Note, Scene

NODE_IDS = ("node0", "node1", "node2", "node3")


def node(node_id: str, step: int = 40, **fields: object) -> NodeView:
    view = {
        "state": "training",
        "starts": 1,
        "member_id": f"{node_id}#a",
        "step": step,
        "total_steps": 120,
        "loss": 2.5,
        "first_loss": 5.5,
        "tokens_per_s": 2100.0,
        "round": 4,
        "epoch": 2,
        "members": tuple(f"{other}#a" for other in NODE_IDS if other != "node2"),
        "digest": "0123456789abcdef",
        "sent_bytes": 1_000_000,
        "ddp_bytes": 20_000_000,
    }
    return NodeView(node_id, **{**view, **fields})  # pyright: ignore[reportArgumentType]


@pytest.fixture(autouse=True)
def colour_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal that is drawn for, whatever the tests are run from: rich reads it from the environment."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run() -> RunView:
    """Three nodes at step 40 of 120; node2 was lost at step 30 and round 3."""
    lost = node("node2", state="lost", step=30, round=3, epoch=1, digest="d3")
    return RunView("demo", (node("node0"), node("node1"), lost, node("node3")), loss_curve=(5.5, 4.0, 3.0, 2.5))


@pytest.fixture
def make_scene(run: RunView) -> Callable[..., Scene]:
    """The same as a scene; anything may be replaced."""

    def make(**fields: object) -> Scene:
        scene = {
            "title": "zeroband demo",
            "run": run,
            "elapsed_s": 61.5,
            "node_ids": NODE_IDS,
            "down": frozenset(["node2"]),
            "total_rounds": 12,
            "notes": (Note(3.0, "the beginning"), Note(60.0, "node2 is gone")),
            "footer": "Next: it comes back.",
        }
        return Scene(**{**scene, **fields})  # pyright: ignore[reportArgumentType]

    return make

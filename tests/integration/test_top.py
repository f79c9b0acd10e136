"""`zeroband top` on a real terminal."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.terminals import Terminal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_top_redraws_a_run_on_a_terminal_and_leaves_it_as_it_was(tmp_path: Path, key: str) -> None:
    node_dir = tmp_path / "runs" / "first" / "node0"
    node_dir.mkdir(parents=True)
    events = [
        {"at_s": 1.0, "kind": "node_started", "total_steps": 10, "local_world_size": 1, "parameters": 7},
        {"at_s": 2.0, "kind": "joined", "member_id": "node0#a", "round": 0},
    ]
    metrics = node_dir / "metrics.jsonl"
    (node_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    metrics.write_text(json.dumps({"at_s": 3.0, "step": 3, "train/loss": 4.5}) + "\n")
    env = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-m", "zeroband.cli", "top", str(tmp_path / "runs")]
    terminal = Terminal(command, 80, 24, env)
    terminal.wait_for(lambda drawn: "3/10" in drawn and "q: end" in drawn)
    assert not terminal.is_line_by_line
    with metrics.open("a") as file:
        file.write(json.dumps({"at_s": 4.0, "step": 4, "train/loss": 4.25}) + "\n{half a li")
    terminal.wait_for(lambda drawn: "4/10" in drawn and "loss 4.25" in drawn)
    frame = terminal.drawn.rpartition("╭")[2]
    terminal.press(key)
    assert terminal.exit_code() == 0
    assert terminal.is_line_by_line
    assert frame.count("\n") <= 23

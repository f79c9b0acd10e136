"""Commands that train nothing, and wrong input to those that do, are answered without loading torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import json, os, runpy, signal, sys
from zeroband import cli
from zeroband.config import load_config

def asked(command):
    try:
        if command[0].endswith(".py"):
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
        return cli.main(command)
    except SystemExit as end:
        return end.code

for command in json.load(sys.stdin):
    read, write = os.pipe()
    if not (child := os.fork()):
        signal.alarm(20)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = asked(command)
        loaded = sorted({"torch", "pyarrow", "matplotlib"} & sys.modules.keys())
        os.write(write, json.dumps([code or 0, loaded]).encode())
        os._exit(0)
    os.close(write)
    print(os.read(read, 4096).decode(), flush=True)
    os.waitpid(child, 0)
"""
"""Runs each command in a child that has loaded the configuration, as most commands do, and says how it ended: an empty
line for one that is still at work after 20 s."""

TRAINER = "src/zeroband/train.py"

COMMANDS: tuple[tuple[int, str], ...] = (
    (0, "--help"),
    (0, "--version"),
    (0, "train --help"),
    (0, "train @150M --store.url redis://127.0.0.1:1 --dry-run"),
    (2, "train @151M"),
    (2, "train"),
    (2, "train --train.lr 3"),
    (2, "train @absent.toml"),
    (2, "train --run.seed 3"),
    (2, TRAINER),
    (2, f"{TRAINER} --train.lr 3"),
    (0, f"{TRAINER} --help"),
    (0, "config @configs/150M.toml --store.url redis://127.0.0.1:1"),
    (2, "config --train.lr 3"),
    (0, "plan --help"),
    (0, "plan --params 1e9 --nodes 8 --up 20mbit --step-s 2"),
    (2, "plan --params many --nodes 8 --up 20mbit --step-s 2"),
    (0, "status --help"),
    (2, "status absent"),
    (0, "ctl --help"),
    (2, "ctl status"),
    (0, "data --help"),
    (0, "doctor --help"),
    (2, "doctor --train.lr 3"),
    (0, "chaos --help"),
    (0, "compare --help"),
    (2, "compare --methods diloko @configs/14M.toml"),
    (0, "demo --help"),
    (2, "demo --train.lr 3"),
    (0, "simulate --help"),
    (2, f"simulate 2 1 {TRAINER} --train.lr 3"),
    (2, f"simulate 2 1 {TRAINER}"),
    (0, "export --help"),
    (2, "export checkpoint-without-a-folder-to-write-to"),
    (2, "sample checkpoint --tokens -1"),
    (0, "eval --help"),
    (0, "sample --help"),
)
"""The exit code that each ends with."""


@pytest.fixture(scope="module")
def answers(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str]]]:
    """The exit code of each command, and what it loaded."""
    asked = json.dumps([command.split() for _, command in COMMANDS])
    home = str(tmp_path_factory.mktemp("home"))
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root / "src"), "HOME": home, "ZERO_BAND_RUN__DIR": home}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=asked, env=environ, cwd=root, capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(COMMANDS), done.stderr
    return {
        command: tuple(json.loads(line or "[null, []]")) for (_, command), line in zip(COMMANDS, lines, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("code", "command"), COMMANDS)
def test_command_that_trains_nothing_answers_without_torch(
    code: int, command: str, answers: dict[str, tuple[int, list[str]]]
) -> None:
    assert answers[command] == (code, [])

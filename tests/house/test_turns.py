"""Processes that share the files of one run: each file is run once, and by one of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import os
import pytest
from pathlib import Path
from tests.turns import Turns

def pytest_configure(config):
    config.pluginmanager.register(Turns(config, Path("turns")))

@pytest.fixture(scope="session")
def server():
    with open("told", "a") as told:
        told.write(f"opened by {os.getpid()}\\n")
        yield told
"""
FILE = """
import os

def test_one(server):
    server.write(f"{os.getpid()} runs NAME\\n")

def test_two():
    assert "NAME" != "bad"
"""


def test_each_file_is_run_by_one_process_and_a_session_lasts_for_all_of_them(root: Path, tmp_path: Path) -> None:
    (tmp_path / "turns").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("one", "two", "bad", "four"):
        (tmp_path / f"test_{name}.py").write_text(FILE.replace("NAME", name))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={root}", "."]
    env = {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    both = [subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    told = (tmp_path / "told").read_text()
    opened = re.findall(r"opened by (\d+)", told)
    runs = re.findall(r"(\d+) runs (\w+)", told)
    assert sorted(name for _, name in runs) == ["bad", "four", "one", "two"], said
    assert len(opened) == len(set(opened)) and {pid for pid, _ in runs} == set(opened)
    worst = {str(process.pid): process.returncode for process in both}
    assert [code for pid, code in worst.items() if (pid, "bad") in runs] == [1]
    counts = [int(count) for text in said for count in re.findall(r"(\d+) (?:passed|failed)", text)]
    assert sum(counts) == 8, said

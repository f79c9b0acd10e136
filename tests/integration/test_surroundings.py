"""A node in surroundings that are not a person's terminal: a bare container, a session whose terminal goes away."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

STEPS = 2
CONFIG = f"""
[model]
n_layers = 1
d_model = 32
n_heads = 2
[data]
seq_length = 32
source = {{ type = "synthetic", documents = 100 }}
[train]
total_steps = {STEPS}
batch_size = 4
micro_bs = 2
"""
CONTAINER = ("unshare", "--user", "--map-user=12345", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Process 1 is the command, and its user has no entry in /etc/passwd."""

ZEROBAND = (str(Path(sysconfig.get_path("scripts")) / "zeroband"),)


def environment(folder: Path) -> dict[str, str]:
    (folder / "tiny.toml").write_text(CONFIG)
    places = {"ZERO_BAND_RUN__DIR": str(folder / "runs"), "ZERO_BAND_RUN__ID": "x", "TMPDIR": str(folder)}
    return {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "ZERO_BAND_OBSERVE__REPORT": "false", **places}


def steps_of(folder: Path) -> list[int]:
    (file,) = (folder / "runs").rglob("metrics.jsonl")
    return [step for line in file.read_text().splitlines() if (step := json.loads(line).get("step"))]


@pytest.mark.slow
def test_a_node_trains_in_a_bare_container(tmp_path: Path) -> None:
    """The launcher is process 1; no home, no name, no streams, and cards named that are not there."""
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no namespaces")
    env = environment(tmp_path) | {"NCCL_SOCKET_IFNAME": "eth9", "GLOO_SOCKET_IFNAME": "eth9"}
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *ZEROBAND]
    command = [*CONTAINER, *closed, "launch", "--nproc-per-node=1", f"@{tmp_path}/tiny.toml"]
    assert subprocess.run(command, env=env, cwd=tmp_path, timeout=240, check=False).returncode == 0
    assert steps_of(tmp_path) == [1, STEPS]
    assert [home.name for home in tmp_path.glob("zeroband-home-*")] == ["zeroband-home-12345"]


@pytest.mark.soak
@pytest.mark.slow
def test_terminal_that_goes_away_under_nohup_costs_nothing(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command = [*ZEROBAND, "train", f"@{tmp_path}/tiny.toml"]
        env = environment(tmp_path) | {"HOME": str(tmp_path)}
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        with subprocess.Popen(command, env=env, cwd=tmp_path, start_new_session=True, **streams) as node:
            os.close(slave)
            os.close(master)
            assert node.wait(timeout=240) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert steps_of(tmp_path) == [1, STEPS]

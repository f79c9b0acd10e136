"""Real nodes that share one GPU: they train, save, crash, come back and hold one state; so does a loop of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroband
from zeroband.observe.view import RunView
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(540)]

DEADLINE_S = 240.0
FED_ADAM = Path(zeroband.__file__).parents[2] / "examples" / "fed_adam.py"
SMALL = (
    *("--model.d-model", "128", "--model.n-layers", "2", "--model.n-heads", "2", "--data.seq-length", "128"),
    *("--data.hold-out", "0", "--data.source.type", "synthetic", "--data.source.documents", "300"),
    *("--train.batch-size", "8", "--train.micro-bs", "3", "--train.total-steps", "1000000", "--train.compile", "false"),
    *("--fault.detect-s", "5"),
)
ROUNDS = ("--outer.inner-steps", "10")
DILOCO = ("--outer.type", "diloco", *ROUNDS)
OTHERS = {
    "streaming": (*DILOCO, "--outer.fragments", "2", "--outer.overlap", "2", "--outer.merge", "mix"),
    "int4": (*DILOCO, "--comm.codec", "int4"),
    "eager": (*DILOCO, "--outer.overlap", "full", "--outer.merge", "eager"),
    "sparseloco": ("--outer.type", "sparseloco", *ROUNDS),
    "demo": ("--outer.type", "demo", "--outer.overlap", "1", "--optim.adamw.lr", "3e-3"),
    "robust demo": ("--outer.type", "demo", "--outer.robust.type", "clip", "--optim.adamw.lr", "3e-3"),
    "custom": ("--outer.type", "custom", "--outer.algorithm", str(FED_ADAM), *ROUNDS),
    "ddp": ("--outer.type", "ddp"),
    "int8 moments": (*DILOCO, "--optim.state-dtype", "int8"),
}


@pytest.mark.parametrize("state_device", ["cpu", "cuda"])
def test_node_that_crashes_comes_back_and_all_hold_one_state(
    device: torch.device, tmp_path: Path, state_device: str
) -> None:
    if device.type == "cpu" and state_device == "cuda":
        pytest.skip("an outer state on the GPU needs one")
    arguments = (*SMALL, *DILOCO, "--outer.state-device", state_device, "--ckpt.path", str(tmp_path / "ckpt"))
    with LocalCluster(tmp_path, (*arguments, "--data.cache-dir", str(tmp_path / "cache")), nodes=2) as cluster:

        def go_on(rounds: int, *members: str) -> None:
            """Wait for so many further rounds of just these nodes."""
            last = cluster.view().round or 0

            def has(run: RunView) -> bool:
                return (run.round or 0) >= last + rounds and set(run.members) == set(members)

            cluster.wait_until(has, timeout_s=DEADLINE_S)

        for _ in range(2):
            cluster.start()
        go_on(3, "node0", "node1")
        cluster.nodes["node1"].kill()
        go_on(2, "node0")
        cluster.restart("node1")
        go_on(3, "node0", "node1")
        for node in cluster.running:
            node.terminate()
        assert set(cluster.wait(timeout_s=DEADLINE_S).values()) == {0}
        rounds = read_rounds(cluster.run_dir)
        view = cluster.view()
    assert audit(rounds).is_exact
    assert view.disagreements == () and len({node.digest for node in view.nodes}) == 1
    assert list((tmp_path / "ckpt").rglob("step_*"))


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS.keys())
def test_each_algorithm_learns_on_two_nodes_of_one_card(
    device: torch.device, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    arguments = [*SMALL, *settings, "--train.total-steps", "60", "--ckpt.path", str(tmp_path / "ckpt")]
    with LocalCluster(tmp_path, (*arguments, "--data.cache-dir", str(tmp_path / "cache")), nodes=2) as cluster:
        for _ in range(2):
            cluster.start()
        assert set(cluster.wait(timeout_s=DEADLINE_S).values()) == {0}
        view = cluster.view()
        lines = (cluster.run_dir / "node0" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]
    assert len(losses) >= 6 and losses[-1] < losses[0] - 0.3
    assert view.disagreements == () and len({node.digest for node in view.nodes}) == 1


@pytest.mark.parametrize("overlap", ["0", "full"])
def test_compiled_ranks_train_beside_rounds_and_checkpoints(device: torch.device, tmp_path: Path, overlap: str) -> None:
    """One rank for each card: sharded over NCCL, compiled, while rounds and checkpoints are under way."""
    ranks = torch.cuda.device_count() if device.type == "cuda" else 2
    arguments = [*SMALL, *DILOCO, "--train.compile", "true", "--train.total-steps", "80"]
    arguments += [
        "--train.batch-size",
        str(4 * ranks),
        "--outer.overlap",
        overlap,
        "--ckpt.path",
        str(tmp_path / "ckpt"),
        "--ckpt.every-rounds",
        "2",
    ]
    with LocalCluster(tmp_path, (*arguments, "--data.cache-dir", str(tmp_path / "cache")), nodes=1) as cluster:
        cluster.start(ranks=ranks)
        assert set(cluster.wait(timeout_s=DEADLINE_S).values()) == {0}
        lines = (cluster.run_dir / "node0" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]
    assert len(losses) >= 8 and losses[-1] < losses[0] - 0.5
    assert sorted((tmp_path / "ckpt").rglob("step_*"))[-1].name == "step_00000080"


def test_loop_of_ones_own_trains_on_the_gpu(device: torch.device, redis_url: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).to(device)
    x, y = torch.randn(256, 64, device=device), torch.randn(256, 8, device=device)
    losses: list[float] = []
    with zeroband.DiLoCoOptimizer(
        params=model.named_parameters(),
        batch_size=256,
        inner_steps=4,
        inner_optimizer=partial(torch.optim.AdamW, lr=0.01),
        store=redis_url,
        total_steps=24,
    ) as optimizer:
        while not optimizer.is_done:
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert len(losses) == 24 and losses[-1] < 0.9 * losses[0]


def test_demo_gets_its_node_back_before_a_fast_card_has_finished(device: torch.device, tmp_path: Path) -> None:
    env = {**os.environ, "ZERO_BAND_RUN__DIR": str(tmp_path), "ZERO_BAND_TRAIN__DEVICE": device.type}
    smaller = () if device.type == "cuda" else ("--model.d-model", "64", "--model.n-layers", "1")
    command = [sys.executable, "-m", "zeroband.cli", "demo", *smaller]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0 and "equal on all 4 nodes" in done.stdout, done.stdout

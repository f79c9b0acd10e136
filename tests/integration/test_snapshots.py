"""A node that trains alone and saves: the trainer's side of checkpoints, with a real writer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from zeroband.checkpoint.loading import open_checkpoint, restore, steps_in_order
from zeroband.checkpoint.random_states import set_random_state
from zeroband.checkpoint.storage import open_storage
from zeroband.config import load_config
from zeroband.elastic.departure import Departure
from zeroband.errors import ConfigError
from zeroband.observe.events import EVENTS_FILE, EventLog
from zeroband.outer.alone import Alone
from zeroband.outer.flat import FlatLayout, parameter_shards
from zeroband.parallel import init_local_mesh
from zeroband.parts import shape_of
from zeroband.snapshots import Snapshots
from zeroband.trainer import TrainerParts, build_trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerParts]:
    folder = tmp_path_factory.mktemp("snapshots")
    settings = {
        "run.id": folder.name,
        "run.dir": folder / "runs",
        "node.id": "solo",
        "model.d_model": 32,
        "model.n_layers": 1,
        "data.seq_length": 16,
        "data.source.type": "synthetic",
        "data.cache_dir": folder / "cache",
        "train.total_steps": 100,
        "train.batch_size": 4,
        "train.dtype": "float32",
        "ckpt.path": folder / "checkpoints",
        "ckpt.every_rounds": 2,
    }
    config = load_config([f"--{key}={value}" for key, value in settings.items()])
    local = init_local_mesh()
    node = build_trainer(config, local, Departure(1.0))
    node.node_dir.mkdir(parents=True)
    for first, second in node.inner.moments().values():
        first.normal_()
        second.uniform_()
    yield node
    local.close()


def step(node: TrainerParts, hooks: Alone, snapshots: Snapshots) -> None:
    for shard in parameter_shards(node.model).values():
        shard.add_(1)
    hooks.sync_gradients(0, 64)
    hooks.sync_parameters(0, 64, ends_round=True)
    snapshots.take_if_due(None)


def test_node_saves_what_it_holds_skips_while_it_writes_and_is_alone_on_its_path(node: TrainerParts) -> None:
    hooks, events = Alone(shape_of(node.config)), EventLog(node.node_dir)
    with ExitStack() as stack:
        stack.callback(events.close)
        snapshots = Snapshots(node, None, hooks, events)
        writer = snapshots._writer
        assert writer is not None
        step(node, hooks, snapshots)
        assert not writer.is_busy  # due every second round
        torch.manual_seed(7)
        step(node, hooks, snapshots)
        drawn = torch.rand(3)
        writer.await_free()
        kept = {name: shard.clone() for name, shard in parameter_shards(node.model).items()}
        os.kill(writer.pid, signal.SIGSTOP)
        for _ in range(4):  # two more are due; the writer stands still with the first of them
            step(node, hooks, snapshots)
        assert snapshots.measured()["ckpt/backlog_bytes"]
        os.kill(writer.pid, signal.SIGCONT)
        snapshots.close(waits=True)
    kinds = [json.loads(line)["kind"] for line in (node.node_dir / EVENTS_FILE).read_text().splitlines()]
    staged, committed, skipped = "checkpoint_staged", "checkpoint_committed", "checkpoint_skipped"
    assert kinds == [staged, committed, staged, skipped, committed]
    assert not list(Path("/dev/shm").glob(f"*{node.config.run.id}@*"))

    storage = open_storage(str(node.config.ckpt.path), node.config.run.id)
    assert steps_in_order(storage) == [4, 2]
    require_state(node, kept, drawn, step=2)
    with pytest.raises(ConfigError, match="belongs to another run"):
        Snapshots(node, None, Alone(shape_of(node.config)), None)


def require_state(node: TrainerParts, kept: Mapping[str, torch.Tensor], drawn: torch.Tensor, *, step: int) -> None:
    """The checkpoint of a step holds these parameters, the node's moments, and the random state that drew `drawn`."""
    storage = open_storage(str(node.config.ckpt.path), node.config.run.id)
    layout = FlatLayout.of(node.model)
    flat = torch.zeros(layout.numel)
    assert restore(storage, layout.slots, {"params": flat}, step=step) is not None
    found = open_checkpoint(storage, step)
    for slot in layout.slots:
        assert torch.equal(flat[slot.start : slot.start + slot.numel].view(slot.shape), kept[slot.name])
    moments = {f"exp_avg.{name}": torch.zeros_like(pair[0]) for name, pair in node.inner.moments().items()}
    assert found.read_inner("solo", moments)
    assert all(torch.equal(moments[f"exp_avg.{name}"], pair[0]) for name, pair in node.inner.moments().items())
    state = found.node_state("solo")
    assert state is not None and (state["round"], state["local_world_size"]) == (step, 1)
    assert set_random_state(state["random_states"], node.local)
    assert torch.equal(torch.rand(3), drawn)
    assert not set_random_state([*state["random_states"]] * 2, node.local)

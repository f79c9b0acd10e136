"""A node that trains alone and saves: the trainer's side of checkpoints, with a real writer."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.runtime.test_report import round_after

from zeroband.checkpoint.loading import open_checkpoint, restore, steps_in_order
from zeroband.checkpoint.own_state import set_random_state
from zeroband.checkpoint.restorer import Restorer, source_of
from zeroband.checkpoint.storage import open_storage
from zeroband.checkpoint.writer_process import WriterProcess
from zeroband.config import load_config
from zeroband.config.optim import MuonConfig
from zeroband.config.outer import DilocoConfig
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import ConfigError
from zeroband.model.optim import InnerOptimizer
from zeroband.node.async_copy import Pairs
from zeroband.node.faults import FaultPoints
from zeroband.node.mesh import init_local_mesh
from zeroband.observe.events import EVENTS_FILE, EventLog, NoEvents
from zeroband.outer.no_algorithm import NoAlgorithm
from zeroband.runtime import checkpointing as checkpoints
from zeroband.runtime.build import TrainerParts, build_trainer
from zeroband.runtime.checkpointing import Checkpoints
from zeroband.runtime.loop import train
from zeroband.runtime.single_node import SingleNode
from zeroband.state.flat import FlatLayout, parameter_shards
from zeroband.tools.cluster import RedisServer

pytestmark = pytest.mark.slow

SMALL: Mapping[str, Any] = {
    "node.id": "solo",
    "model.d_model": 32,
    "model.n_layers": 1,
    "data.seq_length": 16,
    "data.source.type": "synthetic",
    "train.batch_size": 4,
    "train.dtype": "float32",
}


@pytest.fixture(params=[{}, {"optim.muon": "{}"}], ids=["AdamW", "Muon"])
def node(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[TrainerParts]:
    folder = tmp_path_factory.mktemp("checkpoints")
    settings = {
        **SMALL,
        **request.param,
        "run.id": f"{folder.name}-{os.getpid()}",  # pytest's workers have folders of equal names, and one shared memory
        "run.dir": folder / "runs",
        "data.cache_dir": folder / "cache",
        "train.total_steps": 100,
        "ckpt.path": folder / "checkpoints",
        "ckpt.every_rounds": 2,
    }
    config = load_config([f"--{key}={value}" for key, value in settings.items()])
    local = init_local_mesh()
    node = build_trainer(config, local, Departure(1.0))
    node.node_dir.mkdir(parents=True)
    for moment in node.inner.named_moments().values():
        moment.uniform_()
    yield node
    local.close()


class LateCopier:
    """Copies as late as it may, so that whatever is read or changed too early shows."""

    def __init__(self) -> None:
        self.pairs: Pairs = ()

    def begin(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def finish(self) -> None:
        for target, source in self.pairs:
            target.copy_(source.detach())
        self.pairs = ()


class EarlyCopier(LateCopier):
    """Copies at once."""

    def begin(self, pairs: Pairs) -> None:
        super().begin(pairs)
        self.finish()


def copies_by(copier: type[LateCopier], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have checkpoints copy by it, from the host and as from a GPU."""
    monkeypatch.setattr(checkpoints, "HostCopier", lambda stack: copier())
    monkeypatch.setattr(checkpoints, "copier_for", lambda device, targets, stack: copier())


def writers_of(monkeypatch: pytest.MonkeyPatch) -> list[WriterProcess]:
    """The processes that are started for checkpoints."""
    started: list[WriterProcess] = []

    def start(*arguments: Any) -> WriterProcess:
        started.append(WriterProcess(*arguments))
        return started[-1]

    monkeypatch.setattr(checkpoints, "WriterProcess", start)
    return started


def step(node: TrainerParts, hooks: NoAlgorithm, checkpoints: Checkpoints) -> None:
    checkpoints.wait_for_copy()
    for shard in parameter_shards(node.model).values():
        shard.add_(1)
    hooks.sync_gradients(0, 64)
    hooks.sync_parameters(0, ends_round=True)
    checkpoints.take_if_due(())


def test_node_saves_what_it_holds_skips_while_it_writes_and_is_alone_on_its_path(
    node: TrainerParts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies_by(LateCopier, monkeypatch)
    writers = writers_of(monkeypatch)
    world, events = SingleNode(node, NoEvents()), EventLog(node.node_dir)
    with ExitStack() as stack:
        stack.callback(events.close)
        hooks, checkpoints = world.outer, Checkpoints(node, world, events)
        (writer,) = writers
        step(node, hooks, checkpoints)
        assert not writer.is_busy  # due every second round
        torch.manual_seed(7)
        step(node, hooks, checkpoints)
        drawn = torch.rand(3)
        assert not writer.is_busy  # nothing is read before the copy is whole
        checkpoints.wait_for_copy()
        assert writer.is_busy
        writer.await_free()
        kept = {name: shard.clone() for name, shard in parameter_shards(node.model).items()}
        os.kill(writer.pid, signal.SIGSTOP)
        for _ in range(4):  # two more are due; the writer stands still with the first of them
            step(node, hooks, checkpoints)
        assert checkpoints.metrics()["ckpt/backlog_bytes"]
        os.kill(writer.pid, signal.SIGCONT)
        checkpoints.close(waits=True)
    kinds = [json.loads(line)["kind"] for line in (node.node_dir / EVENTS_FILE).read_text().splitlines()]
    staged, committed, skipped = "checkpoint_staged", "checkpoint_committed", "checkpoint_skipped"
    assert kinds == [staged, committed, staged, skipped, committed]
    assert not list(Path("/dev/shm").glob(f"*{node.config.run.id}@*"))

    storage = open_storage(str(node.config.ckpt.path), node.config.run.id)
    assert steps_in_order(storage) == [4, 2]
    require_state(node, kept, drawn, step=2)
    require_moments(node, caplog, step=2)
    with pytest.raises(ConfigError, match="belongs to another run"):
        Checkpoints(node, SingleNode(node, NoEvents()), NoEvents())


def test_node_that_was_not_in_the_round_saves_nothing(node: TrainerParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a replay: its members save the round, and would let this node wait for minutes."""
    writers = writers_of(monkeypatch)
    shared = replace(node, config=node.config.model_copy(update={"outer": DilocoConfig(type="diloco")}))
    with ExitStack() as stack:
        world, events = SingleNode(shared, NoEvents()), EventLog(node.node_dir)
        stack.callback(events.close)
        hooks, checkpoints = world.outer, Checkpoints(shared, world, events)
        stack.callback(partial(checkpoints.close, waits=True))
        for _ in range(2):
            hooks.sync_parameters(0, ends_round=True)
            checkpoints.take_if_due(())
        checkpoints.wait_for_copy()
        assert hooks.progress.outer_step == 2 and not writers[0].is_busy
        earlier = round_after(hooks.progress, 0)
        checkpoints.take_if_due([earlier])
        checkpoints.wait_for_copy()
        assert earlier.round < hooks.round and not writers[0].is_busy
        checkpoints.take_if_due([replace(earlier, round=hooks.round)])
        checkpoints.wait_for_copy()
        assert writers[0].is_busy


def require_state(node: TrainerParts, kept: Mapping[str, torch.Tensor], drawn: torch.Tensor, *, step: int) -> None:
    """The checkpoint of a step holds these parameters, the node's moments, and the random state that drew `drawn`."""
    storage = open_storage(str(node.config.ckpt.path), node.config.run.id)
    layout = FlatLayout.of(node.model)
    flat = torch.zeros(layout.numel)
    assert restore(storage, layout.slots, {"params": flat}, step=step) is not None
    found = open_checkpoint(storage, step)
    for slot in layout.slots:
        assert torch.equal(flat[slot.start : slot.start + slot.numel].view(slot.shape), kept[slot.name])
    moments = {name: torch.zeros_like(moment) for name, moment in node.inner.named_moments().items()}
    assert found.read_inner("solo", moments)
    assert all(torch.equal(moments[name], moment) for name, moment in node.inner.named_moments().items())
    state = found.node_state("solo")
    assert state is not None and (state["round"], state["local_world_size"]) == (step, 1)
    assert set_random_state(state["random_states"], node.local)
    assert torch.equal(torch.rand(3), drawn)
    assert not set_random_state([*state["random_states"]] * 2, node.local)


OUTER = {"outer.type": "diloco", "outer.inner_steps": "2"}


def require_moments(node: TrainerParts, caplog: pytest.LogCaptureFixture, *, step: int) -> None:
    """The same inner optimizer goes on with the moments of a checkpoint; another one says that it begins afresh."""
    config, layout = node.config, FlatLayout.of(node.model)
    assert config.ckpt.path is not None
    source = source_of(config.ckpt.path, config.run.id, node.node_id, other=None, step=None)
    restorer = Restorer(source, node.node_id, layout, FaultPoints(()))
    restorer.restore({"params": torch.zeros(layout.numel)}, step)
    same = InnerOptimizer(node.model, config.optim, total_steps=100)
    assert restorer.load_inner(step, same, node.local)
    ours, theirs = node.inner.named_moments(), same.named_moments()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

    muon = MuonConfig() if config.optim.muon is None else None
    other = InnerOptimizer(node.model, config.optim.model_copy(update={"muon": muon}), total_steps=100)
    for moment in other.named_moments().values():
        moment.fill_(1.0)
    assert not restorer.load_inner(step, other, node.local)
    assert not any(moment.any() for moment in other.named_moments().values())
    assert caplog.messages[-1] == "fresh moments: those saved are of another inner optimizer"


@pytest.mark.parametrize("outer", [{}, OUTER], ids=["alone", "diloco"])
def test_trainer_changes_nothing_before_it_is_copied(
    outer: Mapping[str, str], redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is as late as it may be holds the same bytes as one that is made at once."""
    found: list[dict[str, bytes]] = []
    for copier in (EarlyCopier, LateCopier):
        copies_by(copier, monkeypatch)
        folder = tmp_path / copier.__name__
        settings = {**SMALL, **outer} | {"run.id": folder.name, "run.dir": folder, "ckpt.path": folder / "checkpoints"}
        settings |= {"train.total_steps": 6, "ckpt.every_rounds": 1, "ckpt.keep_last": 10, "data.cache_dir": tmp_path}
        environ = {"ZERO_BAND_STORE__URL": redis_server.url} if outer else {}
        with ExitStack() as stack:
            local = init_local_mesh({})
            stack.callback(local.close)
            config = load_config([f"--{key}={value}" for key, value in settings.items()], environ)
            train(config, local, Departure(1.0), stack)
        root = folder / "checkpoints" / folder.name
        found.append({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")})
    early, late = found
    shared = early.keys() & late.keys()  # where the writer was busy with one, it was left out
    first = "step_00000002" if outer else "step_00000001"
    assert {first, "step_00000006"} <= {name.split("/")[0] for name in shared}
    assert [name for name in sorted(shared) if early[name] != late[name]] == []


def test_algorithm_of_ones_own_that_synchronises_at_every_step_is_not_saved_at_every_step(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    algorithm = tmp_path / "mine.py"
    algorithm.write_text(
        "from zeroband.outer.ddp import Ddp\n\n"
        "class Mine(Ddp):\n"
        "    def __init__(self, parts, config, settings):\n"
        "        super().__init__(parts, clip_norm=1.0)\n\n"
        "ALGORITHM = Mine\n"
    )
    outer = {"outer.type": "custom", "outer.algorithm": algorithm, "outer.inner_steps": 1}
    settings = {**SMALL, **outer} | {
        "run.id": tmp_path.name,
        "run.dir": tmp_path,
        "ckpt.path": tmp_path / "checkpoints",
    }
    settings |= {"train.total_steps": 4, "data.cache_dir": tmp_path}
    with ExitStack() as stack:
        local = init_local_mesh({})
        stack.callback(local.close)
        environ = {"ZERO_BAND_STORE__URL": redis_server.url}
        config = load_config([f"--{key}={value}" for key, value in settings.items()], environ)
        train(config, local, Departure(1.0), stack)
    events = [json.loads(line) for line in (tmp_path / tmp_path.name / "solo" / EVENTS_FILE).read_text().splitlines()]
    due = [event["step"] for event in events if event["kind"] in ("checkpoint_staged", "checkpoint_skipped")]
    assert due == [4]

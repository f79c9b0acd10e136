"""Checkpoints of a loop of one's own: the outer state for all, what a node had of itself for that node."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import redis
import torch
from tests.unit.dropin.conftest import Join
from torch import Tensor, nn

import zeroband
from zeroband.checkpoint.loading import open_checkpoint, steps_in_order
from zeroband.checkpoint.storage import open_storage
from zeroband.errors import ConfigError, StoreLost
from zeroband.export.opened import open_trained
from zeroband.node.shm import NodeFolder
from zeroband.runtime.node_runtime import NodeRuntime

pytestmark = pytest.mark.slow

COSINE = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20)


class Sampler:
    """Gives numbered batches, and knows how many it gave."""

    def __init__(self) -> None:
        self.given = 0

    def next(self) -> Tensor:
        self.given += 1
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(self.given))

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["given"]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sampler: Sampler, steps: int) -> Tensor:
    for _ in range(steps):
        model(sampler.next()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.fixture
def resume(join: Join, tmp_path: Path) -> Join:
    """resume(model, sampler, ...): a node of one run with checkpoints, which goes on from them where there are some."""

    def resume_one(model: nn.Module, sampler: Sampler, **arguments: Any) -> zeroband.DiLoCoOptimizer:
        settings = {"node.id": "a", "ckpt.path": tmp_path / "saved", "resume": True, **arguments.pop("settings", {})}
        outer = partial(torch.optim.SGD, lr=1.0)
        arguments = {"lr_scheduler": COSINE, "outer_optimizer": outer, "state": {"sampler": sampler}, **arguments}
        return join(model, settings=settings, **arguments)

    return resume_one


@pytest.mark.parametrize("schedules", [pytest.param("the run", marks=pytest.mark.soak), "the loop"])
def test_node_that_resumes_goes_on_as_if_it_had_not_stopped(resume: Join, schedules: str) -> None:
    """Parameters, moments, schedule, random state and the sampler: the bits are those of one run."""
    straight, whole = model_of(), Sampler()
    inner = torch.optim.AdamW(straight.parameters(), lr=0.05)
    schedule = COSINE(inner)
    wanted = torch.empty(0)
    for _ in range(6):
        wanted = train(straight, inner, whole, 1)
        schedule.step()
    first, sampler = model_of(), Sampler()
    with resume(first, sampler, lr_scheduler=COSINE) as optimizer:
        train(first, optimizer, sampler, 4)
        digest = optimizer.last_round.state_digest
    second, sampler = model_of(), Sampler()
    torch.manual_seed(99)
    optimizer = resume(second, sampler, lr_scheduler=COSINE if schedules == "the run" else None)
    own = COSINE(optimizer) if schedules == "the loop" else None
    assert (optimizer.inner_step, sampler.given, optimizer.last_round.state_digest) == (4, 4, digest)
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    got = torch.empty(0)
    for _ in range(2):
        got = train(second, optimizer, sampler, 1)
        if own is not None:
            own.step()
    assert torch.equal(got, wanted)


def test_other_node_that_resumes_gets_the_outer_state_and_keeps_its_own(
    resume: Join, redis_client: redis.Redis
) -> None:
    first, sampler = model_of(), Sampler()
    with resume(first, sampler) as optimizer:
        after = train(first, optimizer, sampler, 4)
        rate = optimizer.param_groups[0]["lr"]
    redis_client.flushall()  # another store knows nothing of the run
    model, sampler = model_of(), Sampler()
    optimizer = resume(model, sampler, settings={"node.id": "b"}, lr_scheduler=None)
    schedule = COSINE(optimizer)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), after)
    assert (optimizer.inner_step, sampler.given) == (4, 0)
    assert not optimizer.state
    train(model, optimizer, sampler, 1)
    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch) == (rate, 4)


def test_node_that_leaves_as_the_last_one_saves_what_it_learned(resume: Join, run_id: str, tmp_path: Path) -> None:
    model, sampler = model_of(), Sampler()
    optimizer = resume(model, sampler, settings={"ckpt.every_rounds": 100})
    train(model, optimizer, sampler, 2)
    optimizer.leave()
    train(model, optimizer, sampler, 1)
    assert optimizer.is_done
    digest = optimizer.last_round.state_digest
    optimizer.close()
    storage = open_storage(str(tmp_path / "saved"), run_id, "a")
    assert steps_in_order(storage) == [3]
    checkpoint = open_checkpoint(storage, 3)
    checkpoint.verify()
    assert checkpoint.manifest.stamp.state_digest == digest
    assert "nodes/a/rank_0.safetensors" in checkpoint.manifest.files


def test_end_without_a_store_releases_all_that_the_node_held(
    resume: Join, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampler = model_of(), Sampler()
    optimizer = resume(model, sampler)
    held = NodeFolder.path_of(Path("/dev/shm"), run_id, "a")
    assert held.is_dir()

    def announce(_: NodeRuntime) -> NoReturn:
        raise StoreLost("the store is gone")

    monkeypatch.setattr(NodeRuntime, "announce_leaving", announce)
    with pytest.raises(StoreLost):
        optimizer.close()
    assert not held.exists()


def test_copy_is_whole_before_the_next_step_changes_anything(resume: Join, run_id: str, tmp_path: Path) -> None:
    model, sampler = model_of(), Sampler()
    optimizer = resume(model, sampler)
    train(model, optimizer, sampler, 3)  # a round, which is saved, and a step of the next
    told = (tmp_path / run_id / "a" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in told]
    assert [event["step"] for event in events if event["kind"] == "checkpoint_staged"] == [2]


class Unfit:
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"what": self.state}

    def load_state_dict(self, state_dict: Any) -> None: ...


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"x": object()}, r"^state\['x'\] is a object without state_dict and load_state_dict"),
        ({"x": Unfit(object())}, r"^checkpoint\['state'\]\['x'\]\['what'\] is a object, which a checkpoint does not"),
    ],
)
def test_state_that_cannot_be_saved_is_refused_at_the_start(
    redis_url: str, run_id: str, tmp_path: Path, state: dict[str, Any], says: str
) -> None:
    settings = {"run.id": run_id, "run.dir": tmp_path, "ckpt.path": tmp_path / "saved"}
    with pytest.raises(ConfigError, match=says):
        zeroband.DiLoCoOptimizer(
            params=model_of().named_parameters(), batch_size=8, store=redis_url, state=state, settings=settings
        )


def test_checkpoint_of_a_loop_is_no_model_of_the_trainers(resume: Join, run_id: str, tmp_path: Path) -> None:
    model, sampler = model_of(), Sampler()
    with resume(model, sampler) as optimizer:
        train(model, optimizer, sampler, 2)
    with pytest.raises(ConfigError, match="was trained in a custom loop"):
        open_trained(str(tmp_path / "saved" / run_id))

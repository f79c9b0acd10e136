"""Identities of the whole trainer: real nodes, started by torchrun, against the same mathematics written out here.

The reference runs in this process. It reads what a node reads and takes the inner step with the trainer's own parts;
ranges of samples, means and outer steps are computed here. Bit for bit where one order of additions is defined, within
float32 rounding where sharding or another batch changes that order.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_runs import ForkedCluster
from torch import Tensor

from zeroband.config import RunConfig
from zeroband.elastic.membership.departure import Departure
from zeroband.model.parallel import clip_grad_norm_
from zeroband.node.mesh import LocalMesh, init_local_mesh
from zeroband.runtime.build import TrainerParts, build_trainer
from zeroband.runtime.loop import forward_backward
from zeroband.state.digest import digest_of
from zeroband.state.flat import FlatLayout, ShardMap, parameter_shards

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIMIT_S = 200.0
BATCH, STEPS, INNER_STEPS = 4, 8, 4
BASE = """
[model]
type = "llama"
d_model = 32
n_layers = 2
n_heads = 2

[data]
seq_length = 32
source = { type = "synthetic", documents = 200 }

[train]
total_steps = 8
batch_size = 4
micro_bs = 2
dtype = "float32"
threads = 1

[optim]
warmup_steps = 2
clip_norm = 0.5
adamw = { lr = 0.01 }
"""
PLAIN_AVERAGE = (
    'outer = { type = "diloco", inner_steps = 4, optimizer = { lr = 1.0, momentum = 0.0, nesterov = false } }\n'
)
NESTEROV = 'outer = { type = "diloco", inner_steps = 4, optimizer = { lr = 0.7, momentum = 0.9 } }\n'
DDP = 'outer = { type = "ddp" }\n'


@dataclass(frozen=True)
class Seen:
    """What a node wrote down."""

    losses: list[float]
    norms: list[float]
    digests: list[str]
    """Of the outer state, after round 0, 1, ..."""
    rounds: list[dict[str, Any]]


def train_nodes(tmp_path: Path, outer: str, ranks: Sequence[int]) -> list[Seen]:
    """Run a node for each entry of `ranks`, to the end."""
    config = tmp_path / "run.toml"
    config.write_text(outer + BASE)
    arguments = [f"@{config}", f"--data.cache-dir={tmp_path / 'cache'}", "--fault.detect-s=10", "--comm.codec=fp32"]
    env = {"OMP_NUM_THREADS": "1"}
    with ForkedCluster(tmp_path, arguments, nodes=len(ranks), alone=not outer, env=env) as cluster:
        for rank_count in ranks:
            cluster.start(ranks=rank_count)
        codes = cluster.wait(timeout_s=LIMIT_S)
        assert set(codes.values()) == {0}, cluster.describe()
        return [seen_of(node.metrics(), node.events("round_committed")) for node in cluster.nodes.values()]


def seen_of(metrics: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> Seen:
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    return Seen(
        losses=[record["train/loss"] for record in metrics],
        norms=[record["train/grad_norm"] for record in metrics],
        digests=[record["digest"] for record in rounds],
        rounds=rounds,
    )


# -- the reference --------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """A node without anything between nodes."""

    parts: TrainerParts

    def __post_init__(self) -> None:
        self._layout = FlatLayout.of(self.parts.model)
        self.losses: list[float] = []
        self.norms: list[float] = []

    @property
    def flat(self) -> Tensor:
        """(n,) copy of the parameters in the order of their names."""
        parameters = sorted(parameter_shards(self.parts.model).items())
        return torch.cat([parameter.reshape(-1).clone() for _, parameter in parameters])

    def load(self, flat: Tensor) -> None:
        ShardMap(self._layout, 0, 1).load(parameter_shards(self.parts.model), flat)

    def train(self, first: int, steps: int) -> Tensor:
        """Inner steps on the samples from `first` on; the parameters afterwards."""
        self.parts.loader.assign([(first, first + steps * self.parts.config.train.batch_size)])
        for _ in range(steps):
            passed = forward_backward(self.parts)
            self.losses.append(passed.nats.item() / passed.tokens)
            self.norms.append(clip_grad_norm_(self.parts.model, self.parts.config.optim.clip_norm).item())
            self.parts.inner.step()
            self.parts.inner.zero_grad()
        return self.flat


@pytest.fixture(scope="module")
def local() -> Iterator[LocalMesh]:
    threads = torch.get_num_threads()
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()
    torch.set_num_threads(threads)  # train.threads set it


def reference(local: LocalMesh, tmp_path: Path, **train: Any) -> Reference:
    config = tomllib.loads(BASE)
    config["train"] |= train
    config["data"]["cache_dir"] = tmp_path / "cache"
    return Reference(build_trainer(RunConfig.model_validate(config), local, Departure(grace_s=1.0)))


def nesterov_rounds(nodes: Sequence[Reference]) -> list[str]:
    """The whole run of NESTEROV on these nodes; the digests of the outer state after round 0, 1, ..."""
    theta = nodes[0].flat
    velocity = torch.zeros_like(theta)
    digests, first = [digest_of(theta, velocity)], 0
    for _ in range(STEPS // INNER_STEPS):
        mean = torch.zeros_like(theta)
        for node in nodes:
            node.load(theta)
            mean += (theta - node.train(first, INNER_STEPS)) / len(nodes)
            first += INNER_STEPS * BATCH
        velocity = velocity * 0.9 + mean
        theta = theta - (velocity * 0.9 + mean) * 0.7
        digests.append(digest_of(theta, velocity))
    return digests


# -- identities -----------------------------------------------------------------------------------------------------


def test_one_node_with_plain_average_is_the_plain_run_bit_for_bit(local: LocalMesh, tmp_path: Path) -> None:
    (seen,) = train_nodes(tmp_path, PLAIN_AVERAGE, [1])
    plain = reference(local, tmp_path)
    momentum = torch.zeros_like(plain.flat)
    digests = [digest_of(plain.flat, momentum)]
    starts = range(0, STEPS * BATCH, INNER_STEPS * BATCH)
    digests += [digest_of(plain.train(first, INNER_STEPS), momentum) for first in starts]
    assert seen.losses == plain.losses
    assert seen.norms == plain.norms
    assert seen.digests == digests
    assert plain.losses[-1] < plain.losses[0] - 0.5


def test_two_nodes_take_the_nesterov_step_on_their_mean_bit_for_bit(local: LocalMesh, tmp_path: Path) -> None:
    nodes = train_nodes(tmp_path, NESTEROV, [1, 1])
    references = [reference(local, tmp_path) for _ in nodes]
    digests = nesterov_rounds(references)
    for seen, node in zip(nodes, references, strict=True):
        assert seen.digests == digests
        assert seen.losses == node.losses
        assert seen.norms == node.norms


@pytest.mark.soak
def test_two_ranks_learn_what_one_learns_within_rounding(local: LocalMesh, tmp_path: Path) -> None:
    (seen,) = train_nodes(tmp_path, "", [2])
    one = reference(local, tmp_path)
    one.train(0, STEPS)
    assert seen.losses == pytest.approx(one.losses, rel=1e-5)
    assert seen.norms == pytest.approx(one.norms, rel=1e-3)
    assert seen.losses != one.losses  # two ranks add in another order: equal bits would mean that there was only one


@pytest.fixture(scope="module")
def two_and_one(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return train_nodes(tmp_path_factory.mktemp("two_and_one"), NESTEROV, [2, 1])


@pytest.mark.soak
def test_nodes_with_different_numbers_of_ranks_hold_the_same_state(two_and_one: list[Seen]) -> None:
    big, small = two_and_one
    assert big.digests == small.digests
    assert len(set(big.digests)) == 1 + STEPS // INNER_STEPS


@pytest.mark.soak
def test_two_ranks_and_one_learn_what_one_and_one_learn_within_rounding(
    local: LocalMesh, tmp_path: Path, two_and_one: list[Seen]
) -> None:
    ones = [reference(local, tmp_path) for _ in two_and_one]
    nesterov_rounds(ones)
    for seen, node in zip(two_and_one, ones, strict=True):
        assert seen.losses == pytest.approx(node.losses, rel=1e-5)


@pytest.mark.defect(9)
def test_two_data_parallel_nodes_learn_what_one_learns_from_their_batches_together(
    local: LocalMesh, tmp_path: Path
) -> None:
    nodes = train_nodes(tmp_path, DDP, [2, 1])
    one = reference(local, tmp_path, batch_size=2 * BATCH)
    one.train(0, STEPS)
    assert nodes[0].digests == nodes[1].digests
    assert len(set(nodes[0].digests)) == 1 + STEPS
    assert all(round["weights"] == [BATCH * 32, BATCH * 32] for round in nodes[0].rounds[1:])
    losses = [(a + b) / 2 for a, b in zip(nodes[0].losses, nodes[1].losses, strict=True)]
    assert losses == pytest.approx(one.losses, rel=1e-5)
    assert nodes[0].norms == nodes[1].norms == pytest.approx(one.norms, rel=1e-3)

"""The outer state on a GPU, here on the CPU in its place: what it sends and holds is what the canonical state would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from zeroband.config.outer import DilocoConfig, OuterSGDConfig
from zeroband.errors import ConfigError
from zeroband.kernels.codec import CODECS
from zeroband.node.mesh import LocalMesh
from zeroband.outer import device_state
from zeroband.outer.device_state import DeviceState, require_device
from zeroband.outer.diloco import MOMENTUM, PARAMS
from zeroband.outer.outer_optimizer import OuterSGD
from zeroband.state.flat import FlatLayout, ShardMap, SharedBuffers

StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]
INT8, CPU = CODECS["int8"], torch.device("cpu")
SGD = OuterSGDConfig(lr=0.7, momentum=0.9)
ON_DEVICE = DilocoConfig(type="diloco", inner_steps=1, optimizer=SGD, state_device="cuda")
LAYOUTS = {
    "whole blocks": {"a": (4, 256), "b": (2, 512)},
    "odd sizes": {"a": (3, 100), "b": (7, 211), "c": (1, 5), "d": (2000,), "e": (40, 33)},
    "less than a block": {"a": (3,), "b": (5, 2)},
    "blocks that begin inside a shard": {"a": (100,), "b": (8, 256), "c": (156,)},
}
EACH_LAYOUT = pytest.mark.parametrize("shapes", LAYOUTS.values(), ids=LAYOUTS.keys())
EACH_WORLD = pytest.mark.parametrize("world", [1, 2, 3])


class Node:
    """All ranks of a node in one process: their shards of a model, and the canonical state."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], world: int, folder: Path, local: LocalMesh, dtype: torch.dtype
    ) -> None:
        model = nn.Module()
        for name, shape in shapes.items():
            model.register_parameter(name, nn.Parameter(torch.empty(shape)))
        layout = FlatLayout.of(model)
        self.n = layout.numel
        self.buffers = SharedBuffers(folder, self.n, local)
        self.buffers.open("params", "momentum", "contribution")
        self.params, self.momentum = self.buffers["params"], self.buffers["momentum"]
        self.params.copy_(noise(self.n, 1))
        self.momentum.copy_(1e-3 * noise(self.n, 2))
        self.maps = [ShardMap(layout, rank, world) for rank in range(world)]
        self.shards = [
            {name: torch.empty(stop - start, dtype=dtype) for name, (start, stop) in m.ranges().items()}
            for m in self.maps
        ]
        state = {"params": self.params, "momentum": self.momentum}
        self.ranks = [
            DeviceState(self.buffers, m, OuterSGD(SGD), CPU, lambda shards=shards: shards, **state)
            for m, shards in zip(self.maps, self.shards, strict=True)
        ]

    @property
    def inner(self) -> Tensor:
        """(n,) what the model holds."""
        flat = torch.empty(self.n)
        for shard_map, shards in zip(self.maps, self.shards, strict=True):
            shard_map.store(shards, flat)
        return flat

    def train(self, values: Tensor) -> None:
        """As if the inner steps had led here."""
        for shard_map, shards in zip(self.maps, self.shards, strict=True):
            shard_map.load(shards, values)

    def contribute(self) -> Tensor:
        assert not any(rank.contribute() for rank in self.ranks)
        self.ranks[0].encode_borders()
        return self.ranks[0].encoded.contribution


def noise(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make_node(tmp_path: Path, local: LocalMesh) -> Callable[..., Node]:
    def make(shapes: Mapping[str, tuple[int, ...]], world: int = 1, dtype: torch.dtype = torch.float32) -> Node:
        return Node(shapes, world, tmp_path, local, dtype)

    return make


@EACH_LAYOUT
@EACH_WORLD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contribution_is_the_encoding_of_the_flat_difference(
    make_node: Callable[..., Node], shapes: Mapping[str, tuple[int, ...]], world: int, dtype: torch.dtype
) -> None:
    node = make_node(shapes, world, dtype)
    for seed in (3, 4):  # the second overwrites all of the first
        node.train(node.params + 1e-2 * noise(node.n, seed))
        assert torch.equal(node.contribute(), INT8.encode(node.params - node.inner))


@EACH_LAYOUT
@EACH_WORLD
def test_step_leaves_the_bits_of_the_canonical_state(
    make_node: Callable[..., Node], shapes: Mapping[str, tuple[int, ...]], world: int
) -> None:
    node, optimizer = make_node(shapes, world), OuterSGD(SGD)
    for round in (1, 2, 3):
        data = INT8.encode(1e-2 * noise(node.n, 10 + round))
        node.ranks[0].encoded.result.copy_(data)
        for rank in node.ranks:
            rank.take_step(outer_step=round)
        optimizer.apply(node.params, node.momentum, INT8.decode(data, node.n), outer_step=round)
        assert torch.equal(node.inner, node.params)
        for rank in node.ranks:
            rank.receive(0)
        assert torch.equal(node.contribute(), INT8.encode(torch.zeros(node.n)))


@EACH_WORLD
def test_state_from_elsewhere_is_loaded(make_node: Callable[..., Node], world: int) -> None:
    node = make_node(LAYOUTS["odd sizes"], world)
    node.params.copy_(noise(node.n, 5))
    for rank in node.ranks:
        rank.restart(0)
    assert torch.equal(node.inner, node.params)
    assert torch.equal(node.contribute(), INT8.encode(torch.zeros(node.n)))


@pytest.mark.parametrize(("name", "index"), [("d", 1000), ("c", 0), ("e", 1319)], ids=["block", "border", "end"])
def test_parameter_that_is_not_finite_is_named(make_node: Callable[..., Node], name: str, index: int) -> None:
    node = make_node(LAYOUTS["odd sizes"])
    node.train(node.params)
    node.shards[0][name][index] = float("nan")
    assert node.ranks[0].contribute() == [name]


def test_copy_that_differs_is_noticed(make_node: Callable[..., Node]) -> None:
    node = make_node(LAYOUTS["odd sizes"])
    rank = node.ranks[0]
    rank.encoded.result.zero_()
    for outer_step in (4, 5):
        rank.take_step(outer_step=outer_step)
        OuterSGD(SGD).apply(node.params, node.momentum, torch.zeros(node.n), outer_step=outer_step)
        if outer_step == 4:  # it looks at e then
            node.params[100] += 1.0  # of a; the GPU knows nothing of it
            rank.receive(0)
    with pytest.raises(
        RuntimeError, match="after outer step 5 the GPU holds other outer parameters for a than the CPU"
    ):
        rank.receive(0)
    rank.restart(0)
    assert torch.equal(node.inner, node.params)


def test_bytes_that_cross_are_one_for_a_parameter_and_its_share_of_a_scale(make_node: Callable[..., Node]) -> None:
    node = make_node(LAYOUTS["whole blocks"])
    encoded = node.ranks[0].encoded
    assert encoded.contribution.numel() == encoded.result.numel() == node.n + 4 * node.n // 256
    node.buffers["contribution"].fill_(7.0)
    node.train(node.params + 1e-2 * noise(node.n, 3))
    node.contribute()
    assert bool((node.buffers["contribution"] == 7.0).all()), "whole blocks do not pass through float32"


class Locked:
    """`PinnedMemory` that only remembers what is locked."""

    now: ClassVar[list[Tensor]] = []

    def __init__(self, device: torch.device, ranges: list[Tensor], stack: ExitStack) -> None:
        self.error = 0
        self.store, self.load = Tensor.copy_, Tensor.to
        self.now.extend(ranges)
        stack.callback(lambda: self.now.__delitem__(slice(-len(ranges), None)))


def test_rank_locks_its_own_part_of_the_encodings_until_it_is_closed(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_state, "PinnedMemory", Locked)
    node = make_node(LAYOUTS["whole blocks"], world=2)
    whole = 2 * node.ranks[0].encoded.contribution.numel()
    assert sum(part.nbytes for part in Locked.now) == whole, "of two ranks each locks a half"
    for rank in reversed(node.ranks):
        assert Locked.now
        rank.close()
    assert not Locked.now


def test_memory_that_the_driver_refuses_to_lock_is_an_error_with_the_way_out(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device, ranges: list[Tensor], stack: ExitStack) -> Locked:
        locked = Locked(device, ranges, stack)
        locked.error = 2
        return locked

    monkeypatch.setattr(device_state, "PinnedMemory", refuse)
    with pytest.raises(ConfigError, match=r"lock \d+ bytes .* error 2\); put node.shm_dir on "):
        make_node(LAYOUTS["odd sizes"])
    assert not Locked.now


# -- in a run ---------------------------------------------------------------------------------------------------------


def require_canonical(run: Any, *names: str) -> None:
    """All nodes hold the same outer state, and train from it."""
    first = run[names[0]]
    for name in names:
        assert torch.equal(run[name].buffers[PARAMS], first.buffers[PARAMS])
        assert torch.equal(run[name].buffers[MOMENTUM], first.buffers[MOMENTUM])
        assert torch.equal(run[name].params, first.buffers[PARAMS])


def test_rounds_follow_the_decoded_means_bit_for_bit(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ON_DEVICE, "a", "b", codec="int8")
    theta, velocity = run["a"].params, torch.zeros(22)
    for round in range(1, 5):
        updates = [noise(10 * round + i) for i in range(2)]
        sent = [INT8.decode(INT8.encode(theta - (theta + update)), 22) for update in updates]
        mean = INT8.decode(INT8.encode(sent[0] * 0.5 + sent[1] * 0.5), 22)
        run.round(a=updates[0], b=updates[1])
        velocity = velocity * 0.9 + mean
        theta = theta - (velocity * 0.9 + mean) * 0.7
        assert torch.equal(run["a"].params, theta)
        require_canonical(run, "a", "b")


def test_round_that_loses_a_node_keeps_the_encoded_contribution(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ON_DEVICE, "a", "b", "c", codec="int8", inject={"c": ["reduced@1=SIGKILL"]})
    reports = run.round(a=noise(1), b=noise(2), c=noise(3))
    assert set(reports) == {"a", "b"} and reports["a"].retries == 1
    require_canonical(run, "a", "b")


def test_late_node_catches_up_and_contributes_what_it_learned(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ON_DEVICE, "a", "b", codec="int8")
    with run.hurry():
        run.round(a=noise(1))
    before = run["a"].params
    run.round_with_late("b", [noise(2)], a=torch.zeros(22))
    require_canonical(run, "a", "b")
    assert not torch.equal(run["a"].params, before)


def test_joiner_takes_the_state_over(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ON_DEVICE, "a", codec="int8")
    run.round(a=noise(1))
    run.add("b")
    run["b"].receive(run["a"])
    run.round_with_joiner("b", a=noise(2))
    run.round(a=noise(3), b=noise(4))
    require_canonical(run, "a", "b")


def test_update_that_is_not_finite_is_left_out(start_run: StartRun, noise: Noise) -> None:
    run = start_run(ON_DEVICE, "a", "b", codec="int8")
    reports = run.round(a=noise(1), b=torch.full((22,), float("inf")))
    assert reports["b"].is_left_out and not reports["a"].is_left_out
    require_canonical(run, "a", "b")


def test_node_that_ends_unlocks_its_memory(start_run: StartRun, noise: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "PinnedMemory", Locked)
    run = start_run(ON_DEVICE, "a", codec="int8")
    run.round(a=noise(1))
    assert Locked.now
    run["a"].outer.abandon()
    assert not Locked.now


# -- where it is possible ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "codec", "device", "problem"),
    [
        (ON_DEVICE, "int8", "cpu", "this node trains on cpu; give it a GPU, or set outer.state_device"),
        (ON_DEVICE, "fp32", "cuda", "exchange fp32; set comm.backend = 'native' and comm.codec = 'int8'"),
        (ON_DEVICE, "int4", "cuda", "exchange int4; set comm.backend"),
        (ON_DEVICE.model_copy(update={"overlap": 1}), "int8", "cuda", "leave outer.fragments, overlap and merge"),
    ],
    ids=["no GPU", "gloo", "int4", "an overlap"],
)
def test_state_that_cannot_be_on_a_gpu_is_refused_with_the_way_out(
    config: DilocoConfig, codec: str, device: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        require_device(config, CODECS[codec], torch.device(device))


def test_state_on_the_cpu_needs_nothing() -> None:
    require_device(ON_DEVICE.model_copy(update={"state_device": "cpu"}), CODECS["fp32"], CPU)
    require_device(ON_DEVICE, INT8, torch.device("cuda"))

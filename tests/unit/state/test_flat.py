import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zeroband.errors import ConfigError
from zeroband.node.mesh import LocalMesh
from zeroband.state.flat import (
    FlatLayout,
    ShardMap,
    SharedBuffers,
    gradient_shards,
    parameter_shards,
)


def model_of(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    model = nn.Module()
    for number, (name, shape) in enumerate(shapes.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        model.register_parameter(name, nn.Parameter(values))
    return model


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for _, p in sorted(model.named_parameters())])


SHAPES = {"z": (1, 3), "b": (7, 2), "c": (5,), "a": (2, 3, 2), "d": (8, 1)}


def test_layout_is_in_the_order_of_names_without_gaps() -> None:
    layout = FlatLayout.of(model_of(SHAPES))
    assert [(slot.name, slot.start) for slot in layout.slots] == [("a", 0), ("b", 12), ("c", 26), ("d", 31), ("z", 39)]
    assert layout.numel == 42


def test_layout_of_a_model_without_parameters_is_empty() -> None:
    assert FlatLayout.of(nn.Module()).numel == 0


def test_layout_digest_ignores_the_order_of_definition_and_sees_names_and_shapes() -> None:
    digest = FlatLayout.of(model_of(SHAPES)).digest()
    assert FlatLayout.of(model_of(dict(reversed(SHAPES.items())))).digest() == digest
    assert FlatLayout.of(model_of(SHAPES | {"b": (2, 7)})).digest() != digest
    assert FlatLayout.of(model_of({**{k: v for k, v in SHAPES.items() if k != "b"}, "bb": (7, 2)})).digest() != digest


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_shards_of_all_ranks_cover_the_buffer_exactly_once(world_size: int) -> None:
    layout = FlatLayout.of(model_of(SHAPES))
    covered = torch.zeros(layout.numel)
    for rank in range(world_size):
        for _, part in ShardMap(layout, rank, world_size).parts(covered, SHAPES):
            part += 1
    assert torch.equal(covered, torch.ones(layout.numel))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.defect(9)
def test_shards_stored_by_all_ranks_give_the_whole_state_and_load_back(world_size: int) -> None:
    model = model_of(SHAPES)
    layout = FlatLayout.of(model)
    buffer = torch.full((layout.numel,), float("nan"))
    chunks = {name: p.detach().chunk(world_size) for name, p in model.named_parameters()}
    for rank in range(world_size):
        shards = {name: part[rank] if rank < len(part) else part[0][:0] for name, part in chunks.items()}
        shard_map = ShardMap(layout, rank, world_size)
        shard_map.store(shards, buffer)
        loaded = {name: torch.empty_like(shard) for name, shard in shards.items()}
        shard_map.load(loaded, buffer)
        assert all(torch.equal(loaded[name], shards[name]) for name in shards)
    assert torch.equal(buffer, flat(model))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_with_copies_write_a_part_each_and_read_everything(world_size: int) -> None:
    model = model_of(SHAPES)
    layout = FlatLayout.of(model)
    copies = [ShardMap(layout, rank, world_size, is_copy=True) for rank in range(world_size)]
    buffer, covered = torch.full((layout.numel,), float("nan")), torch.zeros(layout.numel)
    for one in copies:
        one.store(parameter_shards(model), buffer)
        for _, part in one.parts(covered, SHAPES):
            part += 1
    assert torch.equal(covered, torch.ones(layout.numel))
    assert torch.equal(buffer, flat(model))
    values = torch.arange(42.0)
    for one in copies:
        other = model_of(SHAPES)
        one.load(parameter_shards(other), values)
        assert torch.equal(flat(other), values)


def test_parameter_shards_write_to_the_model() -> None:
    model = model_of(SHAPES)
    layout = FlatLayout.of(model)
    values = torch.arange(42.0)
    ShardMap(layout, 0, 1).load(parameter_shards(model), values)
    assert torch.equal(flat(model), values)


def test_gradient_of_a_parameter_that_took_no_part_is_zero() -> None:
    model = model_of({"a": (2,), "b": (3,)})
    model.get_parameter("a").grad = torch.tensor([1.0, 2.0])
    buffer = torch.full((5,), float("nan"))
    ShardMap(FlatLayout.of(model), 0, 1).store(gradient_shards(model), buffer)
    assert buffer.tolist() == [1, 2, 0, 0, 0]


# -- shared buffers -------------------------------------------------------------------------------------------------


def test_buffers_are_zeros_with_pages_reserved_and_shared_with_other_mappings(local: LocalMesh, tmp_path: Path) -> None:
    buffers = SharedBuffers(tmp_path, 5000, local)
    buffers.open("params", "momentum")
    (path,) = tmp_path.glob("params*")
    assert path.stat().st_blocks * 512 >= 20_000
    assert not buffers["params"].any()
    buffers["params"].copy_(torch.arange(5000.0))
    other = torch.from_file(str(path), shared=True, size=5000, dtype=torch.float32)
    assert torch.equal(other, torch.arange(5000.0))
    assert not buffers["momentum"].any()


def test_buffers_opened_twice_keep_their_values(local: LocalMesh, tmp_path: Path) -> None:
    buffers = SharedBuffers(tmp_path, 3, local)
    buffers.open("params")
    buffers["params"].fill_(1)
    buffers.open("params", "result")
    assert buffers["params"].tolist() == [1, 1, 1]


def full_after(calls: int) -> Callable[[int, int, int], None]:
    reserve, made = os.posix_fallocate, iter(range(calls))

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if next(made, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, length)

    return fallocate


def test_buffers_that_do_not_fit_are_the_users_error_and_say_how_much_was_needed(
    local: LocalMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full_after(1))
    buffers = SharedBuffers(tmp_path, 1000, local)
    with pytest.raises(ConfigError, match=r"No space left.*2 buffers of 4000 bytes.*--shm-size.*node\.shm_dir") as e:
        buffers.open("params", "momentum")
    assert str(tmp_path) in str(e.value)


def test_renewed_buffer_is_another_one_and_the_old_one_stays_writable(local: LocalMesh, tmp_path: Path) -> None:
    buffers = SharedBuffers(tmp_path, 4, local)
    buffers.open("result", "params")
    old = buffers["result"]
    old.fill_(1)
    buffers.renew("result")
    assert buffers["result"].tolist() == [0, 0, 0, 0]
    old.fill_(float("nan"))  # a transfer that was left behind
    assert buffers["result"].tolist() == [0, 0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["params.f32", "result.f32"]

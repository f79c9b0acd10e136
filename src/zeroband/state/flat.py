"""The canonical flat state: float32 buffers in the order of the parameter names, shared by the local ranks.

The layout is independent of a node's sharding. FSDP2 shards dim 0, so a rank's shard of a parameter is one contiguous
range of the buffer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from zeroband.errors import ConfigError
from zeroband.node.async_copy import host_copies, to_device
from zeroband.node.mesh import LocalMesh, barrier, gather_json
from zeroband.node.sharding import Parameters, chunk_rows, is_sharded, local_part
from zeroband.state.slot import Slot

_PIECE = 1 << 22
"""Values that travel at once between machines of a node."""


@dataclass(frozen=True)
class FlatLayout:
    """The parameters in the order of their names, without gaps."""

    slots: tuple[Slot, ...]

    @staticmethod
    def of(model: Parameters) -> FlatLayout:
        slots: list[Slot] = []
        start = 0
        for name, parameter in sorted(model.named_parameters()):
            slots.append(Slot(name, tuple(parameter.shape), start))
            start += slots[-1].numel
        return FlatLayout(tuple(slots))

    def only(self, names: Iterable[str]) -> FlatLayout:
        """Select parameters; they keep their places."""
        wanted = set(names)
        return FlatLayout(tuple(slot for slot in self.slots if slot.name in wanted))

    @property
    def numel(self) -> int:
        return self.slots[-1].start + self.slots[-1].numel if self.slots else 0

    def digest(self) -> str:
        """Hash names and shapes: models with equal digests have the same flat state."""
        return xxhash.xxh3_128_hexdigest(repr([(slot.name, slot.shape) for slot in self.slots]).encode())


class ShardMap:
    """Maps this rank's shards to ranges of the flat buffer.

    `is_copy`: every rank holds all parameters, as with DDP inside a node. A rank then writes the range that its shard
    would have, and reads everything.
    """

    def __init__(self, layout: FlatLayout, rank: int, world_size: int, *, is_copy: bool = False) -> None:
        self.is_copy = is_copy
        self._layout = layout
        self._world_size = world_size
        self._ranges: dict[str, tuple[int, int]] = {}
        for slot in layout.slots:
            rows = slot.shape[0] if slot.shape else 1
            row_numel = slot.numel // rows if rows else 0
            held = chunk_rows(rows, rank, world_size)
            self._ranges[slot.name] = (slot.start + held.start * row_numel, slot.start + held.stop * row_numel)
        whole = {slot.name: (slot.start, slot.start + slot.numel) for slot in layout.slots}
        self._held = whole if is_copy else self._ranges

    @staticmethod
    def of(layout: FlatLayout, model: Parameters, local: LocalMesh) -> ShardMap:
        """Map a model that is sharded by FSDP2, or held by each rank as a whole."""
        is_copy = not any(is_sharded(parameter) for _, parameter in model.named_parameters())
        return ShardMap(layout, local.rank, local.world_size, is_copy=is_copy)

    def store(self, shards: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Copy this rank's shards into the flat buffer."""
        own = dict(self.parts(buffer, shards))
        for part, values in zip(own.values(), host_copies(self.own(n, shards[n]) for n in own), strict=True):
            part.copy_(values)

    def load(self, shards: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Copy the flat buffer into this rank's parameters, in place."""
        for name, part in self.held(buffer, shards):
            shards[name].detach().copy_(to_device(part, shards[name].device).view(shards[name].shape))

    def own(self, name: str, shard: Tensor) -> Tensor:
        """Return the part of a held parameter that this rank writes to the flat buffer, (n,)."""
        offset = self._held[name][0]
        start, stop = self._ranges[name]
        return shard.detach().reshape(-1)[start - offset : stop - offset]

    def of_rank(self, rank: int) -> ShardMap:
        """Return the map of another rank."""
        return ShardMap(self._layout, rank, self._world_size)

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Return the ranges of this rank's non-empty shards, by name."""
        return {name: (start, stop) for name, (start, stop) in self._ranges.items() if stop > start}

    def all_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of all ranks' shards."""
        ranks = (self.of_rank(rank) for rank in range(self._world_size))
        return [one for rank in ranks for one in rank.ranges().values()]

    def parts(self, buffer: Tensor, names: Iterable[str]) -> Iterable[tuple[str, Tensor]]:
        """Yield the ranges of the flat buffer that this rank writes, disjoint over the ranks, by parameter."""
        return _cut(buffer, names, self._ranges)

    def held(self, buffer: Tensor, names: Iterable[str]) -> Iterable[tuple[str, Tensor]]:
        """Yield the ranges of the flat buffer that this rank reads, by parameter."""
        return _cut(buffer, names, self._held)


def _cut(buffer: Tensor, names: Iterable[str], ranges: Mapping[str, tuple[int, int]]) -> Iterable[tuple[str, Tensor]]:
    for name in names:
        start, stop = ranges[name]
        if stop > start:
            yield name, buffer[start:stop]


def parameter_shards(model: Parameters) -> dict[str, Tensor]:
    """Return this rank's shard of every parameter, as views of the model."""
    return {name: local_part(parameter.data) for name, parameter in model.named_parameters()}


def gradient_shards(model: Parameters) -> dict[str, Tensor]:
    """Return this rank's shard of every gradient; a missing gradient becomes zeros."""
    shards: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        shards[name] = local_part(parameter.grad)
    return shards


class SharedBuffers:
    """Named float32 buffers of one length, and byte buffers, in shared memory that all local ranks map.

    All local ranks call `open`, `open_bytes` and `renew` in the same order. `open` reserves the pages, so that a full
    /dev/shm raises an error here instead of SIGBUS at a later write.

    On another machine of the node than the first, a buffer has only what its ranks wrote or `spread` gave them, and
    takes memory for nothing else. `collect` and `spread` move shards to and from the first machine.
    """

    def __init__(self, folder: Path, numel: int, local: LocalMesh) -> None:
        self.numel = numel
        self._folder = folder
        self._local = local
        self._buffers: dict[str, Tensor] = {}
        self._bytes: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Shape (numel,) float32 on CPU."""
        return self._buffers[name]

    def open(self, *names: str) -> None:
        """Create and map buffers of zeros. Raises ConfigError if shared memory is too small."""
        new = [name for name in names if name not in self._buffers]
        self._reserve_all([self._path(name) for name in new], 4 * self.numel)
        for name in new:
            self._buffers[name] = torch.from_file(
                str(self._path(name)), shared=True, size=self.numel, dtype=torch.float32
            )

    def open_bytes(self, name: str, size: int) -> Tensor:
        """Create and map a buffer of `size` zero bytes, (size,) uint8 on CPU. Raises ConfigError as `open` does."""
        if name not in self._bytes:
            path = self._folder / f"{name}.u8"
            self._reserve_all([path], size)
            self._bytes[name] = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return self._bytes[name]

    def renew_bytes(self, name: str, size: int) -> Tensor:
        """Replace a byte buffer that an abandoned transfer may still write to by zero bytes."""
        if self._bytes.pop(name, None) is not None:
            self._remove(self._folder / f"{name}.u8")
        return self.open_bytes(name, size)

    def renew(self, name: str) -> None:
        """Replace a buffer that an abandoned transfer may still write to by zeros in a new file."""
        self._buffers.pop(name)
        self._remove(self._path(name))
        self.open(name)

    def _remove(self, path: Path) -> None:
        barrier(self._local)
        if self._local.local_rank == 0:
            path.unlink()

    def collect(self, name: str, shards: ShardMap, names: Iterable[str]) -> None:
        """Copy the other machines' shards of these parameters into the first machine's buffer. All ranks."""
        self._move(self._buffers[name], shards, names, to_first=True)

    def spread(self, name: str, shards: ShardMap, names: Iterable[str]) -> None:
        """Copy shards of these parameters from the first machine's buffer to the machines that hold them. All ranks."""
        self._move(self._buffers[name], shards, names, to_first=False)

    def _move(self, buffer: Tensor, shards: ShardMap, names: Iterable[str], *, to_first: bool) -> None:
        """Between rank 0 and each rank of another machine, in pieces, so that little memory is needed beside."""
        local, ordered = self._local, sorted(names)
        if local.machines == 1:
            return
        for rank in local.remote_ranks if local.rank == 0 else (local.rank,) if not local.has_state else ():
            other = 0 if local.rank else rank
            for _, part in shards.of_rank(rank).parts(buffer, ordered):
                for piece in part.split(_PIECE):
                    if (local.rank == 0) == to_first:
                        dist.recv(piece, group_src=other, group=local.control)  # pyright: ignore[reportUnknownMemberType]
                    else:
                        dist.send(piece, group_dst=other, group=local.control)  # pyright: ignore[reportUnknownMemberType]
        barrier(local)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.f32"

    def _reserve_all(self, paths: Sequence[Path], size: int) -> None:
        problem = ""
        if self._local.local_rank == 0:
            try:
                for path in paths:
                    _reserve(path, size, is_whole=self._local.has_state)
            except OSError as error:
                problem = f"{error.strerror} ({len(paths)} buffers of {size} bytes in {self._folder})"
        problem = next(filter(None, gather_json(problem, self._local)), "")
        if problem:
            raise ConfigError(
                f"shared memory is too small for the outer state: {problem}; raise it (docker: --shm-size) "
                "or set node.shm_dir to another memory file system"
            )


def _reserve(path: Path, size: int, *, is_whole: bool) -> None:
    """Create a file of zeros. `is_whole`: with memory for all of it, not only for what will be written."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if is_whole:
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)

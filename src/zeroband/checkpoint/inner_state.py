"""The inner optimizer's file, through torch.distributed.checkpoint: loads on any number of local ranks.

torch's own writers pickle their metadata or know local paths alone. These two keep everything in one safetensors file,
whose header is the metadata, and leave places, retries and hashes to those who call them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner import WriteItemType as WriteKind
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zeroband.checkpoint.chunks import bytes_of
from zeroband.checkpoint.layout import (
    MAX_HEADER_BYTES,
    Slot,
    StoredTensor,
    numel_of,
    parse_safetensors_header,
    safetensors_header,
)
from zeroband.checkpoint.manifest import StoredFile
from zeroband.checkpoint.storage import read_exactly
from zeroband.errors import CheckpointDamaged

_PIECE_ELEMENTS = 4 << 20


def views_of(slots: Sequence[Slot], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`buffer.parameter` of every slot of flat buffers, (slot.shape) each; writing to them writes to the buffers."""
    return {
        f"{name}.{slot.name}": buffer[slot.start : slot.start + numel_of(slot)].view(slot.shape)
        for name, buffer in buffers.items()
        for slot in slots
    }


def save_inner(tensors: Mapping[str, Tensor], write: Callable[[Iterable[memoryview]], None]) -> None:
    """Write whole float32 CPU tensors by name as one file; `write` is given its bytes in order."""
    with _quietly():
        save(dict(tensors), storage_writer=_Writer(write), no_dist=True)


def load_inner(tensors: Mapping[str, Tensor], open_file: Callable[[], BinaryIO], expected: StoredFile) -> None:
    """Fill tensors by name in place, each rank its own shards of DTensors, whatever wrote them.

    Raises OSError where it cannot be read, CheckpointDamaged where it is not the expected one, or lacks a tensor, or
    has another shape of it.
    """
    try:
        with open_file() as file, _quietly():
            load(dict(tensors), storage_reader=_Reader(file, expected), no_dist=True)
    except (EOFError, RuntimeError, ValueError) as error:
        raise CheckpointDamaged(f"it does not fit: {error!s:.300}") from error


@contextmanager
def _quietly() -> Generator[None]:
    """torch wraps what goes wrong, and warns that one process works alone, which is what we ask for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


class _Writer(StorageWriter):
    def __init__(self, write: Callable[[Iterable[memoryview]], None]) -> None:
        self._write = write

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        strange = [item.index.fqn for item in plan.items if item.type == WriteKind.BYTE_IO]
        assert not strange, f"only tensors go into this file, not {strange}"
        tensors = [(item, cast(Tensor, planner.resolve_data(item))) for item in plan.items]
        header = safetensors_header([(item.index.fqn, tensor.shape) for item, tensor in tensors])

        def pieces() -> Iterable[memoryview]:
            yield memoryview(header)
            for _, tensor in tensors:
                for piece in tensor.detach().reshape(-1).split(_PIECE_ELEMENTS):
                    yield bytes_of(piece)

        self._write(pieces())
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 4 * tensor.numel(), None) for item, tensor in tensors])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The header in front of the tensors is all the metadata there is."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Reader(StorageReader):
    """Reads the file once from start to end, and takes from each tensor what this rank holds of it."""

    def __init__(self, file: BinaryIO, expected: StoredFile) -> None:
        self._file = file
        self._expected = expected
        self._seen = xxhash.xxh3_128()
        self._tensors: list[StoredTensor] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._tensors = read_header(self._file, self._expected.size, self._seen)
        return Metadata(
            {
                tensor.name: TensorStorageMetadata(
                    TensorProperties(dtype=torch.float32),
                    torch.Size(tensor.shape),
                    [ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape))],
                )
                for tensor in self._tensors
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            assert item.type == LoadItemType.TENSOR, item
            wanted.setdefault(item.storage_index.fqn, []).append(item)
        scratch = torch.empty(max((tensor.size // 4 for tensor in self._tensors), default=0))
        for tensor in self._tensors:
            whole = scratch[: tensor.size // 4]
            for piece in whole.split(_PIECE_ELEMENTS):
                read_exactly(self._file, [bytes_of(piece)])
                self._seen.update(bytes_of(piece))
            for item in wanted.get(tensor.name, []):
                _take(whole.view(tensor.shape), item, planner)
        if self._file.read(1) or self._seen.hexdigest() != self._expected.hash:
            raise CheckpointDamaged(f"it has hash {self._seen.hexdigest()}, the manifest says {self._expected.hash}")
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _take(tensor: Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    part = tensor
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item)
    target.detach().copy_(part)
    planner.commit_tensor(item, target)


def read_header(file: BinaryIO, size: int, seen: xxhash.xxh3_128) -> list[StoredTensor]:
    """Read a safetensors file up to its data; `seen` hashes what was read. Raises CheckpointDamaged, EOFError."""
    length_field = bytearray(8)
    read_exactly(file, [memoryview(length_field)])
    length = int.from_bytes(length_field, "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointDamaged(f"its header would have {length} bytes, the file has {size}")
    text = bytearray(length)
    read_exactly(file, [memoryview(text)])
    seen.update(length_field)
    seen.update(text)
    try:
        return parse_safetensors_header(bytes(text), size - 8 - length)
    except ValueError as error:
        raise CheckpointDamaged(str(error)) from error

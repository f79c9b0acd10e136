"""Reads the inner optimizer's file through torch.distributed.checkpoint, on any number of local ranks.

The file has the format of torch's HuggingFaceStorageWriter: safetensors, whose header is all the metadata; torch's
default writers pickle theirs. torch's HuggingFaceStorageReader reads it from local folders; the reader here supports
any storage, and checks the hash.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zeroband.checkpoint.authenticity import FileHash
from zeroband.checkpoint.layout import StoredTensor, read_header
from zeroband.checkpoint.manifest import StoredFile
from zeroband.checkpoint.storage import read_exactly
from zeroband.errors import CheckpointDamaged
from zeroband.state.slot import Slot, bytes_of

_PIECE_ELEMENTS = 4 << 20


def views_of(slots: Sequence[Slot], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views `buffer.parameter` of all slots of flat buffers, (slot.shape) each."""
    return {
        f"{name}.{slot.name}": buffer[slot.start : slot.start + slot.numel].view(slot.shape)
        for name, buffer in buffers.items()
        for slot in slots
    }


def load_inner(
    tensors: Mapping[str, Tensor],
    open_file: Callable[[], BinaryIO],
    expected: StoredFile,
    on_piece: Callable[[], object] = lambda: None,
) -> None:
    """Fill tensors by name in place, each rank its own shards of DTensors, independent of the writer's sharding.

    `on_piece`: called after every few megabytes. Raises OSError if the file cannot be read, CheckpointDamaged if it is
    not the expected one, lacks a tensor, or has another shape.
    """
    try:
        with open_file() as file, _quietly():
            reader = _Reader(file, expected, on_piece)
            load(dict(tensors), storage_reader=reader, no_dist=True)
    except (EOFError, RuntimeError, ValueError) as error:
        raise CheckpointDamaged(f"it does not fit: {error!s:.300}") from error


@contextmanager
def _quietly() -> Generator[None]:
    """Unwrap torch's errors, and hide its warning about a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


class _Reader(StorageReader):
    """Reads the file once from start to end, and copies this rank's part of each tensor.

    Raises CheckpointDamaged, EOFError in its constructor: torch swallows errors of `read_metadata`.
    """

    def __init__(self, file: BinaryIO, expected: StoredFile, on_piece: Callable[[], object]) -> None:
        self._file = file
        self._on_piece = on_piece
        self._expected = expected
        self._seen = FileHash.like(expected)
        self._tensors: list[StoredTensor] = read_header(file, expected.size, self._seen)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: loads share no state."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
        """Do nothing: there is nothing to prepare."""

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
                self._on_piece()
            for item in wanted.get(tensor.name, []):
                _take(whole.view(tensor.shape), item, planner)
        if self._file.read(1):
            raise CheckpointDamaged(f"it has more than {self._expected.size} bytes")
        self._seen.require(self._expected)
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
    target.detach().copy_(part.to(target.device))  # moments in int8 round on their device
    planner.commit_tensor(item, target)

"""Records: 8 chunks of one shape in a known number of bytes, first the places of their values, then the values.

Each part of a payload, made by a rank or a block of work, consists of whole records, so it is one range of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zeroband.config.outer import ValueCodingName
from zeroband.outer.sparse.bits import has_clean_ends, pack, unpack
from zeroband.outer.sparse.sizes import ALIGNMENT, index_bits, packed_size, record_size, records_size
from zeroband.outer.sparse.values import ValueCoding, coding_of


@dataclass(frozen=True)
class Chosen:
    """Values of a range of chunks and their places. Shapes: both (chunks, k); places ascend in each chunk."""

    indices: Tensor
    """Any integer type."""
    values: Tensor
    """float32."""


@dataclass(frozen=True)
class RecordFormat:
    """Format of records for chunks of `numel` values, k of them sent."""

    numel: int
    k: int
    values: ValueCodingName

    @cached_property
    def coding(self) -> ValueCoding:
        return coding_of(self.values, self.k, self.numel)

    @property
    def index_bits(self) -> int:
        """Bits of one place; 0 if all values are sent."""
        return index_bits(self.k, self.numel)

    @property
    def _marks_nothing(self) -> bool:
        """Whether a chunk of zeros is marked by places that are all 0, since one-bit values have no zero."""
        return self.coding.is_of_signs and 1 < self.k < self.numel

    def size(self, chunks: int) -> int:
        """Bytes of `chunks` chunks, the first at a multiple of 8."""
        return records_size(self.values, chunks, self.k, self.numel)

    def encode(self, chosen: Chosen) -> Tensor:
        """Encode chunks, the first at a multiple of 8: (size(chunks),) uint8."""
        whole = len(chosen.indices) // ALIGNMENT * ALIGNMENT
        parts = [
            self._encode_records(chosen.indices[part], chosen.values[part], count)
            for part, count in ((slice(whole), ALIGNMENT), (slice(whole, None), len(chosen.indices) - whole))
            if count and len(chosen.indices[part])
        ]
        return torch.cat(parts) if parts else chosen.indices.new_empty(0, dtype=torch.uint8)

    def _encode_records(self, indices: Tensor, values: Tensor, chunks: int) -> Tensor:
        if self._marks_nothing:
            indices = torch.where((values == 0).all(dim=1, keepdim=True), 0, indices)
        head = pack(indices.reshape(-1, chunks * self.k), self.index_bits)
        return torch.cat([head, self.coding.encode(values.reshape(-1, chunks, self.k))], dim=1).view(-1)

    def decode(self, data: Tensor, chunks: int) -> Chosen:
        """Invert `encode` for `chunks` chunks. `data`: (size(chunks),) uint8, already checked by `check`."""
        parts = [self._decode_records(records, count) for records, count in self._records(data, chunks)]
        if not parts:
            nothing = data.new_empty(0, self.k)
            return Chosen(nothing.to(torch.int32), nothing.float())
        return Chosen(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))

    def _decode_records(self, records: Tensor, chunks: int) -> Chosen:
        border = packed_size(chunks * self.k, self.index_bits)
        values = self.coding.decode(records[:, border:], chunks, self.k).reshape(-1, self.k)
        if self.index_bits == 0:
            return Chosen(_all_places(values), values)
        indices = unpack(records[:, :border], chunks * self.k, self.index_bits).reshape(-1, self.k)
        if self._marks_nothing:
            is_nothing = indices[:, -1:] == 0
            indices = torch.where(is_nothing, _all_places(indices), indices)
            values = torch.where(is_nothing, 0.0, values)
        return Chosen(indices, values)

    def check(self, data: Tensor, chunks: int) -> str | None:
        """Why (size(chunks),) received bytes are malformed, or None: then every place lies in its chunk."""
        for records, count in self._records(data, chunks):
            border = packed_size(count * self.k, self.index_bits)
            problem = self.coding.problem(records[:, border:], count, self.k)
            if problem is None and self.index_bits:
                problem = self._check_places(records[:, :border], count)
            if problem:
                return problem
        return None

    def _check_places(self, data: Tensor, chunks: int) -> str | None:
        if not has_clean_ends(data, chunks * self.k, self.index_bits):
            return "bits behind the last place"
        indices = unpack(data, chunks * self.k, self.index_bits).reshape(-1, self.k)
        if (indices[:, -1] >= self.numel).any():
            return f"place {int(indices[:, -1].max())} in chunks of {self.numel}"
        is_good = (indices[:, 1:] > indices[:, :-1]).all(dim=1)
        if self._marks_nothing:
            is_good |= (indices == 0).all(dim=1)
        return None if is_good.all() else "places that do not ascend"

    def _records(self, data: Tensor, chunks: int) -> list[tuple[Tensor, int]]:
        """Rows of bytes, one for each record, and the number of chunks in each."""
        whole, rest = divmod(chunks, ALIGNMENT)
        size = record_size(self.values, ALIGNMENT, self.k, self.numel)
        rows = [(data[: whole * size].view(whole, size), ALIGNMENT), (data[whole * size :].view(1, -1), rest)]
        return [(records, count) for records, count in rows if count and records.numel()]


def _all_places(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device, dtype=torch.int32).expand(like.shape)

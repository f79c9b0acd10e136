"""The sparse codec: flat float32 buffer -> transform of each chunk -> the k largest values -> one payload, and back.

A payload is one contiguous uint8 tensor: a header of 32 bytes, then the records of each group of chunks. Its length
depends only on the layout and the rule. Decoding is exact or rounds once per operation, so all nodes get the same bits
from the same payloads in the same order, on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash
from torch import Tensor

from zeroband.config.outer import Uneven, ValueCodingName
from zeroband.errors import ConfigError, MalformedPayload
from zeroband.kernels import dct
from zeroband.kernels.dct_kernels import DctKernels, dct_kernels_on
from zeroband.kernels.one_rounding import exact_sqrt
from zeroband.kernels.robust import OwnerMeasurements
from zeroband.kernels.scan import all_finite
from zeroband.kernels.select import largest, place
from zeroband.outer.sparse.chunk_records import Chosen, RecordFormat
from zeroband.outer.sparse.chunks import ChunkGroup, ChunkLayout, share_of
from zeroband.outer.sparse.sizes import ALIGNMENT, HEADER
from zeroband.state.flat import FlatLayout

MAGIC, VERSION = b"ZBSP", 1
KIND_OWN = 0
"""Kind of a node's own payload; `combine` defines further kinds."""

_NORM_BITS = 20

_TOO_FEW_FOR_A_MEDIAN = 2

BLOCK_NUMEL, GPU_BLOCK_NUMEL = 1 << 19, 1 << 22
"""Values processed at a time. On a CPU the temporaries of a block, about 30 bytes for each, come from memory that is
there already: with eight times as many, the kernel's clearing of new pages takes as long as the transforms."""

Divisor = Literal["none", "senders"]
"""none: a decoded value is the sum over members; senders: divided by the total weight of the value's senders."""


@dataclass(frozen=True)
class SparseRule:
    """Which values of each chunk are sent, and in which coding. The same on all nodes."""

    k: int
    """Values sent per chunk."""
    chunk: int = 64
    """Longest side of the tile of a matrix that is one chunk, and longest piece of a vector."""
    flat_chunk: int | None = None
    """Longest piece of a vector. None: chunk."""
    values: ValueCodingName = "float32"
    """Coding of a value on the wire."""
    transform: Literal["dct"] | None = "dct"
    """Transform of a chunk before its largest values are chosen."""
    uneven: Uneven = "pad"
    """Treatment of dimensions that the chunk does not divide."""
    keeps_density: bool = False
    """True: chunks smaller than chunk x chunk send proportionally fewer values. False: k, or all that they have."""

    def __post_init__(self) -> None:
        if self.k < 1 or self.chunk < 1 or (self.flat_chunk or 1) < 1:
            raise ConfigError(f"k={self.k} and chunk={self.chunk} must be 1 or more")
        if self.transform and self.longest > dct.MAX_CHUNK:
            raise ConfigError(f"chunk={self.longest} is too long for the cosine transform; at most {dct.MAX_CHUNK}")
        if max(self.chunk**2, self.longest) > 1 << 16:
            raise ConfigError(f"chunk={self.longest} makes chunks of more than 65536 values, whose places take 17 bits")

    @property
    def longest(self) -> int:
        """Longest side of a chunk."""
        return max(self.chunk, self.flat_chunk or 0)

    def k_of(self, numel: int) -> int:
        """Number of values sent from a chunk of this size."""
        wanted = -(-self.k * numel // self.chunk**2) if self.keeps_density else self.k
        return min(wanted, numel)


@dataclass(frozen=True)
class PayloadSection:
    """A group of chunks and where its records lie in a payload."""

    group: ChunkGroup
    record: RecordFormat
    start: int
    block_numel: int
    """Values processed at a time."""

    @property
    def size(self) -> int:
        return self.record.size(self.group.chunks)

    def bytes_of(self, first: int, stop: int) -> slice:
        """Byte range of the records of these chunks; `first` is a multiple of 8."""
        start = self.start + self.record.size(first)
        return slice(start, start + self.record.size(stop - first))

    def blocks(self, rank: int, world_size: int) -> Iterator[tuple[int, int]]:
        """A rank's share of the chunks, in ranges of at most `block_numel` values that end at whole records."""
        first, stop = share_of(self.group.chunks, rank, world_size)
        step = max(ALIGNMENT, self.block_numel // self.group.numel // ALIGNMENT * ALIGNMENT)
        for begin in range(first, stop, step):
            yield begin, min(begin + step, stop)


@dataclass(frozen=True)
class Part:
    """Values taken from a range of chunks of one section."""

    section: PayloadSection
    first: int
    stop: int
    chosen: Chosen


@dataclass(frozen=True)
class EncodedPayload:
    """A node's payload, and the values that it took from the buffer."""

    payload: Tensor
    """(nbytes,) uint8. With several ranks, this rank's share of it is written."""
    taken: tuple[Part, ...]
    """Coefficients as others decode them; for sign codings, the unquantised ones."""


@dataclass(frozen=True)
class Payload:
    """Checked bytes: decoding them cannot fail nor write beyond a chunk."""

    data: Tensor
    """(nbytes,) uint8."""


class SparseCodec:
    """Encodes and decodes payloads of one layout under one rule. Buffers are (layout.numel,) float32 on any device.

    `device`: CUDA GPU for the transforms, the choice of values and the sums, with bits equal to any other device's;
    buffers and payloads then lie on the host. None, or no CUDA device: work where they lie. On a CPU the transforms are
    half of a node's work: 256 float32 operations per value to encode, 256 in float64 to decode.
    """

    def __init__(self, layout: FlatLayout, rule: SparseRule, *, device: torch.device | None = None) -> None:
        self.rule = rule
        self._device = device if device is not None and device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None
        chunks = ChunkLayout.of(layout, rule.chunk, flat_chunk=rule.flat_chunk, uneven=rule.uneven)
        sections: list[PayloadSection] = []
        block_numel = BLOCK_NUMEL if self._device is None else GPU_BLOCK_NUMEL
        start = HEADER.size
        for group in chunks.groups:
            k = rule.k_of(group.numel)
            record = RecordFormat(group.numel, k, rule.values)
            sections.append(PayloadSection(group, record, start, block_numel))
            start += sections[-1].size
        self.sections = tuple(sections)
        self.numel = layout.numel
        self.nbytes = start
        """Length of every payload of a node."""
        self.digest = xxhash.xxh3_64_intdigest(repr((layout.digest(), rule)).encode())

    def encode(
        self, buffer: Tensor, *, out: Tensor | None = None, rank: int = 0, world_size: int = 1
    ) -> EncodedPayload:
        """Choose and pack values. The buffer is unchanged; `add` with -1 takes out the sent values.

        `out`: (nbytes,) uint8 to write to, for ranks that write shares of one payload; rank 0 writes the header.
        Raises: ValueError naming a parameter with a value that is not finite.
        """
        payload = torch.zeros(self.nbytes, dtype=torch.uint8, device=buffer.device) if out is None else out
        if rank == 0:
            payload[: HEADER.size] = self.header(KIND_OWN, 1, self.nbytes - HEADER.size).to(payload.device)
        taken: list[Part] = []
        for section in self.sections:
            for first, stop in section.blocks(rank, world_size):
                chosen = self._choose(section, buffer, first, stop)
                data = section.record.encode(chosen)
                payload[section.bytes_of(first, stop)] = data.to(payload.device)
                if not section.record.coding.is_of_signs:
                    chosen = section.record.decode(data, stop - first)
                taken.append(Part(section, first, stop, Chosen(chosen.indices.int(), chosen.values)))
        return EncodedPayload(payload, tuple(taken))

    def _choose(self, section: PayloadSection, buffer: Tensor, first: int, stop: int) -> Chosen:
        """The largest coefficients of a range of chunks; without a transform, the largest values."""
        group, k = section.group, section.record.k
        chunks = group.read(buffer, first, stop).to(self._device or buffer.device)
        if not all_finite(chunks):
            bad = first + int((~chunks.isfinite()).flatten(1).any(dim=1).nonzero()[0])
            raise ValueError(f"{group.name_of(bad)} has a value that is not finite, which has no encoding")
        if self.rule.transform:
            return Chosen(*self._dct_kernels_on(chunks.device).choose(chunks, k))
        places = largest(chunks.flatten(1), k)
        return Chosen(places, chunks.flatten(1).gather(1, places))

    def _dct_kernels_on(self, device: torch.device) -> DctKernels:
        return dct_kernels_on(device, longest=self.rule.longest)

    def add(self, buffer: Tensor, taken: Sequence[Part], scale: float) -> None:
        """Add the values that `encode` took, times `scale`, to a buffer: -1 takes them out, 1 puts them back."""
        for part in taken:
            group, places, values = part.section.group, part.chosen.indices, part.chosen.values
            if self.rule.transform:
                waves = self._dct_kernels_on(values.device)
                chunks = waves.restore(places, values, group.chunk_rows, group.chunk_columns)
            else:
                chunks = place(places, values, group.numel)
            group.add(chunks.mul_(scale).to(buffer.device), buffer, part.first, part.stop)

    def check(self, data: Tensor) -> Payload:
        """Check received bytes and accept them as one node's payload. Raises MalformedPayload."""
        self.check_header(data, (KIND_OWN,), self.nbytes)
        for section in self.sections:
            for first, stop in section.blocks(0, 1):
                problem = section.record.check(data[section.bytes_of(first, stop)], stop - first)
                if problem:
                    raise MalformedPayload(f"payload: {problem}, near {section.group.name_of(first)}")
        return Payload(data)

    def norm(self, payload: Payload) -> float:
        """Norm of a decoded payload, see `norm_of`."""
        return norm_of(self, payload)

    def decode(
        self,
        payloads: Sequence[Payload],
        out: Tensor,
        *,
        weights: Sequence[float] | None = None,
        parts: Sequence[float] | None = None,
        divisor: Divisor = "none",
        clips: bool = False,
        measured: OwnerMeasurements | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Write the weighted sum of payloads, or their mean over the senders of each value, into a flat buffer.

        `payloads`: in the order of the members, the same on all nodes. `weights`: one for each; None: 1. `parts`: their
        weights in the divisor, if they differ. `clips`: clip each payload's norm in a chunk to the median payload's, if
        there are 3 payloads or more. `measured`: measurements of each payload are added to it.
        Ranks of a node write their shares of the chunks. Raises MalformedPayload if a sum is not finite.
        """
        with self._beside_training():
            for section in self.sections:
                for first, stop in section.blocks(rank, world_size):
                    each: Iterable[Chosen] = self._each(section, first, stop, payloads, self._device)
                    held, scales = (), None
                    if clips:
                        each = held = list(each)
                        scales = clip_scales([one.values for one in held])
                    room = self._room(section, stop - first, payloads, self._device)
                    total, weight = _summed(room, each, weights or [1.0] * len(payloads), parts, scales)
                    coefficients = mean_over_senders(total, weight) if divisor == "senders" else total
                    if measured is not None:
                        _measure(held, coefficients, measured)
                    self.write(section, first, stop, coefficients, out)

    def write(self, section: PayloadSection, first: int, stop: int, coefficients: Tensor, out: Tensor) -> None:
        """Transform coefficients, (stop - first, numel), back to chunks and write these into a flat buffer."""
        shape = section.group.chunk_rows, section.group.chunk_columns
        with self._beside_training():
            if not all_finite(coefficients):
                raise MalformedPayload(f"payloads: a sum that is not finite, near {section.group.name_of(first)}")
            chunks = coefficients.to(self._device or coefficients.device).view(-1, *shape)
            restored = dct.inverse(chunks) if self.rule.transform else chunks
            section.group.write(restored.to(out.device), out, first, stop)

    def _beside_training(self) -> AbstractContextManager[object]:
        """A separate stream, so that waiting for a block does not wait for all work that training has queued."""
        if self._device is None:
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)

    def sums_of(
        self,
        section: PayloadSection,
        first: int,
        stop: int,
        payloads: Sequence[Payload],
        weights: Sequence[float] | None = None,
        parts: Sequence[float] | None = None,
        *,
        device: torch.device | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum of each coefficient in a range of chunks, and the weight of its senders of non-zero values.

        Shapes: both (stop - first, numel) float32. `device`: of the results; None: the payloads' device.
        """
        each = self._each(section, first, stop, payloads, device)
        room = self._room(section, stop - first, payloads, device)
        return _summed(room, each, weights or [1.0] * len(payloads), parts, None)

    @staticmethod
    def _each(
        section: PayloadSection, first: int, stop: int, payloads: Sequence[Payload], device: torch.device | None
    ) -> Iterator[Chosen]:
        """Each payload's values in a range of chunks, decoded lazily."""
        for payload in payloads:
            data = payload.data[section.bytes_of(first, stop)]
            yield section.record.decode(data.to(device or data.device), stop - first)

    @staticmethod
    def _room(
        section: PayloadSection, chunks: int, payloads: Sequence[Payload], device: torch.device | None
    ) -> tuple[Tensor, Tensor]:
        """Zeros for sums of values and of weights, (chunks, numel) each, on `device` or the payloads' device."""
        device = device or (payloads[0].data.device if payloads else None)
        total, weight = torch.zeros(2, chunks, section.group.numel, device=device).unbind()
        return total, weight

    def header(self, kind: int, sources: int, body_bytes: int) -> Tensor:
        """Header of a payload."""
        content = HEADER.pack(MAGIC, VERSION, kind, sources, 0, body_bytes, self.digest)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def check_header(self, data: Tensor, kinds: Sequence[int], nbytes: int | None) -> tuple[int, int]:
        """Check the header; returns its kind and number of sources. Raises MalformedPayload.

        `nbytes`: required length; None: the length that the header gives.
        """
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            raise MalformedPayload(f"payload: {tuple(data.shape)} {data.dtype} is no row of bytes")
        if len(data) < HEADER.size or (nbytes is not None and len(data) != nbytes):
            raise MalformedPayload(f"payload: {len(data)} bytes, expected {nbytes or HEADER.size}")
        content = bytes(data[: HEADER.size].tolist())
        magic, version, kind, sources, reserved, body_bytes, digest = HEADER.unpack(content)
        is_ours = (magic, version, reserved, content[6:8]) == (MAGIC, VERSION, 0, b"\0\0") and kind in kinds
        if not is_ours:
            raise MalformedPayload(f"payload: header {content[:16].hex()} is none of version {VERSION}, kinds {kinds}")
        if body_bytes != len(data) - HEADER.size:
            raise MalformedPayload(f"payload: {len(data) - HEADER.size} bytes, its header says {body_bytes}")
        if digest != self.digest:
            raise MalformedPayload("payload: made for other parameters or by another rule; restart with equal settings")
        if sources < 1 or (kind == KIND_OWN and sources != 1):
            raise MalformedPayload(f"payload: of {sources} nodes")
        return kind, sources


def _summed(
    room: tuple[Tensor, Tensor],
    payloads: Iterable[Chosen],
    weights: Sequence[float],
    parts: Sequence[float] | None,
    scales: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Sum payloads into `room`, as for `sums_of`. `scales`: factor on each payload's values by chunk; None: 1."""
    total, weight = room
    each = zip(payloads, weights, parts or weights, scales or [None] * len(weights), strict=True)
    for chosen, share, part, scale in each:
        places, values = chosen.indices.long(), chosen.values
        scaled = values if scale is None else values * scale
        # the places in a chunk are distinct, so each gets one addition per payload, in the payloads' order
        total.scatter_(1, places, total.gather(1, places) + scaled * share)
        weight.scatter_(1, places, weight.gather(1, places) + (values != 0) * part)
    return total, weight


def clip_scales(values: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """Factors that clip each payload's norm in a chunk to the median; None: too few payloads to clip.

    Shapes: values (chunks, k) of each payload; gives (chunks, 1) float32 for each. The same bits on every device.
    """
    if len(values) <= _TOO_FEW_FOR_A_MEDIAN:
        return None
    norms = torch.stack([_norms_by_chunk(of_one) for of_one in values])  # (payloads, chunks)
    most = norms.sort(dim=0).values[(len(values) - 1) // 2]
    scales = torch.where(norms > most, most / norms, 1.0).float()
    return [scale[:, None] for scale in scales]


def _norms_by_chunk(values: Tensor) -> Tensor:
    """Norm of each chunk: (chunks,) float64 of (chunks, k). Sums integers as in `norm_of`, with a unit per chunk."""
    largest = values.abs().amax(dim=1, keepdim=True).double()
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - _NORM_BITS)
    whole = (values.double() / unit).round().to(torch.int64).square().sum(dim=1)
    return unit[:, 0] * exact_sqrt(whole.double())


def _measure(payloads: Sequence[Chosen], result: Tensor, measured: OwnerMeasurements) -> None:
    """Add measurements of the payloads' values and of their result, (chunks, numel), to `measured`."""
    count, exact = len(payloads), result.double()
    seen = torch.zeros(2 * count + 1, dtype=torch.float64)
    for number, chosen in enumerate(payloads):
        values = chosen.values.double()
        seen[number] = (values * exact.gather(1, chosen.indices.long())).sum()
        seen[count + number] = values.square().sum()
    seen[-1] = exact.square().sum()
    measured.values.add_(seen)


def mean_over_senders(total: Tensor, weight: Tensor) -> Tensor:
    """Weighted sums divided by the senders' total weight; 0 where there is no sender."""
    return torch.where(weight > 0, total / weight, 0.0)


def norm_of(codec: SparseCodec, payload: Payload) -> float:
    """Euclidean norm of a payload's coefficients, before any inverse transform: the same on every node and device.

    Sums integers, so the order does not matter; precise to about 2^-20 of the largest value.
    """
    values = [
        section.record.decode(payload.data[section.bytes_of(first, stop)], stop - first).values
        for section in codec.sections
        for first, stop in section.blocks(0, 1)
    ]
    largest = max((float(part.abs().max()) for part in values if part.numel()), default=0.0)
    if largest == 0:
        return 0.0
    unit = 2.0 ** (math.frexp(largest)[1] - _NORM_BITS)
    whole = sum(int((part.double() / unit).round().to(torch.int64).square().sum()) for part in values)
    return unit * math.sqrt(whole)

"""The aggregator's coding: combines several nodes' payloads into one, so that a node uploads and downloads once.

The combined payload decodes to the same bits as the sum of the separate payloads. Its size depends on how many
coefficients the nodes have in common; `combined_bytes` bounds it. Source: DisTrO's form for home uplinks, as its
authors describe it; the coding is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroband.errors import MalformedPayload
from zeroband.kernels import reference
from zeroband.kernels.scan import all_finite
from zeroband.kernels.select import place
from zeroband.outer.sparse.bits import has_clean_ends, pack, unpack
from zeroband.outer.sparse.sizes import HEADER, combined_fields, combined_size, most_entries, packed_size
from zeroband.outer.sparse.sparse_codec import Divisor, Payload, PayloadSection, SparseCodec, mean_over_senders

MOST_SOURCES = (1 << 15) - 1
"""Most signs whose sum fits into 16 bits."""

_VALUES, _SIGNS, _SIGNS_AND_SENDERS = 1, 2, 3
"""Kinds: float32 results; sums of signs; sums of signs and how many sent one."""


@dataclass(frozen=True)
class Union:
    """All non-zero coefficients of a section, chunk by chunk."""

    counts: Tensor
    """Number in each chunk, (chunks,) int64."""
    places: Tensor
    """(entries,) ascending in each chunk."""
    values: Tensor
    """(entries,) float32: the result, or the sum of signs."""
    senders: Tensor
    """(entries,) float32, with kind 3; else empty."""


@dataclass(frozen=True)
class Combined:
    """A checked and parsed combined payload, with an entry for each section."""

    unions: tuple[Union, ...]


def combine(
    codec: SparseCodec,
    payloads: Sequence[Payload],
    *,
    weights: Sequence[float] | None = None,
    divisor: Divisor = "none",
) -> Tensor:
    """Combine payloads into their sum or mean, uint8. Arguments as in `SparseCodec.decode`.

    Raises: ValueError for no payload or more than MOST_SOURCES, MalformedPayload if a sum is not finite.
    """
    if not 0 < len(payloads) <= MOST_SOURCES:
        raise ValueError(f"{len(payloads)} payloads cannot be combined; 1 to {MOST_SOURCES} can")
    kind = _kind_of(codec, weights, divisor)
    body: list[Tensor] = []
    for section in codec.sections:
        parts: list[Union] = []
        for first, stop in section.blocks(0, 1):
            total, weight = codec.sums_of(section, first, stop, payloads, weights)
            result = mean_over_senders(total, weight) if kind == _VALUES and divisor == "senders" else total
            if not all_finite(result):
                raise MalformedPayload(f"payloads: a sum that is not finite, near {section.group.name_of(first)}")
            row, at = result.nonzero(as_tuple=True)
            counts = torch.bincount(row, minlength=stop - first)
            senders = weight[row, at] if kind == _SIGNS_AND_SENDERS else result.new_empty(0)
            parts.append(Union(counts, at, result[row, at], senders))
        body += _pack(_joined(parts), section, kind, len(payloads))
    data = torch.cat(body)
    return torch.cat([codec.header(kind, len(payloads), len(data)).to(data.device), data])


def combined_bytes(codec: SparseCodec, sources: int, *, divisor: Divisor = "none", weighted: bool = False) -> int:
    """Most bytes that combining `sources` payloads can give: when no two chose the same coefficient."""
    kind = _kind_of(codec, [1.0] if weighted else None, divisor)
    flags = {"has_sums": kind != _VALUES, "has_senders": kind == _SIGNS_AND_SENDERS}
    shapes = ((section.group.chunks, section.record.k, section.group.numel) for section in codec.sections)
    return HEADER.size + sum(combined_size(*shape, sources, **flags) for shape in shapes)


def check_combined(codec: SparseCodec, data: Tensor, *, most_sources: int = MOST_SOURCES) -> Combined:
    """Check received bytes and parse them as a combined payload. Raises MalformedPayload; never reads beyond the end.

    `most_sources`: most payloads that can have been combined.
    """
    kind, sources = codec.check_header(data, (_VALUES, _SIGNS, _SIGNS_AND_SENDERS), None)
    if sources > min(most_sources, MOST_SOURCES) or (kind != _VALUES and codec.rule.values != "sign"):
        raise MalformedPayload(f"combined payload: kind {kind} of {sources} nodes with values as {codec.rule.values}")
    at, unions = HEADER.size, list[Union]()
    for section in codec.sections:
        union, at = _unpack(data, at, section, kind, sources)
        unions.append(union)
    if at != len(data):
        raise MalformedPayload(f"combined payload: {len(data) - at} bytes behind its end")
    return Combined(tuple(unions))


def decode_combined(codec: SparseCodec, combined: Combined, out: Tensor, *, rank: int = 0, world_size: int = 1) -> None:
    """Decode a combined payload into a flat buffer; ranks of a node write their shares of the chunks."""
    for section, union in zip(codec.sections, combined.unions, strict=True):
        ends = union.counts.cumsum(0)
        values = mean_over_senders(union.values, union.senders) if len(union.senders) else union.values
        for first, stop in section.blocks(rank, world_size):
            begin, end = int(ends[first - 1]) if first else 0, int(ends[stop - 1])
            rows = torch.repeat_interleave(torch.arange(stop - first, device=values.device), union.counts[first:stop])
            flat = rows * section.group.numel + union.places[begin:end]
            numel = (stop - first) * section.group.numel
            coefficients = place(flat[None], values[None, begin:end], numel).view(stop - first, -1)
            codec.write(section, first, stop, coefficients, out)


def _kind_of(codec: SparseCodec, weights: Sequence[float] | None, divisor: Divisor) -> int:
    if codec.rule.values != "sign" or weights is not None:
        return _VALUES
    return _SIGNS_AND_SENDERS if divisor == "senders" else _SIGNS


def _joined(parts: Sequence[Union]) -> Union:
    return Union(
        torch.cat([part.counts for part in parts]),
        torch.cat([part.places for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat([part.senders for part in parts]),
    )


def _fields(section: PayloadSection, kind: int, sources: int, entries: int) -> list[tuple[int, int]]:
    """(number, bits of each) for the fields of a section in order: counts, places, values, senders."""
    return combined_fields(
        section.group.chunks,
        section.record.k,
        section.group.numel,
        sources,
        entries,
        has_sums=kind != _VALUES,
        has_senders=kind == _SIGNS_AND_SENDERS,
    )


def _pack(union: Union, section: PayloadSection, kind: int, sources: int) -> list[Tensor]:
    (_, count_bits), (_, place_bits), (_, value_bits), (_, sender_bits) = _fields(section, kind, sources, 0)
    values = union.values
    packed = reference.encode_fp32(values) if kind == _VALUES else pack((values + sources)[None], value_bits)[0]
    senders = pack(union.senders[None], sender_bits)[0] if kind == _SIGNS_AND_SENDERS else packed[:0]
    return [pack(union.counts[None], count_bits)[0], pack(union.places[None], place_bits)[0], packed, senders]


def _unpack(data: Tensor, at: int, section: PayloadSection, kind: int, sources: int) -> tuple[Union, int]:
    """Parse a section; returns it and the start of the next one. The counts come first and give the rest's length."""

    def take(count: int, bits: int) -> Tensor:
        nonlocal at
        size = packed_size(count, bits)
        if len(data) - at < size:
            raise MalformedPayload(f"combined payload: ends at byte {len(data)}, needs {at + size}")
        at += size
        return data[None, at - size : at]

    def numbers(count: int, bits: int) -> Tensor:
        packed = take(count, bits)
        if count and not has_clean_ends(packed, count, bits):
            raise MalformedPayload("combined payload: bits behind the last number")
        return unpack(packed, count, bits)[0].long()

    chunks, count_bits = _fields(section, kind, sources, 0)[0]
    counts = numbers(chunks, count_bits)
    if (counts > most_entries(sources, section.record.k, section.group.numel)).any():
        raise MalformedPayload(f"combined payload: {int(counts.max())} values in a chunk")
    _, of_places, of_values, of_senders = _fields(section, kind, sources, int(counts.sum()))
    places = numbers(*of_places)
    if kind == _VALUES:
        values = reference.decode_fp32(take(*of_values)[0].clone(), of_values[0])
    else:
        values = (numbers(*of_values) - sources).float()
    union = Union(counts, places, values, numbers(*of_senders).float())
    _check_union(union, section.group.numel, kind, sources)
    return union, at


def _check_union(union: Union, numel: int, kind: int, sources: int) -> None:
    rows = torch.repeat_interleave(torch.arange(len(union.counts), device=union.counts.device), union.counts)
    if (union.places >= numel).any():
        raise MalformedPayload(f"combined payload: place {int(union.places.max())} in chunks of {numel}")
    if (rows * numel + union.places).diff().le(0).any():
        raise MalformedPayload("combined payload: places that do not ascend")
    if not all_finite(union.values) or (union.values == 0).any():
        raise MalformedPayload("combined payload: a value that is 0 or not finite")
    if kind != _VALUES and (union.values.abs() > sources).any():
        raise MalformedPayload(f"combined payload: a sum of more than {sources} signs")
    if kind == _SIGNS_AND_SENDERS:
        surplus = union.senders - union.values.abs()
        if (surplus < 0).any() or (surplus % 2 != 0).any() or (union.senders > sources).any():
            raise MalformedPayload("combined payload: a sum of signs that its senders cannot have sent")

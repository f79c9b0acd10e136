"""Sizes of payloads in bytes, used by the codec's layout and by `zeroband plan`. Pure; no torch."""

from __future__ import annotations

import struct

from zeroband.config.outer import ValueCodingName

ALIGNMENT = 8
"""This many numbers of any bit width fill whole bytes."""

HEADER = struct.Struct("<4sBBxxIIQQ")
"""Magic, version, kind, sources, (reserved) 0, bytes of the body, digest of what both ends must share."""

LEVEL_BYTES = 4
"""Bytes of the two sizes that a run of two-bit values shares."""


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` packed numbers of `bits` bits."""
    return -(-count * bits // 8)


def has_zeros(k: int, numel: int) -> bool:
    """Whether signs need a code for zero.

    A chunk that sends all of its values, or only one, has no other way to mark itself as empty.
    """
    return k == 1 or k == numel


def values_size(values: ValueCodingName, count: int, *, with_zeros: bool) -> int:
    """Bytes of `count` values that are coded together. `with_zeros`: for signs, see `has_zeros`."""
    match values:
        case "float32":
            return 4 * count
        case "bfloat16":
            return 2 * count
        case "two_bit":
            return LEVEL_BYTES + packed_size(count, 2)
        case "sign":
            return packed_size(count, 2 if with_zeros else 1)


def index_bits(k: int, numel: int) -> int:
    """Bits of a value's place in a chunk; 0 if all values are sent."""
    return 0 if k == numel else (numel - 1).bit_length()


def record_size(values: ValueCodingName, chunks: int, k: int, numel: int) -> int:
    """Bytes of at most ALIGNMENT chunks of `numel` values, k of them sent: first the places, then the values."""
    count = chunks * k
    return packed_size(count, index_bits(k, numel)) + values_size(values, count, with_zeros=has_zeros(k, numel))


def records_size(values: ValueCodingName, chunks: int, k: int, numel: int) -> int:
    """Bytes of `chunks` chunks, the first at a multiple of ALIGNMENT."""
    whole, rest = divmod(chunks, ALIGNMENT)
    return whole * record_size(values, ALIGNMENT, k, numel) + (record_size(values, rest, k, numel) if rest else 0)


def most_entries(sources: int, k: int, numel: int) -> int:
    """Most values of one chunk in a payload that combines those of `sources` nodes."""
    return min(numel, k * sources)


def combined_fields(
    chunks: int, k: int, numel: int, sources: int, entries: int, *, has_sums: bool, has_senders: bool
) -> list[tuple[int, int]]:
    """(number, bits of each) for the fields of combined chunks in order: counts, places, values, senders.

    `has_sums`: the values are sums of signs, not float32.
    """
    return [
        (chunks, most_entries(sources, k, numel).bit_length()),
        (entries, (numel - 1).bit_length()),
        (entries, (2 * sources).bit_length() if has_sums else 32),
        (entries if has_senders else 0, sources.bit_length()),
    ]


def combined_size(chunks: int, k: int, numel: int, sources: int, *, has_sums: bool, has_senders: bool = False) -> int:
    """Most bytes of the chunks of `sources` combined payloads: when no two chose the same coefficient."""
    entries = chunks * most_entries(sources, k, numel)
    fields = combined_fields(chunks, k, numel, sources, entries, has_sums=has_sums, has_senders=has_senders)
    return sum(packed_size(count, bits) for count, bits in fields)

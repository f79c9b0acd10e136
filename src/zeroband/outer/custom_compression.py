"""User-defined compression: an algorithm encodes values to bytes and decodes them; this file does the rest.

A payload encodes the node's unsent update: the encoding error stays in a memory of the node, and a payload that never
counts returns to it. The result of a round is the mean of the decoded payloads, weighted by the members' shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.errors import MalformedPayload
from zeroband.kernels.one_rounding import OneRounding
from zeroband.kernels.robust import OwnerMeasurements
from zeroband.kernels.scan import all_finite, largest
from zeroband.outer.local_memory import LocalMemory
from zeroband.outer.payloads import PayloadExchange
from zeroband.outer.sparse.sparse_codec import Divisor, Payload
from zeroband.state.fragments import Fragment

UNSENT = "unsent"
"""Local section with a node's unsent update."""


class Compression(Protocol):
    """Wire format of a fragment's values. Called by local rank 0; values are (n,) float32 on CPU."""

    def nbytes(self, numel: int) -> int:
        """Length of each payload of `numel` values."""
        ...

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write the payload of finite values into `out`, (nbytes,) uint8."""
        ...

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Decode a payload into `out`, (n,) float32 of zeros, with the same bits on every node.

        The bytes are untrusted: another node sent them. Raises ValueError, IndexError or RuntimeError if they are
        malformed.
        """
        ...


class CustomCodec:
    """Adapts a compression to `PayloadCodec`, for one fragment."""

    def __init__(self, compression: Compression, numel: int) -> None:
        self._compression = compression
        self.numel = numel
        self.nbytes = compression.nbytes(numel)

    def check(self, data: Tensor) -> Payload:
        if len(data) != self.nbytes:
            raise MalformedPayload(f"payload: {len(data)} bytes, expected {self.nbytes}")
        self._values(Payload(data))
        return Payload(data)

    def norm(self, payload: Payload) -> float:
        return largest(self._values(payload))  # in place of the norm, whose last bits depend on the processor

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
        """Write the weighted sum of payloads; rank 0 does it for all."""
        if rank != 0:
            return
        out.zero_()
        for payload, weight in zip(payloads, weights or [1.0] * len(payloads), strict=True):
            out.add_(self._values(payload).mul_(weight))
        if not all_finite(out):
            raise MalformedPayload("payloads: a sum that is not finite")

    def _values(self, payload: Payload) -> Tensor:
        """Decode a payload into new memory. Raises MalformedPayload."""
        values = torch.zeros(self.numel)
        try:
            with OneRounding():
                self._compression.decode(payload.data, values)
        except (ValueError, IndexError, RuntimeError) as error:
            raise MalformedPayload(f"payload: {error}") from error
        if not all_finite(values):
            raise MalformedPayload("payload: a value that is not finite")
        return values


class CustomMemoryRule:
    """Keeps a fragment's encoding error in the memory. Local rank 0 packs for all ranks."""

    def __init__(self, compression: Compression, fragment: Fragment) -> None:
        self._compression = compression
        self._fragment = fragment

    def accumulate(self, memory: Tensor, values: Tensor, *, scale: float = 1.0) -> None:
        memory.add_(values if scale == 1 else values.mul(scale))

    def pack(self, memory: Tensor, *, out: Tensor, rank: int, world_size: int) -> Tensor | None:
        """Encode the fragment and subtract the decoded payload from the memory."""
        if rank != 0:
            return None
        sent = torch.zeros(self._fragment.numel)
        self._compression.encode(torch.cat(self._fragment.parts(memory)), out)
        self._compression.decode(out, sent)
        self._add(memory, sent.neg())
        return sent

    def restore(self, memory: Tensor, taken: Tensor) -> None:
        self._add(memory, taken)

    def _add(self, memory: Tensor, values: Tensor) -> None:
        parts = self._fragment.parts(memory)
        for part, of_part in zip(parts, values.split([part.numel() for part in parts]), strict=True):
            part.add_(of_part)


def exchange_of(parts: OuterParts, compression: Compression) -> PayloadExchange[CustomCodec]:
    """Build the exchange of a compression's payloads, with a codec for each fragment."""
    memory = LocalMemory(parts, UNSENT, [CustomMemoryRule(compression, fragment) for fragment in parts.fragments])
    codecs = [CustomCodec(compression, fragment.numel) for fragment in parts.fragments]
    return PayloadExchange(parts, memory, codecs, counts_tokens=True)

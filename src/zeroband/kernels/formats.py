"""Formats of encoded values and their sizes. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """Size and error bounds of a codec."""

    name: str
    number: int
    """Id on the wire."""
    bits: int
    """Bits per value, without scales."""
    block: int | None
    """Values that share a float32 scale; None: no scales."""
    relative_error: float
    """Error of a value: at most this fraction of |x|,"""
    block_error: float
    """plus this fraction of the largest |x| in its block."""

    @property
    def ratio(self) -> float:
        """Compression ratio relative to float32, for long buffers."""
        scale_bits = 32 / self.block if self.block else 0
        return 32 / (self.bits + scale_bits)

    @property
    def is_exact(self) -> bool:
        """Whether encoding is lossless."""
        return self.relative_error == self.block_error == 0

    @property
    def needs_feedback(self) -> bool:
        """Whether convergence needs error feedback."""
        return self.bits < 8

    def encoded_size(self, n: int) -> int:
        """Return the bytes of n encoded values."""
        scales = -(-n // self.block) if self.block else 0
        return 4 * scales + -(-n * self.bits // 8)


_SLACK = 1 + 2.0**-14  # rounding of the scale and the quotient

_EACH = (
    Format("fp32", 0, 32, None, 0.0, 0.0),
    Format("bf16", 1, 16, None, 2.0**-8, 0.0),
    Format("fp16", 2, 16, 256, 2.0**-11, 2.0**-25),
    Format("int8", 3, 8, 256, 0.0, 0.5 / 127 * _SLACK),
    Format("int4", 4, 4, 128, 0.0, 0.5 / 7 * _SLACK),
)

FORMATS: dict[str, Format] = {format.name: format for format in _EACH}

"""The formats of encoded values: the numbers that tell how many bytes travel. Pure; no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """What a codec does to values, and how many bytes it makes of them."""

    name: str
    number: int
    """Number of the format on the wire."""
    bits: int
    """Bits of one value, without its share of the scale."""
    block: int | None
    """Neighbours that share one float32 scale; None: no scale."""
    relative_error: float
    """The error of every value is at most this share of |x|,"""
    block_error: float
    """plus this share of the largest |x| of its block."""

    @property
    def ratio(self) -> float:
        """Bytes of float32 for one byte on the wire, in long buffers."""
        scale_bits = 32 / self.block if self.block else 0
        return 32 / (self.bits + scale_bits)

    @property
    def is_exact(self) -> bool:
        """Whether every value arrives as it was sent."""
        return self.relative_error == self.block_error == 0

    @property
    def needs_feedback(self) -> bool:
        """Whether it takes so much that a round's loss must go into the next one for training to converge."""
        return self.bits < 8

    def encoded_size(self, n: int) -> int:
        """Bytes that n values take."""
        scales = -(-n // self.block) if self.block else 0
        return 4 * scales + -(-n * self.bits // 8)


_SLACK = 1 + 2.0**-14  # the scale and the quotient are rounded themselves

_EACH = (
    Format("fp32", 0, 32, None, 0.0, 0.0),
    Format("bf16", 1, 16, None, 2.0**-8, 0.0),
    Format("fp16", 2, 16, 256, 2.0**-11, 2.0**-25),
    Format("int8", 3, 8, 256, 0.0, 0.5 / 127 * _SLACK),
    Format("int4", 4, 4, 128, 0.0, 0.5 / 7 * _SLACK),
)

FORMATS: dict[str, Format] = {format.name: format for format in _EACH}

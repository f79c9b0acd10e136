"""Combinations that bear liars, slow and plain: one value after the other, in the order that csrc/robust.h fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
PIECE, LANES = 4096, 16


@dataclass(frozen=True)
class Part:
    """One contribution, or a piece of it: the bytes of each piece, what they decode to, and its share."""

    data: Sequence[bytes]
    values: Floats
    share: np.float32


def in_lanes(terms: npt.NDArray[np.float32] | npt.NDArray[np.float64]) -> float:
    """The sum of terms in 16 lanes of their kind, which are added in float64 from the first to the last."""
    lanes = np.zeros(LANES, terms.dtype)
    for start in range(0, len(terms), LANES):
        row = terms[start : start + LANES]
        lanes[: len(row)] += row
    total = np.float64(0)
    for lane in lanes:
        total += np.float64(lane)
    return float(total)


def product(a: Floats, b: Floats) -> float:
    """The sum of the products of two rows: in float32, and in float64 where that is too large or too small for it."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = in_lanes(a * b)
    return total if 1e-20 < abs(total) < 1e30 else in_lanes(a.astype(np.float64) * b.astype(np.float64))


def squared_distance(a: Floats, b: Floats) -> float:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        total = in_lanes((a - b) ** 2)
    return total if 1e-20 < total < 1e30 else in_lanes((a.astype(np.float64) - b.astype(np.float64)) ** 2)


def median_low(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def shrunk(length: float, most: float) -> float:
    return most / length if length > most else 1.0


def middle(rows: Sequence[Floats], trim: int) -> Floats:
    """The mean of what is left of each column, added from the smallest value to the largest."""
    columns = np.sort(np.stack(rows) + np.float32(0), axis=0)[trim : len(rows) - trim]
    total = columns[0].copy()
    for row in columns[1:]:
        total += row
    return total / np.float32(len(columns))


def clipped(parts: Sequence[Part], total: float) -> Floats:
    norms = [float(np.sqrt(product(part.values, part.values))) for part in parts]
    most = median_low(norms) if len(parts) > 2 else float("inf")
    counted = sum(float(part.share) for part in parts)
    out = np.zeros_like(parts[0].values)
    for part, norm in zip(parts, norms, strict=True):
        out += np.float32(float(part.share) / counted * total * shrunk(norm, most)) * part.values
    return out


def trimmed(parts: Sequence[Part], total: float, trim: float) -> Floats:
    left_out = min(max(int(trim * len(parts)), 1), (len(parts) - 1) // 2)
    return middle([part.values for part in parts], left_out) * np.float32(total)


def centered(parts: Sequence[Part], total: float, iterations: int) -> Floats:
    out = middle([part.values for part in parts], (len(parts) - 1) // 2)
    counted = sum(float(part.share) for part in parts)
    for _ in range(iterations):
        before = out.copy()
        distances = [float(np.sqrt(squared_distance(part.values, before))) for part in parts]
        most = median_low(distances)
        for part, distance in zip(parts, distances, strict=True):
            weight = np.float32(float(part.share) / counted * shrunk(distance, most))
            out += weight * (part.values - before)
    return out * np.float32(total)


def distinct(parts: Sequence[Part]) -> list[Part]:
    """The parts without copies of another one, of which that with the largest share counts; all zeros are no copy."""
    last = {part.data[0]: part for part in parts if part.values.any()}
    return [part for part in parts if last.get(part.data[0], part) is part]


def combined(name: str, parts: Sequence[Part], *, trim: float = 0.0, iterations: int = 0) -> Floats:
    """What an owner makes of contributions, piece by piece."""
    out = np.zeros_like(parts[0].values)
    for number, start in enumerate(range(0, len(out), PIECE)):
        here = [Part([p.data[number]], p.values[start : start + PIECE], p.share) for p in parts if p.share > 0]
        here = sorted(here, key=lambda part: (part.data, part.share))
        total = sum(float(part.share) for part in here)
        here = [part for part in here if np.isfinite(part.values).all()]
        here = distinct(here)
        if not here:
            continue
        if name == "clip":
            piece = clipped(here, total)
        elif name == "trimmed":
            piece = trimmed(here, total, trim)
        else:
            piece = centered(here, total, iterations)
        out[start : start + PIECE] = piece if np.isfinite(piece).all() else 0
    return out

"""DeMo (arXiv:2411.19870) and SparseLoCo (arXiv:2508.15706), chunk by chunk, value by value, in Python's floats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from tests.oracles.problem import LAYOUT, SHAPES, Problem
from torch import Tensor

from zeroband.outer.sparse.bits import ALIGNMENT
from zeroband.outer.sparse.sparse_codec import SparseCodec

Chunk = list[list[float]]
Coefficient = tuple[int, int]


def smaller_divisor(length: int, most: int) -> int:
    """DeMo's chunk length: the largest divisor of a dimension that is not above `most`."""
    return next(d for d in range(min(length, most), 0, -1) if length % d == 0)


def tiles(shape: tuple[int, ...], most: int) -> Iterator[tuple[range, range]]:
    """Rows and columns of each chunk of a parameter, seen as a matrix."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    height, width = smaller_divisor(rows, most), smaller_divisor(columns, most)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield range(top, top + height), range(left, left + width)


def cosine(n: int) -> list[list[float]]:
    """Orthonormal DCT-II: row u is the wave of frequency u."""
    return [
        [math.sqrt((1 if u == 0 else 2) / n) * math.cos(math.pi * (2 * i + 1) * u / (2 * n)) for i in range(n)]
        for u in range(n)
    ]


def dct(chunk: Chunk, *, is_inverse: bool = False) -> Chunk:
    rows, columns = cosine(len(chunk)), cosine(len(chunk[0]))
    if is_inverse:
        rows, columns = [list(r) for r in zip(*rows, strict=True)], [list(c) for c in zip(*columns, strict=True)]
    left = torch.tensor(rows, dtype=torch.float64)
    right = torch.tensor(columns, dtype=torch.float64)
    return (left @ torch.tensor(chunk, dtype=torch.float64) @ right.T).tolist()


def largest(chunk: Chunk, k: int) -> dict[Coefficient, float]:
    """The k values of largest size, of equal ones the first."""
    values = {(i, j): value for i, row in enumerate(chunk) for j, value in enumerate(row)}
    return dict(sorted(values.items(), key=lambda item: (-abs(item[1]), item[0]))[:k])


def dense(values: dict[Coefficient, float], like: Chunk) -> Chunk:
    return [[values.get((i, j), 0.0) for j in range(len(row))] for i, row in enumerate(like)]


def mean_of_senders(sent: list[dict[Coefficient, float]]) -> dict[Coefficient, float]:
    places = {place for values in sent for place in values}
    of = {place: [values[place] for values in sent if place in values] for place in places}
    return {place: sum(values) / len(values) for place, values in of.items()}


def each_chunk(most: int) -> Iterator[tuple[slice, tuple[int, ...], range, range]]:
    start = 0
    for _, shape in sorted(SHAPES.items()):
        numel = math.prod(shape)
        for rows, columns in tiles(shape, most):
            yield slice(start, start + numel), shape, rows, columns
        start += numel


def cut(flat: Tensor, where: tuple[slice, tuple[int, ...], range, range]) -> Chunk:
    part, shape, rows, columns = where
    matrix = flat[part].view(shape if len(shape) == 2 else (1, -1))
    return matrix[rows.start : rows.stop, columns.start : columns.stop].tolist()


def paste(flat: Tensor, where: tuple[slice, tuple[int, ...], range, range], chunk: Chunk) -> None:
    part, shape, rows, columns = where
    matrix = flat[part].view(shape if len(shape) == 2 else (1, -1))
    matrix[rows.start : rows.stop, columns.start : columns.stop] = torch.tensor(chunk)


def demo(
    problem: Problem,
    steps: int,
    *,
    chunk: int,
    k: int,
    lr: float,
    decay: float,
    share: float,
    leaves: dict[int, int] | None = None,
    overlap: int = 0,
) -> list[Tensor]:
    """The parameters after each step; values travel as they are. `leaves`: nodes, and the first step without them.

    `overlap`: steps after which an update is applied, at the end of the run at once.
    """
    theta = problem.start()
    momenta = [torch.zeros(problem.numel) for _ in range(problem.nodes)]
    history, on_their_way = list[Tensor](), list[Tensor]()
    for step in range(1, steps + 1):
        there = [m for m in range(problem.nodes) if step < (leaves or {}).get(m, steps + 1)]
        for m in range(problem.nodes):
            momenta[m] = decay * momenta[m] + lr * problem.gradient(m, step, theta)
        update = torch.zeros(problem.numel)
        taken = [torch.zeros(problem.numel) for _ in momenta]
        for where in each_chunk(chunk):
            coefficients = [dct(cut(momentum, where)) for momentum in momenta]
            sent = [largest(chunk_of, k) for chunk_of in coefficients]
            for q, values in zip(taken, sent, strict=True):
                paste(q, where, dct(dense(values, coefficients[0]), is_inverse=True))
            mean_of_those = mean_of_senders([sent[m] for m in there])
            paste(update, where, dct(dense(mean_of_those, coefficients[0]), is_inverse=True))
        momenta = [momentum - share * q for momentum, q in zip(momenta, taken, strict=True)]
        update[update.abs() < 1e-12] = 0  # where all waves are 0, as in the middle of a chunk, floats give anything
        on_their_way.append(update)
        while len(on_their_way) > (overlap if step < steps else 0):
            theta = theta - lr * on_their_way.pop(0).sign()
        history.append(theta)
    return history


def two_bit(values: list[float]) -> list[float]:
    """Sign and one of two sizes: the mean of those above the mean size, and of the others; bfloat16."""
    sizes = [abs(value) for value in values]
    border = sum(sizes) / len(sizes)
    levels: list[float] = []
    for is_high in (False, True):
        same = [size for size in sizes if (size > border) == is_high]
        levels.append(float(torch.tensor(sum(same) / max(len(same), 1)).to(torch.bfloat16)))
    return [math.copysign(levels[abs(value) > border], value) for value in values]


Runs = list[list[tuple[list[int], int]]]
"""Chunks whose values share their two sizes, each as indices of its values and how many are sent."""


def runs_of(codec: SparseCodec) -> Runs:
    """Chunks of each run, as indices into the flat buffer without what is padded, and how many values each sends."""
    numbers = torch.arange(1, LAYOUT.numel + 1).float()
    found: Runs = []
    for section in codec.sections:
        chunks = section.group.read(numbers, 0, section.group.chunks).flatten(1).int().tolist()
        lists = [([i - 1 for i in chunk if i], section.record.k) for chunk in chunks]
        found += [lists[i : i + ALIGNMENT] for i in range(0, len(lists), ALIGNMENT)]
    return found


def sparsified(errors: Tensor, runs: Runs) -> Tensor:
    """The largest values of each chunk, in two bits; 0 elsewhere."""
    sent = torch.zeros_like(errors)
    for run in runs:
        chosen: list[int] = []
        for chunk, k in run:
            order = sorted(chunk, key=lambda i: (-abs(float(errors[i])), chunk.index(i)))
            chosen += sorted(order[:k], key=chunk.index)
        sent[chosen] = torch.tensor(two_bit(errors[chosen].tolist()))
    return sent


def divided(sent: list[Tensor], divisor: str, weights: Sequence[int] | None = None) -> Tensor:
    """The weighted sum of what nodes sent, over the weight of all of them, or of those that sent a value.

    `divisor`: "members" or "senders". `weights`: None: equal.
    """
    weights = weights or [1] * len(sent)
    result = torch.zeros(len(sent[0]))
    for i in range(len(result)):
        senders = [m for m, values in enumerate(sent) if values[i] != 0 or divisor == "members"]
        if senders:
            result[i] = sum(weights[m] * float(sent[m][i]) for m in senders) / sum(weights[m] for m in senders)
    return result


def sparseloco(
    problem: Problem,
    rounds: int,
    inner_steps: int,
    *,
    runs: Runs,
    decay: float,
    lr: float,
    leaves: dict[int, int] | None = None,
    divisor: str = "senders",
    weights: Sequence[int] | None = None,
) -> list[Tensor]:
    """The outer parameters after each round. `leaves`: nodes, and the first round without them, which count from 0.

    `divisor`: "senders", of each value those nodes that sent it, as the authors' code has it; "members", all of them,
    as in the paper. `weights`: of the nodes; None: equal.
    """
    theta = problem.start()
    errors = [torch.zeros(problem.numel) for _ in range(problem.nodes)]
    history: list[Tensor] = []
    for round in range(rounds):
        decoded: list[Tensor] = []
        for m in range(problem.nodes):
            inner = problem.inner_steps(m, 1 + round * inner_steps, inner_steps, theta)
            errors[m] = decay * errors[m] + (theta - inner)
            sent = sparsified(errors[m], runs)
            errors[m] = errors[m] - sent
            decoded.append(sent)
        there = [m for m in range(problem.nodes) if round < (leaves or {}).get(m, rounds)]
        theta = theta - lr * divided([decoded[m] for m in there], divisor, weights and [weights[m] for m in there])
        history.append(theta)
    return history

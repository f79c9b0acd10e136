"""The passes of an outer round in C++ have the bits of plain torch, whatever the size, the threads, the processor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zeroband.kernels import host_passes, native
from zeroband.kernels.fused import OuterStep
from zeroband.kernels.host_passes import copy_away, take_step, write_difference

VARIANTS = range(len(native.variants()) if native.problem() is None else 0)
THREADS = (1, 2, 3)
PART = 1 << 17
"""Values that are worth a thread, at least (outer.cpp)."""

SIZES = (0, 1, 2, 15, 16, 17, 255, 256, 257, 4095, 2 * PART + 1)
FOR_THREE = 3 * PART + 17
STEPS = [OuterStep(0.7, 0.9, is_nesterov=True), OuterStep(0.3, 0.0, is_nesterov=True), OuterStep(0.7, 0.9, False)]
EACH_VARIANT = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: native.variants()[variant])


def values(n: int, seed: int, offset: int = 0) -> Tensor:
    """Of all sizes, with signs, zeros of both kinds and some that are subnormal; `offset`: from a line of the cache."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n + offset, generator=generator) * torch.logspace(-42, 4, n + offset)
    drawn[::97], drawn[1::97] = 0.0, -0.0
    return drawn[offset:]


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


def stepped(params: Tensor, momentum: Tensor, delta: Tensor, step: OuterStep) -> tuple[Tensor, Tensor]:
    """The step as torch takes it of the whole, an operation after the other."""
    v = momentum.mul(step.momentum).add(delta)
    change = v.mul(step.momentum).add(delta) if step.is_nesterov else v
    return params.sub(change.mul(step.lr)), v


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_passes, "is_native", lambda: False)


@EACH_VARIANT
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("offset", [0, 3])
def test_outer_step_has_the_bits_of_torch(variant: int, threads: int, offset: int) -> None:
    for n, step in [*itertools.product(SIZES[:-1], STEPS), (SIZES[-1], STEPS[2]), (FOR_THREE, STEPS[0])]:
        params, momentum, delta = (values(n, seed, offset) for seed in range(3))
        expected, v = stepped(params, momentum, delta, step)
        take_step(params, momentum, delta, step, variant=variant, threads=threads)
        assert same_bits(params, expected) and same_bits(momentum, v), (n, step)


def test_outer_step_without_the_library_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain(monkeypatch)
    for n, step in [*itertools.product(SIZES[:-1], STEPS), (SIZES[-1], STEPS[0])]:
        params, momentum, delta = (values(n, seed) for seed in range(3))
        expected, v = stepped(params, momentum, delta, step)
        take_step(params, momentum, delta, step)
        assert same_bits(params, expected) and same_bits(momentum, v), (n, step)


@EACH_VARIANT
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("offset", [0, 3])
def test_difference_and_its_largest_size_are_those_of_torch(variant: int, threads: int, offset: int) -> None:
    for n in (*SIZES, FOR_THREE):
        outer, inner, out = values(n, 0, offset), values(n, 1), values(n, 2, offset)
        found = write_difference(outer, inner, out, variant=variant, threads=threads)
        assert same_bits(out, outer - inner), n
        assert found == (float((outer - inner).abs().max()) if n else 0.0)


@pytest.mark.parametrize("change", [lambda _: None, plain], ids=["native", "plain"])
@pytest.mark.parametrize("spoilt", [math.nan, -math.nan, math.inf, -math.inf])
def test_difference_that_is_not_finite_shows(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], spoilt: float
) -> None:
    change(monkeypatch)
    for n in (1, 257, FOR_THREE):
        for place in {0, n // 2, n - 1}:
            outer, inner, out = torch.ones(n), torch.zeros(n), torch.empty(n)
            inner[place] = spoilt
            for threads in THREADS:
                assert not math.isfinite(write_difference(outer, inner, out, threads=threads)), (n, place)
            inner[place] = 0.0
            assert write_difference(outer, inner, out) == 1.0


@EACH_VARIANT
@pytest.mark.parametrize("threads", THREADS)
def test_copy_is_whole_and_writes_nothing_else(variant: int, threads: int) -> None:
    for n, offset in itertools.product((*SIZES[:-1], FOR_THREE), (0, 1, 15)):
        source, room = values(n, 0), torch.full((n + 40,), 7.0)
        copy_away(source, room[offset : offset + n], variant=variant, threads=threads)
        assert same_bits(room[offset : offset + n], source)
        assert bool(room[:offset].eq(7).all()) and bool(room[offset + n :].eq(7).all())


def test_other_layouts_and_types_are_taken_by_torch() -> None:
    outer, inner = values(200, 0).view(2, 100).t(), values(200, 1).bfloat16().view(100, 2)
    out = torch.empty(100, 2)
    assert write_difference(outer, inner, out) == float((outer - inner).abs().max())
    assert torch.equal(out, outer - inner)

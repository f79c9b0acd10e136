"""What all nodes must hold alike comes to the same bits on processors of all kinds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.model.tiny import KINDS, made
from tests.unit.outer.test_torch_optimizer import TAKEN
from torch import Tensor

from zeroband.kernels.one_rounding import OneRounding, exact_sqrt
from zeroband.outer.sparse.sparse_codec import clip_scales
from zeroband.outer.torch_optimizer import TorchOuterOptimizer
from zeroband.state.digest import digest_of


def exact_values(numel: int, seed: int) -> Tensor:
    """(n,) float32 that every machine begins with; torch's random numbers depend on the processor, too."""
    return ((torch.arange(numel) * 7919 + seed * 104729) % 2003 - 1001) / 4096


def inner_steps(kind: str) -> str:
    """Digest of a model after some steps of its inner optimizer."""
    model, optimizer = made(kind)
    for parameter in model.parameters():
        parameter.data = exact_values(parameter.numel(), 0).view(parameter.shape)
    for step in range(1, 4):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = exact_values(parameter.numel(), 10 * step + number).view(parameter.shape)
        optimizer.step()
    return digest_of(*(parameter.detach().reshape(-1) for parameter in model.parameters()))


def digests() -> Iterator[tuple[str, str]]:
    """Name and digest of each kind of step that nodes take alike."""
    for name, build in TAKEN.items():
        yield name, TorchOuterOptimizer(build).digest
    for kind in KINDS:
        if KINDS[kind][2].get("slice_exact"):
            yield kind.replace(" ", "_"), inner_steps(kind)
    scales = clip_scales([exact_values(64 * 1000, seed).view(1000, 64) for seed in range(5)])
    yield "clip_scales", digest_of(*(scales or ()))


OTHER_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "MKL_VML_DEBUG_CPU_TYPE": "1"}
"""Torch's kernels without vector instructions fuse nothing, those with AVX2 much. MKL's roots of older Intels are those
of neither newer ones nor AMDs."""


@pytest.mark.slow
def test_processors_of_all_kinds_come_to_the_same_bits() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.unit.outer.test_processors import digests\n"
        "print(*(f'{name}={digest}' for name, digest in digests()))"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parents[3])]
    env = {**os.environ, **OTHER_PROCESSOR}
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.split() == [f"{name}={digest}" for name, digest in digests()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_root_is_rounded_once(dtype: torch.dtype) -> None:
    """The square of each is exact, so its root is known; between two of them lies what is rounded."""
    roots = torch.arange(1, 4000, dtype=dtype) / 4096
    assert torch.equal(exact_sqrt(roots.square()), roots)
    values = exact_values(50_000, 3).abs().to(dtype) + torch.arange(50_000, dtype=dtype) / 2**20
    exact = [math.sqrt(value) for value in values.double().tolist()]
    assert torch.equal(exact_sqrt(values), torch.tensor(exact, dtype=torch.float64).to(dtype))
    assert torch.equal(exact_sqrt(values[::3]), exact_sqrt(values)[::3])


def test_roots_of_all_spellings_are_the_exact_one() -> None:
    values = exact_values(1000, 5).abs() + 0.001
    root, out = exact_sqrt(values), torch.empty(1000)
    with OneRounding():
        spelt = [values.sqrt(), values**0.5, torch.pow(values, 0.5), values.clone().sqrt_(), values.clone().pow_(0.5)]
        spelt += [torch.sqrt(values, out=out), out]
        inverse = [values.rsqrt(), values.clone().rsqrt_()]
    assert all(torch.equal(one, root) for one in spelt)
    assert all(torch.equal(one, root.reciprocal()) for one in inverse)


def test_root_that_a_gradient_passes_through_keeps_it() -> None:
    values = torch.full((3,), 4.0, requires_grad=True)
    with OneRounding():
        values.sqrt().sum().backward()
    assert torch.equal(values.grad, torch.full((3,), 0.25))

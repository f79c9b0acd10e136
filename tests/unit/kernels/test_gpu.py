"""The Triton kernels: bit for bit what plain torch does on the CPU; without a GPU, under Triton's interpreter.

Triton decides when a kernel is defined whether it is interpreted, so that runs in a process of its own.
On a machine with a GPU: pytest tests/unit/kernels/test_gpu.py
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.kernels.offline import encode_launch, step_launch
from tests.unit.kernels.passes import DIFFERENCES, INT8, encode, is_same, noise, step
from torch import Tensor

from zeroband.kernels import fused, reference
from zeroband.kernels.fused import BLOCK, OuterStep, Passes

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU and not IS_INTERPRETED else "cpu"
NESTEROV, PLAIN = OuterStep(0.7, 0.9, is_nesterov=True), OuterStep(0.7, 0.9, is_nesterov=False)

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed; it comes with torch's CUDA wheels")
runs_kernels = pytest.mark.skipif(
    not HAS_TRITON or not (HAS_GPU or IS_INTERPRETED),
    reason="no GPU; with triton, test_all_kernels_under_the_interpreter runs it",
)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("zeroband.kernels.gpu")


@runs_kernels
@EACH_DTYPE
@pytest.mark.parametrize("make", DIFFERENCES.values(), ids=DIFFERENCES.keys())
def test_encoding_is_that_of_plain_torch_bit_for_bit(
    kernels: Passes, make: Callable[[int], Tensor], dtype: torch.dtype
) -> None:
    for blocks in (1, 7, 8, 19):
        inner = make(blocks * BLOCK).to(dtype)
        outer = torch.where(inner.isfinite(), noise(blocks * BLOCK, seed=1), 0.0) * (inner.abs().amax() < 1e3)
        found = encode(kernels, outer.to(DEVICE), inner.nan_to_num().to(DEVICE))
        expected = encode(fused, outer, inner.nan_to_num())
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1], blocks


@runs_kernels
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [0, 3 * BLOCK + 1, 9 * BLOCK - 1])
def test_difference_that_is_not_finite_is_told(kernels: Passes, bad: float, index: int) -> None:
    inner = noise(9 * BLOCK)
    inner[index] = bad
    assert encode(kernels, noise(9 * BLOCK, seed=1).to(DEVICE), inner.to(DEVICE))[1]


@runs_kernels
@EACH_DTYPE
@pytest.mark.parametrize("rule", [NESTEROV, PLAIN], ids=["nesterov", "plain"])
@pytest.mark.parametrize(("start", "stop"), [(0, 17 * BLOCK), (0, 1), (3, 700), (BLOCK - 1, 16 * BLOCK + 5)])
def test_step_is_that_of_plain_torch_bit_for_bit(
    kernels: Passes, start: int, stop: int, rule: OuterStep, dtype: torch.dtype
) -> None:
    data = INT8.encode(1e-3 * noise(17 * BLOCK))
    found = step(kernels, data, start, stop, rule, dtype, DEVICE)
    expected = step(fused, data, start, stop, rule, dtype, "cpu")
    assert is_same(found.params, expected.params) and is_same(found.momentum, expected.momentum)
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts off where a GPU rounds (see below)
        cut = (expected.params.view(torch.int32) & -0x10000).view(torch.float32)
        assert is_same(found.inner, cut.to(dtype))
    else:
        assert is_same(found.inner, expected.inner)


@runs_kernels
def test_decoding_gives_the_bits_of_the_codec(kernels: Passes) -> None:
    """A step of 1 without momentum from zeros leaves minus what was decoded; nothing of it is subnormal."""
    rule = OuterStep(1.0, 0.0, is_nesterov=False)
    n = 24 * BLOCK
    for make in DIFFERENCES.values():
        data = INT8.encode(make(n))
        scales, codes = data[: 4 * n // BLOCK].view(torch.float32), data[4 * n // BLOCK :].view(torch.int8)
        params, momentum, inner = (torch.zeros(n, device=DEVICE) for _ in range(3))
        kernels.take_step(scales.clone().to(DEVICE), codes.clone().to(DEVICE), 0, params, momentum, inner, rule)
        decoded = INT8.decode(data, n)
        assert torch.equal(momentum.cpu(), decoded) and torch.equal(inner.cpu(), -decoded)
        assert not ((decoded != 0) & (decoded.abs() < 2.0**-126)).any()


@runs_kernels
def test_numbers_of_values_and_scales_must_fit(kernels: Passes) -> None:
    x, scales, codes = torch.zeros(300), torch.zeros(1), torch.zeros(300, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^1 scales belong to 256 values, not 300"):
        kernels.encode_difference(x, x, scales, codes, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^300 values after 5 take 2 blocks, not 1"):
        kernels.take_step(scales, codes, 5, x, x.clone(), x.clone(), NESTEROV)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU or IS_INTERPRETED, reason="the tests above run in this process")
def test_all_kernels_under_the_interpreter(tmp_path: Path) -> None:
    files = [__file__, str(Path(__file__).with_name("test_dct_gpu.py"))]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:pytest_cov",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    options = [f"--basetemp={tmp_path / 'inner'}", "--tb=short"]
    ran = subprocess.run(
        [*command, *options], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=200
    )
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|skipped|failed|error)", ran.stdout)}
    assert ran.returncode == 0 and counts.get("passed", 0) >= 55, ran.stdout[-5000:] + ran.stderr[-2000:]


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="Triton's interpreter compiles nothing")
@EACH_DTYPE
def test_compiled_kernels_round_as_the_reference_does_and_move_16_bytes_at_a_time(
    kernels: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = (encode_launch(kernels, dtype), step_launch(kernels, dtype))
    encoding, stepping = (launch.compiled(90).asm["ptx"] for launch in launches)
    for ptx in (encoding, stepping):
        assert not re.search(r"\bfma\.|\.ftz|\.approx|\.full\.f32", ptx)
        assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert "div.rn.f32" in encoding
    assert ("cvt.rn.bf16x2.f32" in stepping) == (dtype == torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
def test_ten_million_values_on_a_gpu_are_those_of_the_reference(kernels: Passes) -> None:
    n = 10_000_128
    outer = noise(n)
    inner = outer + 1e-3 * noise(n, seed=1)
    data, has_bad = encode(kernels, outer.cuda(), inner.cuda())
    assert torch.equal(data, reference.encode_int8(outer - inner, BLOCK)) and not has_bad
    found = step(kernels, data, 0, n, NESTEROV, torch.bfloat16, "cuda")
    expected = step(fused, data, 0, n, NESTEROV, torch.bfloat16, "cpu")
    assert is_same(found.params, expected.params) and is_same(found.momentum, expected.momentum)
    assert is_same(found.inner, expected.inner)

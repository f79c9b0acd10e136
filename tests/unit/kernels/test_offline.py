"""What the Triton kernels take of a GPU that is not there: hardly a stack, and at most half of a multiprocessor.

Compiled in a process of its own, as another test may have told Triton to interpret kernels.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.kernels.test_gpu import needs_triton

import zeroband.kernels

SHARED_KB = {80: 164, 89: 100, 90: 228, 100: 228}
"""Shared memory of a multiprocessor by compute capability, in 1024 bytes; CUDA keeps one of them for each program.
Source: CUDA C++ Programming Guide, technical specifications per compute capability; so are the registers."""

REGISTERS = 1 << 16

MOST_STACK_BYTES = 16
"""For each thread. Triton 3.6 uses none; 3.7 spills four registers of two forms of `choose_kernel`, for 10.0 alone."""


@pytest.mark.soak
@needs_triton
@pytest.mark.slow
def test_no_kernel_spills_more_than_a_few_bytes_and_two_programs_fit_on_a_multiprocessor(tmp_path: Path) -> None:
    rows, kernels = compiled_for(tmp_path, *map(str, SHARED_KB)), all_kernels()
    assert {(row["kernel"], row["capability"]) for row in rows} == {(k, c) for k in kernels for c in SHARED_KB}
    for row in rows:
        assert row["stack"] <= MOST_STACK_BYTES, row
        assert 2 * row["registers"] * row["threads"] <= REGISTERS, row
        assert 2 * (row["shared"] + 1024) <= SHARED_KB[row["capability"]] << 10, row


@needs_triton
@pytest.mark.slow
def test_every_kernel_is_compiled_for_gpus_of_amd_with_options_that_their_compiler_knows(tmp_path: Path) -> None:
    rows = compiled_for(tmp_path, "gfx942")
    assert {row["kernel"] for row in rows} == all_kernels()
    assert all("hsaco" in row["made"] for row in rows)


def compiled_for(cache: Path, *architectures: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.offline", *architectures],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return [json.loads(line) for line in ran.stdout.splitlines()]


def all_kernels() -> set[str]:
    sources = "".join(path.read_text() for path in Path(*zeroband.kernels.__path__).glob("*.py"))
    return set(re.findall(r"@triton\.jit.*\ndef (\w+_kernel)", sources))


ROTATED = """
@triton.jit
def rotated_kernel(x):
    first, second = none, none
    for _ in tl.range(2):
        first, second = second, x
"""


def handed_on(source: str) -> list[str]:
    """Loops of kernels in which one carried value becomes another one.

    Of such values that begin alike, Triton 3.6 and 3.7 take all but the last for the constant that they begin with.
    """
    found: list[str] = []
    kernels = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    loops = [(k, loop) for k in kernels for loop in ast.walk(k) if isinstance(loop, ast.For | ast.While)]
    for kernel, loop in loops:
        assigned = [node for node in ast.walk(loop) if isinstance(node, ast.Assign)]
        pairs = [
            (target, value)
            for node in assigned
            for targets in [node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets]
            for target, value in zip(targets, getattr(node.value, "elts", [node.value]), strict=False)
            if isinstance(target, ast.Name)
        ]
        carried = {target.id for target, _ in pairs}
        found += [
            f"{kernel.name}: {target.id} = {value.id}"
            for target, value in pairs
            if isinstance(value, ast.Name) and value.id in carried - {target.id}
        ]
    return found


def test_no_loop_of_a_kernel_hands_a_carried_value_on_to_another_one() -> None:
    assert handed_on(ROTATED) == ["rotated_kernel: first = second"]
    sources = [path.read_text() for path in Path(*zeroband.kernels.__path__).glob("*.py")]
    assert not [problem for source in sources if "@triton.jit" in source for problem in handed_on(source)]

"""What a GPU that is not there would be given: the package's launches are recorded and compiled for it.

Triton brings the compilers. As a program it prints what each kernel takes of a multiprocessor, one JSON object a line:
`python -m tests.unit.kernels.offline CAPABILITY ...` (80, 89 ...). With the name of an AMD architecture (gfx942) in
their place it prints what that compiler makes of each. `TRITON_INTERPRET` must not be set.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from zeroband.kernels.fused import BLOCK, OuterStep

CHUNKS = [(64, 64, 4), (52, 16, 4), (1, 64, 4), (13, 16, 4)]
"""Rows, columns, k. Choosing has one form for each pair of 16 and 32 into which half a side fits, and no other."""


@dataclass(frozen=True)
class Launch:
    """A kernel with what it was launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def compiled(self, architecture: int | str) -> Any:
        """What Triton compiles of this launch for a GPU of this compute capability (90: 9.0), or of AMD's architecture.

        Triton's own launcher binds the arguments, so that what it cannot bind on a GPU fails here, too. Raises KeyError
        for an option that the compiler does not know, as a launch does.
        """
        jit, compiler = importlib.import_module("triton.runtime.jit"), importlib.import_module("triton.compiler")
        maker, width = ("hip", 64) if isinstance(architecture, str) else ("cuda", 32)
        target = importlib.import_module("triton.backends.compiler").GPUTarget(maker, architecture, width)
        backend = compiler.make_backend(target)
        bind = jit.create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, kinds, _ = bind(*self.arguments, **self.named)
        options, names = vars(backend.parse_options(self.named)), [p.name for p in self.kernel.params]
        if unknown := self.named.keys() - options.keys() - set(names):
            raise KeyError(f"{self.kernel.fn.__name__}: {unknown}")
        known = [kind == "constexpr" for kind, _ in kinds]
        constants = {(i,): value for i, value in enumerate(bound.values()) if known[i]}
        marks = {(i,): mark for i, (_, mark) in enumerate(kinds) if not known[i] and isinstance(mark, str)}
        attributes = {place: backend.parse_attr(mark) for place, mark in marks.items()}
        signature = {name: kind for name, (kind, _) in zip(names, kinds, strict=True)}
        source = compiler.ASTSource(self.kernel, signature, constants, attributes)
        return compiler.compile(source, target=target, options=options)


def launches(module: Any, call: Callable[[], object]) -> list[Launch]:
    """The launches of a module's kernels in a call, none of which happens. Tensors may be meta tensors."""
    noted: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return self._note

        def _note(self, *arguments: Any, **named: Any) -> None:
            noted.append(Launch(self._kernel, arguments, named))

    kernels = {name: Recorder(found) for name, found in vars(module).items() if name.endswith("_kernel")}
    with mock.patch.dict(vars(module), kernels):
        call()
    return noted


def encode_launch(module: Any, dtype: torch.dtype, *, blocks: int = 16) -> Launch:
    """How `encode_difference` launches its kernel."""
    outer, inner = _empty(blocks * BLOCK), _empty(blocks * BLOCK, dtype=dtype)
    scales, codes, has_bad = _empty(blocks), _empty(blocks * BLOCK, dtype=torch.int8), _empty(1, dtype=torch.int32)
    return launches(module, lambda: module.encode_difference(outer, inner, scales, codes, has_bad))[0]


def step_launch(module: Any, dtype: torch.dtype, *, start: int = 0, is_nesterov: bool = True) -> Launch:
    """How `take_step` launches its kernel for 16 blocks from this value on."""
    n, rule = 16 * BLOCK - start, OuterStep(0.7, 0.9, is_nesterov=is_nesterov)
    whole = (_empty(n + start, dtype=kind) for kind in (torch.int8, torch.float32, torch.float32, dtype))
    codes, params, momentum, inner = (values[start:] for values in whole)
    return launches(module, lambda: module.take_step(_empty(16), codes, start, params, momentum, inner, rule))[0]


def dct_launches(module: Any, rows: int, columns: int, k: int) -> list[Launch]:
    """How `choose` and `restore` launch theirs."""

    def both() -> None:
        module.restore(*module.choose(_empty(2, rows, columns), k), rows, columns)

    return launches(module, both)


def all_launches(chunks: Sequence[tuple[int, int, int]] = CHUNKS) -> Iterator[tuple[str, Launch]]:
    """Every kernel of the package in each of its forms, and what tells the form."""
    gpu, dct = (importlib.import_module(f"zeroband.kernels.{name}") for name in ("gpu", "dct_gpu"))
    for dtype in (torch.float32, torch.bfloat16):
        yield f"{dtype}", encode_launch(gpu, dtype)
        yield f"{dtype}, Nesterov", step_launch(gpu, dtype)
    yield "from value 3 on", step_launch(gpu, torch.bfloat16, start=3, is_nesterov=False)
    for rows, columns, k in chunks:
        for launch in dct_launches(dct, rows, columns, k):
            yield f"{k} of {rows} x {columns}", launch


def usage(compiled: Any) -> dict[str, int]:
    """What a program of a compiled kernel takes: bytes of stack for each thread, registers, threads, shared bytes."""
    tool = importlib.import_module("triton.knobs").nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", told)}
    return {
        "stack": counts["STACK"] + counts["LOCAL"],
        "registers": counts["REG"],
        "threads": 32 * compiled.metadata.num_warps,
        "shared": counts["SHARED"] + compiled.metadata.shared,
    }


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def main(architectures: list[str]) -> None:
    if not architectures[0].isdecimal():
        torch.version.hip = "of the tests"  # before the kernels are imported
        for form, launch in all_launches(chunks=CHUNKS[-1:]):
            made = launch.compiled(architectures[0])
            print(json.dumps({"kernel": launch.kernel.fn.__name__, "form": form, "made": list(made.asm)}), flush=True)
        return
    for form, launch in all_launches():
        for capability in map(int, architectures):
            taken = usage(launch.compiled(capability))
            name = launch.kernel.fn.__name__
            print(json.dumps({"kernel": name, "form": form, "capability": capability, **taken}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

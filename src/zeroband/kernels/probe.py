"""Which implementation serves on a device, where there is one in Triton and one in plain torch."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType

import torch

from zeroband.kernels.compiler import compiler_problem

_LEAST_CAPABILITY = (7, 0)


def module_for(device: torch.device, *, triton: str, plain: str) -> ModuleType:
    """Triton's module on a GPU for which it can compile, else the plain one."""
    serves = device.type == "cuda" and triton != plain and not triton_problem(device)
    return importlib.import_module(triton if serves else plain)


def triton_problem(device: torch.device, environ: Mapping[str, str] | None = None) -> str:
    """Why Triton, and torch.compile with it, compile nothing for this GPU; empty where they do."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 7.0"
    return compiler_problem(os.environ if environ is None else environ, for_gpu=True)

"""Selects between Triton and plain torch implementations for a device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType

import torch

from zeroband.kernels.compiler import compiler_problem

_MIN_CAPABILITY = (7, 0)


def module_for(device: torch.device, *, triton: str, plain: str) -> ModuleType:
    """Return the Triton module if it can compile for the device, else the plain one."""
    is_usable = device.type == "cuda" and triton != plain and not triton_problem(device)
    return importlib.import_module(triton if is_usable else plain)


def triton_problem(device: torch.device, environ: Mapping[str, str] | None = None) -> str:
    """Return why Triton and torch.compile cannot compile for this GPU; empty if they can."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 7.0"
    return compiler_problem(os.environ if environ is None else environ, for_gpu=True)

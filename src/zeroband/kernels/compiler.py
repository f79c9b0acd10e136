"""Checks for the compiler and Python headers that torch.compile and Triton need. Does not load torch."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_C, _CPP = ("CC", ("gcc", "clang")), ("CXX", ("g++",))


def compiler_problem(environ: Mapping[str, str], *, for_gpu: bool) -> str:
    """Return what is missing to compile C (for GPUs) or C++ (for CPUs); empty if nothing."""
    variable, defaults = _C if for_gpu else _CPP
    candidates = (environ[variable],) if environ.get(variable) else defaults
    if not any(shutil.which(name, path=environ.get("PATH", "")) for name in candidates):
        return f"{' or '.join(candidates)} is not on the PATH"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else f"{headers} is missing"

"""What torch.compile and Triton run while training: a compiler, with Python's headers. Loads no torch."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

_C, _CPP = ("CC", ("gcc", "clang")), ("CXX", ("g++",))


def compiler_problem(environ: Mapping[str, str], *, for_gpu: bool) -> str:
    """What is missing for compiling here, for C on GPUs and for C++ on CPUs; empty where nothing is."""
    named, usual = _C if for_gpu else _CPP
    candidates = (environ[named],) if environ.get(named) else usual
    if not any(shutil.which(name, path=environ.get("PATH", "")) for name in candidates):
        return f"{' or '.join(candidates)} is not on the PATH"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else f"{headers} is missing"

"""Which implementation serves on a device, where there is one in Triton and one in plain torch."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

_log = logging.getLogger(__name__)


def module_for(device: torch.device, *, triton: str, plain: str, what: str) -> ModuleType:
    """Triton's module on a GPU; the plain one on all else, and, said for `what` it does, where Triton is missing."""
    if device.type == "cuda":
        try:
            return importlib.import_module(triton)
        except ImportError as error:
            _log.warning("%s on the GPU runs in plain torch: %s; install triton", what, error)
    return importlib.import_module(plain)

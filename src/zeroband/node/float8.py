"""Matrix products in float8: replaces the linear layers of a model's blocks by torchao's."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeroband.config.training import Float8Recipe

_LEAST_CAPABILITY = (8, 9)


def float8_problem(device: torch.device) -> str:
    """Return why a device cannot multiply in float8; empty if it can."""
    if device.type != "cuda":
        return "there is no GPU"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.9"
    return ""


def use_float8(blocks: Iterable[nn.Module], recipe: Float8Recipe) -> None:
    """Make the blocks' linear layers multiply in float8, in all three products of a step, in place.

    Parameters keep their names, types and values, also on the meta device. Call before `torch.compile` and FSDP2.
    """
    torchao: Any = importlib.import_module("torchao.float8")  # has no types
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    for block in blocks:
        torchao.convert_to_float8_training(block, config=config)

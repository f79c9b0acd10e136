"""Forward passes without a backward pass."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from zeroband.node.sharding import is_fsdp


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Run forward passes for their values only: no graph, evaluation mode, sharded parameters freed at the end.

    FSDP2 frees gathered parameters in the backward pass. Without one the root would keep them, and the next forward
    pass would use them even after somebody wrote new values into the shards.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for module in model.modules():
            if is_fsdp(module):
                module.reshard()

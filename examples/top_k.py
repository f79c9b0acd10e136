"""An outer algorithm with its own compression, in one file: of what a node learned it sends the largest values alone.

    ./scripts/simulate_multi_node.sh 2 1 src/zeroband/train.py @configs/debug/custom.toml \
        --outer.algorithm examples/top_k.py --outer.settings '["part=0.05"]'

What is too small for a round stays on the node, adds up and goes with a later one (top-k with error feedback,
arXiv:1809.07599); a payload that a round did not count goes back there, too. Written here are how values become bytes,
the knobs and the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from zeroband.config.section import Section
from zeroband.outer.algorithm import PARAMS, Algorithm


class Largest:
    """A payload: the places of the largest values, ascending int32, and then these, float32. `part`: of all values."""

    def __init__(self, part: float) -> None:
        self._part = part

    def nbytes(self, numel: int) -> int:
        return 8 * math.ceil(self._part * numel)

    def encode(self, values: Tensor, out: Tensor) -> None:
        places = values.abs().topk(len(out) // 8).indices.sort().values
        out.copy_(torch.cat([places.int().view(torch.uint8), values[places].view(torch.uint8)]))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        places, values = payload.clone().split(len(payload) // 2)
        index = places.view(torch.int32).long()
        if (index.diff() <= 0).any():
            raise ValueError("places that do not ascend")
        out.scatter_(0, index, values.view(torch.float32))


class TopK(Algorithm):
    """outer <- outer - lr d, with d the mean of what the nodes' payloads say."""

    class Settings(Section):
        """Knobs, as KEY=VALUE in outer.settings."""

        lr: PositiveFloat = 1.0
        part: float = Field(default=0.01, gt=0, le=1)
        """Part of the values that is sent: 8 bytes each."""

    def compression(self) -> Largest:
        return Largest(self.settings.part)

    def step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        """Each operation rounds once, so all nodes get the same bits."""
        outer[PARAMS].sub_(result.mul(self.settings.lr))


ALGORITHM = TopK

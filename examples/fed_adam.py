"""An outer algorithm in one file: Adam on the mean pseudo-gradient (FedAdam, arXiv:2003.00295).

    ./scripts/simulate_multi_node.sh 2 1 src/zeroband/train.py @configs/debug/custom.toml

Membership, retries, votes, checkpoints, joiners and guards are those of every algorithm. Written here are its knobs,
its outer state and its step.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, PositiveFloat
from torch import Tensor

from zeroband.config.section import Section
from zeroband.outer.algorithm import PARAMS, Algorithm

MEAN, SQUARES = "mean", "squares"


class FedAdam(Algorithm):
    """Adam on the mean pseudo-gradient d.

    m <- b1 m + (1 - b1) d;  v <- b2 v + (1 - b2) d d, both from 0;  outer <- outer - lr m / (sqrt(v) + tau).
    """

    sections = (PARAMS, MEAN, SQUARES)

    class Settings(Section):
        """Knobs, as KEY=VALUE in outer.settings."""

        lr: PositiveFloat = 3e-3
        """Outer learning rate: about what a parameter moves in a round."""
        beta1: float = Field(default=0.9, ge=0, lt=1)
        beta2: float = Field(default=0.99, ge=0, lt=1)
        tau: PositiveFloat = 1e-3
        """How adaptive: pseudo-gradients far below it move a parameter in proportion."""

    def step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        """Each line rounds once, so all nodes get the same bits."""
        knobs, mean, squares = self.settings, outer[MEAN], outer[SQUARES]
        mean.mul_(knobs.beta1).add_(result.mul(1 - knobs.beta1))
        squares.mul_(knobs.beta2).add_(result.square().mul_(1 - knobs.beta2))
        outer[PARAMS].sub_(mean.div(squares.sqrt().add_(knobs.tau)).mul_(knobs.lr))


ALGORITHM = FedAdam

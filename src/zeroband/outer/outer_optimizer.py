"""Outer optimizers: a node's contribution to a round, and the outer step by the contributions' mean.

All arithmetic is float32 with one rounding for each operation, never fused: nodes with other processors, thread counts
or slices must get the same bits.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from zeroband.config.outer import DilocoConfig, OuterSGDConfig
from zeroband.kernels.codec import Codec
from zeroband.kernels.fused import OuterStep
from zeroband.kernels.host_passes import take_step, write_difference


class OuterOptimizer(Protocol):
    """Shapes: all (n,) float32 on CPU, slices of the flat state at the same place."""

    sends_parameters: bool
    """True: contributions are parameters, shifted with the outer ones until they count. False: differences."""

    def contribution(self, outer: Tensor, inner: Tensor, out: Tensor) -> float | None:
        """Write this node's contribution, from the outer parameters and its inner parameters.

        Returns its largest absolute value, if writing it shows that.
        """
        ...

    def apply(self, outer: Tensor, momentum: Tensor, mean: Tensor, *, outer_step: int) -> None:
        """Take an outer step, in place. `outer_step` counts from 1."""
        ...


class OuterSGD:
    """SGD with momentum on the pseudo-gradient, outer minus inner parameters.

    v <- mu v + delta; outer <- outer - lr (delta + mu v) with Nesterov, else outer <- outer - lr v.
    Source: DiLoCo, arXiv:2311.08105, algorithm 1; torch.optim.SGD with dampening 0.
    """

    sends_parameters = False

    def __init__(self, config: OuterSGDConfig) -> None:
        self._config = config

    def contribution(self, outer: Tensor, inner: Tensor, out: Tensor) -> float:
        return write_difference(outer, inner, out)

    def momentum_at(self, outer_step: int) -> float:
        """Momentum of an outer step: grows linearly over the warm-up, so that step 1 has the least."""
        warmup = self._config.momentum_warmup_rounds
        return self._config.momentum * min(1.0, outer_step / (warmup + 1))

    def step_at(self, outer_step: int) -> OuterStep:
        """The step of `apply`."""
        return OuterStep(self._config.lr, self.momentum_at(outer_step), self._config.nesterov)

    def apply(self, outer: Tensor, momentum: Tensor, mean: Tensor, *, outer_step: int) -> None:
        take_step(outer, momentum, mean, self.step_at(outer_step))


class PlainAverage:
    """Sets the outer parameters to the mean of the nodes' parameters: outer SGD with lr 1 and momentum 0.

    Averaging parameters instead of pseudo-gradients keeps the last bits that outer - (outer - inner) loses, so a single
    node trains exactly as without an outer algorithm. Needs a lossless codec.
    """

    sends_parameters = True

    def contribution(self, outer: Tensor, inner: Tensor, out: Tensor) -> None:
        out.copy_(inner)

    def apply(self, outer: Tensor, momentum: Tensor, mean: Tensor, *, outer_step: int) -> None:
        outer.copy_(mean)


def build_outer_optimizer(config: DilocoConfig, codec: Codec) -> OuterOptimizer:
    """The outer optimizer that a configuration asks for. `codec`: of contributions.

    A lossy codec would round away changes that are small against the parameters, so it gets differences. So do robust
    combinations, which measure contributions, and fragments, whose shares need not add up to 1 when a node joins.
    """
    is_average = config.optimizer.lr == 1 and config.optimizer.momentum == 0
    is_plain_mean = config.fragments == 1 and config.robust is None
    takes_parameters = codec.is_exact and config.merge != "eager" and is_plain_mean
    return PlainAverage() if is_average and takes_parameters else OuterSGD(config.optimizer)

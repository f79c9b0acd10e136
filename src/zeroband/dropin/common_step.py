"""Steps that all nodes make together: a user's optimizer in the place of the trainer's, for DDP and DeMo.

With DDP the optimizer's moments are part of the outer state, so what holds for outer optimizers holds here: it is
element-wise, each operation rounds once, and the nodes compare at join what some steps of it come to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from zeroband.config.outer import DdpConfig, DemoConfig, Outer
from zeroband.dropin.inner import OptimizerFactory, ScheduledOptimizer
from zeroband.dropin.loop_state import LoopState
from zeroband.elastic.rounds.interfaces import OuterParts, open_buffers
from zeroband.errors import ConfigError
from zeroband.model.optim import sign_step
from zeroband.node.sharding import local_part
from zeroband.outer.ddp import Ddp
from zeroband.outer.every_step import PARAMS, EveryStep
from zeroband.outer.torch_optimizer import OneRounding, TorchOuterOptimizer
from zeroband.state.flat import parameter_shards


class SteppedLoopState(LoopState, ABC):
    """The inner optimizer as an algorithm sees it that says by which gradients it steps. `named`: the parameters."""

    def __init__(
        self, inner: ScheduledOptimizer, held: Mapping[str, Any], named: Mapping[str, nn.Parameter], *, ranks: int = 1
    ) -> None:
        super().__init__(inner, held, ranks=ranks)
        self._inner = inner
        self._named = named

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._inner.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._named.values():
            parameter.grad = None

    @abstractmethod
    def step(self) -> None:
        """Step by the gradients that lie in the model, if any do, and move on by one inner step."""
        ...

    @property
    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._named.values())


class CommonOptimizer(SteppedLoopState):
    """An optimizer that is the same on all nodes, DDP's. Its moments can be read and written before its first step."""

    def __init__(
        self,
        inner: ScheduledOptimizer,
        held: Mapping[str, Any],
        named: Mapping[str, nn.Parameter],
        proven: TorchOuterOptimizer,
        *,
        ranks: int = 1,
    ) -> None:
        super().__init__(inner, held, named, ranks=ranks)
        self._proven = proven
        self.update_count = 0
        """Steps that the moments have seen."""
        self._moments = {
            moment: {name: torch.zeros_like(parameter) for name, parameter in named.items()}
            for moment in proven.state_names
        }
        for group in inner.optimizer.param_groups:
            group.update({way: False for way in proven.ways if way in group})

    @property
    def common_moments(self) -> dict[str, dict[str, Tensor]]:
        """This rank's shards by moment and parameter; writing into them sets them."""
        return {moment: {n: local_part(t) for n, t in held.items()} for moment, held in self._moments.items()}

    def step(self) -> None:
        """Step by the gradients that lie in the model, if any do, and move on by one inner step."""
        optimizer = self._inner.optimizer
        if self._has_gradients:
            with OneRounding():
                optimizer.step()
            self.update_count += 1
            for moment, held in self._moments.items():
                for name, parameter in self._named.items():
                    after = optimizer.state[parameter].get(moment)
                    if after is not None and after is not held[name]:
                        held[name].copy_(after)
                        optimizer.state[parameter][moment] = held[name]
        self._inner.advance()

    def seek(self, step: int, *, update_count: int | None = None) -> None:
        """Go on at this inner step; with moments that have seen so many updates, where that is said."""
        super().seek(step)
        if update_count is None or update_count == self.update_count:
            return
        self.update_count, state = update_count, self._inner.optimizer.state
        state.clear()
        for name, parameter in self._named.items() if update_count else ():
            moments = {moment: held[name] for moment, held in self._moments.items()}
            state[parameter] = {**self._proven.numbers_after(update_count), **moments}

    def forget_moments(self) -> None:
        """Do nothing: they are the run's."""

    def _optimizer_state(self) -> dict[int, dict[str, Any]]:
        return {}

    def _load_optimizer(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Do nothing: the outer state has it."""


class SignSteps(SteppedLoopState):
    """DeMo's step: theta <- theta (1 - lr weight_decay) - lr sign(gradient), with the options of a plain SGD."""

    update_count = 0

    def step(self) -> None:
        """Step by the signs of the gradients that lie in the model, if any do, and move on by one inner step."""
        for group in self._inner.optimizer.param_groups if self._has_gradients else ():
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is None:  # frozen
                    continue
                theta = local_part(parameter.data).view(-1)
                theta.mul_(1.0 - lr * decay)
                sign_step(theta, local_part(parameter.grad).reshape(-1), lr=lr)
        self._inner.advance()

    def seek(self, step: int, *, update_count: int | None = None) -> None:
        super().seek(step)


class LoopDdp(Ddp):
    """DDP over a user's optimizer. Outer state: the parameters and its moments, `inner_NAME` each."""

    def __init__(self, parts: OuterParts, optimizer: CommonOptimizer) -> None:
        self._clip_norm = None
        self._optimizer = optimizer
        self.sections = (PARAMS, *(f"inner_{moment}" for moment in optimizer.common_moments))
        open_buffers(parts.buffers, self.sections)
        EveryStep.__init__(self, parts)

    def _held(self) -> Mapping[str, Mapping[str, Tensor]]:
        moments = {f"inner_{moment}": shards for moment, shards in self._optimizer.common_moments.items()}
        return {PARAMS: parameter_shards(self._parts.model), **moments}


def loop_state_of(
    outer: Outer | None,
    inner: ScheduledOptimizer,
    factory: OptimizerFactory | None,
    held: Mapping[str, Any],
    named: Mapping[str, nn.Parameter],
    *,
    ranks: int,
) -> tuple[LoopState, dict[str, str]]:
    """The inner optimizer as the algorithm needs it, and what all nodes must agree on of it. Raises ConfigError.

    `factory`: what made it; None: it was given as it is.
    """
    match outer:
        case DdpConfig():
            if factory is None:
                raise ConfigError(
                    "inner_optimizer is an instance, and with outer.type='ddp' its moments are the run's: give the "
                    "class, or functools.partial"
                )
            proven = TorchOuterOptimizer(factory, what="inner_optimizer")
            said = {"inner_optimizer": str(proven), "inner_optimizer (its bits on this machine)": proven.digest}
            return CommonOptimizer(inner, held, named, proven, ranks=ranks), said
        case DemoConfig():
            options = _sign_options(inner)
            return SignSteps(inner, held, named, ranks=ranks), {"inner_optimizer": f"SGD({options})"}
        case _:
            return LoopState(inner, held, ranks=ranks), {}


def _sign_options(inner: ScheduledOptimizer) -> str:
    """Learning rates and decays. Raises ConfigError where they are not those of a plain SGD."""
    groups = inner.optimizer.param_groups
    is_plain = isinstance(inner.optimizer, SGD) and not any(
        group["momentum"] or group["nesterov"] or group["maximize"] for group in groups
    )
    if not is_plain:
        raise ConfigError(
            f"inner_optimizer is {type(inner.optimizer).__name__}, and outer.type='demo' is an optimizer itself, which "
            "takes learning rate and weight decay from it: give functools.partial(torch.optim.SGD, "
            "lr=..., weight_decay=...) without momentum"
        )
    return ", ".join(f"lr={group['lr']:g} weight_decay={group['weight_decay']:g}" for group in groups)

"""A user's inner optimizer for a run: its state in checkpoints, and the steps that all nodes make together.

DDP and DeMo use it instead of the trainer's optimizer. With DDP its moments are part of the outer state, so the rules
of outer optimizers apply: it must be element-wise, each operation rounds once, and the nodes compare the results of
some test steps at join. One rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from zeroband.checkpoint.state_dict_file import pack, unpack
from zeroband.config.outer import DdpConfig, DemoConfig, Outer
from zeroband.dropin.inner import OptimizerFactory, ScheduledOptimizer
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.errors import ConfigError
from zeroband.kernels.one_rounding import OneRounding
from zeroband.model.optim import sign_step
from zeroband.node.sharding import is_sharded, local_part
from zeroband.observe.log import get_logger
from zeroband.outer.ddp import Ddp
from zeroband.outer.torch_optimizer import TorchOuterOptimizer

_log = get_logger(__name__)


class LoopState:
    """The user's inner optimizer, with the other objects of this node's part of a checkpoint.

    `held`: the user's objects by name. `named`: the parameters. `ranks`: of this node. Raises ConfigError if an object
    has no `state_dict`.
    """

    moment_names = ()

    def __init__(
        self, inner: ScheduledOptimizer, held: Mapping[str, Any], named: Mapping[str, nn.Parameter], *, ranks: int
    ) -> None:
        for name, one in held.items():
            if not all(hasattr(one, name) for name in ("state_dict", "load_state_dict")):
                raise ConfigError(
                    f"state[{name!r}] is a {type(one).__name__} without state_dict and load_state_dict; give it both, "
                    "or leave it out"
                )
        self._inner = inner
        self._held = held
        self._named = named
        self._ranks = ranks

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self._inner.optimizer.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self._named.values():
            parameter.grad = None

    @property
    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._named.values())

    def seek(self, step: int) -> None:
        self._inner.seek(step)

    def forget_moments(self) -> None:
        self._inner.forget_moments()

    def moments(self) -> Mapping[str, Any]:
        return {}

    def named_moments(self) -> Mapping[str, Tensor]:
        return {}

    def counters(self) -> Mapping[str, Any]:
        return {"step_count": self._inner.step_count, "local_world_size": self._ranks}

    def pack(self) -> bytes:
        """Pack the state. Raises ConfigError with the name of an unsupported value."""
        held = {name: one.state_dict() for name, one in self._held.items()}
        return pack({"optimizer": self._optimizer_state(), "names": self._names(), "state": held}, "checkpoint")

    def restore(self, counters: Mapping[str, Any], packed: bytes | None) -> bool:
        """Load what was packed; returns False if the node had other ranks or parameters."""
        saved = None if packed is None else unpack(packed)
        if saved is None or counters["local_world_size"] != self._ranks or saved["names"] != self._names():
            _log.warning("fresh moments and loop state: the saved ones are of other ranks")
            return False
        self._load_optimizer(saved["optimizer"])
        theirs: Mapping[str, Any] = saved["state"]
        if missing := sorted(self._held.keys() ^ theirs.keys()):
            _log.warning("saved and given states differ", extra={"fields": {"left_as_they_were": missing}})
        for name in self._held.keys() & theirs.keys():
            self._held[name].load_state_dict(theirs[name])
        return True

    # -- the optimizer's state, of which a rank has shards --------------------------------------------------------

    def _names(self) -> list[Any]:
        groups = self._inner.optimizer.param_groups
        return [list(group.get("param_names") or range(len(group["params"]))) for group in groups]

    def _optimizer_state(self) -> dict[int, dict[str, Any]]:
        """Return this rank's part of each parameter's state, by index."""
        state: dict[int, dict[str, Any]] = self._inner.state_dict()["state"]
        return {
            place: {name: local_part(value) if isinstance(value, Tensor) else value for name, value in one.items()}
            for place, one in state.items()
        }

    def _load_optimizer(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        parameters = [parameter for group in self._inner.optimizer.param_groups for parameter in group["params"]]
        self._inner.load_moments(
            {
                place: {name: _like(value, parameters[place]) for name, value in one.items()}
                for place, one in state.items()
            }
        )


def _like(value: Any, parameter: Tensor) -> Any:
    """Return a rank's shard as a DTensor with the parameter's sharding."""
    if not (isinstance(value, Tensor) and is_sharded(parameter)) or value.shape != local_part(parameter).shape:
        return value
    whole = parameter
    shard = value.to(device=whole.device, dtype=torch.float32 if value.is_floating_point() else value.dtype)
    return DTensor.from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


# -- steps of all nodes together -------------------------------------------------------------------------------------


class CommonOptimizer(LoopState):
    """An optimizer that is the same on all nodes, DDP's. Its moments can be read and written before its first step."""

    def __init__(
        self,
        inner: ScheduledOptimizer,
        held: Mapping[str, Any],
        named: Mapping[str, nn.Parameter],
        proven: TorchOuterOptimizer,
        *,
        ranks: int,
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
        """This rank's shards by moment and parameter; writing to them sets them."""
        return {moment: {n: local_part(t) for n, t in held.items()} for moment, held in self._moments.items()}

    def step(self) -> None:
        """Step by the model's gradients, if it has any, and advance one inner step."""
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
        """Move to this inner step; `update_count`: number of updates that the moments have seen, if given."""
        super().seek(step)
        if update_count is None or update_count == self.update_count:
            return
        self.update_count, state = update_count, self._inner.optimizer.state
        state.clear()
        for name, parameter in self._named.items() if update_count else ():
            moments = {moment: held[name] for moment, held in self._moments.items()}
            state[parameter] = {**self._proven.numbers_after(update_count), **moments}

    def forget_moments(self) -> None:
        """Do nothing: the moments belong to the run."""

    def _optimizer_state(self) -> dict[int, dict[str, Any]]:
        return {}

    def _load_optimizer(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Do nothing: the outer state has it."""


class SignSteps(LoopState):
    """DeMo's step: theta <- theta (1 - lr weight_decay) - lr sign(gradient), with the options of a plain SGD."""

    update_count = 0

    def step(self) -> None:
        """Step by the signs of the model's gradients, if it has any, and advance one inner step."""
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
        self._optimizer = optimizer
        super().__init__(parts, clip_norm=None)

    def _moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {f"inner_{moment}": shards for moment, shards in self._optimizer.common_moments.items()}


def loop_state_of(
    outer: Outer | None,
    inner: ScheduledOptimizer,
    factory: OptimizerFactory | None,
    held: Mapping[str, Any],
    named: Mapping[str, nn.Parameter],
    *,
    ranks: int,
) -> tuple[LoopState, dict[str, str]]:
    """Return the inner optimizer for an algorithm, and what all nodes must agree on of it. Raises ConfigError.

    `factory`: created it; None: the user passed an instance.
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
            return LoopState(inner, held, named, ranks=ranks), {}


def _sign_options(inner: ScheduledOptimizer) -> str:
    """Return learning rates and decays. Raises ConfigError if they are not those of a plain SGD."""
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

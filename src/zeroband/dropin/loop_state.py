"""What a loop of the user's own saves of itself: the inner optimizer, and objects with a `state_dict`. One rank's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeroband.checkpoint.state_dict_file import pack, unpack
from zeroband.dropin.inner import ScheduledOptimizer
from zeroband.errors import ConfigError
from zeroband.node.sharding import is_sharded, local_part
from zeroband.observe.log import get_logger

_log = get_logger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """A sampler, a loader, a gradient scaler, a moving average: whatever torch.distributed.checkpoint would save."""

    def state_dict(self) -> Any:
        """Give numbers, strings, bytes, arrays and tensors, in dicts and lists."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take it over again."""
        ...


class LoopState:
    """The inner optimizer as a run sees it, with what else goes into this node's part of a checkpoint.

    `held`: the user's objects by name. `ranks`: of this node. Raises ConfigError where one has no `state_dict`.
    """

    moment_names = ()

    def __init__(self, inner: ScheduledOptimizer, held: Mapping[str, Any], *, ranks: int = 1) -> None:
        for name, one in held.items():
            if not isinstance(one, Stateful):
                raise ConfigError(
                    f"state[{name!r}] is a {type(one).__name__} without state_dict and load_state_dict; give it both, "
                    "or leave it out"
                )
        self._inner = inner
        self._held = held
        self._ranks = ranks

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
        """Raises ConfigError naming what a checkpoint cannot hold."""
        held = {name: one.state_dict() for name, one in self._held.items()}
        return pack({"optimizer": self._optimizer_state(), "names": self._names(), "state": held}, "checkpoint")

    def restore(self, counters: Mapping[str, Any], packed: bytes | None) -> bool:
        """Take over what was packed; not where the node had another number of ranks or other parameters."""
        saved = None if packed is None else unpack(packed)
        if saved is None or counters["local_world_size"] != self._ranks or saved["names"] != self._names():
            _log.warning("fresh moments, and the state of the loop as it was made: what was saved is of other ranks")
            return False
        self._load_optimizer(saved["optimizer"])
        theirs: Mapping[str, Any] = saved["state"]
        if missing := sorted(self._held.keys() ^ theirs.keys()):
            _log.warning("saved and given state differ", extra={"fields": {"left_as_they_were": missing}})
        for name in self._held.keys() & theirs.keys():
            self._held[name].load_state_dict(theirs[name])
        return True

    # -- the optimizer's state, of which a rank has shards --------------------------------------------------------

    def _names(self) -> list[Any]:
        groups = self._inner.optimizer.param_groups
        return [list(group.get("param_names") or range(len(group["params"]))) for group in groups]

    def _optimizer_state(self) -> dict[int, dict[str, Any]]:
        """What this rank has of each parameter's state, by its place."""
        state: dict[int, dict[str, Any]] = self._inner.state_dict()["state"]
        return {place: {name: _local(value) for name, value in one.items()} for place, one in state.items()}

    def _load_optimizer(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        self._inner.load_moments(self._sharded(state))

    def _sharded(self, state: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        return {
            place: {name: _like(value, parameter) for name, value in state[place].items()}
            for place, parameter in enumerate(self._parameters())
            if place in state
        }

    def _parameters(self) -> Iterator[Tensor]:
        for group in self._inner.optimizer.param_groups:
            yield from group["params"]


def _local(value: Any) -> Any:
    return local_part(value) if isinstance(value, Tensor) else value


def _like(value: Any, parameter: Tensor) -> Any:
    """A rank's shard as one of a tensor that is cut as the parameter is."""
    if not (isinstance(value, Tensor) and is_sharded(parameter)) or value.shape != local_part(parameter).shape:
        return value
    whole = parameter
    shard = value.to(device=whole.device, dtype=torch.float32 if value.is_floating_point() else value.dtype)
    return DTensor.from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )

"""DiLoCo: many inner steps on each node, then SGD with momentum on the mean of their changes.

Source: arXiv:2311.08105; OpenDiLoCo, arXiv:2407.07852. Streaming, delayed and eager DiLoCo are schedules of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zeroband.config.outer import DilocoConfig
from zeroband.elastic.rounds.exchange import Exchange
from zeroband.elastic.rounds.interfaces import OuterParts, open_buffers
from zeroband.node.mesh import barrier
from zeroband.outer.algorithm import PARAMS, Algorithm
from zeroband.outer.device_state import DeviceExchange, DeviceState
from zeroband.outer.merge import Merge
from zeroband.outer.outer_optimizer import OuterSGD, build_outer_optimizer
from zeroband.outer.robust import rule_of
from zeroband.state.flat import parameter_shards

MOMENTUM = "momentum"


class DiLoCo(Algorithm):
    """Outer state: parameters and momentum."""

    sections = (PARAMS, MOMENTUM)

    def __init__(self, parts: OuterParts, config: DilocoConfig) -> None:
        super().__init__(parts, config)
        self.outer_sgd = config.optimizer
        self._optimizer = build_outer_optimizer(config, parts.codec)
        self.sends_parameters = self._optimizer.sends_parameters
        self._device = self._open_device_state() if config.state_device == "cuda" else None

    def _open_device_state(self) -> DeviceState:
        assert isinstance(self._optimizer, OuterSGD), "require_device has seen to that"
        parts = self.parts
        open_buffers(parts.buffers, self.sections)
        parts.shards.store(parameter_shards(parts.model), parts.buffers[PARAMS])
        barrier(parts.mesh.local)  # the ranks have stored their shards
        return DeviceState(
            parts.buffers,
            parts.shards,
            self._optimizer,
            parts.mesh.local.device,
            lambda: parameter_shards(parts.model),
            params=parts.buffers[PARAMS],
            momentum=parts.buffers[MOMENTUM],
        )

    def step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        self._optimizer.apply(outer[PARAMS], outer[MOMENTUM], result, outer_step=outer_step)

    def contribute(self, anchor: Tensor, inner: Tensor, out: Tensor) -> float | None:
        return self._optimizer.contribution(anchor, inner, out)

    def exchange(self) -> Exchange:
        if self._device is None:
            return super().exchange()
        return DeviceExchange(self.parts, self._device, rule_of(self.config.robust))

    def merge(self) -> Merge:
        return self._device or super().merge()

    def close(self) -> None:
        if self._device is not None:
            self._device.close()

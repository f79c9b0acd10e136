"""DiLoCo: many inner steps on each node, then SGD with momentum on the mean of what they changed.

Source: arXiv:2311.08105; OpenDiLoCo, arXiv:2407.07852. Streaming, delayed and eager DiLoCo are schedules of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zeroband.config.outer import DilocoConfig
from zeroband.elastic.rounds.exchange import CONTRIBUTION, MeanExchange
from zeroband.elastic.rounds.interfaces import OuterParts, open_buffers
from zeroband.node.mesh import barrier
from zeroband.outer.device_state import DeviceState
from zeroband.outer.many_steps import PARAMS, ManySteps
from zeroband.outer.outer_optimizer import OuterSGD, build_outer_optimizer
from zeroband.outer.robust import rule_of
from zeroband.state.flat import parameter_shards

MOMENTUM = "momentum"


class DiLoCo(ManySteps):
    """Outer state: parameters and momentum."""

    sections = (PARAMS, MOMENTUM)

    def __init__(self, parts: OuterParts, config: DilocoConfig) -> None:
        self.outer_sgd = config.optimizer
        self._optimizer = build_outer_optimizer(config, parts.codec)
        self._device = self._open_device_state(parts) if config.state_device == "cuda" else None
        encoded = None if self._device is None else self._device.encoded
        exchange = MeanExchange(
            parts.mesh, parts.buffers, parts.feedback, parts.codec, parts.fragments, encoded, rule_of(config.robust)
        )
        super().__init__(parts, config, exchange=exchange, inner_parameters=self._device)

    def _open_device_state(self, parts: OuterParts) -> DeviceState:
        assert isinstance(self._optimizer, OuterSGD), "require_device has seen to that"
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

    def take_step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        self._optimizer.apply(outer[PARAMS], outer[MOMENTUM], result, outer_step=outer_step)

    def _take_step(self, outer: Mapping[str, Tensor], result: Tensor, contribution: Tensor, outer_step: int) -> None:
        self._optimizer.detach(outer[PARAMS], contribution)
        super()._take_step(outer, result, contribution, outer_step)
        self._optimizer.attach(outer[PARAMS], contribution)

    def _measure(self, anchor: Tensor, inner: Tensor, out: Tensor) -> None:
        self._optimizer.contribution(anchor, inner, out)

    def abandon(self) -> None:
        super().abandon()
        if self._device is not None:
            self._device.close()

    def contribute(self, turn: int) -> bool:
        if self._device is None:
            return super().contribute(turn)
        is_finite = self._is_finite_everywhere(self._device.contribute())
        if is_finite and self._local.rank == 0:
            self._device.encode_borders()
            encoded = self._device.encoded.contribution
            self._largest = self._parts.codec.largest(encoded, self._buffers[CONTRIBUTION].numel())
        return is_finite

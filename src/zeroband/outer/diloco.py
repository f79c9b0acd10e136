"""DiLoCo: many inner steps on each node, then one outer step on the mean of what they changed.

Source: arXiv:2311.08105; OpenDiLoCo, arXiv:2407.07852. Inner optimizer states stay on their nodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zeroband.config.schema import DilocoConfig
from zeroband.elastic.epoch import FOUNDING_ROUND
from zeroband.elastic.groups import lane_bounds
from zeroband.elastic.progress import Progress
from zeroband.outer.base import OuterParts, RoundReport, StateCopy, open_buffers
from zeroband.outer.device_state import DeviceState
from zeroband.outer.flat import digest_of, parameter_shards
from zeroband.outer.journal import JournalEntry
from zeroband.outer.optimizer import OuterSGD, build_outer_optimizer
from zeroband.outer.rounds import RoundKeeper
from zeroband.outer.transaction import CONTRIBUTION, RESULT, MeanExchange
from zeroband.parallel import barrier

PARAMS, MOMENTUM = "params", "momentum"


class DiLoCo:
    """Outer state: parameters and momentum, in shared memory. The model holds the inner parameters."""

    sections = (PARAMS, MOMENTUM)

    def __init__(self, parts: OuterParts, config: DilocoConfig) -> None:
        self._parts = parts
        self._buffers = parts.buffers
        self._local = parts.mesh.local
        self._optimizer = build_outer_optimizer(config.optimizer)
        open_buffers(parts.buffers, self.sections)
        parts.shards.store(parameter_shards(parts.model), self._buffers[PARAMS])
        self._device = self._open_device_state() if config.state_device == "cuda" else None
        encoded = None if self._device is None else self._device.encoded
        exchange = MeanExchange(parts.mesh, parts.buffers, parts.feedback.residual, encoded)
        self._keeper = RoundKeeper(parts, self.sections, self.replay, exchange)
        self._keeper.state = self._digest()

    def _open_device_state(self) -> DeviceState:
        assert isinstance(self._optimizer, OuterSGD), "require_device has seen to that"
        barrier(self._local)  # the ranks have stored their shards
        return DeviceState(
            self._buffers,
            self._parts.shards,
            self._optimizer,
            self._local.device,
            params=self._buffers[PARAMS],
            momentum=self._buffers[MOMENTUM],
            contribution=self._buffers[CONTRIBUTION],
        )

    @property
    def round(self) -> int:
        return self._keeper.round

    @property
    def progress(self) -> Progress:
        return self._keeper.progress

    @property
    def payload(self) -> Mapping[str, Any]:
        return self._keeper.payload

    @property
    def state(self) -> str:
        return self._keeper.state

    def found(self, round: int = FOUNDING_ROUND) -> RoundReport:
        return self._keeper.found(round, {})

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Nothing: gradients stay inside the node."""
        return None

    def is_time_over(self, steps: int) -> bool:
        return self._parts.pace.is_over(time.monotonic(), steps)

    def sync_parameters(self, step: int, tokens: int, *, ends_round: bool) -> RoundReport | None:
        self._keeper.count(tokens)
        if not ends_round:
            return None
        is_finite = self._contribute()
        if not is_finite:
            self._parts.inner.forget_moments()
        return self._finish_round(weighted=is_finite)

    def join(self) -> RoundReport:
        return self._finish_round(is_joining=True)

    def _contribute(self) -> bool:
        """Write this node's contribution; False on all local ranks if it is not finite somewhere."""
        shards = parameter_shards(self._parts.model)
        if self._device is not None:
            return self._contribute_encoded(self._device, shards)
        outer = dict(self._parts.shards.parts(self._buffers[PARAMS], shards))
        contribution = self._buffers[CONTRIBUTION]
        for name, out in self._parts.shards.parts(contribution, shards):
            inner = shards[name].to("cpu").reshape(-1)
            self._optimizer.contribution(outer[name], inner, out)
        self._parts.feedback.add_to(contribution, shards)
        return self._keeper.is_contribution_finite(shards)

    def _contribute_encoded(self, device: DeviceState, shards: Mapping[str, Tensor]) -> bool:
        is_finite = self._keeper.is_finite_everywhere(device.contribute(shards))
        if is_finite and self._local.rank == 0:
            device.encode_borders()
        return is_finite

    def _finish_round(self, *, weighted: bool = True, is_joining: bool = False) -> RoundReport:
        barrier(self._local)
        committed = self._keeper.commit(weighted=weighted, is_joining=is_joining)
        started_at_s = time.monotonic()
        with self._keeper.changing_state():
            self._apply(committed.result, committed.verdict.payload, is_encoded=True)
            self._keeper.advance(committed.verdict, self._digest())
        self._parts.inner.seek(self.progress.inner_step)  # nodes that made fewer steps follow the run's schedule
        self._keeper.record(committed)
        self._parts.faults.at("applied", self.round)
        return self._keeper.report(committed, time.monotonic() - started_at_s)

    def _apply(self, mean: Tensor, payload: Mapping[str, Any], *, is_encoded: bool = False) -> None:
        """Take the outer step, each local rank on its part, and restart the inner parameters from it.

        What this node learned and has not contributed stays what it is, relative to the outer parameters.
        `is_encoded`: the mean lies beside its encoding, if this node keeps that.
        """
        params, momentum = self._buffers[PARAMS], self._buffers[MOMENTUM]
        start, stop = lane_bounds(params.numel(), self._local.world_size)[self._local.rank]
        shards, has_stepped = parameter_shards(self._parts.model), False
        if payload["weight"] > 0:
            part = slice(start, stop)
            step = Progress.from_record(payload["progress"]).outer_step
            if is_encoded and self._device is not None:  # the GPU works while the CPU does
                self._device.take_step(shards, outer_step=step)
                has_stepped = True
            self._optimizer.detach(params[part], self._buffers[CONTRIBUTION][part])
            self._optimizer.apply(params[part], momentum[part], mean[part], outer_step=step)
            self._optimizer.attach(params[part], self._buffers[CONTRIBUTION][part])
        barrier(self._local)
        self._restart(shards, has_stepped=has_stepped)

    def _restart(self, shards: Mapping[str, Tensor], *, has_stepped: bool = False) -> None:
        """Start the inner parameters from the outer ones. `has_stepped`: the GPU did so with its copy of them."""
        if self._device is None:
            self._parts.shards.load(shards, self._buffers[PARAMS])
        elif has_stepped:
            self._device.settle(self._keeper.round + 1)
        else:
            self._device.load()
            self._device.restart(shards)

    def _digest(self) -> str:
        barrier(self._local)
        return digest_of(self._buffers[PARAMS], self._buffers[MOMENTUM]) if self._local.rank == 0 else ""

    def adopt(self, round: int, payload: Mapping[str, Any], sections: Mapping[str, Tensor] | None = None) -> str:
        with self._keeper.changing_state(sections):
            self._keeper.settle(round, payload, self._digest())
        self._restart(parameter_shards(self._parts.model))
        self._parts.inner.seek(self.progress.inner_step)
        return self._keeper.state

    def replay(self, entry: JournalEntry) -> str:
        if self._local.rank == 0:
            self._buffers[RESULT].copy_(entry.result)
        with self._keeper.changing_state():
            self._apply(self._buffers[RESULT], entry.payload)
            self._keeper.settle(entry.round, entry.payload, self._digest())
        self._parts.inner.seek(self.progress.inner_step)
        return self._keeper.state

    def copy_state(self) -> StateCopy:
        with self._keeper.state_lock:
            sections = {name: self._buffers[name].clone() for name in self.sections}
            return StateCopy(self._keeper.round, sections, self._keeper.payload, self._keeper.state)

"""What algorithms have in common whose rounds are many inner steps, and for whose rounds training stands still.

The nodes make something together of what each of them learned, by default the mean of their pseudo-gradients, which are
outer minus inner parameters. The outer state takes a step by it, and all nodes train on from the outer parameters.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroband.config.outer import RoundsConfig
from zeroband.config.section import Section
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.coordinator import CoordinatedRounds, Offer, RoundCoordinator
from zeroband.elastic.rounds.interfaces import MissedRound, OuterParts, open_buffers
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.rounds.transaction import CONTRIBUTION, Committed, Exchange
from zeroband.elastic.transport.gloo_plane import lane_bounds
from zeroband.kernels.scan import norm
from zeroband.node.mesh import barrier
from zeroband.state.flat import digest_of, parameter_shards

PARAMS = "params"


class ManySteps(CoordinatedRounds, ABC):
    """Outer state: the parameters, and what else `sections` names, in shared memory. The model holds the inner ones.

    `settings`: the algorithm's own knobs. `exchange`: of a round; None: the mean of the contributions, in `comm.codec`.
    """

    Settings: type[Section] = Section
    """Of an algorithm in a file of its own (`outer/custom.py`)."""
    sections: tuple[str, ...] = (PARAMS,)
    """The first are the parameters; the others begin as zeros."""
    local_sections: tuple[str, ...] = ()

    def __init__(
        self, parts: OuterParts, config: RoundsConfig, settings: Any = None, *, exchange: Exchange | None = None
    ) -> None:
        self.settings = settings
        self._parts = parts
        self._buffers = parts.buffers
        self._local = parts.mesh.local
        self._clips = config.clip_to_median
        self._coordinator = RoundCoordinator(parts, self.sections, self.replay, exchange)
        open_buffers(parts.buffers, self.sections)
        parts.shards.store(parameter_shards(parts.model), self._buffers[PARAMS])
        self._coordinator.state_digest = self._digest()

    # -- what an algorithm says of itself -----------------------------------------------------------------------

    @abstractmethod
    def take_step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        """Take the outer step in place, the `outer_step`-th of the run, from 1.

        `outer`: the same part of each section; `result`: of what the nodes made together. All (n,) float32 on CPU; the
        bits must not depend on where a part begins, nor on the processor: every operation rounds once, none is fused.
        """
        ...

    def _contribute(self) -> bool:
        """Write this node's contribution; False on all local ranks if it is not finite somewhere."""
        deltas = self._write_pseudo_gradient()
        self._parts.feedback.add_to(self._buffers[CONTRIBUTION], deltas)
        return self._coordinator.is_contribution_finite(deltas)

    def _norm(self) -> float:
        """Of the contribution of all local ranks; on local rank 0, where the run asks for it."""
        if not self._clips or self._local.rank != 0:
            return 0.0
        return norm(self._buffers[CONTRIBUTION])

    # -- the round ----------------------------------------------------------------------------------------------

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Nothing: gradients stay inside the node."""
        return None

    def sync_parameters(self, step: int, tokens: int, *, ends_round: bool) -> Sequence[RoundReport]:
        self._coordinator.count(tokens)
        if not ends_round:
            return ()
        is_finite = self._contribute()
        if not is_finite:
            self._parts.inner.forget_moments()
        barrier(self._local)
        return (self._finish_round(self._coordinator.offer(weighted=is_finite, norm=self._norm())),)

    def join(self) -> RoundReport:
        barrier(self._local)
        return self._finish_round(self._coordinator.offer(is_joining=True))

    def _write_pseudo_gradient(self) -> dict[str, Tensor]:
        """Outer minus inner parameters into the contribution buffer; this rank's shards of it, by parameter."""
        shards = parameter_shards(self._parts.model)
        outer = dict(self._parts.shards.parts(self._buffers[PARAMS], shards))
        deltas = dict(self._parts.sent.parts(self._buffers[CONTRIBUTION], shards))
        for name, out in deltas.items():
            torch.sub(outer[name], self._parts.shards.own(name, shards[name]).to("cpu"), out=out)
        return deltas

    def _finish_round(self, offer: Offer) -> RoundReport:
        committed = self._commit(offer)
        started_at_s = time.monotonic()
        with self._coordinator.changing_state():
            self._apply(committed.result, committed.verdict.record)
            self._coordinator.advance(committed.verdict, self._digest())
        self._coordinator.begin_phase()
        self._parts.inner.seek(self.progress.inner_step)  # nodes that made fewer steps follow the run's schedule
        self._coordinator.keep_in_journal(committed)
        self._parts.faults.at("applied", self.round)
        return self._coordinator.report(committed, time.monotonic() - started_at_s)

    def _commit(self, offer: Offer) -> Committed:
        return self._coordinator.commit(offer)

    def _apply(self, result: Tensor, record: Mapping[str, Any]) -> None:
        """Take the outer step, each local rank on its part, and restart the inner parameters from it.

        What a late node has not contributed yet does not depend on the outer parameters.
        """
        if record["weight"] > 0:
            start, stop = lane_bounds(result.numel(), self._local.world_size)[self._local.rank]
            outer = {name: self._buffers[name][start:stop] for name in self.sections}
            step = Progress.from_record(record["progress"]).outer_step
            self.take_step(outer, result[start:stop], outer_step=step)
        barrier(self._local)
        self._parts.shards.load(parameter_shards(self._parts.model), self._buffers[PARAMS])

    def _digest(self) -> str:
        barrier(self._local)
        return digest_of(*(self._buffers[name] for name in self.sections)) if self._local.rank == 0 else ""

    def adopt(self, round: int, record: Mapping[str, Any], sections: Mapping[str, Tensor] | None = None) -> str:
        with self._coordinator.changing_state(sections):
            self._coordinator.record_state(round, record, self._digest())
        self._parts.shards.load(parameter_shards(self._parts.model), self._buffers[PARAMS])
        self._parts.inner.seek(self.progress.inner_step)
        return self._coordinator.state_digest

    def replay(self, missed: MissedRound) -> str:
        with self._coordinator.changing_state():
            self._apply(missed.result, missed.record)
            self._coordinator.record_state(missed.round, missed.record, self._digest())
        self._parts.inner.seek(self.progress.inner_step)
        return self._coordinator.state_digest

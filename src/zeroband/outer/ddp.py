"""DDP: the nodes' gradients are averaged before every inner optimizer step, so all nodes hold one model at every step.

The outer state is the whole training state: parameters and both AdamW moments. The baseline that others are measured
against; for links that carry 8 bytes of each parameter at every step. The state, 12 bytes of each parameter, is written
out after every step, so that a joiner can fetch it at any time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroband.data.ledger import Range
from zeroband.elastic.epoch import FOUNDING_ROUND
from zeroband.elastic.progress import Progress
from zeroband.outer.base import OuterParts, RoundReport, StateCopy, open_buffers
from zeroband.outer.flat import digest_of, gradient_shards, parameter_shards
from zeroband.outer.journal import JournalEntry
from zeroband.outer.rounds import RoundKeeper
from zeroband.outer.transaction import CONTRIBUTION, Committed
from zeroband.parallel import barrier

PARAMS, FIRST_MOMENT, SECOND_MOMENT = "params", "exp_avg", "exp_avg_sq"


class Ddp:
    """One round is one inner step."""

    sections = (PARAMS, FIRST_MOMENT, SECOND_MOMENT)

    def __init__(self, parts: OuterParts, *, clip_norm: float | None) -> None:
        self._parts = parts
        self._buffers = parts.buffers
        self._local = parts.mesh.local
        self._clip_norm = clip_norm
        self._keeper = RoundKeeper(parts, self.sections, self.replay)
        self._committed: Committed | None = None
        open_buffers(parts.buffers, self.sections)
        self._keeper.state = self._store_state()

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

    @property
    def inner_step(self) -> int:
        return self._keeper.inner_step

    def upcoming(self) -> Sequence[Range]:
        return self._keeper.upcoming()

    def flush(self) -> Sequence[RoundReport]:
        """Nothing is on its way between two steps."""
        return ()

    def abandon(self) -> None:
        """Nothing is on its way between two steps."""

    def found(self, round: int = FOUNDING_ROUND) -> RoundReport:
        return self._keeper.found(round, {"grad_norm": 0.0, "updates_before": self._parts.inner.update_count})

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        self._keeper.count(tokens)
        contribution, gradients = self._buffers[CONTRIBUTION], gradient_shards(self._parts.model)
        self._parts.shards.store(gradients, contribution)
        self._parts.feedback.add_to(contribution, gradients)
        is_finite = self._keeper.is_contribution_finite(gradients)
        self._committed = self._keeper.commit(self._keeper.offer(weighted=is_finite), self._describe)
        return self._set_gradients(self._committed.result, self._committed.verdict.payload)

    def _set_gradients(self, mean: Tensor, payload: Mapping[str, Any]) -> float:
        """Put the mean gradient into the model, clipped by the norm that the verdict fixed for all nodes.

        Where nobody had weight there is no gradient at all, and the optimizer leaves parameters and moments alone.
        """
        norm = float(payload["grad_norm"])
        if payload["weight"] == 0:
            self._parts.inner.zero_grad()
            return norm
        shards = gradient_shards(self._parts.model)
        self._parts.shards.load(shards, mean)
        if self._clip_norm is not None and norm > self._clip_norm:
            for shard in shards.values():
                shard.mul_(self._clip_norm / norm)
        return norm

    def _describe(self, mean: Tensor) -> Mapping[str, Any]:
        """For the verdict: one node computes the norm and all clip by the same bits; a joiner learns Adam's age."""
        norm = torch.linalg.vector_norm(mean, dtype=torch.float64)
        return {"grad_norm": float(norm), "updates_before": self._parts.inner.update_count}

    def is_time_over(self, steps: int) -> bool:
        return False

    def sync_parameters(self, step: int, tokens: int, *, ends_round: bool) -> Sequence[RoundReport]:
        return (self._take_over(),)

    def _take_over(self) -> RoundReport:
        committed, self._committed = self._committed, None
        assert committed is not None, "sync_gradients comes first"
        started_at_s = time.monotonic()
        with self._keeper.changing_state():
            self._keeper.advance(committed.verdict, self._store_state())
        self._keeper.begin_phase()
        self._keeper.record(committed)
        self._parts.faults.at("applied", self.round)
        return self._keeper.report(committed, time.monotonic() - started_at_s)

    def _store_state(self) -> str:
        """Write this rank's shards of model and moments into the outer state; the digest of it, on local rank 0."""
        moments = self._parts.inner.moments()
        shards = self._parts.shards
        shards.store(parameter_shards(self._parts.model), self._buffers[PARAMS])
        shards.store({name: first for name, (first, _) in moments.items()}, self._buffers[FIRST_MOMENT])
        shards.store({name: second for name, (_, second) in moments.items()}, self._buffers[SECOND_MOMENT])
        barrier(self._local)
        return digest_of(*(self._buffers[name] for name in self.sections)) if self._local.rank == 0 else ""

    def join(self) -> RoundReport:
        self._committed = self._keeper.commit(self._keeper.offer(is_joining=True), self._describe)
        self._step(self._committed.result, self._committed.verdict.payload)
        return self._take_over()

    def _step(self, mean: Tensor, payload: Mapping[str, Any]) -> None:
        self._set_gradients(mean, payload)
        self._parts.inner.step()
        self._parts.inner.zero_grad()

    def adopt(self, round: int, payload: Mapping[str, Any], sections: Mapping[str, Tensor] | None = None) -> str:
        with self._keeper.changing_state(sections):
            self._load_state(payload)
            self._keeper.settle(round, payload, self._store_state())
        return self._keeper.state

    def _load_state(self, payload: Mapping[str, Any]) -> None:
        """Take model and moments from the outer state."""
        shards, inner = self._parts.shards, self._parts.inner
        progress = Progress.from_record(payload["progress"])
        updates = payload.get("updates_before", 0) + (payload["weight"] > 0)
        inner.seek(progress.inner_step, update_count=updates)
        shards.load(parameter_shards(self._parts.model), self._buffers[PARAMS])
        moments = inner.moments()
        shards.load({name: first for name, (first, _) in moments.items()}, self._buffers[FIRST_MOMENT])
        shards.load({name: second for name, (_, second) in moments.items()}, self._buffers[SECOND_MOMENT])
        barrier(self._local)  # all have read before anybody writes

    def replay(self, entry: JournalEntry) -> str:
        barrier(self._local)
        self._step(entry.result, entry.payload)
        with self._keeper.changing_state():
            self._keeper.settle(entry.round, entry.payload, self._store_state())
        return self._keeper.state

    def copy_state(self) -> StateCopy:
        with self._keeper.state_lock:
            sections = {name: self._buffers[name].clone() for name in self.sections}
            return StateCopy(self._keeper.round, sections, self._keeper.payload, self._keeper.state)

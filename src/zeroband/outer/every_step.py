"""The schedule with a round per inner step: all nodes hold the same model at every step.

The outer state is the whole training state. It is written out after every step, so a joiner can fetch it at any time.
Training waits for a round, or the round overlaps the next step and is applied at its end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zeroband.elastic.rounds.interfaces import RESULT, OuterParts
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.rounds.runner import Committed
from zeroband.kernels.one_rounding import OneRounding
from zeroband.node.mesh import barrier, broadcast_json
from zeroband.outer.algorithm import StepAlgorithm
from zeroband.outer.schedule import Schedule
from zeroband.state.round_state import RoundUpdate


class EveryStep(Schedule[StepAlgorithm]):
    """Rounds of one inner step, with an algorithm that makes the nodes' common gradient."""

    has_own_steps = False

    def __init__(self, parts: OuterParts, algorithm: StepAlgorithm) -> None:
        super().__init__(parts, algorithm, algorithm.exchange())
        self._committed: Committed | None = None
        """The round whose result is now the model's gradient."""
        self._is_finite = True
        """Whether the newest contribution is finite."""
        parts.buffers.open(*self.sections, RESULT)
        self._state.digest = self._store_state()

    # -- the trainer's hooks ------------------------------------------------------------------------------------

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Contribute the model's gradients and replace them by the round's result."""
        self._count_step()
        self._committed = self._arrived_before()
        began_at_s = time.monotonic()
        self._is_finite = self._algorithm.contribute(self.exchange, self.round + 1)
        self._contribute_s = time.monotonic() - began_at_s
        if not self._algorithm.overlaps:
            self._committed = self._commit(weighted=self._is_finite)
        if self._committed is None:
            self._parts.stepper.zero_grad()  # the trainer's step moves nothing
            return self._algorithm.norm(None)
        self._set_gradients(self._committed.result, self._committed.verdict.record)
        return self._algorithm.norm(self._committed.verdict.record)

    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]:
        reports = [] if self._committed is None else [self._apply(self._committed)]
        if self._algorithm.overlaps:
            reports += self._send()
        self._begin_phase()
        return reports

    def flush(self) -> Sequence[RoundReport]:
        committed = self._arrived_before()
        return () if committed is None else (self._step_by(committed),)

    def join(self) -> RoundReport:
        report = self._step_by(self._commit(is_joining=True))
        self._begin_phase()
        return report

    # -- a round ------------------------------------------------------------------------------------------------

    def _send(self) -> Sequence[RoundReport]:
        """Send the contribution during the next step; if the nodes wait for this round, apply it at once."""
        waits = broadcast_json(self._is_end() or self._parts.length.departure.is_asked, self._local)
        if waits:
            return (self._step_by(self._commit(weighted=self._is_finite)),)
        self._runner.start(self._offer(weighted=self._is_finite))
        self._parts.inner.seek(self.inner_step)
        return ()

    def _commit(self, *, weighted: bool = True, is_joining: bool = False) -> Committed:
        committed = self._runner.commit(
            self._offer(weighted=weighted, is_joining=is_joining), self._caught_up, is_joining=is_joining
        )
        assert committed is not None, "all nodes make the same steps, so a node that missed a round waits for the next"
        return committed

    def _arrived_before(self) -> Committed | None:
        """Wait for the round that overlapped this step, if any; from here on there may be a new contribution."""
        return self._runner.arrived(self._caught_up) if self._runner.is_under_way else None

    def _apply(self, committed: Committed) -> RoundReport:
        """Note the state that the inner optimizer's step by a committed round led to."""
        self._committed, started_at_s = None, time.monotonic()
        with self._state.changing():
            self._advance(committed.verdict, self._store_state())
        return self._applied(committed, since_s=started_at_s)

    def _step_by(self, committed: Committed) -> RoundReport:
        """Apply a round for which the trainer makes no step itself."""
        self._step(committed.result, committed.verdict.record)
        return self._apply(committed)

    def _step(self, result: Tensor, record: Mapping[str, Any]) -> None:
        self._set_gradients(result, record)
        self._parts.stepper.step()
        self._parts.stepper.zero_grad()
        self._algorithm.seek(record)  # a round of joiners alone is no step of the schedule

    def _set_gradients(self, result: Tensor, record: Mapping[str, Any]) -> None:
        with OneRounding():
            self._algorithm.set_gradients(result, record, inner_step=self.progress.inner_step)

    # -- the outer state ----------------------------------------------------------------------------------------

    def _store_state(self) -> str:
        """Write this rank's shards of the training state into the sections; returns their digest on local rank 0."""
        for section, shards in self._algorithm.held().items():
            self._parts.shards.store(shards, self._parts.buffers[section])
        return self._state.compute_digest()

    def _take_over(self, round: int, record: Mapping[str, Any], sections: Mapping[str, Tensor] | None) -> None:
        assert not self._state.later, "an optimizer steps all of a matrix at once"
        with self._state.changing(sections):
            self._algorithm.seek(record)
            for section, shards in self._algorithm.held().items():
                self._parts.shards.load(shards, self._parts.buffers[section])
            barrier(self._local)  # all have read before anybody writes
            self._state.note(round, record, self._store_state())

    def replay(self, update: RoundUpdate, result: Tensor, has_already: Sequence[tuple[int, int]] = ()) -> str:
        barrier(self._local)
        self._step(result, update.record)
        with self._state.changing():
            self._state.note(update.round, update.record, self._store_state())
        return self.state_digest

"""What algorithms have in common whose rounds are one inner step: all nodes hold one model at every step.

What the nodes make together of their gradients becomes the gradient of all of them, by which the inner optimizer steps.
The outer state is the whole training state. It is written out after every step, so that a joiner can fetch it at any
time.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.coordinator import Committed, RoundCoordinator
from zeroband.elastic.rounds.exchange import RESULT, Exchange, MeanExchange
from zeroband.elastic.rounds.interfaces import LaterPart, OuterParts
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.node.mesh import barrier
from zeroband.state.flat import gradient_shards
from zeroband.state.round_state import RoundUpdate

PARAMS = "params"


class EveryStep(RoundCoordinator):
    """One round is one inner step. `exchange`: of a round; None: the mean of the contributions."""

    sections = (PARAMS,)
    has_own_steps = False

    def __init__(self, parts: OuterParts, exchange: Exchange | None = None) -> None:
        mean = MeanExchange(parts.mesh, parts.buffers, parts.feedback, parts.codec, parts.fragments, audits=False)
        super().__init__(parts, exchange or mean)
        self._committed: Committed | None = None
        parts.buffers.open(*self.sections, RESULT)
        self.state_digest = self._store_state()

    # -- what an algorithm says of itself -----------------------------------------------------------------------

    @abstractmethod
    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Contribute the gradients that lie in the model, and put what the nodes made of them into their place."""
        ...

    @abstractmethod
    def _held(self) -> Mapping[str, Mapping[str, Tensor]]:
        """This rank's shards of each section, by parameter; writing to them writes to the model and its optimizer."""
        ...

    def _set_gradients(self, result: Tensor, record: Mapping[str, Any]) -> None:
        """Put a committed result into the model.

        Where nobody had weight there is no gradient at all, and the optimizer leaves parameters and moments alone.
        """
        if record["weight"] == 0:
            self._parts.stepper.zero_grad()
        else:
            self._parts.shards.load(gradient_shards(self._parts.model), result)

    def _seek(self, record: Mapping[str, Any]) -> None:
        """Bring the inner optimizer to the place that a verdict stands for."""
        self._parts.stepper.seek(Progress.from_record(record["progress"]).inner_step)

    # -- the round ----------------------------------------------------------------------------------------------

    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]:
        report = self._apply_committed()
        self._begin_phase()
        return (report,)

    def _apply_committed(self) -> RoundReport:
        committed, self._committed = self._committed, None
        assert committed is not None, "sync_gradients comes first"
        started_at_s = time.monotonic()
        with self._changing_state():
            self._advance(committed.verdict, self._store_state())
        self._keep_in_journal(committed)
        self._parts.faults.at("applied", self.round)
        return self._report(committed, time.monotonic() - started_at_s)

    def _store_state(self) -> str:
        """Write this rank's shards of the training state into the sections; the digest of them, on local rank 0."""
        for section, shards in self._held().items():
            self._parts.shards.store(shards, self._buffers[section])
        return self._digest()

    def join(self) -> RoundReport:
        report = self._step_by(self._commit(self._offer(is_joining=True)))
        self._begin_phase()
        return report

    def _step_by(self, committed: Committed) -> RoundReport:
        """Step by a round for which the trainer makes no step."""
        self._committed = committed
        self._step(committed.result, committed.verdict.record)
        return self._apply_committed()

    def _step(self, result: Tensor, record: Mapping[str, Any]) -> None:
        self._set_gradients(result, record)
        self._parts.stepper.step()
        self._parts.stepper.zero_grad()
        self._seek(record)  # a round of joiners alone is no step of the schedule

    def adopt(
        self,
        round: int,
        record: Mapping[str, Any],
        sections: Mapping[str, Tensor] | None = None,
        later: Sequence[LaterPart] = (),
    ) -> str:
        assert not later, "an optimizer steps all of a matrix at once"
        with self._changing_state(sections):
            self._load_state(record)
            self._record_state(round, record, self._store_state())
        return self.state_digest

    def _load_state(self, record: Mapping[str, Any]) -> None:
        """Take the training state from the sections."""
        self._seek(record)
        for section, shards in self._held().items():
            self._parts.shards.load(shards, self._buffers[section])
        barrier(self._local)  # all have read before anybody writes

    def replay(self, update: RoundUpdate, result: Tensor, has_already: Sequence[tuple[int, int]] = ()) -> str:
        barrier(self._local)
        self._step(result, update.record)
        with self._changing_state():
            self._record_state(update.round, update.record, self._store_state())
        return self.state_digest

"""What inner steps showed, told when the next one was given to the device, which so always has work. Main thread."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.rounds.interfaces import SyncHooks
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import LearnsNothing, Leaving
from zeroband.observe.log import get_logger
from zeroband.runtime.report import InnerStep, Report

_ROUNDS = 3
"""One round that is left out is an accident, whatever its length."""

_log = get_logger(__name__)


class FailedSteps:
    """Counts inner steps in a row from which a node learns nothing: gradients, or updates of rounds, are not finite.

    limit: how many there may be, and at least three rounds; None: any number. `has_learned`: before this start.
    Local ranks count the same.
    """

    def __init__(self, limit: int | None = None, *, has_learned: bool = False) -> None:
        self._limit = math.inf if limit is None else limit
        self._has_learned = has_learned
        self._gradients = 0
        self._steps, self._rounds = 0, 0
        """Since the last round that this node's update counted in, and how many it was left out of."""
        self._loss = 0.0

    def note(self, step: int, norm: float, loss: float, rounds: Sequence[RoundReport]) -> None:
        """Count a step. Raises LearnsNothing where it is one too many."""
        self._gradients = 0 if math.isfinite(norm) else self._gradients + 1
        self._steps, self._loss = self._steps + 1, loss
        for round in rounds:
            self._rounds = self._rounds + 1 if round.is_left_out else 0
            if not round.is_left_out:
                self._steps, self._has_learned = 0, True
        lost = self._steps if self._rounds >= _ROUNDS else 0
        if max(lost, self._gradients) >= self._limit:
            raise LearnsNothing(
                f"nothing was learned in {max(lost, self._gradients)} inner steps in a row (train.non_finite_steps), "
                f"up to step {step}: their updates are not finite (gradient norm {norm}, loss {loss}); look at the "
                "data and the rate, and go on from a checkpoint with --resume; where one node alone has this, look at "
                "its hardware"
            )

    def require_something(self) -> None:
        """Raise LearnsNothing at the end of a run that gave a model without a loss, or the one it began with."""
        is_broken = self._gradients > 0 and not math.isfinite(self._loss)
        if self._limit < math.inf and (is_broken or (self._rounds and not self._has_learned)):
            raise LearnsNothing(
                f"nothing was learned in the last {max(self._steps, self._gradients)} inner steps, whose updates are "
                f"not finite (loss {self._loss}), so there is nothing to export; look at the data and the rate"
            )


class LateReports:
    """Tells outer algorithm and report of each inner step, one step late and in order; at a boundary, at once.

    As a context: tells of the last step at the end, too.
    """

    def __init__(self, outer: SyncHooks, report: Report, departure: Departure, failed: FailedSteps) -> None:
        self._outer = outer
        self._failed = failed
        self._report = report
        self._departure = departure
        self._late: InnerStep | None = None

    def __enter__(self) -> LateReports:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Leaving):
            self._tell_late()

    def learn(self, made: InnerStep) -> None:
        """Tell the algorithm of all steps up to this one, before the hook of a boundary. Waits for the device."""
        self._tell_late()
        self._learn(made)

    def end(self, made: InnerStep, *, is_late: bool) -> None:
        """The hooks of a step were called. `is_late`: it is told of with the next one."""
        if is_late:
            self._tell_late()
            self._late = made
        else:
            self._tell(made, ended_at_s=time.monotonic())

    def _tell_late(self) -> None:
        made, self._late = self._late, None
        if made is not None:
            self._learn(made)
            self._tell(made, ended_at_s=made.shown.ready_at_s)

    def _learn(self, made: InnerStep) -> None:
        if not self._outer.has_own_steps:  # told with the gradient
            return
        with self._departure.in_step():
            made.read()
        is_finite = math.isfinite(made.grad_norm)
        if not is_finite:
            fields = {"step": made.number, "norm": made.grad_norm, "loss": made.loss}
            _log.warning("non-finite gradient: inner step left out", extra={"fields": fields})
        self._outer.learned(made.passed.tokens if is_finite else 0, made.loss)

    def _tell(self, made: InnerStep, *, ended_at_s: float) -> None:
        made.read()
        made.ended_at_s = ended_at_s
        self._report.stepped(made)
        self._failed.note(made.number + 1, made.grad_norm, made.loss, made.synced)

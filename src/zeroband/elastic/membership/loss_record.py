"""The run's loss by round, as recorded in the verdicts, and when it calls for a rollback. Pure rules.

All nodes read the same record, so any of them reaches the same decision about a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroband.config.ranges import Count, Loss
from zeroband.elastic.membership.records import RoundPlan, from_record, to_record

if TYPE_CHECKING:  # the guardian reads records, and need not build the schema of a run for it
    from zeroband.config.schema import RollbackConfig

RECORD = "losses"
"""Its key in a verdict's record."""

_MEAN_ROUNDS = 20
"""Window of the running mean, in rounds."""

_LEAST_ROUNDS = 5
"""Rounds that the mean needs before a loss is compared with it."""


@dataclass(frozen=True)
class LossRecord:
    """The loss of a round and the running mean of the rounds before it."""

    loss: Loss | None = None
    """In nats, over all nodes by their tokens. None: no node trained in this round, or none had a finite loss."""
    is_finite: bool = True
    mean: Loss = 0.0
    """Running mean of the finite losses of earlier rounds; `rounds`: how many these are."""
    rounds: Count = 0
    from_step: Count = 0
    """Inner step at which the round began: checkpoints up to it are older than this loss."""

    @staticmethod
    def of(record: Mapping[str, Any]) -> LossRecord:
        """Read a verdict's loss record; a new one if it has none."""
        return from_record(LossRecord, record[RECORD]) if RECORD in record else LossRecord()

    def to_record(self) -> dict[str, Any]:
        """Return the plain values that a verdict records."""
        return to_record(self)

    def carried(self) -> LossRecord:
        """The record of a round in which no node trains: the mean so far, without a loss to judge."""
        if self.loss is None:
            return LossRecord(mean=self.mean, rounds=self.rounds, from_step=self.from_step)
        rounds = self.rounds + 1
        mean = self.mean + (self.loss - self.mean) / min(rounds, _MEAN_ROUNDS)
        return LossRecord(mean=mean, rounds=rounds, from_step=self.from_step)

    def after(self, plan: RoundPlan, from_step: int) -> LossRecord:
        """The record of this plan's round, which follows this record's."""
        before, loss = self.carried(), loss_of(plan)
        is_finite = loss is None or math.isfinite(loss)
        return LossRecord(loss if is_finite else None, is_finite, before.mean, before.rounds, from_step)


def loss_of(plan: RoundPlan) -> float | None:
    """The loss of a round in nats per token, over the members whose update counts.

    NaN if none of the members that trained has a finite one, None if no member trained.
    """
    if not any(plan.steps):
        return None
    return math.nan if plan.loss is None else plan.loss


def reason_to_go_back(record: LossRecord, config: RollbackConfig | None) -> str:
    """Why the run should roll back this round; empty if it should not."""
    if config is None:
        return ""
    if not record.is_finite:
        return "no node had a finite loss" if config.on_non_finite else ""
    if config.on_spike is None or record.loss is None or record.rounds < _LEAST_ROUNDS:
        return ""
    if record.loss <= config.on_spike * record.mean:
        return ""
    return f"a loss of {record.loss:.4g} after a mean of {record.mean:.4g} (rollback.on_spike={config.on_spike:g})"

"""The loss of the run, round by round, as the verdicts record it, and when it calls for going back. Pure rules.

All nodes read the same record, so they come to the same decision about a round, whoever takes it first.
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
"""Where it stands in a verdict's record."""

_MEAN_ROUNDS = 20
"""The running mean forgets as fast as a mean over so many rounds."""

_LEAST_ROUNDS = 5
"""Fewer make no mean to compare with."""


@dataclass(frozen=True)
class LossRecord:
    """The loss of a round beside that of the rounds before it."""

    loss: Loss | None = None
    """In nats, over all nodes by their tokens. None: nobody learned in this round, or nobody had a finite loss."""
    is_finite: bool = True
    mean: Loss = 0.0
    """Running mean of the finite losses of the rounds before, and how many they are."""
    rounds: Count = 0
    from_step: Count = 0
    """Inner step with which the round began: checkpoints up to there are older than what it showed."""

    @staticmethod
    def of(record: Mapping[str, Any]) -> LossRecord:
        """What a verdict recorded; of one that recorded nothing, a new record."""
        return from_record(LossRecord, record[RECORD]) if RECORD in record else LossRecord()

    def to_record(self) -> dict[str, Any]:
        """What a verdict records of it."""
        return to_record(self)

    def carried(self) -> LossRecord:
        """For a round in which nobody learns: the mean up to now, without a loss to judge."""
        if self.loss is None:
            return LossRecord(mean=self.mean, rounds=self.rounds, from_step=self.from_step)
        rounds = self.rounds + 1
        mean = self.mean + (self.loss - self.mean) / min(rounds, _MEAN_ROUNDS)
        return LossRecord(mean=mean, rounds=rounds, from_step=self.from_step)

    def after(self, plan: RoundPlan, from_step: int) -> LossRecord:
        """The record of the round of this plan, that follows the one of this record."""
        before, loss = self.carried(), loss_of(plan)
        is_finite = loss is None or math.isfinite(loss)
        return LossRecord(loss if is_finite else None, is_finite, before.mean, before.rounds, from_step)


def loss_of(plan: RoundPlan) -> float | None:
    """The loss of a round in nats per token, over the members whose update counts.

    NaN where none of those that learned has a finite one, None where nobody learned.
    """
    if not any(plan.steps):
        return None
    return math.nan if plan.loss is None else plan.loss


def reason_to_go_back(record: LossRecord, config: RollbackConfig | None) -> str:
    """Why the run should leave what this round led to; empty where it should not."""
    if config is None:
        return ""
    if not record.is_finite:
        return "no node had a finite loss" if config.on_non_finite else ""
    if config.on_spike is None or record.loss is None or record.rounds < _LEAST_ROUNDS:
        return ""
    if record.loss <= config.on_spike * record.mean:
        return ""
    return f"a loss of {record.loss:.4g} after a mean of {record.mean:.4g} (rollback.on_spike={config.on_spike:g})"

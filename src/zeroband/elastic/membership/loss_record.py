"""The loss of each round, as recorded in verdicts, and when it requires a rollback. Pure rules.

All nodes read the same record, so all reach the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroband.config.ranges import Count, Loss
from zeroband.elastic.membership.records import RoundPlan, from_record, to_record

if TYPE_CHECKING:  # keeps the guardian, which imports this, from loading the configuration schema
    from zeroband.config.schema import RollbackConfig

RECORD = "losses"
"""Its key in a verdict's record."""

_MEAN_ROUNDS = 20
"""Window of the running mean, in rounds."""

_LEAST_ROUNDS = 5
"""Rounds in the mean before losses are compared with it."""


@dataclass(frozen=True)
class LossRecord:
    """The loss of a round and the running mean of the rounds before it."""

    loss: Loss | None = None
    """In nats, over all nodes by their tokens. None: no node trained in this round, or none had a finite loss."""
    is_finite: bool = True
    mean: Loss = 0.0
    """Running mean of the finite losses of earlier rounds; `rounds`: their number."""
    rounds: Count = 0
    from_step: Count = 0
    """Inner step at which the round began; checkpoints up to it precede this loss."""

    @staticmethod
    def of(record: Mapping[str, Any]) -> LossRecord:
        """Read a verdict's loss record; a new one if it has none."""
        return from_record(LossRecord, record[RECORD]) if RECORD in record else LossRecord()

    def to_record(self) -> dict[str, Any]:
        """Return the plain values that a verdict records."""
        return to_record(self)

    def carried(self) -> LossRecord:
        """Return the record of a round without training: the mean so far and no loss."""
        if self.loss is None:
            return LossRecord(mean=self.mean, rounds=self.rounds, from_step=self.from_step)
        rounds = self.rounds + 1
        mean = self.mean + (self.loss - self.mean) / min(rounds, _MEAN_ROUNDS)
        return LossRecord(mean=mean, rounds=rounds, from_step=self.from_step)

    def after(self, plan: RoundPlan, from_step: int) -> LossRecord:
        """Return the record of the next round, with this plan."""
        before, loss = self.carried(), loss_of(plan)
        is_finite = loss is None or math.isfinite(loss)
        return LossRecord(loss if is_finite else None, is_finite, before.mean, before.rounds, from_step)


def loss_of(plan: RoundPlan) -> float | None:
    """Return a round's loss in nats per token; NaN if no trained member has a finite one, None if none trained."""
    if not any(plan.steps):
        return None
    return math.nan if plan.loss is None else plan.loss


def reason_to_go_back(record: LossRecord, config: RollbackConfig | None) -> str:
    """Return the reason to roll back this round; empty: none."""
    if config is None:
        return ""
    if not record.is_finite:
        return "no node had a finite loss" if config.on_non_finite else ""
    if config.on_spike is None or record.loss is None or record.rounds < _LEAST_ROUNDS:
        return ""
    if record.loss <= config.on_spike * record.mean:
        return ""
    return f"a loss of {record.loss:.4g} after a mean of {record.mean:.4g} (rollback.on_spike={config.on_spike:g})"

"""Rollback to a checkpoint during a run: the record that members vote for, and the exception that tells the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zeroband.data.ledger import Ledger, Range, holes, settle
from zeroband.elastic.membership.loss_record import RECORD, LossRecord
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import ZerobandError
from zeroband.state.round_state import RoundState


class RolledBack(ZerobandError):
    """The members agreed to roll back to a checkpoint; each has staged it and must now load it.

    `report`: of the round that rolled back, with the state after it. `record`: of its verdict.
    """

    def __init__(self, step: int, report: RoundReport, record: Mapping[str, Any]) -> None:
        super().__init__(f"round {report.round} goes back to the checkpoint of step {step}")
        self.step = step
        self.report = report
        self.record = record


def describe_return(
    staged: RoundState, plan: RoundPlan, shape: RunShape, current: Progress, before: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The record of a rollback's verdict: the checkpoint's progress and data ledgers, with samples dealt again.

    If the plan skips data, the current pool is kept: samples trained on since the checkpoint are not dealt again.
    `staged`: the checkpoint's state, read by this node. `current`: the progress before the rollback. `before`: entries
    from the previous verdict.
    """
    saved, progress = staged.record, Progress.from_record(staged.record["progress"])
    skipped = learned_since(progress, current) if plan.skips_data else {}
    if plan.skips_data:
        progress = replace(progress, ledgers=settle(current.ledgers, {}, {}))
    progress = progress.begin(plan, shape, after_round=staged.round)
    said = {**saved, "progress": progress.to_record(), "weight": 0, "skipped": skipped, **before}
    said[RECORD] = LossRecord.of(saved).carried().to_record()
    if "updates_before" in saved:  # those up to the checkpoint; its own round counts if a member had weight
        said["updates_before"] = saved["updates_before"] + (saved["weight"] > 0)
    return said


def learned_since(saved: Progress, current: Progress) -> dict[str, tuple[Range, ...]]:
    """Samples trained on after a checkpoint, or skipped, by corpus; sorted and disjoint."""
    settled = {corpus: saved.ledgers.get(corpus, Ledger()).settled for corpus in current.ledgers}
    learned = {c: holes([*ledger.owed, *settled[c]], ledger.next) for c, ledger in current.ledgers.items()}
    return {corpus: spans for corpus, spans in learned.items() if spans}

"""Going back to a checkpoint in the middle of a run: what the members vote for, and what tells the trainer."""

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
    """The members agreed to go back to a checkpoint, which each of them has staged and now has to take.

    `report`: of the round that did it, with the state after it. `record`: of its verdict.
    """

    def __init__(self, step: int, report: RoundReport, record: Mapping[str, Any]) -> None:
        super().__init__(f"round {report.round} goes back to the checkpoint of step {step}")
        self.step = step
        self.report = report
        self.record = record


def describe_return(
    staged: RoundState, plan: RoundPlan, shape: RunShape, current: Progress, before: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What the verdict says that goes back: progress and data ledgers as of the checkpoint, dealt out anew.

    Where the plan skips data, the pool is that of now: nothing is handed out again that was learned from since.
    `staged`: the state of the checkpoint, read by this node. `current`: the progress that is left. `before`: what the
    verdict before it adds.
    """
    saved, progress = staged.record, Progress.from_record(staged.record["progress"])
    skipped = learned_since(progress, current) if plan.skips_data else {}
    if plan.skips_data:
        progress = replace(progress, ledgers=settle(current.ledgers, {}, {}))
    progress = progress.begin(plan, shape, after_round=staged.round)
    said = {**saved, "progress": progress.to_record(), "weight": 0, "skipped": skipped, **before}
    said[RECORD] = LossRecord.of(saved).carried().to_record()
    if "updates_before" in saved:  # those behind the checkpoint: its own round was one, where somebody had weight
        said["updates_before"] = saved["updates_before"] + (saved["weight"] > 0)
    return said


def learned_since(saved: Progress, current: Progress) -> dict[str, tuple[Range, ...]]:
    """The samples that were learned from after a checkpoint, or skipped, by corpus; sorted and disjoint."""
    settled = {corpus: saved.ledgers.get(corpus, Ledger()).settled for corpus in current.ledgers}
    learned = {c: holes([*ledger.owed, *settled[c]], ledger.next) for c, ledger in current.ledgers.items()}
    return {corpus: spans for corpus, spans in learned.items() if spans}

"""Going back to a checkpoint in the middle of a run: what the members vote for, and what tells the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroband.elastic.epoch import Opening
from zeroband.elastic.progress import Progress, RunShape
from zeroband.errors import ZerobandError

if TYPE_CHECKING:
    from zeroband.outer.base import RoundReport


class RolledBack(ZerobandError):
    """The members agreed to go back to a checkpoint, which each of them has staged and now has to take.

    `report`: of the round that did it, with the state after it. `payload`: of its verdict.
    """

    def __init__(self, step: int, report: RoundReport, payload: Mapping[str, Any]) -> None:
        super().__init__(f"round {report.round} goes back to the checkpoint of step {step}")
        self.step = step
        self.report = report
        self.payload = payload


@dataclass(frozen=True)
class StagedState:
    """The outer state of a checkpoint, read by this node."""

    round: int
    payload: Mapping[str, Any]
    """As the checkpoint recorded it."""
    state: str


def describe_return(
    staged: StagedState, opening: Opening, shape: RunShape, before: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What the verdict says that goes back: progress and data ledger as of the checkpoint, dealt out anew.

    `before`: what the verdict before it adds.
    """
    saved = staged.payload
    progress = Progress.from_record(saved["progress"]).begin(opening, shape, after_round=staged.round)
    said = {**saved, "progress": progress.to_record(), "weight": 0, **before}
    if "updates_before" in saved:  # those behind the checkpoint: its own round was one, where somebody had weight
        said["updates_before"] = saved["updates_before"] + (saved["weight"] > 0)
    return said

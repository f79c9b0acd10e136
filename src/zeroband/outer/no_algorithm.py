"""The outer algorithm of a single node: nothing is synchronised, and the hooks only count."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zeroband.data.ledger import Range
from zeroband.elastic.membership.progress import Progress, RunShape
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.rounds.round_report import RoundReport

MEMBER_ID = "alone"


class NoAlgorithm:
    """A round is one inner step, as with DDP. All samples of the run are this node's from the start.

    `session`: of the run, where the trainer before this one had it already; empty: another one.
    """

    has_own_steps = True
    state_digest = ""

    def __init__(self, shape: RunShape, session: str = "") -> None:
        self._shape = replace(shape, reads_ahead=True)
        self._session = session or uuid.uuid4().hex
        self._tokens = self._round = 0
        self._progress = Progress.at_start().begin(self._plan(steps=0), self._shape, after_round=None)

    def _plan(self, *, steps: int) -> RoundPlan:
        lists = ((MEMBER_ID,), (self._tokens,), (steps,), (self._shape.total_steps,))
        return RoundPlan(self._round + 1, 1, self._round, *lists)

    def adopt(self, round: int, record: Mapping[str, Any]) -> None:
        """Continue from a checkpoint that was saved after this round."""
        before = Progress.from_record(record["progress"])
        self._round = round
        self._progress = before.begin(self._plan(steps=0), self._shape, after_round=round)

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def round(self) -> int:
        return self._round

    @property
    def record(self) -> Mapping[str, Any]:
        return {"progress": self._progress.to_record(), "session": self._session}

    @property
    def inner_step(self) -> int:
        return self._progress.inner_step

    def upcoming(self) -> Sequence[Range]:
        return self._progress.assigned.get(MEMBER_ID, ())

    def flush(self) -> Sequence[RoundReport]:
        """Return at once: there are no peers."""
        return ()

    def is_time_over(self, steps: int) -> bool:
        return False

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        self._tokens += tokens
        return None

    def learned(self, tokens: int, loss: float) -> None:
        """Do nothing: there are no peers."""

    def is_boundary(self, *, ends_round: bool) -> bool:
        return False

    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]:
        self._round += 1
        self._progress = self._progress.after(self._plan(steps=1), self._shape)
        self._tokens = 0
        return ()

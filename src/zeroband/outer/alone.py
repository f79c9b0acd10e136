"""No outer algorithm: one node trains by itself, and the hooks only count."""

from __future__ import annotations

from zeroband.elastic.epoch import Opening
from zeroband.elastic.progress import Progress, RunShape
from zeroband.outer.base import RoundReport

MEMBER_ID = "alone"


class Alone:
    """The whole run is one round."""

    def __init__(self, shape: RunShape) -> None:
        self._shape = RunShape(shape.total_steps, shape.total_steps, shape.batch_size)
        self._tokens = self._round = 0
        self._progress = Progress.at_start().after(self._opening(0), self._shape)

    def _opening(self, round: int) -> Opening:
        return Opening(version=round + 1, epoch=1, round=round, members=(MEMBER_ID,), weights=(self._tokens,))

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def round(self) -> int:
        return self._round

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        self._tokens += tokens
        return None

    def sync_parameters(self, step: int, tokens: int) -> RoundReport | None:
        if step + 1 == self._shape.total_steps:
            self._round = 1
            self._progress = self._progress.after(self._opening(self._round), self._shape)
        return None

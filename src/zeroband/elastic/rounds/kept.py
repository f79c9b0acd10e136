"""What every outer algorithm says of its rounds through the `RoundKeeper` that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroband.data.ledger import Range
from zeroband.elastic.membership.epoch import FOUNDING_ROUND
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.coordinator import RoundKeeper
from zeroband.elastic.rounds.interfaces import RoundReport, StateCopy
from zeroband.state.flat import SharedBuffers


class KeptRounds:
    """The part of `OuterAlgorithm` that is the same for all. A subclass sets `_keeper` and `_buffers`."""

    sections: tuple[str, ...]
    _keeper: RoundKeeper
    _buffers: SharedBuffers

    @property
    def round(self) -> int:
        return self._keeper.round

    @property
    def progress(self) -> Progress:
        return self._keeper.progress

    @property
    def payload(self) -> Mapping[str, Any]:
        return self._keeper.payload

    @property
    def state(self) -> str:
        return self._keeper.state

    @property
    def inner_step(self) -> int:
        return self._keeper.inner_step

    def upcoming(self) -> Sequence[Range]:
        return self._keeper.upcoming()

    def found(self, round: int = FOUNDING_ROUND) -> RoundReport:
        return self._keeper.found(round, self._at_founding())

    def _at_founding(self) -> Mapping[str, Any]:
        """What the founding's verdict says beside the progress."""
        return {}

    def is_time_over(self, steps: int) -> bool:
        return self._keeper.is_time_over(steps)

    def flush(self) -> Sequence[RoundReport]:
        """Nothing is on its way while training goes on."""
        return ()

    def _is_end(self, rounds: int = 1) -> bool:
        """Whether all nodes wait after so many more rounds, and nothing is on its way then: as all inner steps of the
        run are made, or for a checkpoint, so that it can be gone on from to the last bit."""
        every = self._keeper.parts.flush_every
        return self._keeper.is_last or (every is not None and (self.progress.outer_step + rounds) % every == 0)

    def abandon(self) -> None:
        self._keeper.abandon()

    def copy_state(self) -> StateCopy:
        with self._keeper.state_lock:
            sections = {name: self._buffers[name].clone() for name in self.sections}
            return StateCopy(self._keeper.round, sections, self._keeper.payload, self._keeper.state)

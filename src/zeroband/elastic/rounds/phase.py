"""Phases: how many inner steps this node makes in a round, and the results that are in no round yet. Pure.

Between two phases contributions travel, and own the link for a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroband.config.ranges import MOST_LOSS

_FIRST_STEPS = 8
"""Least steps to ask samples for until the speed of this node is known, with phases by time."""

_SURPLUS = 1.5
"""Factor on the expected steps when asking for samples; unused samples return to the run."""


class PhaseLength:
    """Length of a phase. `steps`: most inner steps. `round_s`: ends it after this time; None: only `steps` does."""

    def __init__(self, steps: int, round_s: float | None = None) -> None:
        self._steps = steps
        self._round_s = round_s
        self._step_s: float | None = None
        self._began_at_s = self._counts_from_s = 0.0
        self._others_s: float | None = None

    @property
    def is_by_time(self) -> bool:
        """Whether a time ends the phase."""
        return self._round_s is not None

    @property
    def most_steps(self) -> int:
        """The most inner steps of a phase."""
        return self._steps

    def begin(self, now_s: float) -> None:
        """A phase begins."""
        self._began_at_s = self._counts_from_s = now_s

    def count_from(self, opened_at_s: float) -> None:
        """Count the phase's time from when the previous round was opened, if the phase began earlier.

        All members see that moment together, so their phases end together, however long each one waited for it.
        """
        self._counts_from_s = max(self._counts_from_s, opened_at_s)

    def follow(self, period_s: float | None) -> None:
        """End phases by steps after the time of the others' rounds, too; for a node that is slower. None: no longer."""
        self._others_s = period_s

    def is_over(self, now_s: float, steps: int) -> bool:
        """Whether the phase ends after `steps` steps: one more would end further from its time."""
        ends_s = self._others_s if self._round_s is None else self._round_s
        if ends_s is None or steps == 0:
            return False
        step_s = (now_s - self._began_at_s) / steps
        return now_s - self._counts_from_s + step_s / 2 >= ends_s

    def learn(self, now_s: float, steps: int) -> None:
        """Measure the time of a step: `steps` were made from `begin` until now."""
        if steps:
            self._step_s = (now_s - self._began_at_s) / steps

    def wanted_steps(self, others: int = 0) -> int:
        """Inner steps to ask samples for.

        `others`: steps that another node holds samples for; used until this node's speed is known.
        """
        if self._round_s is None:
            return self._steps
        if self._step_s is None:
            return min(max(_FIRST_STEPS, others), self._steps)
        return min(math.ceil(_SURPLUS * self._round_s / max(self._step_s, 1e-6)) + 1, self._steps)


@dataclass(frozen=True)
class _Learned:
    """Totals of inner steps."""

    steps: int = 0
    tokens: int = 0
    nats: float = 0.0
    phase_steps: int = 0
    """Inner steps of the longest phase among them."""


class Uncounted:
    """Totals of this node's inner steps since its last contribution, and of a contribution that is not applied yet."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self._nats = 0.0
        self._longest = 0
        """Inner steps of the longest phase that is over."""
        self._over = 0
        """Inner steps of all phases that are over."""
        self._caught_up = 0
        """Inner steps of those phases whose concurrent rounds the state holds."""
        self._offered = _Learned()
        self.contribute_s = 0.0
        """Time in which the newest contribution was written."""
        self.is_left_out = False
        """The newest contribution is not finite, so it has no weight."""

    def learn(self, tokens: int, loss: float) -> None:
        """Add the results of an inner step. `tokens`: 0 if its gradient was not finite. `loss`: mean over tokens."""
        self._nats += loss * tokens if tokens else 0.0
        self.tokens += tokens

    @property
    def loss(self) -> float | None:
        """Mean loss of the steps, in nats per token; None: there are none, or it is not finite."""
        is_known = self.tokens and abs(self._nats) <= MOST_LOSS * self.tokens
        return self._nats / self.tokens if is_known else None

    @property
    def past_steps(self) -> int:
        """Inner steps of phases that are over, in no contribution yet."""
        return self._over

    @property
    def steps_of_phase(self) -> int:
        """Inner steps of the current phase."""
        return self.steps - self._over

    @property
    def steps_ahead(self) -> int:
        """Inner steps by which this node is ahead of its state and of its newest contribution."""
        return self.steps - self._caught_up

    @property
    def phase_steps(self) -> int:
        """Inner steps of the longest phase."""
        return max(self._longest, self.steps_of_phase)

    @property
    def offered_steps(self) -> int:
        """Inner steps in a contribution whose round the state does not hold yet."""
        return self._offered.steps

    @property
    def offered_phase_steps(self) -> int:
        """Inner steps of the longest phase in that contribution, by which the round advances the run."""
        return self._offered.phase_steps

    def end_phase(self) -> None:
        """End a phase; the next contribution holds it and another one."""
        self._longest, self._over = self.phase_steps, self.steps

    def catch_up(self) -> None:
        """Note that the state holds all rounds committed during the phases that are over."""
        self._caught_up = self._over

    def offer(self, *, contribute_s: float = 0.0, is_left_out: bool = False) -> None:
        """Contribute the steps so far, and start counting anew."""
        self.contribute_s, self.is_left_out = contribute_s, is_left_out
        self._offered = _Learned(self.steps, self.tokens, self._nats, self.phase_steps)
        self.clear()

    def take_back(self) -> None:
        """Add the newest contribution's steps to the next one, since it did not count."""
        offered, self._offered = self._offered, _Learned()
        self._longest = max(offered.phase_steps, self.phase_steps)
        self.steps, self.tokens = self.steps + offered.steps, self.tokens + offered.tokens
        self._nats += offered.nats
        self._over = self.steps

    def count(self) -> None:
        """Note that the newest contribution counted and the state holds its round."""
        self._offered = _Learned()

    def clear(self) -> None:
        """Forget the steps that are in no contribution."""
        self.steps, self.tokens, self._nats = 0, 0, 0.0
        self._longest, self._over, self._caught_up = 0, 0, 0


@dataclass(frozen=True)
class TransferWindow:
    """A transfer of a round's contributions. All times are of one clock."""

    began_at_s: float
    before_at_s: float
    """When the previous round's transfer ended."""
    at_most_s: float = math.inf
    """Longest time for which the transfer may own the link."""

    def owns_link(self, now_s: float) -> bool:
        """Whether contributions own the link now: for as long as it was free for others since the last transfer."""
        return now_s - self.began_at_s < min(self.began_at_s - self.before_at_s, self.at_most_s)

"""Phases: how many inner steps this node makes in a round, and what it learned in them that is in no round yet. Pure.

Between two phases contributions travel, and have the link for a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroband.config.ranges import MOST_LOSS

_FIRST_STEPS = 8
"""Steps of a round that only shows how fast this node is."""

_SURPLUS = 1.5
"""Samples are asked for so many times the expected steps; what is not used goes back to the run."""


class PhaseLength:
    """`steps`: in a round, at most. `round_s`: a round ends after this time; None: after `steps` alone."""

    def __init__(self, steps: int, round_s: float | None = None) -> None:
        self._steps = steps
        self._round_s = round_s
        self._step_s: float | None = None
        self._began_at_s = self._counts_from_s = 0.0

    @property
    def is_by_time(self) -> bool:
        """Whether a round ends after a time."""
        return self._round_s is not None

    @property
    def most_steps(self) -> int:
        """The most inner steps of a round."""
        return self._steps

    def begin(self, now_s: float) -> None:
        """A round begins."""
        self._began_at_s = self._counts_from_s = now_s

    def count_from(self, opened_at_s: float) -> None:
        """Count the round's time from when the one before it was opened to its members, if this began earlier.

        All members see that at once, so their rounds end together, however long each waited for it while it trained.
        """
        self._counts_from_s = max(self._counts_from_s, opened_at_s)

    def is_over(self, now_s: float, steps: int) -> bool:
        """Whether the round's time is over after so many steps: another one would end further from it."""
        if self._round_s is None or steps == 0:
            return False
        step_s = (now_s - self._began_at_s) / steps
        return now_s - self._counts_from_s + step_s / 2 >= self._round_s

    def learn(self, now_s: float, steps: int) -> None:
        """The round took so many steps until now."""
        if steps:
            self._step_s = (now_s - self._began_at_s) / steps

    def wanted_steps(self, others: int = 0) -> int:
        """Inner steps for which to ask samples.

        `others`: steps that another node holds samples for; used while this node's speed is not known.
        """
        if self._round_s is None:
            return self._steps
        if self._step_s is None:
            return min(max(_FIRST_STEPS, others), self._steps)
        return min(math.ceil(_SURPLUS * self._round_s / max(self._step_s, 1e-6)) + 1, self._steps)


@dataclass(frozen=True)
class _Learned:
    """What inner steps showed."""

    steps: int = 0
    tokens: int = 0
    nats: float = 0.0
    phase_steps: int = 0
    """Inner steps of the longest phase among them."""


class Uncounted:
    """What this node's inner steps showed since its last contribution, and what is in one that is on its way."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self._nats = 0.0
        self._longest = 0
        """Inner steps of the longest of the phases that are over."""
        self._over = 0
        """Inner steps of all of these."""
        self._caught_up = 0
        """Inner steps of those beside which rounds passed that the state holds."""
        self._offered = _Learned()

    def learn(self, tokens: int, loss: float) -> None:
        """Add what an inner step showed. `tokens`: 0 where this node learned nothing. `loss`: mean over these."""
        self._nats += loss * tokens if tokens else 0.0
        self.tokens += tokens

    @property
    def loss(self) -> float | None:
        """Mean loss of the steps, in nats per token; None: there are none, or it is not finite."""
        is_known = self.tokens and abs(self._nats) <= MOST_LOSS * self.tokens
        return self._nats / self.tokens if is_known else None

    @property
    def steps_of_phases(self) -> int:
        """Those of phases that are over."""
        return self._over

    @property
    def steps_of_phase(self) -> int:
        """Those of the phase that is not over."""
        return self.steps - self._over

    @property
    def steps_ahead(self) -> int:
        """Inner steps by which this node is ahead of its state and of what it offered."""
        return self.steps - self._caught_up

    @property
    def phase_steps(self) -> int:
        """Inner steps of the longest of the phases that they are of."""
        return max(self._longest, self.steps_of_phase)

    @property
    def offered_steps(self) -> int:
        """Inner steps in a contribution to a round that the state does not hold yet."""
        return self._offered.steps

    @property
    def offered_phase_steps(self) -> int:
        """Inner steps of the longest phase in that contribution: by so much the round moves the run on."""
        return self._offered.phase_steps

    def end_phase(self) -> None:
        """A phase is over, and the next contribution holds another one besides it."""
        self._longest, self._over = self.phase_steps, self.steps

    def catch_up(self) -> None:
        """The state holds the rounds that passed beside the phases that are over."""
        self._caught_up = self._over

    def offer(self) -> None:
        """The steps so far are contributed; others are counted anew."""
        self._offered = _Learned(self.steps, self.tokens, self._nats, self.phase_steps)
        self.clear()

    def take_back(self) -> None:
        """The newest contribution did not count: its steps are part of the next one."""
        offered, self._offered = self._offered, _Learned()
        self._longest = max(offered.phase_steps, self.phase_steps)
        self.steps, self.tokens = self.steps + offered.steps, self.tokens + offered.tokens
        self._nats += offered.nats
        self._over = self.steps

    def count(self) -> None:
        """The newest contribution counts: the state holds its round."""
        self._offered = _Learned()

    def clear(self) -> None:
        """Forget the steps that are not contributed."""
        self.steps, self.tokens, self._nats = 0, 0, 0.0
        self._longest, self._over, self._caught_up = 0, 0, 0


@dataclass(frozen=True)
class TransferWindow:
    """Contributions of a round on their way. Times are of one clock."""

    began_at_s: float
    before_at_s: float
    """When those of the round before had travelled."""
    at_most_s: float = math.inf
    """For how long the link is theirs at most."""

    def owns_link(self, now_s: float) -> bool:
        """Whether the link is theirs alone: as long as they had left it to others, joiners among them."""
        return now_s - self.began_at_s < min(self.began_at_s - self.before_at_s, self.at_most_s)

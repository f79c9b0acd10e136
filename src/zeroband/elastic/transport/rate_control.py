"""Rate control for links that share an access link: pacing slightly below its capacity. Pure.

TCP finds a link's rate by filling its queue until packets are lost. If several links share an access link, some get
more and finish early, the access link is then partly idle, and packets lost at the receiver's end were sent in vain.
With rates at which all links finish together, slightly below capacity, nothing queues and nothing is lost.

The target duration is estimated from the middle of an unpaced transfer, when all links are busy, and then refined by
trial. All members learn the last duration from the plan, so all compute the same target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

_MID_RANGE = (0.25, 0.65)
"""Measured range of a transfer: before it TCP is in slow start, after it the first links are done."""

_UNPACED_TRIALS = 2
"""Unpaced transfers before the first paced one; the faster counts, since link measurements may disturb the other."""

_MIN_S = 1.0
"""Shorter transfers are not paced: latency dominates them."""

_MAX_BYTES_PER_S = 8e6
"""Highest paced rate of a link. Faster ones need several streams, and are no home access links."""

_KEPT_FACTOR, _KEPT_SLACK_S = 1.03, 0.05
"""A transfer kept its target if it took at most this factor plus these seconds: pacing does not include latency."""

_SLOWER, _MAX_SLOWER = 1.03, 1.08
"""While no target was kept, it is slowed by the first factor, up to the second in total: TCP is hardly slower."""

_STEP, _MAX_STEP, _BACK = 0.02, 0.16, 4
"""A kept target is sped up by the first fraction, doubling up to the second, until one is missed; then steps are
divided by the third number. Missing with the smallest step ends the search."""

_HARMFUL, _MAX_HARMFUL = 1.5, 2
"""A paced transfer is harmful if it takes this factor of the kept time (the links have changed) or, if none was kept,
of the target (a single stream is too slow, as on a lossy link). After the second number in a row pacing stops."""

_LATE, _MAX_LATE = 1.1, 3
"""A found target is late beyond the first factor; after that many late transfers in a row the search restarts."""

_REST, _LONG_REST = 32, 1024
"""Transfers before a finished search resumes; the long one if pacing was harmful."""


class MidTransfer:
    """Extrapolates a transfer's duration from the rate of its middle part."""

    def __init__(self, to_receive_bytes: int) -> None:
        self._to_receive = to_receive_bytes
        self._marks: list[tuple[int, float]] = []

    def see(self, received_bytes: int, now_s: float) -> None:
        """Record the bytes received since the transfer began."""
        if len(self._marks) < len(_MID_RANGE) and received_bytes >= _MID_RANGE[len(self._marks)] * self._to_receive:
            self._marks.append((received_bytes, now_s))

    @property
    def whole_s(self) -> float:
        """Extrapolated duration; 0 if the transfer was too short to measure."""
        if len(self._marks) < len(_MID_RANGE):
            return 0.0
        (first, first_s), (last, last_s) = self._marks
        return self._to_receive * (last_s - first_s) / (last - first) if last > first else 0.0


@dataclass(frozen=True)
class PacedKind:
    """Search state of one kind of transfer."""

    target_s: float | None = None
    """Target duration of the next one; None: unpaced."""
    guess_s: float = math.inf
    """Shortest extrapolated duration of the unpaced transfers."""
    free: int = 0
    """Number of unpaced transfers."""
    kept_s: float = math.inf
    """Shortest target that was kept."""
    step: float = 0.0
    """Step from that to the current target; 0: none was kept."""
    is_fine: bool = False
    """A target was missed: steps no longer grow."""
    bad: int = 0
    """Consecutive late or harmful transfers."""
    rests: int = 0
    """Transfers until the search resumes."""

    def after(self, took_s: float) -> PacedKind:
        """Return the state after another transfer. `took_s` of an unpaced one is extrapolated from its middle."""
        if self.rests > 0:
            return self._resting(took_s)
        if self.target_s is None:
            return self._left_to_tcp(took_s)
        if took_s > _HARMFUL * (self.target_s if self.kept_s == math.inf else self.kept_s):
            return self._harmed()
        if took_s <= _KEPT_FACTOR * self.target_s + _KEPT_SLACK_S:
            return self._kept(self.target_s)
        return self._missed(self.target_s)

    def _harmed(self) -> PacedKind:
        if self.bad + 1 < _MAX_HARMFUL:
            return replace(self, bad=self.bad + 1)
        return PacedKind(rests=_LONG_REST) if self.kept_s == math.inf else PacedKind()

    def _left_to_tcp(self, took_s: float) -> PacedKind:
        seen = replace(self, guess_s=min(self.guess_s, took_s), free=self.free + 1)
        if seen.free < _UNPACED_TRIALS:
            return seen
        return replace(seen, target_s=seen.guess_s) if seen.guess_s >= _MIN_S else PacedKind(rests=_REST)

    def _kept(self, target_s: float) -> PacedKind:
        step = self.step if self.is_fine else min(2 * self.step, _MAX_STEP) or _STEP
        return replace(self, kept_s=target_s, target_s=target_s / (1 + step), step=step, bad=0)

    def _missed(self, target_s: float) -> PacedKind:
        kept_s = self.kept_s
        if kept_s == math.inf:
            slower_s = _SLOWER * target_s
            pays = slower_s <= _MAX_SLOWER * self.guess_s
            return replace(self, target_s=slower_s, bad=0) if pays else PacedKind(rests=_REST)
        if self.step <= _STEP:
            return PacedKind(target_s=kept_s, kept_s=kept_s, rests=_REST)
        step = max(self.step / _BACK, _STEP)
        return replace(self, target_s=kept_s / (1 + step), step=step, is_fine=True, bad=0)

    def _resting(self, took_s: float) -> PacedKind:
        is_late = self.target_s is not None and took_s > _LATE * self.target_s + _KEPT_SLACK_S
        bad = self.bad + 1 if is_late else 0
        if bad == _MAX_LATE:
            return PacedKind()
        if self.rests > 1:
            return replace(self, bad=bad, rests=self.rests - 1)
        if self.target_s is None:
            return PacedKind()
        return PacedKind(target_s=self.target_s / (1 + _STEP), kept_s=self.target_s, step=_STEP)


Kind = tuple[int, ...]
"""Kind of a transfer: the total bytes of all members, and what else tells it from others."""


@dataclass
class RateControl:
    """Targets of all transfers among the same members, equal on all of them; each kind has a separate search."""

    _between: tuple[int, tuple[str, ...]] = (0, ())
    """Epoch and its members."""
    _kinds: dict[Kind, PacedKind] = field(default_factory=dict[Kind, PacedKind])
    _last: tuple[Kind, int] | None = None
    """The last transfer, and its round."""

    def target_s(
        self, epoch: int, members: tuple[str, ...], kind: Kind, outer_round: int, last_took_s: float
    ) -> float | None:
        """Return a transfer's target duration; None: unpaced.

        `last_took_s`: duration of the previous round's transfer, as the plan tells all members; 0: unknown.
        """
        if (epoch, members) != self._between:
            self._between, self._kinds, self._last = (epoch, members), {}, None
        if self._last is not None and self._last[1] != outer_round and last_took_s > 0:
            last = self._last[0]
            self._kinds[last] = self._kinds.get(last, PacedKind()).after(last_took_s)
        self._last = (kind, outer_round)
        target_s = self._kinds.get(kind, PacedKind()).target_s
        if target_s is None or len(members) < 3 or 2 * kind[0] / len(members) > _MAX_BYTES_PER_S * target_s:
            return None  # two members share no access link, or the link is fast
        return target_s

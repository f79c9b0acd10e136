"""How fast a node sends where its links share an access link: at an even pace, just below what that carries. Pure.

TCP finds the rate of a link by filling its queue until packets are lost. Of several links that share one, some get more
than others and are done long before them; in the end only a part of the access is used, and what was lost at a
receiver's end was sent for nothing. Where every link gets as much as makes it end with all others, a little below what
the access carries, nothing waits and nothing is lost.

How long a transfer takes at that pace is guessed from the middle of one that was left to TCP, when all its links are
busy, and then found by trying. All members learn from the plans of their rounds how the last one went, so all come
to the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

_MIDDLE = (0.25, 0.65)
"""Part of what a node receives: before it TCP is still looking for the rate, after it the first links are done."""

_FREE = 2
"""Transfers that are left to TCP before one is paced; the better one counts, since nodes may have measured their links
during the other."""

_LEAST_S = 1.0
"""A transfer that is over sooner depends on more than the rate of its links."""

_MOST_BYTES_PER_S = 8e6
"""Most bytes a second over one link. What is faster wants several streams, and is no access that a home has."""

_MET, _MET_S = 1.03, 0.05
"""A transfer that takes at most this factor and these seconds more than it was told to has kept its pace: a pace says
nothing of the way to the first byte, and of the last one's."""

_SLOWER, _MOST_SLOWER = 1.03, 1.08
"""A target becomes slower by the first factor while no pace was kept, up to the second: TCP is hardly slower."""

_STEP, _MOST_STEP, _BACK = 0.02, 0.16, 4
"""A target becomes faster by the first share, and by twice as much each time up to the second, until one is too fast;
then steps are smaller by the third factor. A first step that is too fast ends the search."""

_HARMFUL, _MOST_HARMFUL = 1.5, 2
"""A pace does harm where a transfer takes this factor of the time that was kept, as links are not what they were; or,
where none was kept, of the time that it was told: one stream cannot do it, as on a link that loses packets by itself.
After the second number in a row it is given up."""

_LATE, _MOST_LATE = 1.1, 3
"""A found pace is late from the first factor on; after that many late transfers in a row it is searched anew."""

_REST, _LONG_REST = 32, 1024
"""Transfers for which what was found stays, before it is tried again; the long one where a pace did harm."""


class Middle:
    """How long a transfer would take if all of it went as fast as the middle of it."""

    def __init__(self, to_receive_bytes: int) -> None:
        self._to_receive = to_receive_bytes
        self._marks: list[tuple[int, float]] = []

    def see(self, received_bytes: int, now_s: float) -> None:
        """Take note of what came since the transfer began."""
        if len(self._marks) < len(_MIDDLE) and received_bytes >= _MIDDLE[len(self._marks)] * self._to_receive:
            self._marks.append((received_bytes, now_s))

    @property
    def whole_s(self) -> float:
        """0 where it was over too soon to be seen."""
        if len(self._marks) < len(_MIDDLE):
            return 0.0
        (first, first_s), (last, last_s) = self._marks
        return self._to_receive * (last_s - first_s) / (last - first) if last > first else 0.0


@dataclass(frozen=True)
class PacedKind:
    """What was learned of one kind of transfer."""

    target_s: float | None = None
    """How long the next one is to take; None: as TCP has it."""
    guess_s: float = math.inf
    """Shortest time that the middle of a transfer promised, among those that were left to TCP."""
    free: int = 0
    """Number of transfers that were left to TCP."""
    kept_s: float = math.inf
    """The shortest time that was kept."""
    step: float = 0.0
    """Step from that time to the target; 0: no pace was kept."""
    is_fine: bool = False
    """Something was too fast: steps do not grow."""
    bad: int = 0
    """Transfers in a row that were late or harmed."""
    rests: int = 0
    """Transfers for which nothing more is tried."""

    def after(self, took_s: float) -> PacedKind:
        """What is known after another transfer. One that was left to TCP took what its middle promised."""
        if self.rests > 0:
            return self._resting(took_s)
        if self.target_s is None:
            return self._left_to_tcp(took_s)
        if took_s > _HARMFUL * (self.target_s if self.kept_s == math.inf else self.kept_s):
            return self._harmed()
        if took_s <= _MET * self.target_s + _MET_S:
            return self._kept(self.target_s)
        return self._missed(self.target_s)

    def _harmed(self) -> PacedKind:
        if self.bad + 1 < _MOST_HARMFUL:
            return replace(self, bad=self.bad + 1)
        return PacedKind(rests=_LONG_REST) if self.kept_s == math.inf else PacedKind()

    def _left_to_tcp(self, took_s: float) -> PacedKind:
        seen = replace(self, guess_s=min(self.guess_s, took_s), free=self.free + 1)
        if seen.free < _FREE:
            return seen
        return replace(seen, target_s=seen.guess_s) if seen.guess_s >= _LEAST_S else PacedKind(rests=_REST)

    def _kept(self, target_s: float) -> PacedKind:
        step = self.step if self.is_fine else min(2 * self.step, _MOST_STEP) or _STEP
        return replace(self, kept_s=target_s, target_s=target_s / (1 + step), step=step, bad=0)

    def _missed(self, target_s: float) -> PacedKind:
        kept_s = self.kept_s
        if kept_s == math.inf:
            slower_s = _SLOWER * target_s
            pays = slower_s <= _MOST_SLOWER * self.guess_s
            return replace(self, target_s=slower_s, bad=0) if pays else PacedKind(rests=_REST)
        if self.step <= _STEP:
            return PacedKind(target_s=kept_s, kept_s=kept_s, rests=_REST)
        step = max(self.step / _BACK, _STEP)
        return replace(self, target_s=kept_s / (1 + step), step=step, is_fine=True, bad=0)

    def _resting(self, took_s: float) -> PacedKind:
        is_late = self.target_s is not None and took_s > _LATE * self.target_s + _MET_S
        bad = self.bad + 1 if is_late else 0
        if bad == _MOST_LATE:
            return PacedKind()
        if self.rests > 1:
            return replace(self, bad=bad, rests=self.rests - 1)
        if self.target_s is None:
            return PacedKind()
        return PacedKind(target_s=self.target_s / (1 + _STEP), kept_s=self.target_s, step=_STEP)


Kind = tuple[int, ...]
"""A kind of transfers: the bytes moved for all members together, and what else tells it from others."""


@dataclass
class RateControl:
    """Times of all transfers between the same members, equal on all of them. Each kind is paced by itself."""

    _between: tuple[int, tuple[str, ...]] = (0, ())
    """The epoch and its members."""
    _kinds: dict[Kind, PacedKind] = field(default_factory=dict[Kind, PacedKind])
    _last: tuple[Kind, int] | None = None
    """The last transfer, and its round."""

    def target_s(
        self, epoch: int, members: tuple[str, ...], kind: Kind, outer_round: int, last_took_s: float
    ) -> float | None:
        """How long a transfer is to take; None: as TCP has it.

        `last_took_s`: of the one in the round before, which all members know alike; 0: they do not.
        """
        if (epoch, members) != self._between:
            self._between, self._kinds, self._last = (epoch, members), {}, None
        if self._last is not None and self._last[1] != outer_round and last_took_s > 0:
            last = self._last[0]
            self._kinds[last] = self._kinds.get(last, PacedKind()).after(last_took_s)
        self._last = (kind, outer_round)
        target_s = self._kinds.get(kind, PacedKind()).target_s
        if target_s is None or len(members) < 3 or 2 * kind[0] / len(members) > _MOST_BYTES_PER_S * target_s:
            return None  # nothing is shared, or it is no slow link
        return target_s

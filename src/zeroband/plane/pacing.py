"""How fast a node sends where its links share an access link: at an even pace, as long as that is faster. Pure.

TCP finds the rate of a link by filling its queue until packets are lost. Of several links that share one, some get more
than others and are done long before them; in the end only a part of the access is used, and what was lost at a
receiver's end was sent for nothing. Where every link gets as much as makes it end with all others, a little below what
the access carries, nothing waits and nothing is lost. How long a transfer takes then shows only by trying: all members
begin with the same rounds and see the same times, so they come to about the same pace without asking one another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_LEAST_S = 1.0
"""A transfer that is over sooner depends on more than the rate of its links."""

_MOST_BYTES_PER_S = 8e6
"""Over one link. What is faster wants several streams, and is no access that a home has."""

_TRIALS = 2
"""Transfers for each setting; the faster one counts."""

_FIRST, _NEXT, _BOLDEST = 0.95, 0.97, 0.8
"""Of the time that the last one took: what is tried first, and then in steps, which grow where many of them paid: the
times that were seen before had other reasons than the links. To try too much costs little: it is as TCP has it."""

_FEW = 3
"""Steps that pay before they grow."""

_WORTH = 0.985
"""A pace is kept where the transfer takes less than this part of the time before."""

_LATE, _MOST_LATE = 1.1, 3
"""So many transfers in a row that take longer than they did by this factor: the links are not what they were."""

_STRETCH = 32
"""Rounds. What was settled in one stretch is tried again in the next, by all members with the same round."""


@dataclass(frozen=True)
class Pacing:
    """What was learned of one kind of transfer."""

    target_s: float | None = None
    """How long the next one is to take; None: as TCP has it."""
    kept_s: float | None = None
    """The target to go back to where the one that is tried does not pay."""
    best_s: float = math.inf
    """What it took, as it was kept."""
    trials: int = 0
    paid: int = 0
    """Steps in a row that did."""
    settled_in: int | None = None
    """The stretch of rounds; None: something is being tried."""

    def after(self, took_s: float, outer_round: int) -> Pacing:
        """What is known after another transfer, in this round."""
        stretch = outer_round // _STRETCH
        if self.settled_in is not None:
            return self._settled(took_s) if self.settled_in == stretch else self._again()
        if self.target_s is None:
            return self._unpaced(took_s, stretch)
        if took_s <= _WORTH * self.best_s:
            paid = self.paid + 1
            return Pacing(_step(paid) * took_s, self.target_s, took_s, paid=paid)
        if self.trials + 1 < _TRIALS:
            return replace(self, trials=self.trials + 1)
        if self.paid > _FEW:
            return replace(self, target_s=_NEXT * self.best_s, trials=0, paid=0)
        return replace(self, target_s=self.kept_s, trials=0, paid=0, settled_in=stretch)

    def _unpaced(self, took_s: float, stretch: int) -> Pacing:
        seen = replace(self, best_s=min(self.best_s, took_s), trials=self.trials + 1)
        if seen.trials < _TRIALS:
            return seen
        if seen.best_s < _LEAST_S:
            return replace(seen, trials=0, settled_in=stretch)
        return replace(seen, target_s=_FIRST * seen.best_s, trials=0)

    def _settled(self, took_s: float) -> Pacing:
        is_late = self.target_s is not None and took_s > _LATE * self.best_s
        late = self.trials + 1 if is_late else 0
        return Pacing() if late == _MOST_LATE else replace(self, trials=late)

    def _again(self) -> Pacing:
        if self.target_s is None:
            return Pacing()
        return replace(self, target_s=_NEXT * self.best_s, trials=0, settled_in=None)


def _step(paid: int) -> float:
    return _NEXT if paid <= _FEW else max(_BOLDEST, _NEXT**2 ** (paid - _FEW))


@dataclass
class Paces:
    """Of all transfers between the same members. Each kind of them, told by its bytes, is paced by itself."""

    _members: frozenset[str] = frozenset()
    _kinds: dict[tuple[tuple[str, int], ...], Pacing] = field(default_factory=dict[tuple[tuple[str, int], ...], Pacing])

    def of(self, to_send: Mapping[str, int]) -> Mapping[str, int]:
        """Bytes per second to each member in the next transfer; empty: as TCP has it. `to_send`: bytes to each."""
        if self._members != (members := frozenset(to_send)):
            self._members, self._kinds = members, {}
        target_s = self._kinds.get(_kind(to_send), Pacing()).target_s
        return {} if target_s is None else {m: math.ceil(sent / target_s) for m, sent in to_send.items()}

    def after(self, to_send: Mapping[str, int], took_s: float, outer_round: int) -> None:
        """Such a transfer took so long."""
        if len(to_send) < 2 or max(to_send.values()) > _MOST_BYTES_PER_S * took_s:
            return  # nothing is shared, or it is no slow link
        kind = _kind(to_send)
        self._kinds[kind] = self._kinds.get(kind, Pacing()).after(took_s, outer_round)


def _kind(to_send: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(to_send.items()))

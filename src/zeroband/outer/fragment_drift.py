"""How much training a contribution of a fragment holds, as a fraction of the usual amount. Pure.

A fragment's turn comes once in as many phases as there are fragments. A node that joins begins with the outer
parameters of all fragments at once, so it comes to the first turns with fewer phases behind it, and what it contributes
is shorter. Rounds whose members differ in that count phases beside members (`Opening.shares`).
"""

from __future__ import annotations

from typing import Literal

_DIGITS = 9
"""To which a part is rounded, so that the same phases added up in another order are the same part."""


class FragmentDrift:
    """Phases by which each fragment of a node is ahead of the outer parameters.

    `fragments`: how many there are. `travels`: part of a phase that a round travels while training goes on. `merge`,
    `alpha`: what a node does with a round that has arrived, as in `DilocoConfig`.
    """

    def __init__(
        self, fragments: int, *, travels: float, merge: Literal["overwrite", "mix", "eager"], alpha: float
    ) -> None:
        self._ahead = [0.0] * fragments
        self._sent = [0.0] * fragments
        self._is_eager = merge == "eager"
        self._keeps = {"overwrite": 0.0, "mix": alpha, "eager": 1.0}[merge]
        self._usual = fragments - (1 - self._keeps) * travels

    def end_phase(self) -> None:
        """Add a phase to all fragments."""
        self._ahead = [ahead + 1 for ahead in self._ahead]

    def contribute(self, turn: int) -> float:
        """Return the part of a usual turn that lies behind what is contributed now."""
        self._sent[turn] = self._ahead[turn]
        if len(self._ahead) == 1:  # every phase ends with its turn
            return 1.0
        return round(max(0.0, self._ahead[turn]) / self._usual, _DIGITS)

    def receive(self, turn: int, since: float, longest: float) -> None:
        """Merge a fragment with the outer parameters, `since` phases after it was contributed.

        `longest`: of the round (`Opening.longest`). The outer parameters went on by that many turns, those of an eager
        node by its own. Of the distance that is left, merging keeps a part.
        """
        went_on = longest * self._usual if longest and not self._is_eager else self._sent[turn]
        self._ahead[turn] = self._keeps * (self._ahead[turn] + since - went_on) - since

    def restart(self, turn: int) -> None:
        """Train a fragment from the outer parameters."""
        self._ahead[turn] = 0.0

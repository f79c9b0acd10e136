"""What each payload of a scored round alone does to the held-out loss, as this node measures it. All local ranks.

The outer parameters are those before the round's step. Losses are compared on the same rows, so that what differs is
the payload; no gradient is made, and no bit of the training changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor

from zeroband.config.ranges import MOST_LOSS
from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.membership.scoring import drawn, lot_of
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.node.mesh import LocalMesh
from zeroband.outer.payloads import PayloadExchange
from zeroband.state.flat import parameter_shards

SCORED = "scored"
"""Name of the shared buffer that has what one payload alone makes: 4 bytes a parameter, where payloads are scored."""


class PayloadScores:
    """Scores payloads of the newest round. `section`: of the parameters. `step`: (outer, result) -> outer after it."""

    def __init__(
        self, parts: OuterParts, payloads: PayloadExchange, section: str, step: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._parts = parts
        self._payloads = payloads
        self._section = section
        self._step = step
        if parts.scoring is not None:
            parts.buffers.open(SCORED)

    def measure(self, verdict: Verdict, turn: int) -> tuple[float | None, ...]:
        """By how many nats per token each drawn payload alone lowers the loss; empty where none is drawn.

        Empty as well for a node that leaves. `turn`: fragment of the round, which is committed and not applied.
        """
        parts, member_id = self._parts, self._parts.mesh.member_id
        scored, scorer = drawn(verdict, parts.scoring), parts.scorer
        if not scored or scorer is None or not verdict.opening.wanted().get(member_id):
            return ()
        rows = lot_of(verdict, f"rows of {member_id}")
        before = scorer.loss(self._values(None), rows)
        if not math.isfinite(before):
            return ()
        gains: list[float | None] = []
        for sender in scored:
            _show_life(parts.mesh.local, parts.mesh.flags.advance)
            is_there = self._payloads.write_alone(sender, parts.buffers[SCORED])
            gains.append(_gain(before, scorer.loss(self._values(turn), rows)) if is_there else None)
        return tuple(gains)

    def _values(self, turn: int | None) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters before the round, or after a step by what lies in the buffer for this fragment."""
        parts = self._parts
        shards = parameter_shards(parts.model)
        names = () if turn is None else [name for name in parts.fragments[turn].names if name in shards]
        moved = dict(parts.sent.held(parts.buffers[SCORED], names)) if names else {}
        for name, outer in parts.shards.held(parts.buffers[self._section], shards):
            yield name, self._step(outer, moved[name]) if name in moved else outer


def _gain(before: float, after: float) -> float:
    """What is told of two losses; one that is not finite any more is as bad as can be."""
    return max(-MOST_LOSS, min(MOST_LOSS, before - after)) if math.isfinite(after) else -MOST_LOSS


def _show_life(local: LocalMesh, advance: Callable[[], object]) -> None:
    if local.rank == 0:
        advance()

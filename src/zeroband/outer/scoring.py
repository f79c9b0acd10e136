"""Measures how much each payload of a scored round alone changes the held-out loss. All local ranks.

The outer parameters are those before the round's step. Losses are compared on the same rows, so only the payload
differs; no gradient is computed, and training does not change by a single bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.membership.trust import random_draw, scored_members
from zeroband.elastic.rounds.interfaces import OuterParts, Scorer
from zeroband.outer.payloads import PayloadExchange
from zeroband.state.flat import parameter_shards

SCORED = "scored"
"""Name of the shared buffer for the result of one payload alone: 4 bytes per parameter, if payloads are scored."""

_PART = 0.5
"""Fraction of a step that is measured: near the end of training a payload that helps in the mean overshoots alone."""


class PayloadScores:
    """Scores payloads of the newest round. `section`: of the parameters. `step`: (outer, result) -> outer after it."""

    def __init__(
        self, parts: OuterParts, payloads: PayloadExchange[Any], section: str, step: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        self._parts = parts
        self._payloads = payloads
        self._section = section
        self._step = step
        if parts.scoring is not None:
            parts.buffers.open(SCORED)

    def measure(self, verdict: Verdict, fragment_index: int) -> tuple[float | None, ...]:
        """Return `Ready.gains`: how much each drawn payload alone lowers the loss, relative to this node's own payload.

        Empty if none is drawn, if its own does not lower the loss, or if the node leaves. `fragment_index`: of the
        round, which is committed and not applied yet.
        """
        scoring, member_id = self._parts.scoring, self._parts.mesh.member_id
        scored = scored_members(verdict, scoring.rule) if scoring is not None else ()
        if scoring is None or not scored or not verdict.plan.wanted().get(member_id):
            return ()
        rows, scorer = random_draw(verdict, f"rows of {member_id}"), scoring.scorer
        before = scorer.loss(self._values(None), rows)
        own = self._gain(scorer, member_id, fragment_index, before, rows)
        if own is None or not own > 0:
            return ()
        gains = [
            self._gain(scorer, sender, fragment_index, before, rows) if sender != member_id else own
            for sender in scored
        ]
        return tuple(None if gain is None else max(-1.0, min(1.0, gain / own)) for gain in gains)

    def _gain(self, scorer: Scorer, sender: str, fragment_index: int, before: float, rows: int) -> float | None:
        """Nats per token by which a payload alone lowers the loss; None if it did not count in the round."""
        parts = self._parts
        if parts.mesh.local.rank == 0:
            parts.mesh.flags.advance()
        if not self._payloads.write_alone(sender, parts.buffers[SCORED]):
            return None
        gain = before - scorer.loss(self._values(fragment_index), rows)
        return gain if math.isfinite(gain) else -math.inf

    def _values(self, fragment_index: int | None) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters before the round, or on the way of a step by the payload in the buffer."""
        parts = self._parts
        shards = parameter_shards(parts.model)
        names = (
            () if fragment_index is None else [name for name in parts.fragments[fragment_index].names if name in shards]
        )
        moved = dict(parts.wire_layout.held(parts.buffers[SCORED], names)) if names else {}
        for name, outer in parts.shards.held(parts.buffers[self._section], shards):
            yield name, outer.lerp(self._step(outer, moved[name]), _PART) if name in moved else outer

"""How far the run is, as every verdict records it: inner steps, tokens, the data ledger, who reads what next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zeroband.data.ledger import Ledger, Range, count, take
from zeroband.elastic.membership.records import Opening, from_record, to_record


@dataclass(frozen=True)
class RunShape:
    """The numbers that turn rounds into steps and samples; equal on all nodes."""

    total_steps: int
    batch_size: int
    reads_ahead: bool = False
    """A member trains on while its round is still being reduced, so it holds the samples of two rounds."""
    closing_rounds: int = 0
    """Rounds without inner steps at the end, in which the fragments are sent that the last one did not send."""


@dataclass(frozen=True)
class Progress:
    """The run after a committed round. Identical on all members."""

    inner_step: int
    """Inner steps done: in each round as many as the member that made the most."""
    tokens: int
    """Tokens that contributed to committed rounds."""
    ledger: Ledger
    assigned: Mapping[str, tuple[Range, ...]]
    """The ranges of global sample indices that each member reads in the next round, or still does from an earlier."""
    is_complete: bool = False
    """The run is done: there is no next round."""
    outer_step: int = 0
    """Outer steps behind the state. A run that began again, or went back, has had more rounds than that."""
    founding: str = ""
    """Id of the opening with which this line of rounds began."""
    follows: tuple[str, int] | None = None
    """The line and the round whose state it began with; None: with the initial one."""
    closing: int = 0
    """Rounds since all inner steps were done."""

    @staticmethod
    def at_start() -> Progress:
        return Progress(0, 0, Ledger(), {})

    def after(self, opening: Opening, shape: RunShape) -> Progress:
        """The progress once the round of this opening is committed: data settled, and dealt out for the next round."""
        inner_step = min(self.inner_step + max(opening.steps, default=0), shape.total_steps)
        closing = self.closing + 1 if self.inner_step >= shape.total_steps else 0
        is_complete = inner_step >= shape.total_steps and closing >= shape.closing_rounds
        contributors = opening.contributors().items()
        used = {m: steps * shape.batch_size for m, steps in contributors if m in self.assigned}  # others had none of it
        kept = {} if is_complete else self._kept(opening, shape)
        ledger = self.ledger.settle(self.assigned, used, kept)
        left = shape.total_steps - inner_step
        wanted = {m: min(s, left) * shape.batch_size - count(kept.get(m, ())) for m, s in opening.wanted().items()}
        dealt, ledger = ledger.allocate(wanted)
        return replace(
            self,
            inner_step=inner_step,
            tokens=self.tokens + sum(w for w, s in zip(opening.weights, opening.steps, strict=True) if s),
            ledger=ledger,
            assigned={m: (*kept.get(m, ()), *dealt.get(m, ())) for m in [*dealt, *(m for m in kept if m not in dealt)]},
            is_complete=is_complete,
            outer_step=self.outer_step + 1,
            closing=closing,
        )

    def _kept(self, opening: Opening, shape: RunShape) -> dict[str, tuple[Range, ...]]:
        """What members still train on: those that are late, and, where they read ahead, those that stay."""
        kept = {m: spans for m, spans in self.assigned.items() if m in opening.late}
        if shape.reads_ahead:
            for member, steps, requested in zip(opening.members, opening.steps, opening.steps_requested, strict=True):
                _, rest = take(self.assigned.get(member, ()), steps * shape.batch_size)
                if requested and rest:
                    kept[member] = rest
        return kept

    def begin(self, opening: Opening, shape: RunShape, *, after_round: int | None) -> Progress:
        """The progress of a line that begins with this opening, on the state that this progress belongs to.

        What was dealt out goes back to the pool first: those who had it are gone, or begin anew. Members that read
        ahead get what they ask for twice, all of them in turn, as they do later on. `after_round`: the round of the
        state; None: it is the initial one.
        """
        left, ledger = shape.total_steps - self.inner_step, self.ledger.settle(self.assigned, {})
        assigned = dict[str, tuple[Range, ...]]()
        for _ in range(2 if shape.reads_ahead else 1):
            most = left * shape.batch_size
            wanted = {
                m: min(s * shape.batch_size, most - count(assigned.get(m, ()))) for m, s in opening.wanted().items()
            }
            dealt, ledger = ledger.allocate(wanted)
            assigned |= {m: (*assigned.get(m, ()), *spans) for m, spans in dealt.items()}
        follows = None if after_round is None else (self.founding, after_round)
        return replace(
            self,
            ledger=ledger,
            assigned=assigned,
            is_complete=left <= 0,
            founding=opening.id,
            follows=follows,
            closing=0,
        )

    def to_record(self) -> dict[str, Any]:
        """What a verdict records of it."""
        return to_record(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Progress:
        """The inverse. Raises ValueError."""
        return from_record(Progress, record)

"""How far the run is, as every verdict records it: inner steps, tokens, the data ledger, who reads what next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroband.data.ledger import Ledger, Range
from zeroband.elastic.epoch import Opening


@dataclass(frozen=True)
class RunShape:
    """The numbers that turn rounds into steps and samples; equal on all nodes."""

    total_steps: int
    steps_per_round: int
    batch_size: int


@dataclass(frozen=True)
class Progress:
    """The run after a committed round. Identical on all members."""

    inner_step: int
    """Inner steps done."""
    tokens: int
    """Tokens that contributed to committed rounds."""
    ledger: Ledger
    assigned: Mapping[str, tuple[Range, ...]]
    """The ranges of global sample indices that each member reads in the next round."""

    @staticmethod
    def at_start() -> Progress:
        return Progress(0, 0, Ledger(), {})

    @property
    def is_complete(self) -> bool:
        """The run is done: a round was committed that handed out no more work."""
        return self.inner_step > 0 and not self.assigned

    def steps_in_next_round(self, shape: RunShape) -> int:
        return min(shape.steps_per_round, shape.total_steps - self.inner_step)

    def after(self, opening: Opening, shape: RunShape) -> Progress:
        """The progress once the round of this opening is committed: data settled, and dealt out for the next round."""
        done = 0 if not self.assigned else self.steps_in_next_round(shape)
        ledger = self.ledger.settle(self.assigned, set(opening.contributors()))
        settled = Progress(self.inner_step + done, self.tokens + opening.total_weight, ledger, {})
        samples_each = settled.steps_in_next_round(shape) * shape.batch_size
        if samples_each == 0:
            return settled
        assigned, ledger = ledger.allocate(opening.members, samples_each)
        return Progress(settled.inner_step, settled.tokens, ledger, assigned)

    def to_record(self) -> dict[str, Any]:
        return {
            "inner_step": self.inner_step,
            "tokens": self.tokens,
            "ledger": self.ledger.to_json(),
            "assigned": {member: [list(r) for r in ranges] for member, ranges in self.assigned.items()},
        }

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Progress:
        assigned = {m: tuple((int(a), int(b)) for a, b in ranges) for m, ranges in record["assigned"].items()}
        return Progress(record["inner_step"], record["tokens"], Ledger.from_json(record["ledger"]), assigned)

"""How far the run is, as every verdict records it: inner steps, tokens, and the data ledgers: who reads what next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zeroband.config.ranges import Count, Id
from zeroband.data.ledger import SHARED, Ledger, Range, allocate, count, settle, take
from zeroband.elastic.membership.records import Claim, RoundPlan, Verdict, from_record, to_record
from zeroband.errors import ConfigError

MAX_LATE_PHASES = 4
"""Phases of inner steps for which a late member holds samples, at most: it contributes those of one less, and trains on
one."""


@dataclass(frozen=True)
class RunShape:
    """The numbers that turn rounds into steps and samples; equal on all nodes."""

    total_steps: int
    batch_size: int
    reads_ahead: bool = False
    """A member trains on while its round is still being reduced, so it holds the samples of two rounds."""
    closing_rounds: int = 0
    """Rounds without inner steps at the end, in which the fragments are sent that the last one did not send."""
    sample_tokens: int = 0
    """Targets of a sample at most; 0: not known."""


@dataclass(frozen=True)
class Progress:
    """The run after a committed round. Identical on all members."""

    inner_step: Count
    """Inner steps done: in each round as many as the member that made the most."""
    tokens: Count
    """Tokens that contributed to committed rounds."""
    ledgers: Mapping[Id, Ledger]
    """What became of each corpus of which samples were dealt out, by its name (`Ready.corpus`)."""
    is_complete: bool = False
    """The run is done: there is no next round."""
    outer_step: Count = 0
    """Outer steps behind the state. A run that began again, or went back, has had more rounds than that."""
    founding: Id = ""
    """Id of the plan with which this line of rounds began."""
    follows: tuple[Id, Count] | None = None
    """The line and the round whose state it began with; None: with the initial one."""
    closing: Count = 0
    """Rounds since all inner steps were done."""

    @staticmethod
    def at_start() -> Progress:
        return Progress(0, 0, {})

    @cached_property
    def assigned(self) -> Mapping[str, tuple[Range, ...]]:
        """The samples that each member reads in the next round, or still does from an earlier; by its corpus."""
        return {member: spans for ledger in self.ledgers.values() for member, spans in ledger.assigned.items()}

    def after(self, plan: RoundPlan, shape: RunShape) -> Progress:
        """The progress once the round of this plan is committed: data settled, and dealt out for the next round."""
        if plan.claims:
            claimed = replace(self, ledgers=deal_claims(dict(plan.claims), self.ledgers))
            return claimed.after(replace(plan, claims=()), shape)
        inner_step = min(self.inner_step + plan.advanced_steps, shape.total_steps)
        closing = self.closing + 1 if self.inner_step >= shape.total_steps else 0
        is_complete = inner_step >= shape.total_steps and closing >= shape.closing_rounds
        contributors = plan.contributors().items()
        used = {m: steps * shape.batch_size for m, steps in contributors}
        kept = {} if is_complete else self._kept(plan, shape)
        left = shape.total_steps - inner_step
        corpora = {m: corpus for corpus, ledger in self.ledgers.items() for m in ledger.assigned}
        phases = plan.wanted() | self._wanted_by_late(plan, kept, shape)
        wanted = {m: min(s, left) * shape.batch_size - count(kept.get(m, ())) for m, s in phases.items()}
        return replace(
            self,
            inner_step=inner_step,
            tokens=self.tokens + _tokens_of(plan),
            ledgers=allocate(settle(self.ledgers, used, kept), wanted, {**corpora, **plan.corpus_of()}),
            is_complete=is_complete,
            outer_step=self.outer_step + 1,
            closing=closing,
        )

    def _wanted_by_late(self, plan: RoundPlan, kept: Mapping[str, Sequence[Range]], shape: RunShape) -> dict[str, int]:
        """Inner steps for which late members hold samples: they train on while their contribution waits.

        One phase more each round, up to `MAX_LATE_PHASES`, which bounds the work that is late or lost with them.
        """
        phase = max(plan.steps_requested, default=0) // (2 if shape.reads_ahead else 1)
        held = {m: count(kept[m]) // shape.batch_size for m in plan.late if m in kept}
        return {m: min(steps + phase, MAX_LATE_PHASES * phase) for m, steps in held.items()}

    def _kept(self, plan: RoundPlan, shape: RunShape) -> dict[str, tuple[Range, ...]]:
        """Samples that members still train on: late members, and staying members that read ahead.

        If training waits for each round, only members that were late before do: they hold more than any asks for.
        """
        used = {carried.member: carried.steps * shape.batch_size for carried in plan.counted}
        kept = {m: take(spans, used.get(m, 0))[1] for m, spans in self.assigned.items() if m in plan.late}
        most = 0 if shape.reads_ahead else max(plan.steps_requested, default=0) * shape.batch_size
        for member, steps, requested in zip(plan.members, plan.steps, plan.steps_requested, strict=False):
            held = self.assigned.get(member, ())
            _, rest = take(held, steps * shape.batch_size)
            if requested and rest and count(held) > most:
                kept[member] = rest
        return kept

    def begin(self, plan: RoundPlan, shape: RunShape, *, after_round: int | None) -> Progress:
        """The progress of a line of rounds that begins with this plan, on this progress's state.

        Assigned samples return to the pool first: their holders are gone or start over. Members that read ahead get
        twice what they ask for, dealt in turn as in later rounds. `after_round`: the round of the state; None: it is
        the initial one.
        """
        left, ledgers = shape.total_steps - self.inner_step, settle(self.ledgers, {}, {})
        dealt = dict.fromkeys(plan.members, 0)
        for _ in range(2 if shape.reads_ahead else 1):
            wanted = {m: min(s, left - dealt[m]) for m, s in plan.wanted().items()}
            dealt = {m: dealt[m] + steps for m, steps in wanted.items()}
            samples = {m: steps * shape.batch_size for m, steps in wanted.items()}
            ledgers = allocate(ledgers, samples, plan.corpus_of())
        follows = None if after_round is None else (self.founding, after_round)
        return replace(
            self,
            ledgers=ledgers,
            is_complete=left <= 0,
            founding=plan.id,
            follows=follows,
            closing=0,
        )

    def to_record(self) -> dict[str, Any]:
        """What a verdict records of it."""
        return to_record(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Progress:
        """The inverse. Raises ValueError."""
        return from_record(Progress, upgraded(record))

    @staticmethod
    def of_verdict(verdict: Verdict) -> Progress:
        """The run after a verdict that was found in a store. Raises ConfigError where it names no progress."""
        try:
            return Progress.from_record(verdict.record["progress"])
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"the store's record of this run, round {verdict.round}, names no progress that this version reads "
                f"({type(error).__name__}: {error!s:.200}); use the version that wrote it, or another run.id"
            ) from error


def _tokens_of(plan: RoundPlan) -> int:
    """Tokens that count in a round, of members that made steps for it and of those that are carried."""
    member_columns = sum(w for w, s in zip(plan.weights, plan.steps, strict=False) if s)
    return member_columns + sum(carried.weight for carried in plan.counted)


def ledgers_after(verdict: Verdict | None) -> Mapping[str, Ledger]:
    """Return the data ledgers after a verdict; none if there is no verdict, or it names no progress."""
    try:
        return {} if verdict is None else Progress.of_verdict(verdict).ledgers
    except ConfigError:
        return {}


def upgraded(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of a progress in today's form; checkpoints and events of earlier versions have one ledger in it."""
    if "ledger" not in record:
        return record
    rest = {name: value for name, value in record.items() if name not in ("ledger", "assigned")}
    return {**rest, "ledgers": {SHARED: {**record["ledger"], "assigned": record["assigned"]}}}


_MAX_AHEAD = 1 << 32
"""Samples that a claim may reach beyond the dealt ones. A liar with the token gains nothing by it: what it skips is in
the pool. But sample numbers end at `MOST_COUNT`, which claims of this size reach after two million rounds."""

_ROUNDS_AHEAD = 2
"""A round deals at most about twice what is dealt now: late members hold the samples of two phases."""


def valid_claims(ledgers: Mapping[str, Ledger], *claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """Return the claims that can be dealt as they are; of two that overlap, the first, in the order of the arguments.

    A member that holds dealt samples has no claim any more.
    """
    kept, holders = dict[str, Claim](), {member for ledger in ledgers.values() for member in ledger.assigned}
    for member, claim in (pair for some in claims for pair in sorted(some.items())):
        ledger = ledgers.get(claim.corpus, Ledger())
        is_near = ledger.next <= claim.start < claim.stop <= ledger.next + _MAX_AHEAD
        if is_near and member not in (*kept, *holders) and not _overlaps(claim, kept.values()):
            kept[member] = claim
    return kept


def _overlaps(claim: Claim, others: Iterable[Claim]) -> bool:
    same = (other for other in others if other.corpus == claim.corpus)
    return any(claim.start < other.stop and other.start < claim.stop for other in same)


def deal_claims(claims: Mapping[str, Claim], ledgers: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Return the ledgers with each claimed range dealt to its joiner. Claims that do not stand are ignored."""
    found = dict(ledgers)
    for member, claim in sorted(claims.items(), key=lambda pair: (pair[1].start, pair[0])):
        found[claim.corpus] = found.get(claim.corpus, Ledger()).claim(member, claim.span)
    return found


def choose_claim(ledgers: Mapping[str, Ledger], corpus: str, samples: int, others: Mapping[str, Claim]) -> Claim:
    """Return a range of this many samples that no round is about to deal and no other joiner has claimed."""
    ledger = ledgers.get(corpus, Ledger())
    held: list[Range] = [span for spans in ledger.assigned.values() for span in spans]
    taken = [claim.stop for claim in valid_claims(ledgers, others).values() if claim.corpus == corpus]
    start = max([ledger.next + _ROUNDS_AHEAD * count(held), *taken])
    return Claim(start, start + samples, corpus)

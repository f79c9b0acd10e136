"""The run's progress, as every verdict records it: inner steps, tokens, data ledgers, and joiners' claims on samples.

A joiner claims samples so that it can train before a round deals it any. A claim lies beyond all dealt samples and
beyond about what the next round deals. The next plan that sees it deals the range to the joiner. Samples before the
range go to the pool, from which the same round deals first, so the ledger has no gap. Once a round deals claimed
samples to others, the claim is void and the joiner starts again as a new member.
"""

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
"""Most phases for which a late member holds samples: it trains on one, and contributes the others."""


@dataclass(frozen=True)
class RunShape:
    """Settings that convert rounds to steps and samples; equal on all nodes."""

    total_steps: int
    batch_size: int
    reads_ahead: bool = False
    """Members train while a round is reduced, so they hold the samples of two rounds."""
    closing_rounds: int = 0
    """Final rounds without inner steps that send the remaining fragments."""
    sample_tokens: int = 0
    """Most target tokens per sample; 0: unknown."""


@dataclass(frozen=True)
class Progress:
    """The run's state after a committed round, identical on all members."""

    inner_step: Count
    """Completed inner steps: the sum over rounds of the largest member's number."""
    tokens: Count
    """Tokens in committed contributions."""
    ledgers: Mapping[Id, Ledger]
    """Ledger of each corpus by name (`Ready.corpus`)."""
    is_complete: bool = False
    """The run is finished: there is no next round."""
    outer_step: Count = 0
    """Outer steps in the state. A run that was restarted or rolled back has had more rounds."""
    founding: Id = ""
    """Id of the plan that began this line of rounds."""
    follows: tuple[Id, Count] | None = None
    """Line and round whose state it began with; None: the initial state."""
    closing: Count = 0
    """Rounds since all inner steps were completed."""

    @staticmethod
    def at_start() -> Progress:
        return Progress(0, 0, {})

    @cached_property
    def assigned(self) -> Mapping[str, tuple[Range, ...]]:
        """Ranges dealt to each member, of its corpus, for the next round or still from an earlier one."""
        return {member: spans for ledger in self.ledgers.values() for member, spans in ledger.assigned.items()}

    def after(self, plan: RoundPlan, shape: RunShape) -> Progress:
        """Return the progress after committing this plan: samples settled, and dealt for the next round."""
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
        """Inner steps for which late members hold samples, since they continue to train.

        One phase more per round, up to `MAX_LATE_PHASES`, which bounds the work lost if they die.
        """
        phase = max(plan.steps_requested, default=0) // (2 if shape.reads_ahead else 1)
        held = {m: count(kept[m]) // shape.batch_size for m in plan.late if m in kept}
        return {m: min(steps + phase, MAX_LATE_PHASES * phase) for m, steps in held.items()}

    def _kept(self, plan: RoundPlan, shape: RunShape) -> dict[str, tuple[Range, ...]]:
        """Samples that late members, and staying members that read ahead, still train on.

        If training waits for each round, only previously late members hold more samples than any member requests.
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
        """Return the progress of a new line of rounds that begins with this plan and this progress's state.

        Assigned samples return to the pool first, since their holders are gone or start over. Members that read ahead
        get samples for two rounds, dealt in turn as in later rounds. `after_round`: round of the state; None: the
        initial state.
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
        """Convert to the plain values that a verdict records."""
        return to_record(self)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Progress:
        """Read a verdict's values. Raises ValueError."""
        return from_record(Progress, upgraded(record))

    @staticmethod
    def of_verdict(verdict: Verdict) -> Progress:
        """Read the progress in a verdict from a store. Raises ConfigError if it has none."""
        try:
            return Progress.from_record(verdict.record["progress"])
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"the store's record of this run, round {verdict.round}, has no progress that this version can read "
                f"({type(error).__name__}: {error!s:.200}); use the version that wrote it, or another run.id"
            ) from error


def _tokens_of(plan: RoundPlan) -> int:
    """Contributed tokens of a round, including carried ones."""
    member_columns = sum(w for w, s in zip(plan.weights, plan.steps, strict=False) if s)
    return member_columns + sum(carried.weight for carried in plan.counted)


def ledgers_after(verdict: Verdict | None) -> Mapping[str, Ledger]:
    """Return the data ledgers after a verdict; empty without a verdict or progress."""
    try:
        return {} if verdict is None else Progress.of_verdict(verdict).ledgers
    except ConfigError:
        return {}


def upgraded(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a progress record of earlier versions, which had a single ledger, to the current form."""
    if "ledger" not in record:
        return record
    rest = {name: value for name, value in record.items() if name not in ("ledger", "assigned")}
    return {**rest, "ledgers": {SHARED: {**record["ledger"], "assigned": record["assigned"]}}}


_MAX_AHEAD = 1 << 32
"""Most samples that a claim may reach beyond the dealt ones. Skipped samples go to the pool, so a large claim harms
nothing but the range of sample numbers: claims of this size reach `MOST_COUNT` after two million rounds."""

_ROUNDS_AHEAD = 2
"""A round deals at most about twice the currently dealt samples: late members hold those of two phases."""


def valid_claims(ledgers: Mapping[str, Ledger], *claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """Return the claims that can be dealt; of overlapping ones the first, in argument order.

    A member that holds dealt samples has no valid claim.
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
    """Return the ledgers with each claimed range dealt to its joiner; invalid claims are ignored."""
    found = dict(ledgers)
    for member, claim in sorted(claims.items(), key=lambda pair: (pair[1].start, pair[0])):
        found[claim.corpus] = found.get(claim.corpus, Ledger()).claim(member, claim.span)
    return found


def choose_claim(ledgers: Mapping[str, Ledger], corpus: str, samples: int, others: Mapping[str, Claim]) -> Claim:
    """Choose a range of this many samples that no round is about to deal and no other joiner has claimed."""
    ledger = ledgers.get(corpus, Ledger())
    held: list[Range] = [span for spans in ledger.assigned.values() for span in spans]
    taken = [claim.stop for claim in valid_claims(ledgers, others).values() if claim.corpus == corpus]
    start = max([ledger.next + _ROUNDS_AHEAD * count(held), *taken])
    return Claim(start, start + samples, corpus)

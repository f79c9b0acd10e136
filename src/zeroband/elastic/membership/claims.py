"""Samples that joiners take by themselves, so that they train before a round has dealt them any. Pure.

A claim lies behind all that the ledger has dealt, and behind what the next round deals as far as that can be told. It
stands until a round deals its samples out. The next plan that sees it gives the samples to the joiner. Those before
them go to the pool, which the same round deals from first, so the ledger has no gap. A claim that no plan saw in
time is void, and the joiner begins again as another member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zeroband.data.ledger import Ledger, Range, count
from zeroband.elastic.membership.records import Claim

_MOST_AHEAD = 1 << 32
"""Samples that a claim may reach beyond the dealt ones. A liar with the token gains nothing by it: what it skips is in
the pool. But sample numbers end at `MOST_COUNT`, which claims of this size reach after two million rounds."""

_ROUNDS_AHEAD = 2
"""A round deals at most about twice what is dealt now: late members hold the samples of two phases."""


def standing(ledgers: Mapping[str, Ledger], *claims: Mapping[str, Claim]) -> dict[str, Claim]:
    """Return the claims that can be dealt as they are; of two that overlap, the first, in the order of the arguments.

    A member that holds dealt samples has no claim any more.
    """
    kept, holders = dict[str, Claim](), {member for ledger in ledgers.values() for member in ledger.assigned}
    for member, claim in (pair for some in claims for pair in sorted(some.items())):
        ledger = ledgers.get(claim.corpus, Ledger())
        is_near = ledger.next <= claim.start < claim.stop <= ledger.next + _MOST_AHEAD
        if is_near and member not in (*kept, *holders) and not _overlaps(claim, kept.values()):
            kept[member] = claim
    return kept


def _overlaps(claim: Claim, others: Iterable[Claim]) -> bool:
    same = (other for other in others if other.corpus == claim.corpus)
    return any(claim.start < other.stop and other.start < claim.stop for other in same)


def dealt_to(claims: Mapping[str, Claim], ledgers: Mapping[str, Ledger]) -> dict[str, Ledger]:
    """Return the ledgers with each claimed range dealt to its joiner. Claims that do not stand are ignored."""
    found = dict(ledgers)
    for member, claim in sorted(claims.items(), key=lambda pair: (pair[1].start, pair[0])):
        found[claim.corpus] = found.get(claim.corpus, Ledger()).claim(member, claim.span)
    return found


def choose(ledgers: Mapping[str, Ledger], corpus: str, samples: int, others: Mapping[str, Claim]) -> Claim:
    """Return a range of this many samples that no round is about to deal and no other joiner has claimed."""
    ledger = ledgers.get(corpus, Ledger())
    held: list[Range] = [span for spans in ledger.assigned.values() for span in spans]
    taken = [claim.stop for claim in standing(ledgers, others).values() if claim.corpus == corpus]
    start = max([ledger.next + _ROUNDS_AHEAD * count(held), *taken])
    return Claim(start, start + samples, corpus)

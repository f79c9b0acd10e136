"""Whether the digests of a run's rounds agree and its ledgers add up; no other place compares them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

KEPT_DIGESTS = 4096
"""Rounds of a line whose digests and ledgers can still be compared with what comes later."""
MOST_FOUND = 1000
"""Rounds that are kept of those that differ, or do not add up."""


@dataclass(slots=True)
class Check:
    """What nodes recorded of a round that can be held against one another, and when the first of them did."""

    digest: str
    node_id: str
    at_s: float
    is_compared: bool = False
    """Whether another node recorded a digest as well."""
    settled: int | None = None
    """Samples that are settled after it."""
    used: int = 0
    """Samples that its members contributed."""
    beyond: int | None = None
    """Samples that it settled beyond these; None: the round before is not known."""


@dataclass(slots=True)
class Counts:
    """What was checked of a line's rounds."""

    compared: int = 0
    """Rounds of which two nodes or more recorded a digest."""
    ledgers: int = 0
    """Rounds whose ledger was held against the one before."""
    trained: int = 0
    """Samples of these."""


class CheckedRounds:
    """Digests and ledgers of a line's rounds, each held against the others'."""

    def __init__(self) -> None:
        self._rounds: dict[int, Check] = {}
        self._forgotten: tuple[int, Check] | None = None
        """The newest round that is only counted any more."""
        self.counts = Counts()
        self.diverged: dict[int, Check] = {}
        self.wrong: dict[int, Check] = {}

    def digest(self, node_id: str, at_s: float, number: int, digest: str) -> None:
        """A node's digest of a round. One that goes on from memory records its newest again, which compares nothing."""
        known = self._rounds.get(number)
        if known is None:
            self._keep(number, Check(digest, node_id, at_s))
            return
        if node_id != known.node_id and not known.is_compared:
            self.counts.compared += 1
            known.is_compared = True
        if digest != known.digest and len(self.diverged) < MOST_FOUND:
            self.diverged.setdefault(number, known)

    def _keep(self, number: int, check: Check) -> None:
        self._rounds[number] = check
        if len(self._rounds) > KEPT_DIGESTS:
            for old in sorted(self._rounds)[: KEPT_DIGESTS // 8]:  # in one go: sorting costs
                gone = self._rounds.pop(old)
                if self._forgotten is None or old > self._forgotten[0]:
                    self._forgotten = (old, gone)

    def has_account(self, number: int) -> bool:
        """Whether a round's samples are known, or its digest is not kept any more."""
        known = self._rounds.get(number)
        return known is None or known.settled is not None

    def account(self, number: int, settled: int, used: int) -> None:
        """Samples that are settled after a round, and those that its members contributed."""
        known = self._rounds[number]
        known.settled, known.used = settled, used
        self._check(number)
        self._check(number + 1)

    def _check(self, number: int) -> None:
        before, check = self._rounds.get(number - 1), self._rounds.get(number)
        if before is None or check is None or before.settled is None or check.settled is None:
            return
        check.beyond = check.settled - before.settled - check.used
        self.counts.ledgers += 1
        self.counts.trained += check.used
        if check.beyond and len(self.wrong) < MOST_FOUND:
            self.wrong[number] = check

    def counts_at(self, is_later: Callable[[Check], bool]) -> Counts | None:
        """What was checked of the rounds up to a moment; None: of some of those only all together is known."""
        if self._forgotten is not None and is_later(self._forgotten[1]):
            return None
        counts = replace(self.counts)
        for check in filter(is_later, self._rounds.values()):
            counts.compared -= check.is_compared
            if check.beyond is not None:
                counts.ledgers -= 1
                counts.trained -= check.used
        return counts


def settled_of(progress: Mapping[str, Any]) -> int | None:
    """Samples of all corpora that count as learned from; None: recorded by an earlier version."""
    ledgers = progress.get("ledgers")
    if ledgers is None:
        return None
    settled = 0
    for ledger in ledgers.values():
        owed = [*ledger["returned"], *(span for spans in ledger["assigned"].values() for span in spans)]
        settled += int(ledger["next"]) - sum(int(stop) - int(start) for start, stop in owed)
    return settled

"""The four guarantees of the README, and what the facts of a run say of each. Pure.

No other place compares the digests of a run's rounds, or adds up its ledgers. Of an earlier moment it is what was known
then; what is not known of that moment any more is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zeroband.observe.view import EventView, node_id_of_member
from zeroband.observe.words import first_of, listed

KEPT_DIGESTS = 4096
"""Rounds of a line whose digests and ledgers can still be compared with what comes later."""
MOST_FOUND = 1000
"""Rounds that are kept of those that differ, or do not add up."""
_FEW_S = 5.0
"""What detecting a loss may cost on top of `fault.detect_s`: the round is opened and exchanged again."""
_LONG_AGO = "That is so long ago that what was checked by then is not known any more."

State = Literal["good", "bad", "unknown"]
Clock = Callable[[str, float], float]
"""Gives the run's time for a node's."""


@dataclass(frozen=True)
class Guarantee:
    """One of the four, and its evidence."""

    key: Literal["divergence", "ledger", "checkpoint", "detection"]
    state: State
    words: str
    evidence: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return _TITLES[self.key]


_TITLES = {
    "divergence": "No silent divergence",
    "ledger": "No silent data loss",
    "checkpoint": "Only committed state is visible",
    "detection": "Bounded detection",
}


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint that a node said is complete and durable."""

    step: int
    round: int
    node_id: str
    at_s: float
    bytes: int | None
    took_s: float | None
    read_by: tuple[str, float] | None = None
    """Who read and verified it since, and when, to go on from it."""
    gone: tuple[str, float] | None = None
    """Whose clock, and when: it was removed, or another one took its place."""


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


@dataclass(frozen=True)
class LossCost:
    """What a round that was opened again without lost members took a node."""

    member_ids: tuple[str, ...]
    round: int
    node_id: str
    took_s: float
    usual_s: float
    at_s: float


class Checked:
    """What was checked of some lines of rounds by a moment. `then_s` inf: by now."""

    def __init__(self, rounds: Iterable[CheckedRounds], then_s: float, time: Clock) -> None:
        self._rounds, self._then_s, self._time = list(rounds), then_s, time
        self.counts = self._counts()
        """None: that is not known any more."""

    def _counts(self) -> Counts | None:
        counts = Counts()
        for checked in self._rounds:
            known = checked.counts if self._then_s == math.inf else checked.counts_at(self._is_later)
            if known is None:
                return None
            counts.compared += known.compared
            counts.ledgers += known.ledgers
            counts.trained += known.trained
        return counts

    def _is_later(self, check: Check) -> bool:
        return self._time(check.node_id, check.at_s) > self._then_s

    def found(self, name: Literal["diverged", "wrong"]) -> list[tuple[int, Check]]:
        """The rounds in which something was found, by line."""
        found = [one for checked in self._rounds for one in sorted(getattr(checked, name).items())]
        return [(number, check) for number, check in found if not self._is_later(check)]


def divergence(checked: Checked, newest_round: int | None) -> Guarantee:
    """After every round all nodes that recorded it hold the same outer state."""
    counts, rounds = checked.counts, sorted({number for number, _ in checked.found("diverged")})
    if rounds:
        words = f"Nodes recorded different outer states after round {first_of(rounds)}."
        of = "" if counts is None else f" of {counts.compared}"
        return Guarantee("divergence", "bad", words, (f"{len(rounds)}{of} compared rounds differ",))
    if counts is None or not counts.compared:
        words = _LONG_AGO if counts is None else "No round was recorded by two nodes yet."
        return Guarantee("divergence", "unknown", words)
    evidence = [f"{counts.compared} rounds were recorded by two nodes or more, each with equal digests"]
    evidence += [] if newest_round is None else [f"the newest committed round is {newest_round}"]
    words = "After every round that two nodes or more recorded, all of them held the same outer state."
    return Guarantee("divergence", "good", words, tuple(evidence))


def ledger(checked: Checked) -> Guarantee:
    """Every round settles as many samples as its members contributed."""
    counts, wrong = checked.counts, checked.found("wrong")
    if wrong:
        number, check = wrong[0]
        beyond = check.beyond or 0
        what = f"{abs(beyond)} samples {'skipped' if beyond > 0 else 'counted twice'}"
        words = f"The ledger of round {number} does not add up: {what}."
        of = "" if counts is None else f" of {counts.ledgers}"
        return Guarantee("ledger", "bad", words, (f"{len(wrong)}{of} checked rounds do not add up",))
    if counts is None or not counts.trained:
        words = _LONG_AGO if counts is None else "No two neighbouring rounds with samples were recorded yet."
        return Guarantee("ledger", "unknown", words)
    evidence = (
        f"{counts.ledgers} rounds checked: each settled as many samples as its members contributed, "
        f"{counts.trained} in all",
        "single samples are not compared here: `zeroband data audit` replays every range",
    )
    return Guarantee("ledger", "good", "Every round's ledger counts as many samples as were trained.", evidence)


def checkpoint(there: Sequence[CheckpointView], failed: EventView | None, *, is_forgotten: bool) -> Guarantee:
    """The newest checkpoint is complete. `failed`: one that failed after it; `is_forgotten`: older ones may be."""
    newest = max(there, key=lambda one: (one.round, one.step), default=None)
    evidence: list[str] = []
    if newest is not None:
        size = "" if newest.bytes is None else f", {newest.bytes} bytes"
        took = "" if newest.took_s is None else f", written in {newest.took_s:.1f} s"
        evidence.append(f"step {newest.step} was committed by {newest.node_id}{size}{took}")
    read = [one for one in there if one.read_by is not None]
    evidence += [
        f"{one.read_by[0]} read step {one.step} back, verified every file that it took, and went on from it"
        for one in read[-1:]
        if one.read_by is not None
    ]
    if failed is not None:
        reason, step = str(failed.fields.get("reason", "")), failed.fields.get("step")
        words = f"The newest checkpoint, of step {step}, failed on {failed.node_id}: {reason}"
        return Guarantee("checkpoint", "bad", words, tuple(evidence))
    if newest is None:
        return Guarantee("checkpoint", "unknown", _LONG_AGO if is_forgotten else "No checkpoint was committed yet.")
    if newest not in read:
        evidence.append("no node has read it back yet: files are verified when they are read")
    words = f"The newest checkpoint, of step {newest.step}, is committed: every file was hashed as it was written."
    return Guarantee("checkpoint", "good", words, tuple(evidence))


def detection(losses: Sequence[LossCost], detect_s: float | None, time: Clock, *, is_forgotten: bool) -> Guarantee:
    """Losing a node costs the others about `fault.detect_s`. `detect_s` None: no node said it."""
    if not losses:
        return Guarantee("detection", "unknown", _LONG_AGO if is_forgotten else "No member was lost yet.")
    newest = max(losses, key=lambda one: time(one.node_id, one.at_s))
    same = [one for one in losses if one.round == newest.round and one.member_ids == newest.member_ids]
    worst = max(same, key=lambda one: one.took_s - one.usual_s)
    cost_s = max(0.0, worst.took_s - worst.usual_s)
    who = listed(sorted(map(node_id_of_member, worst.member_ids)), len(worst.member_ids))
    words = f"Losing {who} cost the others {cost_s:.1f} s, once."
    evidence = [f"round {worst.round} took {worst.took_s:.1f} s on {worst.node_id}; usual are {worst.usual_s:.1f} s"]
    if detect_s is None:
        words += " The nodes did not record their fault.detect_s."
        return Guarantee("detection", "unknown", words, tuple(evidence))
    evidence.append(f"allowed are fault.detect_s, {detect_s:g} s, and {_FEW_S:g} s for opening the round again")
    state = "good" if cost_s <= detect_s + _FEW_S else "bad"
    return Guarantee("detection", state, words, tuple(evidence))

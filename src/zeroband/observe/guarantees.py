"""Checks of the README's four guarantees against the facts of a run. Pure.

What status, top, board and report say about digests of rounds and ledgers comes from here. `zeroband data audit`
replays every range of samples, and `zeroband chaos` also compares what only a test needs. For a past time it reports
what was known then, or `unknown` if that was dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zeroband.observe.view import EventView, node_id_of_member
from zeroband.observe.words import first_of, listed

KEPT_DIGESTS = 4096
"""Rounds of a line whose digests and ledgers are kept for comparison."""
MOST_FOUND = 1000
"""Violating rounds that are kept."""
_FEW_S = 5.0
"""Allowed cost of a lost member on top of `fault.detect_s`: reopening and repeating the round."""
_LONG_AGO = "The checks of that time are no longer known."

State = Literal["good", "bad", "unknown"]
Clock = Callable[[str, float], float]
"""Converts a node's time to the run's."""


@dataclass(frozen=True)
class Guarantee:
    """A guarantee's state and evidence."""

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
    """A checkpoint that a node reported complete and durable."""

    step: int
    round: int
    node_id: str
    at_s: float
    bytes: int | None
    took_s: float | None
    read_by: tuple[str, float] | None = None
    """Node that resumed from it, verifying it, and when."""
    gone: tuple[str, float] | None = None
    """Node that reported it removed or replaced, and when."""


@dataclass(slots=True)
class Check:
    """What nodes recorded of a round for comparison, and the first of them."""

    digest: str
    node_id: str
    at_s: float
    is_compared: bool = False
    """Whether a second node recorded a digest."""
    settled: int | None = None
    """Samples settled after the round."""
    used: int = 0
    """Samples contributed by its members."""
    beyond: int | None = None
    """Samples settled minus samples contributed; None if the round before is unknown."""


@dataclass(slots=True)
class Counts:
    """Number of checks of a line's rounds."""

    compared: int = 0
    """Rounds with digests from two or more nodes."""
    ledgers: int = 0
    """Rounds whose ledger was compared with the previous round's."""
    trained: int = 0
    """Samples in these rounds."""


class CheckedRounds:
    """Compares the digests and ledgers of a line's rounds."""

    def __init__(self) -> None:
        self._rounds: dict[int, Check] = {}
        self._forgotten: tuple[int, Check] | None = None
        """The newest round that was dropped and is only counted."""
        self.counts = Counts()
        self.diverged: dict[int, Check] = {}
        self.wrong: dict[int, Check] = {}

    def digest(self, node_id: str, at_s: float, number: int, digest: str) -> None:
        """Add a node's digest of a round. A node that restores from memory repeats its newest, without comparison."""
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
            for old in sorted(self._rounds)[: KEPT_DIGESTS // 8]:  # in batches: sorting is slow
                gone = self._rounds.pop(old)
                if self._forgotten is None or old > self._forgotten[0]:
                    self._forgotten = (old, gone)

    def has_account(self, number: int) -> bool:
        """Whether a round's samples are known or its digest was dropped."""
        known = self._rounds.get(number)
        return known is None or known.settled is not None

    def account(self, number: int, settled: int, used: int) -> None:
        """Add the samples settled after a round and those that its members contributed."""
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
        """Return the counts up to a time; None if rounds after it were already dropped."""
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
    """Return the settled samples of all corpora; None for records without ledgers."""
    ledgers = progress.get("ledgers")
    if ledgers is None:
        return None
    settled = 0
    for ledger in ledgers.values():
        owed = [*ledger["returned"], *(span for spans in ledger["assigned"].values() for span in spans)]
        settled += int(ledger["next"]) - sum(int(stop) - int(start) for start, stop in owed)
    return settled


@dataclass(frozen=True)
class PeerLossCost:
    """Cost of lost members: the duration, on one node, of the round that was reopened without them."""

    member_ids: tuple[str, ...]
    round: int
    node_id: str
    took_s: float
    usual_s: float
    at_s: float


class Checked:
    """The checks of some lines of rounds up to `then_s`; inf means now."""

    def __init__(self, rounds: Iterable[CheckedRounds], then_s: float, time: Clock) -> None:
        self._rounds, self._then_s, self._time = list(rounds), then_s, time
        self.counts = self._counts()
        """None if no longer known."""

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
        """Return the violating rounds, by line."""
        found = [one for checked in self._rounds for one in sorted(getattr(checked, name).items())]
        return [(number, check) for number, check in found if not self._is_later(check)]


def divergence(checked: Checked, newest_round: int | None) -> Guarantee:
    """Check that all nodes held the same outer state after every round."""
    counts, rounds = checked.counts, sorted({number for number, _ in checked.found("diverged")})
    if rounds:
        words = f"Nodes recorded different outer states after round {first_of(rounds)}."
        of = "" if counts is None else f" of {counts.compared}"
        return Guarantee("divergence", "bad", words, (f"{len(rounds)}{of} compared rounds differ",))
    if counts is None or not counts.compared:
        words = _LONG_AGO if counts is None else "No round has been recorded by two nodes yet."
        return Guarantee("divergence", "unknown", words)
    evidence = [f"{counts.compared} rounds recorded by two or more nodes, all with equal digests"]
    evidence += [] if newest_round is None else [f"the newest committed round is {newest_round}"]
    words = "Nodes held the same outer state after every round that two or more of them recorded."
    return Guarantee("divergence", "good", words, tuple(evidence))


def ledger(checked: Checked) -> Guarantee:
    """Check that every round settles as many samples as its members contributed."""
    counts, wrong = checked.counts, checked.found("wrong")
    if wrong:
        number, check = wrong[0]
        beyond = check.beyond or 0
        what = f"{abs(beyond)} samples {'skipped' if beyond > 0 else 'counted twice'}"
        words = f"The ledger of round {number} does not add up: {what}."
        of = "" if counts is None else f" of {counts.ledgers}"
        return Guarantee("ledger", "bad", words, (f"{len(wrong)}{of} checked rounds do not add up",))
    if counts is None or not counts.trained:
        words = _LONG_AGO if counts is None else "No two consecutive rounds with samples have been recorded yet."
        return Guarantee("ledger", "unknown", words)
    evidence = (
        f"{counts.ledgers} rounds checked: each settled as many samples as its members contributed, "
        f"{counts.trained} in all",
        "individual samples are not compared; `zeroband data audit` replays every range",
    )
    return Guarantee("ledger", "good", "Every round's ledger counts as many samples as were trained.", evidence)


def checkpoint(there: Sequence[CheckpointView], failed: EventView | None, *, is_forgotten: bool) -> Guarantee:
    """Check that the newest checkpoint is complete. `failed`: a later one; `is_forgotten`: old ones were dropped."""
    newest = max(there, key=lambda one: (one.round, one.step), default=None)
    evidence: list[str] = []
    if newest is not None:
        size = "" if newest.bytes is None else f", {newest.bytes} bytes"
        took = "" if newest.took_s is None else f", written in {newest.took_s:.1f} s"
        evidence.append(f"step {newest.step} was committed by {newest.node_id}{size}{took}")
    read = [one for one in there if one.read_by is not None]
    evidence += [
        f"{one.read_by[0]} loaded step {one.step}, verified every file that it read, and resumed from it"
        for one in read[-1:]
        if one.read_by is not None
    ]
    if failed is not None:
        reason, step = str(failed.fields.get("reason", "")), failed.fields.get("step")
        words = f"The newest checkpoint, of step {step}, failed on {failed.node_id}: {reason}"
        return Guarantee("checkpoint", "bad", words, tuple(evidence))
    if newest is None:
        words = _LONG_AGO if is_forgotten else "No checkpoint has been committed yet."
        return Guarantee("checkpoint", "unknown", words)
    if newest not in read:
        evidence.append("no node has loaded it yet; files are verified on loading")
    words = f"The newest checkpoint, of step {newest.step}, is committed: every file was hashed as it was written."
    return Guarantee("checkpoint", "good", words, tuple(evidence))


def detection(losses: Sequence[PeerLossCost], detect_s: float | None, time: Clock, *, is_forgotten: bool) -> Guarantee:
    """Check that losing a node costs the others about `detect_s`; None if no node recorded it."""
    if not losses:
        return Guarantee("detection", "unknown", _LONG_AGO if is_forgotten else "No member has been lost yet.")
    newest = max(losses, key=lambda one: time(one.node_id, one.at_s))
    same = [one for one in losses if one.round == newest.round and one.member_ids == newest.member_ids]
    worst = max(same, key=lambda one: one.took_s - one.usual_s)
    cost_s = max(0.0, worst.took_s - worst.usual_s)
    who = listed(sorted(map(node_id_of_member, worst.member_ids)), len(worst.member_ids))
    words = f"Losing {who} cost the others {cost_s:.1f} s."
    evidence = [f"round {worst.round} took {worst.took_s:.1f} s on {worst.node_id}, usually {worst.usual_s:.1f} s"]
    if detect_s is None:
        words += " The nodes did not record their fault.detect_s."
        return Guarantee("detection", "unknown", words, tuple(evidence))
    evidence.append(f"allowed: fault.detect_s ({detect_s:g} s) plus {_FEW_S:g} s for reopening the round")
    state = "good" if cost_s <= detect_s + _FEW_S else "bad"
    return Guarantee("detection", state, words, tuple(evidence))

"""A line of rounds: all rounds since a founding or a rollback. Pure, bounded memory.

Times are by the recording node's clock; `RunHistory` converts them to one clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

from zeroband.observe.curves import BUCKETS, Bucket, Range, RangeSeries
from zeroband.observe.guarantees import CheckedRounds, PeerLossCost, settled_of
from zeroband.observe.view import number_of

NEWEST_ROUNDS = 120
"""Rounds that are kept individually; older ones are merged into at most as many ranges."""
_KEPT_LOSSES = 32
_SOURCES = 32
_LOSS_OF = "train/loss/"
_PARTS = ("wait", "transfer", "apply")


@dataclass(frozen=True, slots=True)
class NodeRound:
    """Durations of a round on one node, in seconds; means for merged rounds."""

    end_s: float
    """Time at which the node applied the newest commit."""
    rounds: int = 0
    """Rounds whose durations the node recorded."""
    compute_s: float = 0.0
    """Inner steps, without time blocked by the outer algorithm."""
    wait_s: float = 0.0
    transfer_s: float = 0.0
    apply_s: float = 0.0

    def merged(self, other: NodeRound) -> NodeRound:
        rounds = self.rounds + other.rounds
        share = other.rounds / max(1, rounds)

        def mean_s(mine_s: float, theirs_s: float) -> float:
            return mine_s + share * (theirs_s - mine_s)

        return NodeRound(
            max(self.end_s, other.end_s),
            rounds,
            mean_s(self.compute_s, other.compute_s),
            mean_s(self.wait_s, other.wait_s),
            mean_s(self.transfer_s, other.transfer_s),
            mean_s(self.apply_s, other.apply_s),
        )


@dataclass(frozen=True)
class RoundView:
    """A committed round, or merged neighbours with the newest one's values and mean durations."""

    round: int
    rounds: int
    epoch: int
    committed_at_s: float
    members: int
    retries: int
    step: int | None
    """Inner steps of the run after it."""
    nodes: Mapping[str, NodeRound]


@dataclass(slots=True)
class Round(Range):
    """A round as its members recorded it, or merged neighbours."""

    epoch: int = 0
    members: int = 0
    retries: int = 0
    step: int | None = None
    nodes: dict[str, NodeRound] = field(default_factory=dict[str, NodeRound])
    shown: RoundView | None = None
    """Its cached view; None after a change."""

    def merge(self, other: Self) -> None:
        if other.last >= self.last:
            self.epoch, self.members, self.step = other.epoch, other.members, other.step
        Range.merge(self, other)
        self.retries += other.retries
        for node_id, part in other.nodes.items():
            self.add(node_id, part)
        self.shown = None

    def add(self, node_id: str, part: NodeRound) -> None:
        known = self.nodes.get(node_id)
        self.nodes[node_id] = part if known is None else known.merged(part)


class Rounds:
    """The rounds of a line: the newest individually, older ones merged into ranges."""

    def __init__(self) -> None:
        self.newest: dict[int, Round] = {}
        self._older = RangeSeries[Round](NEWEST_ROUNDS)

    def at(self, number: int) -> Round:
        """Return the round, or the range that contains it, for adding to it."""
        found = self.newest.get(number)
        if found is None and len(self.newest) == NEWEST_ROUNDS and number < min(self.newest):
            found = self._older.at(number, lambda: Round(number, number))
        elif found is None:
            found = self.newest[number] = Round(number, number)
            if len(self.newest) > NEWEST_ROUNDS:
                self._older.add(self.newest.pop(min(self.newest)))
        found.shown = None
        return found

    def newest_first(self) -> Iterator[Round]:
        newest = (self.newest[number] for number in sorted(self.newest, reverse=True))
        return chain(newest, reversed(list(self._older)))


class LineSummary:
    """Summary of a line of rounds."""

    def __init__(self) -> None:
        self.first_at_s: dict[str, float] = {}
        """Time of each node's first line."""
        self.follows: str | None = None
        self.begin_step: int | None = None
        self.rounds = Rounds()
        self.peer_losses: deque[PeerLossCost] = deque(maxlen=_KEPT_LOSSES)
        self.checked = CheckedRounds()
        self.curve = RangeSeries[Bucket](BUCKETS)
        self.sources: dict[str, RangeSeries[Bucket]] = {}
        self.held_out = RangeSeries[Bucket](2 * NEWEST_ROUNDS)
        self._committed: dict[str, int] = {}
        """Tokens of the run after each node's newest round; before its first round, after its first step."""

    def add_step(self, node_id: str, at_s: float, record: Mapping[str, Any], members: int) -> None:
        """Add an inner step of a node. `members`: number in the node's epoch."""
        step, tokens = int(record["step"]), self._tokens(node_id, record, members)
        bucket = self.curve.at(step, lambda: Bucket(step, step, node_id, at_s))
        bucket.lines += 1
        bucket.tokens = max(bucket.tokens, tokens)
        bucket.sent_bytes += int(number_of(record, "outer/sent_bytes") or 0)
        if (rate := number_of(record, "train/tokens_per_s")) is not None:
            step_s = number_of(record, "train/step_s") or 1.0
            bucket.steps_s += step_s
            bucket.step_tokens += rate * step_s
        if (mfu := number_of(record, "train/mfu")) is not None:
            bucket.mfu, bucket.mfu_lines = bucket.mfu + mfu, bucket.mfu_lines + 1
        if (nodes := number_of(record, "outer/nodes")) is not None:
            bucket.members, bucket.members_lines = bucket.members + nodes, bucket.members_lines + 1
        if "train/loss" in record:
            bucket.add_loss(step, float(record["train/loss"]))
        for name in record:
            if name.startswith(_LOSS_OF):
                self._add_source(name.removeprefix(_LOSS_OF), Bucket(step, step, node_id, at_s, tokens), record[name])
        if "eval/loss" in record and "eval/step" in record:
            evaluated = int(record["eval/step"])
            _add_loss(self.held_out, Bucket(evaluated, evaluated, node_id, at_s, tokens), record["eval/loss"])

    def _tokens(self, node_id: str, record: Mapping[str, Any], members: int) -> int:
        """Estimate the tokens of the run after a step: since its last round a node counts only its own."""
        counted = int(number_of(record, "train/tokens") or 0)
        if "outer/nodes" in record or node_id not in self._committed:
            self._committed[node_id] = counted
        committed = min(counted, self._committed[node_id])
        return committed + (counted - committed) * max(1, members)

    def _add_source(self, name: str, new: Bucket, loss: Any) -> None:
        if name in self.sources or len(self.sources) < _SOURCES:
            _add_loss(self.sources.setdefault(name, RangeSeries[Bucket](NEWEST_ROUNDS)), new, loss)

    def of_source(self, name: str) -> Iterable[Bucket]:
        return self.sources.get(name, ())

    @property
    def forgot_peer_losses(self) -> bool:
        """Whether older peer losses may have been dropped."""
        return len(self.peer_losses) == _KEPT_LOSSES

    def finish_round(self, node_id: str, at_s: float, record: Mapping[str, Any], compute_s: float) -> None:
        """Add a node's measurements of a round. `compute_s`: inner steps since the previous round."""
        round = self.rounds.at(int(record["outer/round"]))
        wait_s, transfer_s, apply_s = (number_of(record, f"outer/{part}_s") or 0.0 for part in _PARTS)
        round.add(node_id, NodeRound(at_s, 1, compute_s, wait_s, transfer_s, apply_s))
        round.retries = max(round.retries, int(number_of(record, "outer/retries") or 0))
        round.epoch = max(round.epoch, int(record.get("outer/epoch") or 0))
        round.step = max(round.step or 0, int(record["step"]))
        round.members = round.members or int(number_of(record, "outer/nodes") or 0)

    def commit(self, node_id: str, at_s: float, record: Mapping[str, Any]) -> bool:
        """Add a node's commit of a round. Returns whether it reveals the line that this one follows."""
        number = int(record["round"])
        round = self.rounds.at(number)
        round.epoch, round.members = max(round.epoch, int(record["epoch"])), len(record["members"])
        round.add(node_id, NodeRound(at_s))
        self.checked.digest(node_id, at_s, number, str(record["digest"]))
        progress = record.get("progress")
        return progress is not None and self._add_progress(node_id, number, record, progress)

    def _add_progress(self, node_id: str, number: int, record: Mapping[str, Any], progress: Mapping[str, Any]) -> bool:
        if (tokens := number_of(progress, "tokens")) is not None:
            self._committed[node_id] = int(tokens)
        step = int(progress["inner_step"])
        self.begin_step = step if self.begin_step is None else min(self.begin_step, step)
        is_new = progress.get("follows") is not None and self.follows is None
        if is_new:
            self.follows = str(progress["follows"][0])
        if not self.checked.has_account(number):  # expensive, and every member records the same
            settled = settled_of(progress)
            if settled is not None:
                weighed: Sequence[tuple[Any, Any]] = list(zip(record["weights"], record["samples"], strict=True))
                self.checked.account(number, settled, sum(int(samples) for weight, samples in weighed if weight > 0))
        return is_new


def _add_loss(curve: RangeSeries[Bucket], new: Bucket, loss: Any) -> None:
    part = curve.at(new.first, lambda: new)
    part.tokens = max(part.tokens, new.tokens)
    part.add_loss(new.first, float(loss))

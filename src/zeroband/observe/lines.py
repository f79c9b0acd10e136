"""A line of rounds: all that follows from one founding, or from going back to a checkpoint. Pure, in bounded memory.

Times in it are of the node that recorded them; `RunHistory` shifts them to one clock as it shows them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

from zeroband.observe.curves import BUCKETS, Bucket, Stretch, Stretches
from zeroband.observe.guarantees import CheckedRounds, LossCost, settled_of
from zeroband.observe.view import number_of

NEWEST_ROUNDS = 120
"""Rounds that are kept one by one; older ones as means over neighbours, in at most as many stretches."""
_KEPT_LOSSES = 32
_SOURCES = 32
_LOSS_OF = "train/loss/"
_PARTS = ("wait", "transfer", "apply")


@dataclass(frozen=True, slots=True)
class NodeRound:
    """What a round took a node, in seconds; of several rounds the means."""

    end_s: float
    """When it took the commit over."""
    compute_s: float
    """Inner steps, without standing still for the outer algorithm."""
    wait_s: float
    transfer_s: float
    apply_s: float


@dataclass(frozen=True)
class RoundView:
    """A committed round, or neighbouring ones: of these the newest one's values, and means of seconds."""

    round: int
    rounds: int
    epoch: int
    committed_at_s: float
    members: int
    retries: int
    step: int | None
    """Inner steps that were done with it."""
    nodes: Mapping[str, NodeRound]


@dataclass(slots=True)
class NodeSums:
    """What a node said of the rounds of a stretch."""

    end_s: float = -math.inf
    rounds: int = 0
    parts_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Compute, wait, transfer, apply."""

    def add(self, other: NodeSums) -> None:
        self.end_s = max(self.end_s, other.end_s)
        self.rounds += other.rounds
        mine, theirs = self.parts_s, other.parts_s
        self.parts_s = (mine[0] + theirs[0], mine[1] + theirs[1], mine[2] + theirs[2], mine[3] + theirs[3])


@dataclass(slots=True)
class Round(Stretch):
    """A round as its members recorded it, or neighbouring ones."""

    epoch: int = 0
    members: int = 0
    retries: int = 0
    step: int | None = None
    nodes: dict[str, NodeSums] = field(default_factory=dict[str, NodeSums])
    shown: RoundView | None = None
    """What it looks like; None: it has changed since."""

    def merge(self, other: Self) -> None:
        if other.last >= self.last:
            self.epoch, self.members, self.step = other.epoch, other.members, other.step
        Stretch.merge(self, other)
        self.retries += other.retries
        for node_id, sums in other.nodes.items():
            self.of_node(node_id).add(sums)
        self.shown = None

    def of_node(self, node_id: str) -> NodeSums:
        return self.nodes.setdefault(node_id, NodeSums())


class Rounds:
    """The rounds of a line: the newest one by one, older ones in stretches."""

    def __init__(self) -> None:
        self.newest: dict[int, Round] = {}
        self._older = Stretches[Round](NEWEST_ROUNDS)

    def at(self, number: int) -> Round:
        """The round, or the stretch that it is in, to add to it."""
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
    """What is kept of a line of rounds."""

    def __init__(self) -> None:
        self.first_at_s: dict[str, float] = {}
        """When each node recorded something of it first."""
        self.follows: str | None = None
        self.begin_step: int | None = None
        self.rounds = Rounds()
        self.losses: deque[LossCost] = deque(maxlen=_KEPT_LOSSES)
        self.checked = CheckedRounds()
        self.curve = Stretches[Bucket](BUCKETS)
        self.sources: dict[str, Stretches[Bucket]] = {}
        self.held_out: dict[int, Bucket] = {}
        """By step."""
        self._committed: dict[str, int] = {}
        """Tokens of the run after a node's newest round; before the first one, after its first step."""

    def add_step(self, node_id: str, at_s: float, record: Mapping[str, Any], members: int) -> None:
        """What an inner step of a node measured. `members`: of the node's epoch."""
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
            self._add_held_out(Bucket(evaluated, evaluated, node_id, at_s, tokens), float(record["eval/loss"]))

    def _tokens(self, node_id: str, record: Mapping[str, Any], members: int) -> int:
        """Tokens of the run after a step: since a round a node knows only its own, and the others do as it, about."""
        told = int(number_of(record, "train/tokens") or 0)
        if "outer/nodes" in record or node_id not in self._committed:
            self._committed[node_id] = told
        committed = min(told, self._committed[node_id])
        return committed + (told - committed) * max(1, members)

    def _add_source(self, name: str, new: Bucket, loss: Any) -> None:
        if name in self.sources or len(self.sources) < _SOURCES:
            curve = self.sources.setdefault(name, Stretches[Bucket](NEWEST_ROUNDS))
            part = curve.at(new.first, lambda: new)
            part.tokens = max(part.tokens, new.tokens)
            part.add_loss(new.first, float(loss))

    def _add_held_out(self, new: Bucket, loss: float) -> None:
        if new.first not in self.held_out:
            new.add_loss(new.first, loss)
            self.held_out[new.first] = new
        if len(self.held_out) > 2 * NEWEST_ROUNDS:
            for old in sorted(self.held_out)[1:-1:2]:
                del self.held_out[old]

    def held_out_by_step(self) -> list[Bucket]:
        return [self.held_out[step] for step in sorted(self.held_out)]

    def of_source(self, name: str) -> Iterable[Bucket]:
        return self.sources.get(name, ())

    @property
    def forgot_losses(self) -> bool:
        """Whether there may have been more than are kept."""
        return len(self.losses) == _KEPT_LOSSES

    def finish_round(self, node_id: str, at_s: float, record: Mapping[str, Any], compute_s: float) -> None:
        """What a node measured of a round. `compute_s`: of its inner steps since the one before."""
        round = self.rounds.at(int(record["outer/round"]))
        wait_s, transfer_s, apply_s = (number_of(record, f"outer/{part}_s") or 0.0 for part in _PARTS)
        round.of_node(node_id).add(NodeSums(at_s, 1, (compute_s, wait_s, transfer_s, apply_s)))
        round.retries = max(round.retries, int(number_of(record, "outer/retries") or 0))
        round.epoch = max(round.epoch, int(record.get("outer/epoch") or 0))
        round.step = max(round.step or 0, int(record["step"]))
        round.members = round.members or int(number_of(record, "outer/nodes") or 0)

    def commit(self, node_id: str, at_s: float, record: Mapping[str, Any]) -> bool:
        """A node committed a round, or took one over. Whether it is known only now which line this one follows."""
        number = int(record["round"])
        round = self.rounds.at(number)
        round.epoch, round.members = max(round.epoch, int(record["epoch"])), len(record["members"])
        sums = round.of_node(node_id)
        sums.end_s = max(sums.end_s, at_s)
        self.checked.digest(node_id, at_s, number, str(record["digest"]))
        progress = record.get("progress")
        return progress is not None and self._hold(node_id, number, record, progress)

    def _hold(self, node_id: str, number: int, record: Mapping[str, Any], progress: Mapping[str, Any]) -> bool:
        """A node holds the state after a round, which may be one that others committed while it was away."""
        if (tokens := number_of(progress, "tokens")) is not None:
            self._committed[node_id] = int(tokens)
        step = int(progress["inner_step"])
        self.begin_step = step if self.begin_step is None else min(self.begin_step, step)
        is_new = progress.get("follows") is not None and self.follows is None
        if is_new:
            self.follows = str(progress["follows"][0])
        if not self.checked.has_account(number):  # adding it up costs, and every member records the same
            settled = settled_of(progress)
            if settled is not None:
                weighed: Sequence[tuple[Any, Any]] = list(zip(record["weights"], record["samples"], strict=True))
                self.checked.account(number, settled, sum(int(samples) for weight, samples in weighed if weight > 0))
        return is_new

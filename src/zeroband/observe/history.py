"""The long memory of a run: what its nodes recorded, folded into bounded memory however long it lasts. Pure.

Facts come in the order of each node's own times, and in any order between nodes: a node's whole past may come before
another's first line. Nothing is decided by comparing two nodes' clocks; only what is shown on one axis of time is
shifted by what the nodes' clocks differ in the rounds that they committed together, one offset for each node.
What a rollback or a new founding superseded is told apart by the line of rounds that it belongs to.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from statistics import median, median_low
from typing import Any, Generic, Literal, TypeVar, cast

from zeroband.observe.checked_rounds import Check, CheckedRounds, Counts, settled_of
from zeroband.observe.curves import Bucket, Buckets, thin
from zeroband.observe.events import EVENTS
from zeroband.observe.facts import Fact
from zeroband.observe.view import (
    BROKEN_LINE,
    ENDED,
    EventView,
    NodeHistory,
    NodeState,
    NodeView,
    RunView,
    node_id_of_member,
    number_of,
    origin_of,
    run_view,
)
from zeroband.observe.words import listed

__all__ = [
    "Axis",
    "JoinView",
    "LinkView",
    "NodeRound",
    "Promise",
    "RoundView",
    "RunHistory",
    "Series",
    "Span",
    "Standing",
    "WaitingFor",
]

Axis = Literal["tokens", "time", "bytes", "step"]
Standing = Literal["starting", "joining", "training", "late", "paused", "leaving", "left", "lost", "failed", "finished"]

NEWEST_ROUNDS = 120
"""Rounds that are kept one by one; older ones as means over neighbours, in at most so many stretches."""
KEPT_LINES = 8
"""Lines of rounds: each founding, and each rollback, begins one."""
KEPT_EVENTS = 1000
KEPT_SPANS = 256
KEPT_SAMPLES = 8
_SAMPLE_CHARS = 4000
_ANCHORS = 64
_MOMENTS = 60
_LINK_MOMENTS = 8
_KEPT_FAILURES = 64
_KEPT_LOSSES = 32
_SOURCES = 32
_USUAL_ROUNDS = 32
_USUAL_STEPS = 16
_QUIET_S = 5.0
"""Least silence after which a run counts as waiting for somebody."""
_SAME_CLOCK_S = 2.0
"""Differences of clocks below this are those of seeing one commit, and are not corrected."""
_FEW_S = 5.0
"""What detecting a loss may cost beside `fault.detect_s`: the round is opened and exchanged again."""

_STANDING_AFTER: Mapping[str, Standing] = {
    "node_started": "starting",
    "join_state": "joining",
    "recovering": "joining",
    "joined": "training",
    "fenced": "joining",
    "paused": "paused",
    "resumed": "training",
    "rolled_back": "training",
    "drained": "leaving",
    "left": "left",
    "run_finished": "finished",
    "run_failed": "failed",
}
_LONG_AGO = "That is so long ago that what was checked by then is not known any more."
_IN: frozenset[Standing] = frozenset(["training", "late", "paused", "leaving"])
_SHOWN_ONCE: Mapping[str, tuple[str, ...]] = {
    "epoch_changed": ("epoch", "members"),
    "peer_lost": ("round", "member_ids"),
    "paused": ("round",),
    "resumed": ("round",),
    "rolled_back": ("round", "step", "digest"),
    "rollback_ordered": ("round", "step"),
    "rollback_given_up": ("round", "step"),
    "blamed": ("round", "member_ids", "consequence"),
    "payload_refused": ("round", "member_id"),
    "impostor": ("member_id", "where"),
}
"""Events that every member records, and what makes two of them the same one."""
_OF_CHECKPOINTS = (
    *("checkpoint_committed", "checkpoints_removed", "checkpoint_failed", "checkpoint_left_out"),
    *("resumed_from", "rolled_back"),
)
_NOT_SHOWN = ("round_committed", "payload_scored", "join_state", "join_progress", "links")
"""Too many beside what happened: they are rounds, and states of nodes and links."""

_MOST = 2**53
_LOSS_OF = "train/loss/"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which a node stood so; `to_s` None: it still does."""

    from_s: float
    to_s: float | None
    standing: Standing
    why: str = ""


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


@dataclass(frozen=True)
class Series:
    """A curve of the run. y: None where it was not a number."""

    key: str
    title: str
    unit: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]


@dataclass(frozen=True)
class LinkView:
    """What is known of the way from one node to another."""

    from_id: str
    to_id: str
    mbit_s: float | None = None
    rtt_ms: float | None = None
    is_cut_off: bool = False


@dataclass(frozen=True)
class JoinView:
    """Where a node stands on its way in."""

    state: str
    why: str
    share: float | None = None
    """What is there and verified of the state that it fetches."""
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Promise:
    """One of the four that the design makes, and what the facts say of it."""

    key: Literal["divergence", "ledger", "checkpoint", "detection"]
    title: str
    state: Literal["good", "bad", "unknown"]
    words: str
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleView:
    """A text that a node's model generated, or its beginning."""

    node_id: str
    at_s: float
    text: str


@dataclass(frozen=True)
class WaitingFor:
    """Whom the run waits for, and why. No nodes: an order, or nobody in particular."""

    nodes: tuple[str, ...]
    since_s: float
    words: str


class _Moments(Generic[T]):
    """What a value was at earlier times: the `most` newest ones, and twice as many evenly spaced ones before."""

    def __init__(self, most: int = _MOMENTS) -> None:
        self._most = most
        self._newest: deque[tuple[float, T]] = deque(maxlen=most)
        self._older: list[tuple[float, T]] = []
        self._stride, self._seen = 1, 0

    def add(self, at_s: float, value: T, *, apart_s: float = 0.0) -> None:
        """Keep a value, instead of the newest one where that is not `apart_s` older than the one before it."""
        if len(self._newest) > 1 and 0 <= at_s - self._newest[-2][0] < apart_s:
            self._newest[-1] = (at_s, value)
            return
        self._newest.append((at_s, value))
        if self._seen % self._stride == 0:
            if len(self._older) == 2 * self._most:
                del self._older[1::2]
                self._stride *= 2
            self._older.append((at_s, value))
        self._seen += 1

    def at(self, at_s: float | None) -> T | None:
        """The newest value that is not from later. None: of all."""
        if at_s is None:
            return self._newest[-1][1] if self._newest else None
        for kept in (self._newest, self._older):
            for known_s, value in reversed(kept):
                if known_s <= at_s:
                    return value
        return None


@dataclass(slots=True)
class _NodeSums:
    """What a node said of the rounds of a stretch."""

    end_s: float = -math.inf
    rounds: int = 0
    parts_s: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def add(self, other: _NodeSums) -> None:
        self.end_s = max(self.end_s, other.end_s)
        self.rounds += other.rounds
        mine, theirs = self.parts_s, other.parts_s
        self.parts_s = (mine[0] + theirs[0], mine[1] + theirs[1], mine[2] + theirs[2], mine[3] + theirs[3])


@dataclass(slots=True)
class _Round:
    first: int
    last: int
    epoch: int = 0
    members: int = 0
    retries: int = 0
    step: int | None = None
    nodes: dict[str, _NodeSums] = field(default_factory=dict[str, _NodeSums])
    shown: RoundView | None = None
    """What it looks like; None: it has changed since."""

    def merge(self, other: _Round) -> None:
        if other.last >= self.last:
            self.epoch, self.members, self.step = other.epoch, other.members, other.step
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.retries += other.retries
        for node_id, sums in other.nodes.items():
            self.nodes.setdefault(node_id, _NodeSums()).add(sums)
        self.shown = None


class _Rounds:
    """The rounds of a line: the newest one by one, older ones in stretches."""

    def __init__(self) -> None:
        self.newest: dict[int, _Round] = {}
        self._older: dict[int, _Round] = {}
        self._width = 1

    def at(self, number: int) -> _Round:
        """The round, or the stretch that it is in, to add to it."""
        found = self._at(number)
        found.shown = None
        return found

    def _at(self, number: int) -> _Round:
        found = self.newest.get(number)
        if found is not None:
            return found
        if len(self.newest) < NEWEST_ROUNDS or number > min(self.newest):
            self.newest[number] = found = _Round(number, number)
            if len(self.newest) > NEWEST_ROUNDS:
                self._put_away(self.newest.pop(min(self.newest)))
            return found
        return self._put_away(_Round(number, number))

    def _put_away(self, round: _Round) -> _Round:
        known = self._older.get(round.last // self._width)
        if known is not None:
            known.merge(round)
            return known
        while len(self._older) >= NEWEST_ROUNDS:
            self._width *= 2
            wide: dict[int, _Round] = {}
            for kept in self._older.values():
                index = kept.last // self._width
                if index in wide:
                    wide[index].merge(kept)
                else:
                    wide[index] = kept
            self._older = wide
        index = round.last // self._width
        if index in self._older:
            self._older[index].merge(round)
        else:
            self._older[index] = round
        return self._older[index]

    def newest_first(self) -> Iterator[_Round]:
        for kept in (self.newest, self._older):
            yield from (kept[number] for number in sorted(kept, reverse=True))


class _Line:
    """A line of rounds: what follows from one founding, or from going back to a checkpoint."""

    def __init__(self) -> None:
        self.first_at_s: dict[str, float] = {}
        """When each node recorded something of it first."""
        self.losses: deque[_LossCost] = deque(maxlen=_KEPT_LOSSES)
        self.follows: str | None = None
        self.begin_step: int | None = None
        self.newest_round = -1
        self.newest_late: tuple[str, ...] = ()
        self.progress_step: int | None = None
        self.rounds = _Rounds()
        self.checked = CheckedRounds()
        self.curve = Buckets()
        self.sources: dict[str, Buckets] = {}
        self.held_out: dict[int, tuple[float, str, float, int]] = {}
        """Loss, whose clock, when, tokens; by step."""
        self._committed: dict[str, int] = {}
        """Tokens of the run after a node's newest round; before the first one, after its first step."""

    def add_step(self, node_id: str, at_s: float, record: Mapping[str, Any], members: int) -> None:
        """What an inner step of a node measured. `members`: of the node's epoch."""
        step, tokens = int(record["step"]), self._tokens(node_id, record, members)
        bucket = self.curve.at(step, node_id, at_s)
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
                self._add_source(name.removeprefix(_LOSS_OF), step, node_id, at_s, tokens, float(record[name]))
        if "eval/loss" in record and "eval/step" in record:
            self.evaluated(int(record["eval/step"]), float(record["eval/loss"]), node_id, at_s, tokens)

    def holds(self, node_id: str, progress: Mapping[str, Any]) -> None:
        """A node holds the state after a round, which may be one that others committed while it was away."""
        if (tokens := number_of(progress, "tokens")) is not None:
            self._committed[node_id] = int(tokens)

    def _tokens(self, node_id: str, record: Mapping[str, Any], members: int) -> int:
        """Tokens of the run after a step: since a round a node knows only its own, and the others do as it, about."""
        told = int(number_of(record, "train/tokens") or 0)
        if "outer/nodes" in record or node_id not in self._committed:
            self._committed[node_id] = told
        committed = min(told, self._committed[node_id])
        return committed + (told - committed) * max(1, members)

    def _add_source(self, name: str, step: int, node_id: str, at_s: float, tokens: int, loss: float) -> None:
        if name in self.sources or len(self.sources) < _SOURCES:
            part = self.sources.setdefault(name, Buckets(most=NEWEST_ROUNDS)).at(step, node_id, at_s)
            part.tokens = max(part.tokens, tokens)
            part.add_loss(step, loss)

    def evaluated(self, step: int, loss: float, node_id: str, at_s: float, tokens: int) -> None:
        self.held_out.setdefault(step, (loss, node_id, at_s, tokens))
        if len(self.held_out) > 2 * NEWEST_ROUNDS:
            for old in sorted(self.held_out)[1:-1:2]:
                del self.held_out[old]


@dataclass(slots=True)
class _Stay:
    from_s: float
    standing: Standing
    why: str
    member_id: str | None


class _Node:
    """What is remembered of a node, all by its own clock."""

    def __init__(self, node_id: str) -> None:
        self.fold = NodeHistory(node_id)
        self.moments = _Moments[NodeView]()
        self.stays: deque[_Stay] = deque(maxlen=KEPT_SPANS)
        self.join: JoinView | None = None
        self.links = _Moments[tuple[LinkView, ...]](_LINK_MOMENTS)
        """To the other members, by its own word."""
        self.first_at_s = math.inf
        """When it recorded something first."""
        self.compute_s = 0.0
        self.took_s: deque[float] = deque(maxlen=_USUAL_ROUNDS)
        """Durations of its newest rounds."""
        self.step_s: deque[float] = deque(maxlen=_USUAL_STEPS)
        self.committed_at_s: float | None = None
        self.committed_round: int | None = None
        self.lost_now: tuple[str, ...] = ()
        """Members that the round under way was opened without."""
        self.stalled_on: tuple[str, ...] = ()
        self.anchors: dict[tuple[str, int], float] = {}
        self.lates: dict[tuple[str, int], _Lateness] = {}
        """By membership and round."""

    def stands(self, at_s: float, standing: Standing, why: str) -> None:
        """From now on it stands so."""
        member_id = self.fold.newest.member_id
        newest = self.stays[-1] if self.stays else None
        if newest is not None and (newest.standing, newest.member_id) == (standing, member_id):
            newest.why = why or newest.why
        elif newest is None or newest.standing not in ENDED or standing != "left":
            self.stays.append(_Stay(at_s, standing, why, member_id))


@dataclass(slots=True)
class _Lateness:
    """A round that went on without a node: who said so, when, and when the node was back by its own clock."""

    told_by: str
    told_at_s: float
    back_at_s: float | None = None


@dataclass(frozen=True)
class _LossCost:
    member_ids: tuple[str, ...]
    round: int
    node_id: str
    took_s: float
    usual_s: float
    at_s: float


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint that a node said is complete and durable.

    `read_by`: who read and verified it since, and when, to go on from it.
    """

    step: int
    round: int
    node_id: str
    at_s: float
    bytes: int | None
    took_s: float | None
    read_by: tuple[str, float] | None = None


@dataclass(slots=True)
class _Checkpoint:
    view: CheckpointView
    gone: tuple[str, float] | None = None
    """Whose clock, and when: it was removed, or another one took its place."""


class RunHistory:
    """Folds the facts of a run. One thread.

    Times that it gives, and takes as `at_s`, are seconds since 1970 by the clock that most nodes agree with.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._nodes: dict[str, _Node] = {}
        self._lines: dict[str, _Line] = {}
        self._lost: dict[str, tuple[str, float]] = {}
        """Who said first that a membership was lost, and when."""
        self._gone: dict[str, tuple[str, float]] = {}
        """Memberships that were given back, by whose clock and when."""
        self._events: deque[EventView] = deque(maxlen=KEPT_EVENTS)
        self._told: dict[tuple[object, ...], None] = {}
        self._checkpoints: dict[tuple[int, int], _Checkpoint] = {}
        """By step and round."""
        self._forgot_checkpoints = False
        self._checkpoint_failures: deque[EventView] = deque(maxlen=_KEPT_FAILURES)
        self._samples: deque[SampleView] = deque(maxlen=KEPT_SAMPLES)
        self._odd_lines: Counter[str] = Counter()
        self._anchor_stride = 1
        self._offsets: dict[str, float] = {}
        self._has_new_anchors = False
        self._ordered_events: tuple[EventView, ...] | None = None
        self._own: Sequence[_Line] | None = None
        self._links: Mapping[str, tuple[LinkView, ...]] | None = None
        self._spans: dict[str, tuple[Span, ...]] = {}
        """Where nodes stood, as far as somebody asked since it changed."""
        self.turns = 0
        """Grows whenever a node comes to stand elsewhere."""

    # -- folding ------------------------------------------------------------------------------------------------

    def add(self, fact: Fact) -> None:
        """Fold a line; one that is none of ours is counted."""
        node_id, record = fact
        if node_id not in self._nodes:
            self._nodes[node_id] = _Node(node_id)
        node = self._nodes[node_id]
        try:
            require_line(record)
            at_s = float(record["at_s"])
            node.fold.add(record)
            if "kind" in record:
                self._add_event(node, node_id, at_s, record)
            else:
                self._add_metrics(node, node_id, at_s, record)
        except BROKEN_LINE:
            self._odd_lines[node_id] += 1
            return
        node.first_at_s = min(node.first_at_s, at_s)
        node.moments.add(at_s, node.fold.newest, apart_s=1.0)

    def appeared(self, node_id: str) -> None:
        """There is such a node, although it has not written anything yet."""
        if node_id not in self._nodes:
            self._nodes[node_id] = _Node(node_id)

    def _line(self, node: _Node, node_id: str, at_s: float) -> _Line:
        """The line of rounds that a node is in."""
        founding = node.fold.newest.founding or ""
        if founding not in self._lines:
            if len(self._lines) >= KEPT_LINES:
                del self._lines[min(self._lines, key=lambda name: self._began_at_s(self._lines[name]))]
            self._lines[founding] = _Line()
        line = self._lines[founding]
        if at_s < line.first_at_s.get(node_id, math.inf):
            line.first_at_s[node_id] = at_s
            self._own = None
        return line

    def _turned(self) -> None:
        """A node stands elsewhere than before, or did so at another time."""
        self._spans.clear()
        self._links = None
        self.turns += 1

    def _add_metrics(self, node: _Node, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        if not node.stays or node.stays[-1].standing == "starting":  # a node that trains alone
            node.stands(at_s, "training", "")
            self._turned()
        line = self._line(node, node_id, at_s)
        step_s = number_of(record, "train/step_s")
        if step_s is not None:
            node.step_s.append(step_s)
            node.compute_s += max(0.0, step_s - (number_of(record, "outer/blocked_s") or 0.0))
        line.add_step(node_id, at_s, record, len(node.fold.newest.members))
        if "outer/round" in record:
            self._finish_round(node, node_id, at_s, line, record)

    def _finish_round(self, node: _Node, node_id: str, at_s: float, line: _Line, record: Mapping[str, Any]) -> None:
        parts = tuple(number_of(record, f"outer/{part}_s") or 0.0 for part in ("wait", "transfer", "apply"))
        round = line.rounds.at(int(record["outer/round"]))
        sums = round.nodes.setdefault(node_id, _NodeSums())
        sums.add(_NodeSums(at_s, 1, (node.compute_s, parts[0], parts[1], parts[2])))
        round.retries = max(round.retries, int(number_of(record, "outer/retries") or 0))
        round.epoch = max(round.epoch, int(record.get("outer/epoch") or 0))
        round.step = max(round.step or 0, int(record["step"]))
        round.members = round.members or int(number_of(record, "outer/nodes") or 0)
        node.compute_s = 0.0
        number, digest = int(record["outer/round"]), record.get("outer/digest")
        if digest and node.committed_round in (None, number):  # else it is of the line before going back
            line.checked.digest(node_id, at_s, number, str(digest))

    def _add_event(self, node: _Node, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        kind = str(record["kind"])
        if kind in _STANDING_AFTER:
            _note_standing(node, at_s, kind, record)
            self._turned()
        match kind:
            case "round_committed":
                self._add_round(node, node_id, at_s, record)
            case "peer_lost":
                self._note_lost(node, node_id, at_s, record["member_ids"])
            case "transfer_stalled":
                node.stalled_on = tuple(str(member) for member in record["waiting_for"])
            case _ if kind in _OF_CHECKPOINTS:
                self._note_checkpoint(kind, node_id, at_s, record)
            case "sample_written" if "text" in record:
                self._samples.append(SampleView(node_id, at_s, str(record["text"])[:_SAMPLE_CHARS]))
            case "links" | "join_progress":
                _note_ways(node, node_id, at_s, kind, record)
                self._links = None
            case "left" if node.fold.newest.member_id is not None:
                _remember(self._gone, node.fold.newest.member_id, (node_id, at_s))
                self._turned()
            case _:
                pass
        if kind not in _NOT_SHOWN:
            self._show(node_id, at_s, kind, record)

    def _note_lost(self, node: _Node, node_id: str, at_s: float, member_ids: Sequence[str]) -> None:
        node.lost_now = tuple(member_ids)
        self._turned()
        for lost in node.lost_now:
            known = self._lost.get(lost)
            if known is None or self._time(node_id, at_s) < self._time(*known):
                _remember(self._lost, lost, (node_id, at_s))

    def _add_round(self, node: _Node, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        line, number = self._line(node, node_id, at_s), int(record["round"])
        round = line.rounds.at(number)
        round.epoch, round.members = max(round.epoch, int(record["epoch"])), len(record["members"])
        sums = round.nodes.setdefault(node_id, _NodeSums())
        sums.end_s = max(sums.end_s, at_s)
        late = tuple(cast("Sequence[str]", record.get("late") or ()))
        for member in late:
            self._note_late(member, number, _Lateness(node_id, at_s))
        if node.fold.newest.member_id in record["members"]:
            for (_, missed), lateness in node.lates.items():
                if missed < number and lateness.back_at_s is None:
                    lateness.back_at_s = at_s
                    self._turned()
        if number >= line.newest_round:
            line.newest_round, line.newest_late = number, late
        line.checked.digest(node_id, at_s, number, str(record["digest"]))
        self._anchor(node, node.fold.newest.founding or "", number, at_s)
        if node.committed_at_s is not None:
            took_s = at_s - node.committed_at_s
            if node.lost_now and node.took_s:
                cost = _LossCost(node.lost_now, number, node_id, took_s, median(node.took_s), at_s)
                line.losses.append(cost)
            elif took_s >= 0 and not node.lost_now:
                node.took_s.append(took_s)
        node.committed_at_s, node.committed_round, node.lost_now, node.stalled_on = at_s, number, (), ()
        progress = record.get("progress")
        if progress is not None:
            line.holds(node_id, progress)
            self._add_progress(line, number, record, progress)

    def _add_progress(self, line: _Line, number: int, record: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        line.progress_step = int(progress["inner_step"])
        follows = progress.get("follows")
        if follows is not None and line.follows is None:
            line.follows, self._own = str(follows[0]), None
        if line.begin_step is None or line.progress_step < line.begin_step:
            line.begin_step = line.progress_step
        if line.checked.has_account(number):  # adding it up costs, and every member records the same
            return
        settled = settled_of(progress)
        if settled is not None:
            weighed = zip(record["weights"], record["samples"], strict=True)
            line.checked.account(number, settled, sum(int(samples) for weight, samples in weighed if weight > 0))

    def _note_checkpoint(self, kind: str, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        match kind:
            case "checkpoint_committed":
                self._add_checkpoint(node_id, at_s, record)
            case "checkpoints_removed":
                for step in record["steps"]:
                    self._forget_checkpoint(int(step), node_id, at_s)
            case "resumed_from" | "rolled_back":
                self._note_reading(int(record["step"]), node_id, at_s)
            case _:
                self._checkpoint_failures.append(EventView(at_s, node_id, kind, _usual_fields(kind, record)))

    def _add_checkpoint(self, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        step, number, size = int(record["step"]), int(record["round"]), number_of(record, "bytes")
        if any(key[0] == step and key[1] >= number and one.gone is None for key, one in self._checkpoints.items()):
            return
        self._forget_checkpoint(step, node_id, at_s)  # one after going back takes the place of the one before
        took_s = number_of(record, "took_s")
        view = CheckpointView(step, number, node_id, at_s, None if size is None else int(size), took_s)
        self._checkpoints[step, number] = _Checkpoint(view)
        while len(self._checkpoints) > NEWEST_ROUNDS:
            self._forgot_checkpoints = True
            del self._checkpoints[min(self._checkpoints, key=lambda key: (self._checkpoints[key].gone is None, key))]

    def _forget_checkpoint(self, step: int, node_id: str, at_s: float) -> None:
        for key, checkpoint in self._checkpoints.items():
            if key[0] == step and checkpoint.gone is None:
                checkpoint.gone = (node_id, at_s)

    def _note_reading(self, step: int, node_id: str, at_s: float) -> None:
        """A node went on from a checkpoint, each file of which it verified as it read it."""
        for key, checkpoint in self._checkpoints.items():
            if key[0] == step and checkpoint.gone is None:
                checkpoint.view = replace(checkpoint.view, read_by=(node_id, at_s))

    def _show(self, node_id: str, at_s: float, kind: str, record: Mapping[str, Any]) -> None:
        fields = _usual_fields(kind, record)
        if kind in _SHOWN_ONCE:
            about = (kind, *(str(fields.get(name)) for name in _SHOWN_ONCE[kind]))
            if about in self._told:
                return
            _remember(self._told, about, None)
        self._ordered_events = None
        self._events.append(EventView(at_s, node_id, kind, fields))

    # -- clocks -------------------------------------------------------------------------------------------------

    def _anchor(self, node: _Node, founding: str, number: int, at_s: float) -> None:
        """Keep the time of some rounds by each node's clock; the same ones for all nodes."""
        if number % self._anchor_stride:
            return
        node.anchors[(founding, number)] = at_s
        self._has_new_anchors = True
        while len(node.anchors) > _ANCHORS:
            self._anchor_stride *= 2
            for one in self._nodes.values():
                one.anchors = {key: at for key, at in one.anchors.items() if key[1] % self._anchor_stride == 0}
            if self._anchor_stride > _MOST:
                node.anchors.clear()

    def offsets(self) -> Mapping[str, float]:
        """What each node's clock is ahead of the one that most agree with, in seconds; 0 where nothing shows it.

        The median over rounds that it committed together with others.
        """
        if self._has_new_anchors:
            self._has_new_anchors = False
            offsets = self._measured_offsets()
            if offsets != self._offsets:
                self._offsets = offsets
                self._redraw()
        return self._offsets

    def _measured_offsets(self) -> dict[str, float]:
        seen: dict[tuple[str, int], dict[str, float]] = {}
        for node_id, node in self._nodes.items():
            for key, at_s in node.anchors.items():
                seen.setdefault(key, {})[node_id] = at_s
        ahead: dict[str, list[float]] = {}
        for times in seen.values():
            if len(times) > 1:
                true_s = median_low(times.values())
                for node_id, at_s in times.items():
                    ahead.setdefault(node_id, []).append(at_s - true_s)
        found = {node_id: round(median(by), 1) for node_id, by in ahead.items()}  # what is drawn has to stand still
        return {node_id: by for node_id, by in found.items() if abs(by) > _SAME_CLOCK_S}

    def _redraw(self) -> None:
        """Times look different from now on."""
        self._ordered_events = self._own = None
        self._turned()
        for line in self._lines.values():
            for round in line.rounds.newest_first():
                round.shown = None

    def _time(self, node_id: str, at_s: float) -> float:
        return at_s - self.offsets().get(node_id, 0.0)

    # -- what it knows ------------------------------------------------------------------------------------------

    @property
    def from_s(self) -> float | None:
        """When the first fact was written."""
        known = [(node_id, node.first_at_s) for node_id, node in self._nodes.items()]
        return min((self._time(*one) for one in known if math.isfinite(one[1])), default=None)

    @property
    def to_s(self) -> float | None:
        """When the newest fact was written."""
        known = [(node_id, node.fold.newest.last_at_s) for node_id, node in self._nodes.items()]
        return max((self._time(node_id, at_s) for node_id, at_s in known if at_s is not None), default=None)

    def odd_lines(self) -> dict[str, int]:
        """Lines that were no facts of ours, by node."""
        return dict(self._odd_lines)

    def mean_rate(self, view: RunView) -> float | None:
        """Tokens per second of a whole run as `view` shows it, every wait counted; None where it has not trained."""
        took_s = None if self.from_s is None or self.to_s is None else self.to_s - self.from_s
        tokens = max((node.tokens for node in view.current or view.own), default=0)
        return tokens / took_s if tokens and took_s else None

    def view(self, at_s: float | None = None) -> RunView:
        """The run now, or as it was then; without the nodes' curves and what happened.

        Of an earlier moment each node's numbers are those of its newest kept moment before it; where it stood is exact.
        """
        if at_s is None:
            views = [node.fold.newest for node in self._nodes.values()]
            view = run_view(self._run_id, views, self._lost.keys())
            return replace(view, disagreements=self.diverged_rounds())
        found: list[NodeView] = []
        for node_id, node in self._nodes.items():
            view = node.moments.at(at_s + self.offsets().get(node_id, 0.0))
            if view is not None:
                span = self.standing(node_id, at_s)
                state = view.state if span is None else _node_state(span.standing, view.state)
                found.append(replace(view, state=state))
        return run_view(self._run_id, found, frozenset())

    def membership(self, at_s: float | None = None) -> dict[str, tuple[Span, ...]]:
        """Where each node stood when, oldest first, up to a moment; the oldest of very many are forgotten."""
        spans = {node_id: self._spans_of(node_id, self._nodes[node_id]) for node_id in sorted(self._nodes)}
        if at_s is None:
            return spans
        known = {node_id: _until(stays, at_s) for node_id, stays in spans.items()}
        return {node_id: stays for node_id, stays in known.items() if stays}

    def node_hours(self, node_ids: Iterable[str], at_s: float | None = None) -> float:
        """Hours in which these nodes were up, added up; a node that never said that it ended counts up to `to_s`."""
        shown_s, membership = (self.to_s if at_s is None else at_s), self.membership(at_s)
        up = [span for node_id in node_ids for span in membership.get(node_id, ()) if span.standing not in ENDED]
        return sum(max(0.0, (span.to_s or shown_s or span.from_s) - span.from_s) for span in up) / 3600

    def standing(self, node_id: str, at_s: float | None = None) -> Span | None:
        """Where a node stands, or stood then; None: it was not there yet."""
        node = self._nodes.get(node_id)
        spans = () if node is None else self._spans_of(node_id, node)
        return next((span for span in reversed(spans) if at_s is None or span.from_s <= at_s), None)

    def _spans_of(self, node_id: str, node: _Node) -> tuple[Span, ...]:
        self.offsets()
        if node_id not in self._spans:
            self._spans[node_id] = self._all_spans(node_id, node)
        return self._spans[node_id]

    def _all_spans(self, node_id: str, node: _Node) -> tuple[Span, ...]:
        spans: list[Span] = []
        stays = list(node.stays)
        lates = self._late_spans(node, node_id)
        for stay, after in zip(stays, islice(chain(stays, [None]), 1, None), strict=False):
            from_s = self._time(node_id, stay.from_s)
            to_s = None if after is None else max(from_s, self._time(node_id, after.from_s))
            span = Span(from_s, to_s, stay.standing, stay.why)
            told = self._lost.get(stay.member_id or "") if stay.standing in {*_IN, "joining"} else None
            if told is not None and stay.member_id not in self._gone and (after is None or after.standing not in ENDED):
                lost_s = max(from_s, self._time(*told))
                if to_s is None or lost_s < to_s:
                    spans += _with_lates(Span(from_s, lost_s, stay.standing, stay.why), lates)
                    spans.append(Span(lost_s, to_s, "lost", f"{told[0]} went on without it"))
                    continue
            spans += _with_lates(span, lates)
        return tuple(spans)

    def _late_spans(self, node: _Node, node_id: str) -> list[tuple[float, float | None, int]]:
        """When a node was late: from the commit that others saw to its own next one."""
        return [
            (
                self._time(lateness.told_by, lateness.told_at_s),
                None if lateness.back_at_s is None else self._time(node_id, lateness.back_at_s),
                number,
            )
            for (_, number), lateness in node.lates.items()
        ]

    def _note_late(self, member: str, number: int, lateness: _Lateness) -> None:
        """A membership was late in a round, as another node says; what the late one did since may be known already."""
        node_id = node_id_of_member(member)
        if node_id not in self._nodes:
            self._nodes[node_id] = _Node(node_id)
        node = self._nodes[node_id]
        if (member, number) in node.lates:
            return
        newest = node.fold.newest.round
        if newest is not None and newest > number:
            ends = [
                round.nodes[node_id].end_s
                for line in self._lines.values()
                for round in line.rounds.newest.values()
                if round.first > number and node_id in round.nodes
            ]
            lateness.back_at_s = min(ends, default=-math.inf)
        self._turned()
        node.lates[(member, number)] = lateness
        if len(node.lates) > NEWEST_ROUNDS:
            del node.lates[next(iter(node.lates))]

    def rounds(self, at_s: float | None = None, *, most: int = NEWEST_ROUNDS) -> tuple[RoundView, ...]:
        """The newest committed rounds, oldest first; those before the kept ones as means of neighbours.

        One that stays the same is the same object from call to call.
        """
        self.offsets()
        found: list[RoundView] = []
        for round in chain.from_iterable(line.rounds.newest_first() for line in reversed(self._own_lines())):
            if len(found) == most:
                break
            view = self._round_view(round)
            if view is not None and (at_s is None or view.committed_at_s <= at_s):
                found.append(view if at_s is None else _known_then(view, at_s))
        return tuple(reversed(found))

    def _round_view(self, round: _Round) -> RoundView | None:
        """None: no node is known to have committed it."""
        if round.shown is None:
            nodes = {
                node_id: NodeRound(
                    self._time(node_id, sums.end_s), *(seconds / max(1, sums.rounds) for seconds in sums.parts_s)
                )
                for node_id, sums in sorted(round.nodes.items())
                if math.isfinite(sums.end_s)
            }
            if nodes:
                round.shown = RoundView(
                    round=round.last,
                    rounds=round.last - round.first + 1,
                    epoch=round.epoch,
                    committed_at_s=min(part.end_s for part in nodes.values()),
                    members=round.members,
                    retries=round.retries,
                    step=round.step,
                    nodes=nodes,
                )
        return round.shown

    def diverged_rounds(self) -> tuple[int, ...]:
        """Rounds of which two nodes recorded different outer states, in any line; must be empty, always."""
        return tuple(sorted({number for line in self._lines.values() for number in line.checked.diverged}))

    def loss_curve(self, node_id: str) -> tuple[float, ...]:
        """Losses of a node from the first to a recent step, evenly spaced."""
        return self._nodes[node_id].fold.loss_curve()

    def events(self, at_s: float | None = None) -> tuple[EventView, ...]:
        """What happened, newest last; what all members record is told once. Times are corrected."""
        offsets = self.offsets()
        if self._ordered_events is None:
            moved = [
                replace(event, at_s=self._time(event.node_id, event.at_s)) if event.node_id in offsets else event
                for event in self._events
            ]
            self._ordered_events = tuple(sorted(moved, key=lambda event: event.at_s))
        events = self._ordered_events
        return events if at_s is None else events[: bisect_right(events, at_s, key=lambda event: event.at_s)]

    def checkpoints(self, at_s: float | None = None) -> tuple[CheckpointView, ...]:
        """Complete ones that were not removed by then, by step, ascending."""
        then_s = math.inf if at_s is None else at_s
        there = [
            checkpoint.view
            for checkpoint in self._checkpoints.values()
            if self._time(checkpoint.view.node_id, checkpoint.view.at_s) <= then_s
            and (checkpoint.gone is None or self._time(*checkpoint.gone) > then_s)
        ]
        moved = [replace(one, at_s=self._time(one.node_id, one.at_s)) for one in there]
        return tuple(sorted(moved, key=lambda one: one.step))

    def links(self, at_s: float | None = None) -> tuple[LinkView, ...]:
        """What the nodes that are there said last of the ways to one another; of an ended run all of them.

        Of an earlier moment it is the newest word before it that is kept.
        """
        return tuple(chain.from_iterable(self.links_by_node(at_s).values()))

    def links_by_node(self, at_s: float | None = None) -> Mapping[str, tuple[LinkView, ...]]:
        """The links by the node that says so. What stays the same is the same object from call to call."""
        self.offsets()
        if at_s is None and self._links is not None:
            return self._links
        there = {one for one, node in self._nodes.items() if self._is_there(one, node, at_s)} or self._nodes.keys()
        found: dict[str, tuple[LinkView, ...]] = {}
        for one in sorted(there):
            said = self._nodes[one].links.at(self._by_its_clock(one, at_s)) or ()
            ways = said if all(link.to_id in there for link in said) else tuple(w for w in said if w.to_id in there)
            if ways:
                found[one] = ways
        if at_s is None:
            self._links = found
        return found

    def _is_there(self, node_id: str, node: _Node, at_s: float | None) -> bool:
        """Whether a node has not ended, as far as it says so itself."""
        then_s = self._by_its_clock(node_id, at_s)
        stay = next((stay for stay in reversed(node.stays) if then_s is None or stay.from_s <= then_s), None)
        return stay is not None and stay.standing not in ENDED

    def _by_its_clock(self, node_id: str, at_s: float | None) -> float | None:
        return None if at_s is None else at_s + self.offsets().get(node_id, 0.0)

    def sample(self, at_s: float | None = None) -> SampleView | None:
        """The newest text that was generated by then; of very many the oldest are forgotten."""
        moved = [replace(one, at_s=self._time(one.node_id, one.at_s)) for one in self._samples]
        known = [one for one in moved if at_s is None or one.at_s <= at_s]
        return max(known, key=lambda one: one.at_s, default=None)

    def join_of(self, node_id: str) -> JoinView | None:
        """Where a node stands on its way in; None: it is in, or has ended."""
        node = self._nodes.get(node_id)
        return None if node is None else node.join

    def _began_at_s(self, line: _Line) -> float:
        return min(self._time(*first) for first in line.first_at_s.items())

    def _own_lines(self) -> Sequence[_Line]:
        """The lines that go back to the same one as the newest, in the order in which they began.

        Others are those of another run of this name.
        """
        self.offsets()
        if self._own is None:
            follows = {name: line.follows for name, line in self._lines.items()}
            names = sorted(self._lines, key=lambda name: self._began_at_s(self._lines[name]))
            ours = [name for name in names if origin_of(name, follows) == origin_of(names[-1], follows)]
            self._own = [self._lines[name] for name in ours]
        return self._own

    def series(self, by: Axis = "tokens", *, points: int = 400) -> tuple[Series, ...]:
        """Curves of the run, each of about `points` points at most; extremes of the loss are kept.

        Axis: tokens of the whole run, seconds since 1970, bytes that all nodes sent, or inner steps. What a rollback
        superseded is left out.
        """
        kept: list[tuple[_Line, Bucket, int]] = []
        cut = self._cuts()
        sent = 0
        for line, until in cut:
            for bucket in line.curve:
                sent += bucket.sent_bytes
                if until is None or bucket.first_step <= until:
                    kept.append((line, bucket, sent))
        return (
            *self._bucket_series(by, kept, points),
            *self._held_out_series(by, cut, kept, points),
            *self._source_series(by, cut, kept, points),
        )

    def _cuts(self) -> list[tuple[_Line, int | None]]:
        """The lines that led to the newest state, and the step up to which each counts."""
        lines = self._own_lines()
        by_name = dict(self._lines)
        line = lines[-1] if lines else None
        chosen: list[tuple[_Line, int | None]] = []
        until: int | None = None
        while line is not None and all(line is not known for known, _ in chosen):
            chosen.insert(0, (line, until))
            until = line.begin_step
            line = by_name.get(line.follows) if line.follows is not None else None
        return chosen

    def _bucket_series(self, by: Axis, kept: Sequence[tuple[_Line, Bucket, int]], points: int) -> list[Series]:
        buckets = [bucket for _, bucket, _ in kept]
        xs = [self._x(by, bucket, sent) for _, bucket, sent in kept]
        found = [self._loss_series("loss", "Loss", buckets, xs, points)]
        for key, title, unit, values in (
            ("tokens_per_s", "Tokens per second, all nodes", "tokens/s", [b.tokens_per_s for b in buckets]),
            ("mfu", "Model FLOP utilisation", "ratio", [b.mfu / b.mfu_lines if b.mfu_lines else None for b in buckets]),
            ("nodes", "Nodes", "nodes", [b.nodes for b in buckets]),
        ):
            known = [(x, y) for x, y in zip(xs, values, strict=True) if y is not None]
            chosen = [known[i] for i in thin(len(known), points)]
            found.append(Series(key, title, unit, *_ascending(chosen)))
        return found

    def _loss_series(self, key: str, title: str, buckets: Sequence[Bucket], xs: Sequence[float], points: int) -> Series:
        groups = -(-len(buckets) // max(1, points // 2)) if len(buckets) > points // 2 else 1
        found: list[tuple[float, float | None]] = []
        for start in range(0, len(buckets), groups):
            group = replace(buckets[start])
            for bucket in buckets[start + 1 : start + groups]:
                group.merge(bucket)
            ys = group.points()
            ends = (
                (xs[min(start + groups, len(xs)) - 1],)
                if len(ys) == 1
                else (xs[start], xs[min(start + groups, len(xs)) - 1])
            )
            found += zip(ends, ys, strict=False)
        return Series(key, title, "nats/token", *_ascending(found))

    def _held_out_series(
        self,
        by: Axis,
        cut: Sequence[tuple[_Line, int | None]],
        kept: Sequence[tuple[_Line, Bucket, int]],
        points: int,
    ) -> list[Series]:
        found: list[tuple[float, float | None]] = []
        for line, until in cut:
            for step, (loss, node_id, at_s, tokens) in sorted(line.held_out.items()):
                if until is None or step <= until:
                    bucket = Bucket(step, step, node_id, at_s, tokens=tokens)
                    x = self._x(by, bucket, _sent_by(kept, line, step))
                    found.append((x, loss if math.isfinite(loss) else None))
        chosen = [found[i] for i in thin(len(found), points)]
        return [Series("held_out", "Held-out loss", "nats/token", *_ascending(chosen))]

    def _source_series(
        self,
        by: Axis,
        cut: Sequence[tuple[_Line, int | None]],
        kept: Sequence[tuple[_Line, Bucket, int]],
        points: int,
    ) -> list[Series]:
        found: list[Series] = []
        for name in sorted({name for line, _ in cut for name in line.sources}):
            buckets: list[Bucket] = []
            xs: list[float] = []
            for line, until in cut:
                for bucket in line.sources.get(name, ()):
                    if until is None or bucket.first_step <= until:
                        buckets.append(bucket)
                        xs.append(self._x(by, bucket, _sent_by(kept, line, bucket.last_step)))
            found.append(self._loss_series(f"loss/{name}", f"Loss of {name}", buckets, xs, points))
        return found

    def _x(self, by: Axis, bucket: Bucket, sent_bytes: int) -> float:
        match by:
            case "tokens":
                return float(bucket.tokens)
            case "time":
                return self._time(bucket.node_id, bucket.at_s)
            case "bytes":
                return float(sent_bytes)
            case "step":
                return float(bucket.last_step)

    # -- promises -----------------------------------------------------------------------------------------------

    @property
    def detect_s(self) -> float | None:
        """The run's `fault.detect_s`, as its nodes said when they started; None: none of them did."""
        return max((s for node in self._nodes.values() if (s := node.fold.newest.detect_s) is not None), default=None)

    def promises(self, at_s: float | None = None) -> tuple[Promise, Promise, Promise, Promise]:
        """What the facts say of the four that the design makes, or what those said that there were then."""
        then_s = math.inf if at_s is None else at_s
        return (self._divergence(then_s), self._ledger(then_s), self._checkpoint(then_s), self._detection(then_s))

    def _counts_at(self, then_s: float) -> Counts | None:
        """What was checked of all lines by then; None: that is not known any more."""

        def is_later(check: Check) -> bool:
            return self._time(check.node_id, check.at_s) > then_s

        counts = Counts()
        for line in self._own_lines():
            known = line.checked.counts if then_s == math.inf else line.checked.counts_at(is_later)
            if known is None:
                return None
            counts.compared += known.compared
            counts.ledgers += known.ledgers
            counts.trained += known.trained
        return counts

    def _found_by(self, then_s: float, name: Literal["diverged", "wrong"]) -> list[tuple[int, Check]]:
        """The rounds up to then in which something was found, by line."""
        found = [one for line in self._own_lines() for one in sorted(getattr(line.checked, name).items())]
        return [(number, check) for number, check in found if self._time(check.node_id, check.at_s) <= then_s]

    def _divergence(self, then_s: float) -> Promise:
        title = "No silent divergence"
        counts, rounds = self._counts_at(then_s), sorted({number for number, _ in self._found_by(then_s, "diverged")})
        if rounds:
            named = ", ".join(map(str, rounds[:5])) + (", ..." if len(rounds) > 5 else "")
            words = f"Nodes recorded different outer states after round {named}."
            of = "" if counts is None else f" of {counts.compared}"
            return Promise("divergence", title, "bad", words, (f"{len(rounds)}{of} compared rounds differ",))
        if counts is None:
            return Promise("divergence", title, "unknown", _LONG_AGO)
        if not counts.compared:
            return Promise("divergence", title, "unknown", "No round was recorded by two nodes yet.")
        evidence = [f"{counts.compared} rounds were recorded by two nodes or more, each with equal digests"]
        newest = self.rounds(None if then_s == math.inf else then_s, most=1)
        evidence += [f"the newest committed round is {one.round}" for one in newest]
        words = "After every round that two nodes or more recorded, all of them held the same outer state."
        return Promise("divergence", title, "good", words, tuple(evidence))

    def _ledger(self, then_s: float) -> Promise:
        title = "No silent data loss"
        counts, wrong = self._counts_at(then_s), self._found_by(then_s, "wrong")
        if wrong:
            number, check = wrong[0]
            beyond = check.beyond or 0
            what = f"{abs(beyond)} samples {'skipped' if beyond > 0 else 'counted twice'}"
            words = f"The ledger of round {number} does not add up: {what}."
            of = "" if counts is None else f" of {counts.ledgers}"
            return Promise("ledger", title, "bad", words, (f"{len(wrong)}{of} checked rounds do not add up",))
        if counts is None:
            return Promise("ledger", title, "unknown", _LONG_AGO)
        if not counts.trained:
            return Promise("ledger", title, "unknown", "No two neighbouring rounds with samples were recorded yet.")
        evidence = (
            f"{counts.ledgers} rounds checked: each settled as many samples as its members contributed, "
            f"{counts.trained} in all",
            "single samples are not compared here: `zeroband data audit` replays every range",
        )
        words = "Every round's ledger counts as many samples as were trained."
        return Promise("ledger", title, "good", words, evidence)

    def _checkpoint(self, then_s: float) -> Promise:
        title = "Only committed state is visible"
        there = self.checkpoints(None if then_s == math.inf else then_s)
        newest = max(there, key=lambda one: (one.round, one.step), default=None)
        failed = self._checkpoint_failure(then_s)
        evidence: list[str] = []
        if newest is not None:
            size = "" if newest.bytes is None else f", {newest.bytes} bytes"
            took = "" if newest.took_s is None else f", written in {newest.took_s:.1f} s"
            evidence.append(f"step {newest.step} was committed by {newest.node_id}{size}{took}")
        read = [one for one in there if one.read_by is not None and self._time(*one.read_by) <= then_s]
        evidence += [
            f"{one.read_by[0]} read step {one.step} back, verified every file that it took, and went on from it"
            for one in read[-1:]
            if one.read_by is not None
        ]
        if failed is not None:
            reason, step = str(failed.fields.get("reason", "")), failed.fields.get("step")
            words = f"The newest checkpoint, of step {step}, failed on {failed.node_id}: {reason}"
            return Promise("checkpoint", title, "bad", words, tuple(evidence))
        if newest is None:
            words = _LONG_AGO if self._forgot_checkpoints and then_s < math.inf else "No checkpoint was committed yet."
            return Promise("checkpoint", title, "unknown", words)
        if newest not in read:
            evidence.append("nobody has read it back yet: files are verified when they are read")
        words = f"The newest checkpoint, of step {newest.step}, is committed: every file was hashed as it was written."
        return Promise("checkpoint", title, "good", words, tuple(evidence))

    def _checkpoint_failure(self, then_s: float) -> EventView | None:
        """The newest failure by then, unless a checkpoint of that step or a later one was committed since."""
        failures = [one for one in self._checkpoint_failures if self._time(one.node_id, one.at_s) <= then_s]
        newest = max(failures, key=lambda one: self._time(one.node_id, one.at_s), default=None)
        committed = [one.view for one in self._checkpoints.values()]
        steps = [one.step for one in committed if self._time(one.node_id, one.at_s) <= then_s]
        return None if newest is None or max(steps, default=-1) >= int(newest.fields.get("step", -1)) else newest

    def _detection(self, then_s: float) -> Promise:
        title = "Bounded detection"
        lines = self._own_lines()
        losses = [
            one
            for line in lines
            for one in line.losses
            if self._time(one.node_id, one.at_s) <= then_s and any(self._is_lost(m, then_s) for m in one.member_ids)
        ]
        if not losses:
            is_forgotten = then_s < math.inf and any(len(line.losses) == _KEPT_LOSSES for line in lines)
            words = _LONG_AGO if is_forgotten else "No member was lost yet."
            return Promise("detection", title, "unknown", words)
        newest = max(losses, key=lambda one: self._time(one.node_id, one.at_s))
        same = [one for one in losses if one.round == newest.round and one.member_ids == newest.member_ids]
        worst = max(same, key=lambda one: one.took_s - one.usual_s)
        cost_s = max(0.0, worst.took_s - worst.usual_s)
        who = ", ".join(sorted(map(node_id_of_member, worst.member_ids)))
        words = f"Losing {who} cost the others {cost_s:.1f} s, once."
        evidence = [
            f"round {worst.round} took {worst.took_s:.1f} s on {worst.node_id}; usual are {worst.usual_s:.1f} s",
        ]
        detect_s = self.detect_s
        if detect_s is None:
            words += " The nodes did not record their fault.detect_s."
            return Promise("detection", title, "unknown", words, tuple(evidence))
        evidence.append(f"allowed are fault.detect_s, {detect_s:g} s, and {_FEW_S:g} s for opening the round again")
        state = "good" if cost_s <= detect_s + _FEW_S else "bad"
        return Promise("detection", title, state, words, tuple(evidence))

    def _is_lost(self, member: str, then_s: float) -> bool:
        """Whether a membership that others went on without had not been given back by then."""
        gone = self._gone.get(member)
        return gone is None or self._time(*gone) > then_s

    # -- now ----------------------------------------------------------------------------------------------------

    def usual_step_s(self) -> float | None:
        """Duration of an inner step of the slowest node, waits included; the median of its newest ones."""
        return max((median(node.step_s) for node in self._nodes.values() if node.step_s), default=None)

    def waiting_for(self, now_s: float) -> WaitingFor | None:
        """Whom all wait for at this moment; None: nobody, as far as facts tell. `now_s`: as `to_s` counts."""
        own = [node.node_id for node in self.view().own]
        spans = {node_id: span for node_id in own if (span := self.standing(node_id)) is not None}
        paused = [span for span in spans.values() if span.standing == "paused"]
        if paused:
            since_s = min(span.from_s for span in paused)
            return WaitingFor((), since_s, "The run is paused, as an operator ordered: resume it to go on.")
        members = sorted(node_id for node_id, span in spans.items() if span.standing in _IN)
        last = {node_id: self._last_s(node_id) for node_id in members}
        if not members:
            return None
        newest_s = max(last.values())
        if now_s - newest_s < max(_QUIET_S, 4 * (self.usual_step_s() or 0.0)):
            return None
        stalled = sorted({node_id_of_member(m) for name in members for m in self._nodes[name].stalled_on} & {*members})
        if stalled:
            words = f"{listed(stalled)} sent no byte of the round's transfer; the others wait."
            return WaitingFor(tuple(stalled), newest_s, words)
        late = [node_id for node_id in members if spans[node_id].standing == "late"]
        steps = {node_id: self._nodes[node_id].fold.newest.step for node_id in members}
        behind = [node_id for node_id in members if steps[node_id] < max(steps.values())]
        if behind and len(members) > 1:
            silent_s = now_s - max(last[node_id] for node_id in behind)
            is_late = "is late" if any(node_id in late for node_id in behind) else "is behind"
            where = f"at step {min(steps.values())} of {max(steps.values())}, and silent for {silent_s:.0f} s"
            words = f"{listed(behind)} {is_late}, {where}."
            return WaitingFor(tuple(behind), newest_s, words)
        silent_s = now_s - newest_s
        words = f"No member has recorded anything for {silent_s:.0f} s: a long round, or a store that is away."
        return WaitingFor((), newest_s, words)

    def _last_s(self, node_id: str) -> float:
        at_s = self._nodes[node_id].fold.newest.last_at_s
        return -math.inf if at_s is None else self._time(node_id, at_s)


def _note_standing(node: _Node, at_s: float, kind: str, record: Mapping[str, Any]) -> None:
    """Where a node stands after an event of its own."""
    standing, why = _STANDING_AFTER[kind], str(record.get("why") or record.get("reason") or record.get("error") or "")
    if kind == "join_state":
        state = str(record["state"])
        known = node.join or JoinView(state, why)
        node.join = None if state in ("member", "ended") else replace(known, state=state, why=why)
        if state == "ended":
            return
        standing = "training" if state == "member" else standing
    elif kind in ("joined", "node_started", "left", "run_failed"):
        node.join = None
    if kind in ("node_started", "resumed", "rolled_back"):
        node.committed_at_s = None  # what the next round takes is no measure
    if kind == "node_started":
        node.took_s.clear()
        node.compute_s = 0.0
    node.stands(at_s, standing, why)


def _note_ways(node: _Node, node_id: str, at_s: float, kind: str, record: Mapping[str, Any]) -> None:
    """How its links are, or how far it has come over them."""
    if kind == "links":
        node.links.add(at_s, tuple(_link(node_id, link) for link in record["links"]))
    elif node.join is not None:
        share = int(record["bytes"]) / max(1, int(record["of_bytes"]))
        node.join = replace(node.join, share=share, bytes_per_s=number_of(record, "bytes_per_s"))


def _link(from_id: str, link: Mapping[str, Any]) -> LinkView:
    mbit_s, rtt_ms = number_of(link, "mbit_s"), number_of(link, "rtt_ms")
    return LinkView(from_id, node_id_of_member(str(link["to"])), mbit_s, rtt_ms, bool(link["is_cut_off"]))


def require_line(record: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError for a record that no node writes: no time, or known fields of other types."""
    at_s = record["at_s"]
    if record.get("kind", "") is None:
        raise ValueError("kind=None")
    if isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not 0 <= at_s < 1e11:
        raise ValueError(f"at_s={at_s!r}")
    for name, value in record.items():
        is_usual = _USUAL.get(name)
        if is_usual is None:
            if (type(value) is float and -_MOST < value < _MOST) or "/" not in name:  # nearly all
                continue
            is_usual = _is_number
        if value is not None and not is_usual(value):
            raise ValueError(f"{name}={value!r}")
    if "kind" not in record and not isinstance(record["step"], int):
        raise ValueError("no step")


def _is_count(value: object) -> bool:
    return type(value) is int and -1 <= value < _MOST  # -1: no round yet


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in cast("list[object]", value))


def _is_number(value: object) -> bool:
    """Whether a metric is a number that a node writes; those that JSON lacks are texts, and others raise ValueError."""
    if isinstance(value, str):
        float(value)
        return True
    return isinstance(value, (float, int)) and not isinstance(value, bool) and -(2**63) < value < 2**63


_USUAL: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("kind", "digest", "member_id", "state", "reason", "why", "outer/digest", "text"), _is_text),
    **dict.fromkeys(("members", "member_ids", "late"), _is_list_of_texts),
    **dict.fromkeys(("step", "round", "epoch", "starts", "total_steps", "parameters"), _is_count),
    **dict.fromkeys(("outer/round", "outer/epoch", "eval/step"), _is_count),
}
"""Whether a field is of the type that nodes write."""


def _usual_fields(kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
    usual = EVENTS[kind].fields if kind in EVENTS else [name for name in record if name not in ("kind", "at_s")]
    return {name: record[name] for name in usual if name in record}


def _remember(table: dict[Any, Any], key: object, value: object) -> None:
    """Keep a value; the oldest goes when there are too many."""
    table[key] = value
    if len(table) > 4 * KEPT_EVENTS:
        del table[next(iter(table))]


def _with_lates(span: Span, lates: Sequence[tuple[float, float | None, int]]) -> list[Span]:
    """A span of training, with the stretches in it in which the node was late."""
    if span.standing != "training":
        return [span]
    found: list[Span] = []
    at_s, end_s = span.from_s, math.inf if span.to_s is None else span.to_s
    for from_s, to_s, number in sorted(lates, key=lambda late: late[0]):
        begin, stop = max(at_s, from_s), min(end_s, math.inf if to_s is None else to_s)
        if begin >= stop:
            continue
        if begin > at_s:
            found.append(Span(at_s, begin, "training", span.why))
        found.append(Span(begin, stop if math.isfinite(stop) else None, "late", f"round {number} went on without it"))
        at_s = stop
    if at_s < end_s:
        found.append(Span(at_s, span.to_s, "training", span.why))
    return found


def _until(spans: Sequence[Span], at_s: float) -> tuple[Span, ...]:
    """Spans as they were known at a moment."""
    return tuple(
        span if span.to_s is not None and span.to_s <= at_s else replace(span, to_s=None)
        for span in spans
        if span.from_s <= at_s
    )


def _known_then(view: RoundView, at_s: float) -> RoundView:
    """A round without the nodes that committed it later."""
    nodes = {node_id: part for node_id, part in view.nodes.items() if part.end_s <= at_s}
    return view if len(nodes) == len(view.nodes) else replace(view, nodes=nodes)


def _node_state(standing: Standing, known: NodeState) -> NodeState:
    match standing:
        case "starting" | "training" | "left" | "lost" | "failed" | "finished":
            return standing
        case "late" | "paused" | "leaving":
            return "training"
        case "joining":
            return known if known in ("starting", "recovering", "fenced") else "starting"


def _sent_by(kept: Sequence[tuple[_Line, Bucket, int]], line: _Line, step: int) -> int:
    """Bytes that all nodes had sent at a step of a line."""
    return max((sent for one, bucket, sent in kept if one is line and bucket.first_step <= step), default=0)


def _ascending(points: Sequence[tuple[float, float | None]]) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Points with x that never falls, which a node's clock may do."""
    xs: list[float] = []
    for x, _ in points:
        xs.append(max(x, xs[-1]) if xs else x)
    return tuple(xs), tuple(y for _, y in points)

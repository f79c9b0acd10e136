"""The history of a run: its nodes' facts, folded into bounded memory. Pure.

Facts arrive ordered by time within a node and in any order between nodes. No decision compares two nodes' clocks. Only
what is displayed on a common time axis is shifted, by one clock offset per node, which is measured from the rounds that
nodes committed together. Facts that a rollback or a new founding superseded belong to another line of rounds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from statistics import median, median_low
from typing import Any, Literal

from zeroband.observe.curves import Bucket, thin
from zeroband.observe.events import EVENTS
from zeroband.observe.facts import Fact, require_line
from zeroband.observe.guarantees import (
    Checked,
    CheckpointView,
    Guarantee,
    PeerLossCost,
    checkpoint,
    detection,
    divergence,
    ledger,
)
from zeroband.observe.lines import NEWEST_ROUNDS, LineSummary, Round, RoundView
from zeroband.observe.node_history import BROKEN_LINE, Lateness, LinkView, NodeHistory, StateStart
from zeroband.observe.view import (
    AT_WORK,
    ENDED,
    EventView,
    NodeState,
    NodeView,
    RunView,
    WaitingFor,
    node_id_of_member,
    number_of,
    origin_of,
)
from zeroband.observe.words import listed

Axis = Literal["tokens", "time", "bytes", "step"]

KEPT_LINES = 8
"""Lines of rounds that are kept; each founding and each rollback starts one."""
KEPT_EVENTS = 1000
KEPT_SAMPLES = 8
_SAMPLE_CHARS = 4000
_ANCHORS = 64
_KEPT_FAILURES = 64
_QUIET_S = 5.0
"""Minimum silence before a run counts as waiting."""
_SAME_CLOCK_S = 2.0
"""Smaller clock differences are not corrected: nodes see the same commit at slightly different times."""
_MOST = 2**53

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
"""Events that every member records, with the fields that identify duplicates."""
_NOT_SHOWN = ("round_committed", "payload_scored", "join_state", "join_progress", "links")
"""Frequent events that are shown as rounds, node states and links instead."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A time span in which a node was in one state; `to_s` is None for the current state."""

    from_s: float
    to_s: float | None
    state: NodeState
    why: str = ""


@dataclass(frozen=True)
class Curve:
    """A curve of the run; y is None where the value was not finite."""

    key: str
    title: str
    unit: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]


class RunHistory:
    """Folds the facts of a run. One thread.

    Returned times and `at_s` arguments are seconds since 1970 by the clock that most nodes agree with.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._nodes: dict[str, NodeHistory] = {}
        self._lines: dict[str, LineSummary] = {}
        self._lost: dict[str, tuple[str, float]] = {}
        """First report that a member was lost: reporting node and time."""
        self._left: dict[str, tuple[str, float]] = {}
        """Members that left on purpose: node and time."""
        self._events: deque[EventView] = deque(maxlen=KEPT_EVENTS)
        self._shown_once: dict[tuple[object, ...], None] = {}
        self._checkpoints: dict[tuple[int, int], CheckpointView] = {}
        """By step and round."""
        self._forgot_checkpoints = False
        self._checkpoint_failures: deque[EventView] = deque(maxlen=_KEPT_FAILURES)
        self._samples: deque[EventView] = deque(maxlen=KEPT_SAMPLES)
        self.invalid_lines = 0
        self._anchor_stride = 1
        self._offsets: dict[str, float] = {}
        self._has_new_anchors = False
        self._ordered_events: tuple[EventView, ...] | None = None
        self._own: Sequence[LineSummary] | None = None
        self._links: Mapping[str, tuple[LinkView, ...]] | None = None
        self._spans: dict[str, tuple[StateSpan, ...]] = {}
        """Cache of `_all_spans`."""
        self.revision = 0
        """Grows with every change of a node's state."""

    # -- folding ------------------------------------------------------------------------------------------------

    def take(self, node_ids: Iterable[str], facts: Iterable[Fact]) -> None:
        """Fold facts. `node_ids`: all known nodes, including those without facts."""
        for node_id in node_ids:
            self._node(node_id)
        for fact in facts:
            self.add(fact)

    def add(self, fact: Fact) -> None:
        """Fold a line; invalid lines are only counted."""
        node_id, record = fact
        node = self._node(node_id)
        revision = node.revision
        try:
            require_line(record)
            at_s = float(record["at_s"])
            node.add(record)
            if "kind" in record:
                self._add_event(node, node_id, at_s, record)
            else:
                self._add_metrics(node, node_id, at_s, record)
        except BROKEN_LINE:
            self.invalid_lines += 1
            return
        finally:
            if node.revision != revision:
                self._state_changed()
        node.first_at_s = min(node.first_at_s, at_s)
        node.views.add(at_s, node.newest, apart_s=1.0)

    def _node(self, node_id: str) -> NodeHistory:
        if node_id not in self._nodes:
            self._nodes[node_id] = NodeHistory(node_id)
        return self._nodes[node_id]

    def _line(self, node: NodeHistory, node_id: str, at_s: float) -> LineSummary:
        """Return the line of rounds that a node is in."""
        founding = node.newest.founding or ""
        if founding not in self._lines:
            if len(self._lines) >= KEPT_LINES:
                del self._lines[min(self._lines, key=lambda name: self._began_at_s(self._lines[name]))]
            self._lines[founding] = LineSummary()
        line = self._lines[founding]
        if at_s < line.first_at_s.get(node_id, math.inf):
            line.first_at_s[node_id] = at_s
            self._own = None
        return line

    def _state_changed(self) -> None:
        self._spans.clear()
        self._links = None
        self.revision += 1

    def _add_metrics(self, node: NodeHistory, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        line = self._line(node, node_id, at_s)
        line.add_step(node_id, at_s, record, len(node.newest.members))
        if "outer/round" in record:
            line.finish_round(node_id, at_s, record, node.take_compute_s())
            number, digest = int(record["outer/round"]), record.get("outer/digest")
            if digest and node.committed_round in (None, number):  # else it belongs to the line before a rollback
                line.checked.digest(node_id, at_s, number, str(digest))

    def _add_event(self, node: NodeHistory, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        kind = str(record["kind"])
        match kind:
            case "round_committed":
                self._add_round(node, node_id, at_s, record)
            case "peer_lost":
                self._note_lost(node_id, at_s, record["member_ids"])
            case "sample_written" if "text" in record:
                text = str(record["text"])[:_SAMPLE_CHARS]
                self._samples.append(EventView(at_s, node_id, kind, {"text": text}))
            case "links":
                self._links = None
            case "left" if node.newest.member_id is not None:
                _remember(self._left, node.newest.member_id, (node_id, at_s))
            case _:
                self._note_checkpoint(kind, node_id, at_s, record)
        if kind not in _NOT_SHOWN:
            self._show(node_id, at_s, kind, record)

    def _note_lost(self, node_id: str, at_s: float, member_ids: Sequence[str]) -> None:
        self._state_changed()
        for lost in member_ids:
            known = self._lost.get(lost)
            if known is None or self._time(node_id, at_s) < self._time(*known):
                _remember(self._lost, lost, (node_id, at_s))

    def _add_round(self, node: NodeHistory, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        line, number = self._line(node, node_id, at_s), int(record["round"])
        if line.commit(node_id, at_s, record):
            self._own = None
        for member in record.get("late") or ():
            self._note_late(member, number, Lateness(node_id, at_s))
        if node.newest.member_id in record["members"]:
            for (_, missed), lateness in node.lates.items():
                if missed < number and lateness.back_at_s is None:
                    lateness.back_at_s = at_s
                    self._state_changed()
        self._anchor(node, node.newest.founding or "", number, at_s)
        cost = node.commit(at_s, number)
        if cost is not None:
            line.peer_losses.append(cost)

    def _note_checkpoint(self, kind: str, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        match kind:
            case "checkpoint_committed":
                self._add_checkpoint(node_id, at_s, record)
            case "checkpoints_removed":
                for step in record["steps"]:
                    self._change_checkpoint(int(step), gone=(node_id, at_s))
            case "resumed_from" | "rolled_back":  # loading verifies every file
                self._change_checkpoint(int(record["step"]), read_by=(node_id, at_s))
            case "checkpoint_failed" | "checkpoint_left_out":
                self._checkpoint_failures.append(EventView(at_s, node_id, kind, _usual_fields(kind, record)))
            case _:
                pass

    def _add_checkpoint(self, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        step, number, size = int(record["step"]), int(record["round"]), number_of(record, "bytes")
        if any(one.step == step and one.round >= number and one.gone is None for one in self._checkpoints.values()):
            return
        self._change_checkpoint(step, gone=(node_id, at_s))  # after a rollback the same step is written again
        took_s = number_of(record, "took_s")
        new = CheckpointView(step, number, node_id, at_s, None if size is None else int(size), took_s)
        self._checkpoints[step, number] = new
        while len(self._checkpoints) > NEWEST_ROUNDS:
            self._forgot_checkpoints = True
            del self._checkpoints[min(self._checkpoints, key=lambda key: (self._checkpoints[key].gone is None, key))]

    def _change_checkpoint(self, step: int, **changed: tuple[str, float]) -> None:
        for key, one in self._checkpoints.items():
            if one.step == step and one.gone is None:
                self._checkpoints[key] = replace(one, **changed)

    def _show(self, node_id: str, at_s: float, kind: str, record: Mapping[str, Any]) -> None:
        fields = _usual_fields(kind, record)
        if kind in _SHOWN_ONCE:
            about = (kind, *(str(fields.get(name)) for name in _SHOWN_ONCE[kind]))
            if about in self._shown_once:
                return
            _remember(self._shown_once, about, None)
        self._ordered_events = None
        self._events.append(EventView(at_s, node_id, kind, fields))

    # -- clocks -------------------------------------------------------------------------------------------------

    def _anchor(self, node: NodeHistory, founding: str, number: int, at_s: float) -> None:
        """Keep the commit times of evenly spaced rounds, the same ones for every node."""
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
        """Return how many seconds each node's clock is ahead of the majority's; missing where unknown or negligible.

        The median over rounds that it committed with others.
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
        found = {node_id: round(median(by), 1) for node_id, by in ahead.items()}  # rounded: drawings must not jitter
        return {node_id: by for node_id, by in found.items() if abs(by) > _SAME_CLOCK_S}

    def _redraw(self) -> None:
        """Discard what was computed with the previous offsets."""
        self._ordered_events = self._own = None
        self._state_changed()
        for line in self._lines.values():
            for round in line.rounds.newest_first():
                round.shown = None

    def _time(self, node_id: str, at_s: float) -> float:
        return at_s - self.offsets().get(node_id, 0.0)

    # -- queries ------------------------------------------------------------------------------------------------

    @property
    def from_s(self) -> float | None:
        """Time of the first fact."""
        known = [(node_id, node.first_at_s) for node_id, node in self._nodes.items()]
        return min((self._time(*one) for one in known if math.isfinite(one[1])), default=None)

    @property
    def to_s(self) -> float | None:
        """Time of the newest fact."""
        known = [(node_id, node.newest.last_at_s) for node_id, node in self._nodes.items()]
        return max((self._time(node_id, at_s) for node_id, at_s in known if at_s is not None), default=None)

    def mean_rate(self, view: RunView) -> float | None:
        """Return tokens per second over the whole run in `view`, waits included; None before any training."""
        took_s = None if self.from_s is None or self.to_s is None else self.to_s - self.from_s
        return view.tokens / took_s if view.tokens and took_s else None

    def view(self, at_s: float | None = None) -> RunView:
        """Return the run now or at a time, without loss curve and events.

        Past states are exact; past numbers come from the newest kept view before `at_s`.
        """
        found: list[NodeView] = []
        for node_id, node in sorted(self._nodes.items()):
            view = node.newest if at_s is None else node.views.at(self._by_its_clock(node_id, at_s))
            if view is not None:
                span = self.standing(node_id, at_s)
                found.append(view if span is None or span.state == view.state else replace(view, state=span.state))
        return RunView(self._run_id, tuple(found), disagreements=self.diverged_rounds() if at_s is None else ())

    def membership(self, at_s: float | None = None) -> dict[str, tuple[StateSpan, ...]]:
        """Return each node's states up to a time, oldest first; a bounded number is kept."""
        spans = {node_id: self._spans_of(node_id, self._nodes[node_id]) for node_id in sorted(self._nodes)}
        if at_s is None:
            return spans
        known = {node_id: _until(states, at_s) for node_id, states in spans.items()}
        return {node_id: states for node_id, states in known.items() if states}

    def node_hours(self, node_ids: Iterable[str], at_s: float | None = None) -> float:
        """Return the total hours that these nodes were up; a node that recorded no end counts until `to_s`."""
        shown_s, membership = (self.to_s if at_s is None else at_s), self.membership(at_s)
        up = [span for node_id in node_ids for span in membership.get(node_id, ()) if span.state not in ENDED]
        return sum(max(0.0, (span.to_s or shown_s or span.from_s) - span.from_s) for span in up) / 3600

    def standing(self, node_id: str, at_s: float | None = None) -> StateSpan | None:
        """Return a node's state now or at a time; None before its first line."""
        node = self._nodes.get(node_id)
        spans = () if node is None else self._spans_of(node_id, node)
        return next((span for span in reversed(spans) if at_s is None or span.from_s <= at_s), None)

    def _spans_of(self, node_id: str, node: NodeHistory) -> tuple[StateSpan, ...]:
        self.offsets()
        if node_id not in self._spans:
            self._spans[node_id] = self._all_spans(node_id, node)
        return self._spans[node_id]

    def _all_spans(self, node_id: str, node: NodeHistory) -> tuple[StateSpan, ...]:
        spans: list[StateSpan] = []
        lates = self._late_spans(node, node_id)
        for start, after in zip(node.states, chain(islice(node.states, 1, None), [None]), strict=False):
            from_s = self._time(node_id, start.from_s)
            to_s = None if after is None else max(from_s, self._time(node_id, after.from_s))
            lost_s = self._lost_at_s(start, after, from_s)
            if start.member_id is not None and lost_s < (math.inf if to_s is None else to_s):
                spans += _with_lates(StateSpan(from_s, lost_s, start.state, start.why), lates)
                spans.append(StateSpan(lost_s, to_s, "lost", f"{self._lost[start.member_id][0]} continued without it"))
            else:
                spans += _with_lates(StateSpan(from_s, to_s, start.state, start.why), lates)
        return tuple(spans)

    def _lost_at_s(self, start: StateStart, after: StateStart | None, from_s: float) -> float:
        """Return when the others continued without a node in this state since `from_s`; infinity if they did not."""
        report = self._lost.get(start.member_id or "")
        has_ended = start.member_id in self._left or (after is not None and after.state in ENDED)
        if report is None or has_ended or start.state not in (*AT_WORK, "joining"):
            return math.inf
        lost_s = self._time(*report)
        is_rejoining = start.state == "joining" and lost_s <= from_s
        return math.inf if is_rejoining else max(from_s, lost_s)

    def _late_spans(self, node: NodeHistory, node_id: str) -> list[tuple[float, float | None, int]]:
        """Return when a node was late: from the others' commit to its own next one, with the round."""
        return [
            (
                self._time(lateness.reported_by, lateness.reported_at_s),
                None if lateness.back_at_s is None else self._time(node_id, lateness.back_at_s),
                number,
            )
            for (_, number), lateness in node.lates.items()
        ]

    def _note_late(self, member: str, number: int, lateness: Lateness) -> None:
        """Record another node's report that a member missed a round; its later rounds may already be known."""
        node_id = node_id_of_member(member)
        node = self._node(node_id)
        if (member, number) in node.lates:
            return
        newest = node.newest.round
        if newest is not None and newest > number:
            ends = [
                round.nodes[node_id].end_s
                for line in self._lines.values()
                for round in line.rounds.newest.values()
                if round.first > number and node_id in round.nodes
            ]
            lateness.back_at_s = min(ends, default=-math.inf)
        self._state_changed()
        node.lates[(member, number)] = lateness
        if len(node.lates) > NEWEST_ROUNDS:
            del node.lates[next(iter(node.lates))]

    def rounds(self, at_s: float | None = None, *, most: int = NEWEST_ROUNDS) -> tuple[RoundView, ...]:
        """Return the newest committed rounds, oldest first; older rounds are merged into means of neighbours.

        Unchanged rounds are the same objects from call to call.
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

    def _round_view(self, round: Round) -> RoundView | None:
        """Return the view of a round; None if no node is known to have committed it."""
        if round.shown is None:
            nodes = {
                node_id: replace(part, end_s=self._time(node_id, part.end_s)) if node_id in self._offsets else part
                for node_id, part in sorted(round.nodes.items())
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
        """Return the rounds for which two nodes recorded different outer states, in any line; must stay empty."""
        return tuple(sorted({number for line in self._lines.values() for number in line.checked.diverged}))

    def loss_curve(self) -> tuple[float, ...]:
        """Return the nodes' mean losses over ranges of equally many steps, without superseded steps."""
        curve = [
            bucket for line, until in self._cuts() for bucket in line.curve if until is None or bucket.first <= until
        ]
        return tuple(bucket.loss / bucket.losses for bucket in curve if bucket.losses)

    def events(self, at_s: float | None = None) -> tuple[EventView, ...]:
        """Return the events with corrected times, newest last, without duplicates from several members."""
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
        """Return the complete checkpoints that existed at a time, by ascending step."""

        def is_known(at: tuple[str, float] | None) -> bool:
            return at is not None and (at_s is None or self._time(*at) <= at_s)

        existing = [
            replace(
                one,
                at_s=self._time(one.node_id, one.at_s),
                gone=None,
                read_by=one.read_by if is_known(one.read_by) else None,
            )
            for one in self._checkpoints.values()
            if is_known((one.node_id, one.at_s)) and not is_known(one.gone)
        ]
        return tuple(sorted(existing, key=lambda one: one.step))

    def links(self, at_s: float | None = None) -> Mapping[str, tuple[LinkView, ...]]:
        """Return each running node's newest measurements of its links; for an ended run, those of all nodes.

        At an earlier time: the newest kept ones before it. Unchanged links are the same objects from call to call.
        """
        self.offsets()
        if at_s is None and self._links is not None:
            return self._links
        running = {one for one, node in self._nodes.items() if self._is_running(one, node, at_s)} or self._nodes.keys()
        found: dict[str, tuple[LinkView, ...]] = {}
        for one in sorted(running):
            links = self._nodes[one].links.at(self._by_its_clock(one, at_s)) or ()
            if any(link.to_id not in running for link in links):
                links = tuple(link for link in links if link.to_id in running)
            if links:
                found[one] = links
        if at_s is None:
            self._links = found
        return found

    def _is_running(self, node_id: str, node: NodeHistory, at_s: float | None) -> bool:
        """Return whether a node has recorded no end."""
        then_s = self._by_its_clock(node_id, at_s)
        start = next((start for start in reversed(node.states) if then_s is None or start.from_s <= then_s), None)
        return start is not None and start.state not in ENDED

    def _by_its_clock(self, node_id: str, at_s: float | None) -> float | None:
        return None if at_s is None else at_s + self.offsets().get(node_id, 0.0)

    def sample(self, at_s: float | None = None) -> EventView | None:
        """Return the newest kept sample of generated text, which may be truncated."""
        moved = [replace(one, at_s=self._time(one.node_id, one.at_s)) for one in self._samples]
        known = [one for one in moved if at_s is None or one.at_s <= at_s]
        return max(known, key=lambda one: one.at_s, default=None)

    def _began_at_s(self, line: LineSummary) -> float:
        return min(self._time(*first) for first in line.first_at_s.items())

    def _own_lines(self) -> Sequence[LineSummary]:
        """Return the lines with the same origin as the newest, oldest first.

        Other lines belong to an earlier run of the same name.
        """
        self.offsets()
        if self._own is None:
            follows = {name: line.follows for name, line in self._lines.items()}
            names = sorted(self._lines, key=lambda name: self._began_at_s(self._lines[name]))
            ours = [name for name in names if origin_of(name, follows) == origin_of(names[-1], follows)]
            self._own = [self._lines[name] for name in ours]
        return self._own

    # -- curves -------------------------------------------------------------------------------------------------

    def series(self, by: Axis = "tokens", *, points: int = 400) -> tuple[Curve, ...]:
        """Return the curves of the run, each of at most about `points` points, without superseded steps.

        The extremes of losses are kept. Axis: tokens of the run, seconds since 1970, bytes sent by all nodes, or inner
        steps.
        """
        lines = self._cuts()
        sent = _sent_so_far([line for line, _ in lines])

        def drawn(buckets_of: Callable[[LineSummary], Iterable[Bucket]]) -> Drawn:
            return [
                (self._x(by, bucket, sent[line]), bucket)
                for line, until in lines
                for bucket in buckets_of(line)
                if until is None or bucket.first <= until
            ]

        curve = drawn(lambda line: line.curve)
        return (
            _loss_series("loss", "Loss", curve, points),
            _mean_series("tokens_per_s", "Tokens per second, all nodes", "tokens/s", curve, points),
            _mean_series("mfu", "Model FLOP utilisation", "ratio", curve, points),
            _mean_series("nodes", "Nodes", "nodes", curve, points),
            _loss_series("held_out", "Held-out loss", drawn(lambda line: line.held_out), points),
            *(
                _loss_series(
                    f"loss/{name}", f"Loss of {name}", drawn(partial(LineSummary.of_source, name=name)), points
                )
                for name in sorted({name for line, _ in lines for name in line.sources})
            ),
        )

    def _cuts(self) -> list[tuple[LineSummary, int | None]]:
        """Return the lines that led to the newest state, each with the last step that was not superseded."""
        lines = self._own_lines()
        line = lines[-1] if lines else None
        chosen: list[tuple[LineSummary, int | None]] = []
        until: int | None = None
        while line is not None and all(line is not known for known, _ in chosen):
            chosen.insert(0, (line, until))
            until = line.begin_step
            line = self._lines.get(line.follows) if line.follows is not None else None
        return chosen

    def _x(self, by: Axis, bucket: Bucket, sent: Sequence[tuple[int, int]]) -> float:
        match by:
            case "tokens":
                return float(bucket.tokens)
            case "time":
                return self._time(bucket.node_id, bucket.at_s)
            case "bytes":
                index = bisect_right(sent, bucket.last, key=lambda one: one[0])
                return float(sent[index - 1][1] if index else 0)
            case "step":
                return float(bucket.last)

    # -- guarantees ---------------------------------------------------------------------------------------------

    @property
    def detect_s(self) -> float | None:
        """The run's `fault.detect_s`, as nodes recorded it at their start."""
        return max((s for node in self._nodes.values() if (s := node.newest.detect_s) is not None), default=None)

    def guarantees(self, at_s: float | None = None) -> tuple[Guarantee, ...]:
        """Return the state of the four guarantees by the facts known now or at a time."""
        then_s, lines = math.inf if at_s is None else at_s, self._own_lines()
        checked = Checked((line.checked for line in lines), then_s, self._time)
        newest_round = next((one.round for one in self.rounds(at_s, most=1)), None)
        failed = self._checkpoint_failure(then_s)
        losses = [loss for line in lines for loss in line.peer_losses if self._has_cost(loss, then_s)]
        forgot_peer_losses = at_s is not None and any(line.forgot_peer_losses for line in lines)
        forgot_checkpoints = at_s is not None and self._forgot_checkpoints
        return (
            divergence(checked, newest_round),
            ledger(checked),
            checkpoint(self.checkpoints(at_s), failed, is_forgotten=forgot_checkpoints),
            detection(losses, self.detect_s, self._time, is_forgotten=forgot_peer_losses),
        )

    def _checkpoint_failure(self, then_s: float) -> EventView | None:
        """Return the newest failure by then, unless a checkpoint of that or a later step was committed."""
        failures = [one for one in self._checkpoint_failures if self._time(one.node_id, one.at_s) <= then_s]
        newest = max(failures, key=lambda one: self._time(one.node_id, one.at_s), default=None)
        committed = self._checkpoints.values()
        steps = [one.step for one in committed if self._time(one.node_id, one.at_s) <= then_s]
        return None if newest is None or max(steps, default=-1) >= int(newest.fields.get("step", -1)) else newest

    def _has_cost(self, loss: PeerLossCost, then_s: float) -> bool:
        """Return whether a loss was known by then; a member that left on purpose was not lost."""
        left = [self._left.get(member) for member in loss.member_ids]
        is_lost = any(at is None or self._time(*at) > then_s for at in left)
        return is_lost and self._time(loss.node_id, loss.at_s) <= then_s

    # -- now ----------------------------------------------------------------------------------------------------

    def usual_step_s(self) -> float | None:
        """Return the median duration of the slowest node's newest inner steps, waits included."""
        return max((median(node.step_s) for node in self._nodes.values() if node.step_s), default=None)

    def waiting_for(self, now_s: float) -> WaitingFor | None:
        """Return which nodes block the run; None if the facts show no wait. `now_s`: on the clock of `to_s`."""
        own = [node.node_id for node in self.view().own]
        spans = {node_id: span for node_id in own if (span := self.standing(node_id)) is not None}
        paused = [span for span in spans.values() if span.state == "paused"]
        if paused:
            since_s = min(span.from_s for span in paused)
            words = "An operator paused the run; resume it to continue."
            return WaitingFor((), since_s, now_s - since_s, words)
        members = sorted(node_id for node_id, span in spans.items() if span.state in AT_WORK)
        last = {node_id: self._last_s(node_id) for node_id in members}
        if not members:
            return None
        newest_s = max(last.values())
        silent_s = now_s - newest_s
        if silent_s < max(_QUIET_S, 4 * (self.usual_step_s() or 0.0)):
            return None
        stalled = sorted({node_id_of_member(m) for name in members for m in self._nodes[name].stalled_on} & {*members})
        if stalled:
            words = f"{listed(stalled)} sent no data for this round; the others are waiting."
            return WaitingFor(tuple(stalled), newest_s, silent_s, words)
        late = [node_id for node_id in members if spans[node_id].state == "late"]
        steps = {node_id: self._nodes[node_id].newest.step for node_id in members}
        behind = [node_id for node_id in members if steps[node_id] < max(steps.values())]
        if behind and len(members) > 1:
            behind_s = now_s - max(last[node_id] for node_id in behind)
            is_late = "is late" if any(node_id in late for node_id in behind) else "is behind"
            where = f"at step {min(steps.values())} of {max(steps.values())}, and silent for {behind_s:.0f} s"
            words = f"{listed(behind)} {is_late}, {where}."
            return WaitingFor(tuple(behind), newest_s, silent_s, words)
        words = f"No member has recorded anything for {silent_s:.0f} s: a long round, or the store is unreachable."
        return WaitingFor((), newest_s, silent_s, words)

    def _last_s(self, node_id: str) -> float:
        at_s = self._nodes[node_id].newest.last_at_s
        return -math.inf if at_s is None else self._time(node_id, at_s)


Drawn = Sequence[tuple[float, Bucket]]
"""Buckets of a curve with their x."""


def _sent_so_far(lines: Sequence[LineSummary]) -> dict[LineSummary, list[tuple[int, int]]]:
    """Return, for each bucket of each line, its first step and the bytes sent by all nodes up to its end."""
    found: dict[LineSummary, list[tuple[int, int]]] = {}
    sent_bytes = 0
    for line in lines:
        found[line] = []
        for bucket in line.curve:
            sent_bytes += bucket.sent_bytes
            found[line].append((bucket.first, sent_bytes))
    return found


def _loss_series(key: str, title: str, drawn: Drawn, points: int) -> Curve:
    """Return a loss curve; merged neighbours keep their lowest and highest value."""
    group = -(-len(drawn) // max(1, points // 2)) if len(drawn) > points // 2 else 1
    found: list[tuple[float, float | None]] = []
    for start in range(0, len(drawn), group):
        xs, buckets = zip(*drawn[start : start + group], strict=True)
        merged = replace(buckets[0])
        for bucket in buckets[1:]:
            merged.merge(bucket)
        ys = merged.points()
        found += zip(xs[-1:] if len(ys) == 1 else (xs[0], xs[-1]), ys, strict=False)
    return Curve(key, title, "nats/token", *_ascending(found))


def _mean_series(
    key: Literal["tokens_per_s", "mfu", "nodes"], title: str, unit: str, drawn: Drawn, points: int
) -> Curve:
    known = [(x, mean) for x, bucket in drawn if (mean := bucket.mean(key)) is not None]
    return Curve(key, title, unit, *_ascending([known[i] for i in thin(len(known), points)]))


def _usual_fields(kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
    usual = EVENTS[kind].fields if kind in EVENTS else [name for name in record if name not in ("kind", "at_s")]
    return {name: record[name] for name in usual if name in record}


def _remember(table: dict[Any, Any], key: object, value: object) -> None:
    """Keep a value; drop the oldest if there are too many."""
    table[key] = value
    if len(table) > 4 * KEPT_EVENTS:
        del table[next(iter(table))]


def _with_lates(span: StateSpan, lates: Sequence[tuple[float, float | None, int]]) -> list[StateSpan]:
    """Split a span of training at the times in which the node was late."""
    if span.state != "training":
        return [span]
    found: list[StateSpan] = []
    at_s, end_s = span.from_s, math.inf if span.to_s is None else span.to_s
    for from_s, to_s, number in sorted(lates, key=lambda late: late[0]):
        begin, stop = max(at_s, from_s), min(end_s, math.inf if to_s is None else to_s)
        if begin >= stop:
            continue
        if begin > at_s:
            found.append(StateSpan(at_s, begin, "training", span.why))
        found.append(
            StateSpan(begin, stop if math.isfinite(stop) else None, "late", f"round {number} opened without it")
        )
        at_s = stop
    if at_s < end_s:
        found.append(StateSpan(at_s, span.to_s, "training", span.why))
    return found


def _until(spans: Sequence[StateSpan], at_s: float) -> tuple[StateSpan, ...]:
    """Return the spans as they were known at a time."""
    return tuple(
        span if span.to_s is not None and span.to_s <= at_s else replace(span, to_s=None)
        for span in spans
        if span.from_s <= at_s
    )


def _known_then(view: RoundView, at_s: float) -> RoundView:
    """Return a round without the nodes that committed it later."""
    nodes = {node_id: part for node_id, part in view.nodes.items() if part.end_s <= at_s}
    return view if len(nodes) == len(view.nodes) else replace(view, nodes=nodes)


def _ascending(points: Sequence[tuple[float, float | None]]) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Make x monotonic: a node's clock may go back."""
    xs: list[float] = []
    for x, _ in points:
        xs.append(max(x, xs[-1]) if xs else x)
    return tuple(xs), tuple(y for _, y in points)

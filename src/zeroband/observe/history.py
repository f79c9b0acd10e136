"""The long memory of a run: what its nodes recorded, folded into bounded memory however long it lasts. Pure.

Facts come in the order of each node's own times, and in any order between nodes: a node's whole past may come before
another's first line. Nothing is decided by comparing two nodes' clocks; only what is shown on one axis of time is
shifted by what the nodes' clocks differ in the rounds that they committed together, one offset for each node.
What a rollback or a new founding superseded is told apart by the line of rounds that it belongs to.
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
    LossCost,
    checkpoint,
    detection,
    divergence,
    ledger,
)
from zeroband.observe.lines import NEWEST_ROUNDS, LineSummary, NodeRound, Round, RoundView
from zeroband.observe.node_history import BROKEN_LINE, Lateness, LinkView, NodeHistory, Stay
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
"""Lines of rounds: each founding, and each rollback, begins one."""
KEPT_EVENTS = 1000
KEPT_SAMPLES = 8
_SAMPLE_CHARS = 4000
_ANCHORS = 64
_KEPT_FAILURES = 64
_QUIET_S = 5.0
"""Least silence after which a run counts as waiting for somebody."""
_SAME_CLOCK_S = 2.0
"""Differences of clocks below this are those of seeing one commit, and are not corrected."""
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
"""Events that every member records, and what makes two of them the same one."""
_NOT_SHOWN = ("round_committed", "payload_scored", "join_state", "join_progress", "links")
"""Too many to show: they are rounds, and states of nodes and links."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A stretch of time in which a node was in a state; `to_s` None: it still is."""

    from_s: float
    to_s: float | None
    state: NodeState
    why: str = ""


@dataclass(frozen=True)
class Curve:
    """A curve of the run. y: None where it was not a number."""

    key: str
    title: str
    unit: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]


class RunHistory:
    """Folds the facts of a run. One thread.

    Times that it gives, and takes as `at_s`, are seconds since 1970 by the clock that most nodes agree with.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._nodes: dict[str, NodeHistory] = {}
        self._lines: dict[str, LineSummary] = {}
        self._lost: dict[str, tuple[str, float]] = {}
        """Who said first that a membership was lost, and when."""
        self._gone: dict[str, tuple[str, float]] = {}
        """Memberships that were given back, by whose clock and when."""
        self._events: deque[EventView] = deque(maxlen=KEPT_EVENTS)
        self._told: dict[tuple[object, ...], None] = {}
        self._checkpoints: dict[tuple[int, int], CheckpointView] = {}
        """By step and round."""
        self._forgot_checkpoints = False
        self._checkpoint_failures: deque[EventView] = deque(maxlen=_KEPT_FAILURES)
        self._samples: deque[EventView] = deque(maxlen=KEPT_SAMPLES)
        self.odd_lines = 0
        """Lines that were no facts of ours."""
        self._anchor_stride = 1
        self._offsets: dict[str, float] = {}
        self._has_new_anchors = False
        self._ordered_events: tuple[EventView, ...] | None = None
        self._own: Sequence[LineSummary] | None = None
        self._links: Mapping[str, tuple[LinkView, ...]] | None = None
        self._spans: dict[str, tuple[StateSpan, ...]] = {}
        """Where nodes stood, as far as somebody asked since it changed."""
        self.turns = 0
        """Grows whenever a node comes to stand elsewhere."""

    # -- folding ------------------------------------------------------------------------------------------------

    def take(self, node_ids: Iterable[str], facts: Iterable[Fact]) -> None:
        """Fold facts. `node_ids`: all nodes that there are, some of which may not have written anything yet."""
        for node_id in node_ids:
            self._node(node_id)
        for fact in facts:
            self.add(fact)

    def add(self, fact: Fact) -> None:
        """Fold a line; one that is none of ours is counted."""
        node_id, record = fact
        node = self._node(node_id)
        turns = node.turns
        try:
            require_line(record)
            at_s = float(record["at_s"])
            node.add(record)
            if "kind" in record:
                self._add_event(node, node_id, at_s, record)
            else:
                self._add_metrics(node, node_id, at_s, record)
        except BROKEN_LINE:
            self.odd_lines += 1
            return
        finally:
            if node.turns != turns:
                self._turned()
        node.first_at_s = min(node.first_at_s, at_s)
        node.views.add(at_s, node.newest, apart_s=1.0)

    def _node(self, node_id: str) -> NodeHistory:
        if node_id not in self._nodes:
            self._nodes[node_id] = NodeHistory(node_id)
        return self._nodes[node_id]

    def _line(self, node: NodeHistory, node_id: str, at_s: float) -> LineSummary:
        """The line of rounds that a node is in."""
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

    def _turned(self) -> None:
        """A node stands elsewhere than before, or did so at another time."""
        self._spans.clear()
        self._links = None
        self.turns += 1

    def _add_metrics(self, node: NodeHistory, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        line = self._line(node, node_id, at_s)
        line.add_step(node_id, at_s, record, len(node.newest.members))
        if "outer/round" in record:
            line.finish_round(node_id, at_s, record, node.take_compute_s())
            number, digest = int(record["outer/round"]), record.get("outer/digest")
            if digest and node.committed_round in (None, number):  # else it is of the line before going back
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
                _remember(self._gone, node.newest.member_id, (node_id, at_s))
            case _:
                self._note_checkpoint(kind, node_id, at_s, record)
        if kind not in _NOT_SHOWN:
            self._show(node_id, at_s, kind, record)

    def _note_lost(self, node_id: str, at_s: float, member_ids: Sequence[str]) -> None:
        self._turned()
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
                    self._turned()
        self._anchor(node, node.newest.founding or "", number, at_s)
        cost = node.commit(at_s, number)
        if cost is not None:
            line.losses.append(cost)

    def _note_checkpoint(self, kind: str, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        match kind:
            case "checkpoint_committed":
                self._add_checkpoint(node_id, at_s, record)
            case "checkpoints_removed":
                for step in record["steps"]:
                    self._change_checkpoint(int(step), gone=(node_id, at_s))
            case "resumed_from" | "rolled_back":  # it verified each file as it read it
                self._change_checkpoint(int(record["step"]), read_by=(node_id, at_s))
            case "checkpoint_failed" | "checkpoint_left_out":
                self._checkpoint_failures.append(EventView(at_s, node_id, kind, _usual_fields(kind, record)))
            case _:
                pass

    def _add_checkpoint(self, node_id: str, at_s: float, record: Mapping[str, Any]) -> None:
        step, number, size = int(record["step"]), int(record["round"]), number_of(record, "bytes")
        if any(one.step == step and one.round >= number and one.gone is None for one in self._checkpoints.values()):
            return
        self._change_checkpoint(step, gone=(node_id, at_s))  # one after going back takes the place of the one before
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
            if about in self._told:
                return
            _remember(self._told, about, None)
        self._ordered_events = None
        self._events.append(EventView(at_s, node_id, kind, fields))

    # -- clocks -------------------------------------------------------------------------------------------------

    def _anchor(self, node: NodeHistory, founding: str, number: int, at_s: float) -> None:
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
        known = [(node_id, node.newest.last_at_s) for node_id, node in self._nodes.items()]
        return max((self._time(node_id, at_s) for node_id, at_s in known if at_s is not None), default=None)

    def mean_rate(self, view: RunView) -> float | None:
        """Tokens per second of a whole run as `view` shows it, every wait counted; None where it has not trained."""
        took_s = None if self.from_s is None or self.to_s is None else self.to_s - self.from_s
        return view.tokens / took_s if view.tokens and took_s else None

    def view(self, at_s: float | None = None) -> RunView:
        """The run now, or as it was then; without its curve and what happened.

        Of an earlier moment each node's numbers are those of its newest kept moment before it; where it stood is exact.
        """
        found: list[NodeView] = []
        for node_id, node in sorted(self._nodes.items()):
            view = node.newest if at_s is None else node.views.at(self._by_its_clock(node_id, at_s))
            if view is not None:
                span = self.standing(node_id, at_s)
                found.append(view if span is None or span.state == view.state else replace(view, state=span.state))
        return RunView(self._run_id, tuple(found), disagreements=self.diverged_rounds() if at_s is None else ())

    def membership(self, at_s: float | None = None) -> dict[str, tuple[StateSpan, ...]]:
        """Where each node stood when, oldest first, up to a moment; the oldest of very many are forgotten."""
        spans = {node_id: self._spans_of(node_id, self._nodes[node_id]) for node_id in sorted(self._nodes)}
        if at_s is None:
            return spans
        known = {node_id: _until(stays, at_s) for node_id, stays in spans.items()}
        return {node_id: stays for node_id, stays in known.items() if stays}

    def node_hours(self, node_ids: Iterable[str], at_s: float | None = None) -> float:
        """Hours in which these nodes were up, added up; a node that never said that it ended counts up to `to_s`."""
        shown_s, membership = (self.to_s if at_s is None else at_s), self.membership(at_s)
        up = [span for node_id in node_ids for span in membership.get(node_id, ()) if span.state not in ENDED]
        return sum(max(0.0, (span.to_s or shown_s or span.from_s) - span.from_s) for span in up) / 3600

    def standing(self, node_id: str, at_s: float | None = None) -> StateSpan | None:
        """Where a node stands, or stood then; None: it was not there yet."""
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
        for stay, after in zip(node.stays, chain(islice(node.stays, 1, None), [None]), strict=False):
            from_s = self._time(node_id, stay.from_s)
            to_s = None if after is None else max(from_s, self._time(node_id, after.from_s))
            lost_s = self._lost_at_s(stay, after, from_s)
            if stay.member_id is not None and lost_s < (math.inf if to_s is None else to_s):
                spans += _with_lates(StateSpan(from_s, lost_s, stay.state, stay.why), lates)
                spans.append(StateSpan(lost_s, to_s, "lost", f"{self._lost[stay.member_id][0]} went on without it"))
            else:
                spans += _with_lates(StateSpan(from_s, to_s, stay.state, stay.why), lates)
        return tuple(spans)

    def _lost_at_s(self, stay: Stay, after: Stay | None, from_s: float) -> float:
        """When others went on without a node that stood so from `from_s` on; infinite: they did not."""
        told = self._lost.get(stay.member_id or "")
        has_ended = stay.member_id in self._gone or (after is not None and after.state in ENDED)
        if told is None or has_ended or stay.state not in (*AT_WORK, "joining"):
            return math.inf
        lost_s = self._time(*told)
        is_on_its_way_back = stay.state == "joining" and lost_s <= from_s
        return math.inf if is_on_its_way_back else max(from_s, lost_s)

    def _late_spans(self, node: NodeHistory, node_id: str) -> list[tuple[float, float | None, int]]:
        """When a node was late: from the commit that others saw to its own next one."""
        return [
            (
                self._time(lateness.told_by, lateness.told_at_s),
                None if lateness.back_at_s is None else self._time(node_id, lateness.back_at_s),
                number,
            )
            for (_, number), lateness in node.lates.items()
        ]

    def _note_late(self, member: str, number: int, lateness: Lateness) -> None:
        """A membership was late in a round, as another node says; what the late one did since may be known already."""
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

    def _round_view(self, round: Round) -> RoundView | None:
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

    def loss_curve(self) -> tuple[float, ...]:
        """Mean losses of all nodes over stretches of equal numbers of steps, without what a rollback superseded."""
        curve = [
            bucket for line, until in self._cuts() for bucket in line.curve if until is None or bucket.first <= until
        ]
        return tuple(bucket.loss / bucket.losses for bucket in curve if bucket.losses)

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

        def is_known(said: tuple[str, float] | None) -> bool:
            return said is not None and (at_s is None or self._time(*said) <= at_s)

        there = [
            replace(
                one,
                at_s=self._time(one.node_id, one.at_s),
                gone=None,
                read_by=one.read_by if is_known(one.read_by) else None,
            )
            for one in self._checkpoints.values()
            if is_known((one.node_id, one.at_s)) and not is_known(one.gone)
        ]
        return tuple(sorted(there, key=lambda one: one.step))

    def links(self, at_s: float | None = None) -> Mapping[str, tuple[LinkView, ...]]:
        """What the nodes that are there said last of the ways to one another, by node; of an ended run all of them.

        Of an earlier moment it is the newest word before it that is kept. What stays the same is the same object from
        call to call.
        """
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

    def _is_there(self, node_id: str, node: NodeHistory, at_s: float | None) -> bool:
        """Whether a node has not ended, as far as it says so itself."""
        then_s = self._by_its_clock(node_id, at_s)
        stay = next((stay for stay in reversed(node.stays) if then_s is None or stay.from_s <= then_s), None)
        return stay is not None and stay.state not in ENDED

    def _by_its_clock(self, node_id: str, at_s: float | None) -> float | None:
        return None if at_s is None else at_s + self.offsets().get(node_id, 0.0)

    def sample(self, at_s: float | None = None) -> EventView | None:
        """The newest text that was generated by then, or its beginning; of very many the oldest are forgotten."""
        moved = [replace(one, at_s=self._time(one.node_id, one.at_s)) for one in self._samples]
        known = [one for one in moved if at_s is None or one.at_s <= at_s]
        return max(known, key=lambda one: one.at_s, default=None)

    def _began_at_s(self, line: LineSummary) -> float:
        return min(self._time(*first) for first in line.first_at_s.items())

    def _own_lines(self) -> Sequence[LineSummary]:
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

    # -- curves -------------------------------------------------------------------------------------------------

    def series(self, by: Axis = "tokens", *, points: int = 400) -> tuple[Curve, ...]:
        """Curves of the run, each of about `points` points at most; extremes of the loss are kept.

        Axis: tokens of the whole run, seconds since 1970, bytes that all nodes sent, or inner steps. What a rollback
        superseded is left out.
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
            _loss_series("held_out", "Held-out loss", drawn(LineSummary.held_out_by_step), points),
            *(
                _loss_series(
                    f"loss/{name}", f"Loss of {name}", drawn(partial(LineSummary.of_source, name=name)), points
                )
                for name in sorted({name for line, _ in lines for name in line.sources})
            ),
        )

    def _cuts(self) -> list[tuple[LineSummary, int | None]]:
        """The lines that led to the newest state, and the step up to which each counts."""
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
        """The run's `fault.detect_s`, as its nodes said when they started; None: none of them did."""
        return max((s for node in self._nodes.values() if (s := node.newest.detect_s) is not None), default=None)

    def guarantees(self, at_s: float | None = None) -> tuple[Guarantee, ...]:
        """What the facts say of the four, or what those said that there were then."""
        then_s, lines = math.inf if at_s is None else at_s, self._own_lines()
        checked = Checked((line.checked for line in lines), then_s, self._time)
        newest_round = next((one.round for one in self.rounds(at_s, most=1)), None)
        failed = self._checkpoint_failure(then_s)
        losses = [loss for line in lines for loss in line.losses if self._has_cost(loss, then_s)]
        forgot_losses = at_s is not None and any(line.forgot_losses for line in lines)
        forgot_checkpoints = at_s is not None and self._forgot_checkpoints
        return (
            divergence(checked, newest_round),
            ledger(checked),
            checkpoint(self.checkpoints(at_s), failed, is_forgotten=forgot_checkpoints),
            detection(losses, self.detect_s, self._time, is_forgotten=forgot_losses),
        )

    def _checkpoint_failure(self, then_s: float) -> EventView | None:
        """The newest failure by then, unless a checkpoint of that step or a later one was committed since."""
        failures = [one for one in self._checkpoint_failures if self._time(one.node_id, one.at_s) <= then_s]
        newest = max(failures, key=lambda one: self._time(one.node_id, one.at_s), default=None)
        committed = self._checkpoints.values()
        steps = [one.step for one in committed if self._time(one.node_id, one.at_s) <= then_s]
        return None if newest is None or max(steps, default=-1) >= int(newest.fields.get("step", -1)) else newest

    def _has_cost(self, loss: LossCost, then_s: float) -> bool:
        """Whether a loss was known by then, and is one: a member that gives its membership back is not lost."""
        given_back = [self._gone.get(member) for member in loss.member_ids]
        is_lost = any(gone is None or self._time(*gone) > then_s for gone in given_back)
        return is_lost and self._time(loss.node_id, loss.at_s) <= then_s

    # -- now ----------------------------------------------------------------------------------------------------

    def usual_step_s(self) -> float | None:
        """Duration of an inner step of the slowest node, waits included; the median of its newest ones."""
        return max((median(node.step_s) for node in self._nodes.values() if node.step_s), default=None)

    def waiting_for(self, now_s: float) -> WaitingFor | None:
        """Whom all wait for at this moment; None: for no node, as far as facts tell. `now_s`: as `to_s` counts."""
        own = [node.node_id for node in self.view().own]
        spans = {node_id: span for node_id in own if (span := self.standing(node_id)) is not None}
        paused = [span for span in spans.values() if span.state == "paused"]
        if paused:
            since_s = min(span.from_s for span in paused)
            words = "The run is paused, as an operator ordered: resume it to go on."
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
            words = f"{listed(stalled)} sent no byte of the round's transfer; the others wait."
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
        words = f"No member has recorded anything for {silent_s:.0f} s: a long round, or a store that is away."
        return WaitingFor((), newest_s, silent_s, words)

    def _last_s(self, node_id: str) -> float:
        at_s = self._nodes[node_id].newest.last_at_s
        return -math.inf if at_s is None else self._time(node_id, at_s)


Drawn = Sequence[tuple[float, Bucket]]
"""Parts of a curve, each with where it is drawn."""


def _sent_so_far(lines: Sequence[LineSummary]) -> dict[LineSummary, list[tuple[int, int]]]:
    """Bytes that all nodes had sent after each stretch of each line, with the stretch's first step."""
    found: dict[LineSummary, list[tuple[int, int]]] = {}
    sent_bytes = 0
    for line in lines:
        found[line] = []
        for bucket in line.curve:
            sent_bytes += bucket.sent_bytes
            found[line].append((bucket.first, sent_bytes))
    return found


def _loss_series(key: str, title: str, drawn: Drawn, points: int) -> Curve:
    """A loss; of neighbours that become one point the lowest and the highest."""
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
    """Keep a value; the oldest goes when there are too many."""
    table[key] = value
    if len(table) > 4 * KEPT_EVENTS:
        del table[next(iter(table))]


def _with_lates(span: StateSpan, lates: Sequence[tuple[float, float | None, int]]) -> list[StateSpan]:
    """A span of training, with the stretches in it in which the node was late."""
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
            StateSpan(begin, stop if math.isfinite(stop) else None, "late", f"round {number} went on without it")
        )
        at_s = stop
    if at_s < end_s:
        found.append(StateSpan(at_s, span.to_s, "training", span.why))
    return found


def _until(spans: Sequence[StateSpan], at_s: float) -> tuple[StateSpan, ...]:
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


def _ascending(points: Sequence[tuple[float, float | None]]) -> tuple[tuple[float, ...], tuple[float | None, ...]]:
    """Points with x that never falls, which a node's clock may do."""
    xs: list[float] = []
    for x, _ in points:
        xs.append(max(x, xs[-1]) if xs else x)
    return tuple(xs), tuple(y for _, y in points)

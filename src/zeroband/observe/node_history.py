"""The history of a node, folded from its lines in order of time, by its own clock. Pure, bounded memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from zeroband.observe.curves import Moments
from zeroband.observe.guarantees import PeerLossCost
from zeroband.observe.view import (
    ENDED,
    EvaluationView,
    JoinView,
    NodeState,
    NodeView,
    SourceView,
    node_id_of_member,
    number_of,
)

BROKEN_LINE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What folding an invalid line raises."""
KEPT_STAYS = 256
_KEPT_VIEWS, _KEPT_LINKS = 60, 8
_USUAL_ROUNDS, _USUAL_STEPS = 32, 16

_STATE_AFTER: Mapping[str, NodeState] = {
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


@dataclass(frozen=True)
class LinkView:
    """The link from one node to another."""

    from_id: str
    to_id: str
    mbit_s: float | None = None
    rtt_ms: float | None = None
    is_cut_off: bool = False


@dataclass(slots=True)
class StateStart:
    """A change of a node's state, and the member that the node was then."""

    from_s: float
    state: NodeState
    why: str
    member_id: str | None


@dataclass(slots=True)
class Lateness:
    """A round that opened without a node: who reported it and when; when the node was back, by its own clock."""

    reported_by: str
    reported_at_s: float
    back_at_s: float | None = None


class NodeHistory:
    """Folds a node's lines."""

    def __init__(self, node_id: str) -> None:
        self.newest = NodeView(node_id)
        """Its current view."""
        self.revision = 0
        """Grows with every change of its state."""
        self.states: deque[StateStart] = deque(maxlen=KEPT_STAYS)
        self.views = Moments[NodeView](_KEPT_VIEWS)
        self.links = Moments[tuple[LinkView, ...]](_KEPT_LINKS)
        self.first_at_s = math.inf
        self.step_s: deque[float] = deque(maxlen=_USUAL_STEPS)
        self.lost_now: tuple[str, ...] = ()
        """Lost members that the round in progress was opened without."""
        self.stalled_on: tuple[str, ...] = ()
        self.committed_round: int | None = None
        self.anchors: dict[tuple[str, int], float] = {}
        """Commit times of some rounds, by line and number."""
        self.lates: dict[tuple[str, int], Lateness] = {}
        """By member id and round."""
        self._compute_s = 0.0
        self._committed_at_s: float | None = None
        self._took_s: deque[float] = deque(maxlen=_USUAL_ROUNDS)

    def add(self, record: Mapping[str, Any]) -> None:
        """Fold a line of either file. Raises one of BROKEN_LINE for an invalid one."""
        at_s = float(record["at_s"])
        if "kind" in record:
            self._add_event(str(record["kind"]), at_s, record)
        else:
            self._add_metrics(at_s, record)

    # -- metrics ------------------------------------------------------------------------------------------------

    def _add_metrics(self, at_s: float, record: Mapping[str, Any]) -> None:
        old = self.newest
        if old.state == "starting" and old.member_id is None:
            old = self._fresh_view()
        changed = _measured(old, at_s, record)
        step_s = number_of(record, "train/step_s")
        if step_s is not None:
            self.step_s.append(step_s)
            self._compute_s += max(0.0, step_s - (number_of(record, "outer/blocked_s") or 0.0))
        self.newest = _changed(old, changed)
        if old.state == "starting":  # a node that trains alone
            self._enter(at_s, "training")

    def take_compute_s(self) -> float:
        """Return the seconds of its inner steps since the last call."""
        taken, self._compute_s = self._compute_s, 0.0
        return taken

    # -- events -------------------------------------------------------------------------------------------------

    def _add_event(self, kind: str, at_s: float, record: Mapping[str, Any]) -> None:
        old, changed = self.newest, dict[str, Any](last_at_s=at_s)
        match kind:
            case "node_started":
                changed |= {"starts": old.starts + 1, "member_id": None, "store": None}
                changed |= {name: record.get(name) for name in ("total_steps", "parameters")}
                changed["detect_s"] = number_of(record, "detect_s")
                self._took_s.clear()
                self._compute_s = 0.0
            case "joined":
                old = self._fresh_view() if record["round"] == 0 else old
                changed["member_id"] = record["member_id"]
            case "store_in_use":
                changed["store"] = int(record["generation"]), str(record["store"])
            case "links":
                self.links.add(at_s, tuple(_link(old.node_id, link) for link in record["links"]))
            case "transfer_stalled":
                self.stalled_on = tuple(map(str, record["waiting_for"]))
            case "peer_lost":
                self.lost_now = tuple(record["member_ids"])
            case _:
                pass
        changed["join"] = _join_after(old.join, kind, record)
        changed |= _round_after(old, kind, at_s, record)
        self.newest = _changed(old, changed)
        if kind in _STATE_AFTER:
            self._follow_state(kind, at_s, record)

    def _follow_state(self, kind: str, at_s: float, record: Mapping[str, Any]) -> None:
        state: NodeState = _STATE_AFTER[kind]
        if kind == "join_state" and self.newest.join is None:
            if record["state"] == "ended":
                return
            state = "training"
        if kind in ("node_started", "resumed", "rolled_back"):
            self._committed_at_s = None  # the duration of the next round is not representative
        self._enter(at_s, state, str(record.get("why") or record.get("reason") or record.get("error") or ""))

    def _enter(self, at_s: float, state: NodeState, why: str = "") -> None:
        """Record a state. `left` after another end is dropped: the first reason counts."""
        self.revision += 1
        newest = self.states[-1] if self.states else None
        if newest is not None and (newest.state, newest.member_id) == (state, self.newest.member_id):
            newest.why = why or newest.why
        elif newest is None or newest.state not in ENDED or state != "left":
            self.states.append(StateStart(at_s, state, why, self.newest.member_id))
        self.newest = _changed(self.newest, {"state": self.states[-1].state})

    def commit(self, at_s: float, number: int) -> PeerLossCost | None:
        """Record a commit. Returns the cost of a round that was reopened without lost members."""
        cost: PeerLossCost | None = None
        if self._committed_at_s is not None:
            took_s = at_s - self._committed_at_s
            if self.lost_now and self._took_s:
                node_id = self.newest.node_id
                cost = PeerLossCost(self.lost_now, number, node_id, took_s, median(self._took_s), at_s)
            elif took_s >= 0 and not self.lost_now:
                self._took_s.append(took_s)
        self._committed_at_s, self.committed_round, self.lost_now, self.stalled_on = at_s, number, (), ()
        return cost

    def _fresh_view(self) -> NodeView:
        """Return a view without an earlier run of the same name: a founder and a single node start from scratch."""
        kept = ("state", "starts", "total_steps", "parameters", "detect_s", "store", "last_at_s")
        return NodeView(self.newest.node_id, **{name: getattr(self.newest, name) for name in kept})


def _measured(old: NodeView, at_s: float, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a node's view that a line of metrics changes."""
    changed: dict[str, Any] = {
        "step": int(record["step"]),
        "last_at_s": at_s,
        "tokens": int(record.get("train/tokens", old.tokens)),
        "sent_bytes": old.sent_bytes + int(record.get("outer/sent_bytes", 0)),
        "received_bytes": old.received_bytes + int(record.get("outer/received_bytes", 0)),
        "ddp_bytes": old.ddp_bytes + int(record.get("outer/ddp_bytes", 0)),
        "epoch": record.get("outer/epoch", old.epoch),
        "sources": _sources_after(old.sources, record),
    }
    if "train/tokens_per_s" in record:
        changed["tokens_per_s"] = float(record["train/tokens_per_s"])
    if "train/mfu" in record:
        changed["mfu"] = number_of(record, "train/mfu")
    memory_bytes = number_of(record, "node/gpu_peak_bytes") or number_of(record, "node/rss_bytes")
    if memory_bytes is not None:
        changed["memory_bytes"] = int(memory_bytes)
    if "train/loss" in record:
        loss = changed["loss"] = float(record["train/loss"])
        changed["first_loss"] = loss if old.first_loss is None else old.first_loss
    if "eval/step" in record:
        losses, bits = _by_source(record, "eval/loss"), _by_source(record, "eval/bits_per_byte")
        changed["evaluation"] = EvaluationView(int(record["eval/step"]), losses, bits)
    if "outer/round" in record:
        changed |= {"round": int(record["outer/round"]), "digest": record.get("outer/digest") or old.digest}
    return changed


def _changed(view: NodeView, changed: Mapping[str, Any]) -> NodeView:
    """Do what `replace` does at a tenth of its cost: it runs for every line of every node."""
    made = object.__new__(NodeView)
    made.__dict__.update(view.__dict__, **changed)
    return made


def _round_after(old: NodeView, kind: str, at_s: float, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an event changes of a node's round, epoch and line of rounds."""
    changed = dict[str, Any]()
    if kind in ("epoch_changed", "round_committed"):
        members = tuple(record["members"])  # share equal lists between views
        changed |= {"epoch": record["epoch"], "members": old.members if old.members == members else members}
    if kind in ("round_committed", "recovered"):
        changed |= {"round": int(record["round"]), "digest": record["digest"] or old.digest}
    progress = record.get("progress") if kind == "round_committed" else None
    if progress is not None and progress.get("founding", "") != old.founding:  # round numbers may repeat
        follows = progress.get("follows")
        changed |= {"founding": progress.get("founding", ""), "founded_at_s": at_s}
        changed["follows"] = None if follows is None else str(follows[0])
    return changed


def _join_after(join: JoinView | None, kind: str, record: Mapping[str, Any]) -> JoinView | None:
    """Return a node's join progress after an event."""
    if kind in ("node_started", "left", "run_failed"):
        return None
    if kind == "join_progress" and join is not None:
        share = int(record["bytes"]) / max(1, int(record["of_bytes"]))
        return replace(join, share=share, bytes_per_s=number_of(record, "bytes_per_s"))
    if kind != "join_state":
        return join
    state = str(record["state"])
    if state in ("member", "ended"):
        return None
    return replace(join or JoinView(state), state=state, why=str(record.get("why") or ""))


def _link(from_id: str, link: Mapping[str, Any]) -> LinkView:
    mbit_s, rtt_ms = number_of(link, "mbit_s"), number_of(link, "rtt_ms")
    return LinkView(from_id, node_id_of_member(str(link["to"])), mbit_s, rtt_ms, bool(link["is_cut_off"]))


def _by_source(record: Mapping[str, Any], metric: str) -> dict[str, float]:
    """Return a metric of each source by name; the metric of all data has the name ""."""
    names = [name for name in record if name == metric or name.startswith(f"{metric}/")]
    return {name.removeprefix(metric).removeprefix("/"): float(record[name]) for name in names}


def _sources_after(sources: Mapping[str, SourceView], record: Mapping[str, Any]) -> Mapping[str, SourceView]:
    """Return the sources' totals after the step of a record."""
    if not any(name.startswith("data/pass/") for name in record):
        return sources
    losses, tokens, passes = (_by_source(record, name) for name in ("train/loss", "data/tokens", "data/pass"))
    after = dict(sources)
    for name in passes:
        if not name:
            continue  # all data
        before = sources.get(name, SourceView())
        after[name] = SourceView(before.tokens + int(tokens.get(name, 0)), passes[name], losses.get(name, before.loss))
    return after

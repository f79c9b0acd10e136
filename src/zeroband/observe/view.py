"""What a run looks like from outside: records of each node folded, line by line, into frozen views. Pure."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_low
from typing import Any, Literal

NodeState = Literal["starting", "training", "recovering", "fenced", "lost", "left", "finished", "failed"]

_KEY_BYTES, _KEY_DIGITS = 32, 43
"""Length of a public key, and in base64url without the `=` at its end."""

CURVE_POINTS = 256
"""Most points of a loss curve; when it is full, every second one goes."""

_STATE_AFTER: Mapping[str, NodeState] = {
    "node_started": "starting",
    "joined": "training",
    "recovering": "recovering",
    "recovered": "recovering",
    "fenced": "fenced",
    "left": "left",
    "run_finished": "finished",
    "run_failed": "failed",
}

BROKEN_LINE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What folding a line raises that no node wrote so."""

_NOT_JOINING = ("member", "ended")
ENDED: frozenset[Literal["lost", "left", "finished", "failed"]] = frozenset(["lost", "left", "finished", "failed"])
"""States of a node that has ended."""
SILENT_S = 120.0
"""Seconds without a line after which a node is taken for silent: one that trains writes one for every inner step."""


@dataclass(frozen=True)
class EventView:
    """One event of one node; `at_s` is that node's wall clock, for human readers only."""

    at_s: float
    node_id: str
    kind: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationView:
    """The newest evaluation of a node."""

    step: int
    """Inner step of the run."""
    losses: Mapping[str, float]
    """In nats per token, by source; those of the run's own held-out samples have the name ""."""
    bits_per_byte: Mapping[str, float]


@dataclass(frozen=True)
class SourceView:
    """What was trained of one source of a mixture."""

    tokens: int = 0
    """Over all starts."""
    data_pass: float = 0.0
    """Passes that the run has made over it."""
    loss: float | None = None
    """In nats per token, of the newest step that had some of it."""


@dataclass(frozen=True)
class NodeView:
    """A node as its files show it. None and 0 where it has not said yet."""

    node_id: str
    state: NodeState = "starting"
    join_state: str | None = None
    """Where it stands on its way into the run; None: it is in, or has ended."""
    member_id: str | None = None
    """Member id of its newest membership."""
    starts: int = 0
    """Number of times that its trainer was started."""
    step: int = 0
    """Inner steps it has finished."""
    total_steps: int | None = None
    parameters: int | None = None
    loss: float | None = None
    first_loss: float | None = None
    loss_curve: tuple[float, ...] = ()
    """Losses from the first to a recent step, evenly spaced, at most CURVE_POINTS."""
    evaluation: EvaluationView | None = None
    sources: Mapping[str, SourceView] = field(default_factory=dict[str, SourceView])
    """By name; empty with a single source."""
    tokens: int = 0
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Model FLOP utilisation of its newest step."""
    memory_bytes: int | None = None
    """Bytes of its GPU at the most, else of its trainer."""
    detect_s: float | None = None
    """Its `fault.detect_s`, as it said when it started."""
    store: tuple[int, str] | None = None
    """StoreTerm and address of the store that it uses, in a run that has several."""
    round: int | None = None
    epoch: int | None = None
    members: tuple[str, ...] = ()
    """Member ids of that epoch."""
    digest: str | None = None
    """Digest of the outer state after that round."""
    founding: str | None = None
    """The line of rounds that those belong to; a run that was resumed or went back began another one."""
    founded_at_s: float | None = None
    """Wall clock of the first round that it committed in that line."""
    follows: str | None = None
    """The line that this one goes on from."""
    sent_bytes: int = 0
    """Bytes over all its starts, as the two below."""
    received_bytes: int = 0
    ddp_bytes: int = 0
    """Bytes that it would have sent in per-step data parallel."""
    last_at_s: float | None = None
    """Wall clock of its newest line."""
    silent_s: float = field(default=0.0, compare=False)
    """Seconds since a line of it came, as the reader counts them; what was there before it, as its place tells."""
    skipped_lines: int = 0
    """Lines of its files that could not be read."""

    @property
    def key(self) -> str | None:
        """The short name of its own key."""
        return None if self.member_id is None else short_key(self.member_id)


@dataclass(frozen=True)
class RunView:
    """A run as the files of its nodes show it."""

    run_id: str
    nodes: tuple[NodeView, ...] = ()
    """Ordered by node id."""

    unread: tuple[str, ...] = ()
    """What of it cannot be read now, in words."""
    has_all_machines: bool = field(default=True, compare=False)
    """Whether nodes of other machines would be among them."""
    disagreements: tuple[int, ...] = ()
    """Rounds after which two nodes held different outer states; must be empty, always."""
    events: tuple[EventView, ...] = field(default=(), compare=False)
    """What happened, newest last; the order between nodes is only as good as their clocks."""

    @cached_property
    def current(self) -> tuple[NodeView, ...]:
        """The nodes of the line of rounds that began last, by most of its nodes' clocks.

        Others were in an earlier run of this name, were lost before this one went back, or are not in it yet.
        """
        begun: dict[str, list[float]] = {}
        for node in self.nodes:
            if node.founding is not None:
                begun.setdefault(node.founding, []).append(node.founded_at_s or 0.0)
        line = max(begun, key=lambda name: (median_low(begun[name]), name), default=None)
        return tuple(node for node in self.nodes if node.founding == line)

    @cached_property
    def strangers(self) -> tuple[NodeView, ...]:
        """Nodes that go on in rounds that have nothing to do with the current ones: another run of this name."""
        follows = {node.founding: node.follows for node in self.nodes if node.founding is not None}
        ours = origin_of(self.current[0].founding, follows) if self.current else None
        going_on = [node for node in self.nodes if node.founding is not None and node.state not in ENDED]
        return tuple(node for node in going_on if origin_of(node.founding, follows) != ours)

    @cached_property
    def own(self) -> tuple[NodeView, ...]:
        """All nodes but the strangers."""
        return tuple(node for node in self.nodes if node not in self.strangers)

    @cached_property
    def newest(self) -> NodeView | None:
        """The node that has seen the newest round."""
        known = [node for node in self.current if node.round is not None]
        return max(known, key=lambda n: (n.round, n.epoch or 0, n.node_id)) if known else None

    @property
    def round(self) -> int | None:
        return self.newest.round if self.newest else None

    @property
    def epoch(self) -> int | None:
        return max((node.epoch for node in self.current if node.epoch is not None), default=None)

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Node ids in the newest epoch; without [outer], the nodes that train."""
        known = [node for node in self.current if node.epoch is not None]
        if not known:
            return tuple(node.node_id for node in self.current if node.state == "training")
        return tuple(node_id_of_member(m) for m in max(known, key=lambda n: n.epoch or 0).members)

    @property
    def store(self) -> str | None:
        """The store in use, in words, of a run that has several."""
        newest = max((node.store for node in self.current if node.store is not None), default=None)
        return None if newest is None else f"{newest[1]}, generation {newest[0]}"

    @property
    def sent_bytes(self) -> int:
        return sum(node.sent_bytes for node in self.current)

    @property
    def ddp_bytes(self) -> int:
        return sum(node.ddp_bytes for node in self.current)

    @cached_property
    def first_loss(self) -> float | None:
        """Mean of the nodes' first losses, in nats per token; None where none has trained."""
        return _mean(node.first_loss for node in self._counted)

    @cached_property
    def loss(self) -> float | None:
        """Mean of the nodes' newest losses: one figure wherever the loss of the run is shown."""
        return _mean(node.loss for node in self._counted)

    @property
    def _counted(self) -> Sequence[NodeView]:
        """The nodes that are in, or, where none is, all of this run."""
        current = self.current or self.own
        return [node for node in current if node.node_id in self.members] or current

    @cached_property
    def sources(self) -> Mapping[str, SourceView]:
        """What all nodes trained of each source: tokens in all, the most passes, the mean of their newest losses."""
        by_name: dict[str, list[SourceView]] = {}
        for node in self.current:
            for name, source in node.sources.items():
                by_name.setdefault(name, []).append(source)
        return {name: _of_all_nodes(views) for name, views in by_name.items()}


def _mean(losses: Iterable[float | None]) -> float | None:
    """Mean of the losses that are finite numbers; None where there is none."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return sum(known) / len(known) if known else None


def _of_all_nodes(views: Sequence[SourceView]) -> SourceView:
    return SourceView(
        sum(view.tokens for view in views),
        max(view.data_pass for view in views),
        _mean(view.loss for view in views),
    )


def node_id_of_member(member_id: str) -> str:
    """The node behind a membership."""
    return member_id.rpartition("#")[0] or member_id


def public_key_in(name: str) -> bytes | None:
    """The 32 bytes of the public key at the end of a member's or a node's name; None where it carries none.

    A key has one form only: two names that differ carry two keys.
    """
    _, _, digits = name.rpartition("#")[2].rpartition(".")
    if len(digits) != _KEY_DIGITS:
        return None
    try:
        key = base64.b64decode(f"{digits}=", altchars=b"-_", validate=True)
    except ValueError:
        return None
    return key if len(key) == _KEY_BYTES and base64.urlsafe_b64encode(key).decode() == f"{digits}=" else None


def short_key(name: str) -> str | None:
    """The short name of the key that a name carries: its first 8 hexadecimal digits."""
    key = public_key_in(name)
    return None if key is None else key[:4].hex()


class NodeHistory:
    """Folds a node's records, in the order of their times, into its view."""

    def __init__(self, node_id: str) -> None:
        self._view = NodeView(node_id)
        self._curve = Curve()

    @property
    def newest(self) -> NodeView:
        """The view without its curve: costs nothing."""
        return self._view

    def loss_curve(self) -> tuple[float, ...]:
        """Losses from the first to a recent step, evenly spaced, at most CURVE_POINTS."""
        return self._curve.points()

    def add(self, record: Mapping[str, Any]) -> None:
        """Fold a line of either file. Raises one of BROKEN_LINE where it is none."""
        if "kind" in record:
            self.add_event(record)
        else:
            self.add_metrics(record)

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        """Fold a line of metrics.jsonl. Raises as `add` does."""
        old = self._view
        if old.state == "starting" and old.member_id is None:
            old = self._begin_anew()
        changed: dict[str, Any] = {
            "state": "training" if old.state == "starting" else old.state,
            "step": int(record["step"]),
            "last_at_s": float(record["at_s"]),
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
            self._curve.add(loss)
        if "eval/step" in record:
            losses, bits = _by_source(record, "eval/loss"), _by_source(record, "eval/bits_per_byte")
            changed["evaluation"] = EvaluationView(int(record["eval/step"]), losses, bits)
        if "outer/round" in record:
            changed |= {"round": int(record["outer/round"]), "digest": record.get("outer/digest") or old.digest}
        self._view = _changed(old, changed)

    def add_event(self, record: Mapping[str, Any]) -> None:
        """Fold a line of events.jsonl. Raises as `add` does."""
        kind, at_s = str(record["kind"]), float(record["at_s"])
        changed: dict[str, Any] = {"last_at_s": at_s, "state": self._state_after(kind)}
        if kind == "node_started":
            changed |= {
                "starts": self._view.starts + 1,
                "join_state": None,
                "member_id": None,
                "total_steps": record.get("total_steps"),
                "parameters": record.get("parameters"),
                "detect_s": number_of(record, "detect_s"),
                "store": None,
            }
        elif kind == "join_state":
            state = str(record["state"])
            changed["join_state"] = None if state in _NOT_JOINING else state
        elif kind == "joined":
            self._view = self._begin_anew() if record["round"] == 0 else self._view
            changed["member_id"] = record["member_id"]
        elif kind == "store_in_use":
            changed["store"] = int(record["generation"]), str(record["store"])
        if kind in ("epoch_changed", "round_committed"):
            before, members = self._view.members, tuple(record["members"])  # equal lists are kept once
            changed |= {"epoch": record["epoch"], "members": before if before == members else members}
        if kind == "round_committed" and record.get("progress") is not None:
            changed |= self._follow(record["progress"], at_s)
        if kind in ("round_committed", "recovered"):
            changed |= {"round": int(record["round"]), "digest": record["digest"] or self._view.digest}
        self._view = _changed(self._view, changed)

    def _state_after(self, kind: str) -> NodeState:
        if kind == "left" and self._view.state in ("finished", "failed"):
            return self._view.state
        return _STATE_AFTER.get(kind, self._view.state)

    def _follow(self, progress: Mapping[str, Any], at_s: float) -> dict[str, Any]:
        """What another line of rounds changes; its rounds may have the same numbers as those before."""
        founding, follows = progress.get("founding", ""), progress.get("follows")
        if founding == self._view.founding:
            return {}
        return {"founding": founding, "founded_at_s": at_s, "follows": None if follows is None else str(follows[0])}

    def _begin_anew(self) -> NodeView:
        """Forget an earlier run of the same name: a founder, and a node that trains alone, start from nothing."""
        old = self._view
        self._curve = Curve()
        return NodeView(
            old.node_id,
            state=old.state,
            starts=old.starts,
            total_steps=old.total_steps,
            parameters=old.parameters,
            detect_s=old.detect_s,
            store=old.store,
            last_at_s=old.last_at_s,
        )


def _changed(view: NodeView, changed: Mapping[str, Any]) -> NodeView:
    """A view with other values, as `replace` makes it: at a tenth of its cost, for every line of every node."""
    made = object.__new__(NodeView)
    made.__dict__.update(view.__dict__, **changed)
    return made


def origin_of(line: str | None, follows: Mapping[str, str | None]) -> str | None:
    """The line of rounds that a line goes back to. `follows`: what each known line goes on from."""
    seen: set[str] = set()
    while line is not None and line not in seen and (before := follows.get(line)) is not None:
        seen.add(line)
        line = before
    return line


def number_of(record: Mapping[str, Any], name: str) -> float | None:
    """A finite number of a line; None where there is none. Raises ValueError for a text that is no number."""
    value = record.get(name)
    if value is None or isinstance(value, (bool, list, dict)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _by_source(record: Mapping[str, Any], metric: str) -> dict[str, float]:
    """A metric and those of its sources, by their names; its own has the name ""."""
    names = [name for name in record if name == metric or name.startswith(f"{metric}/")]
    return {name.removeprefix(metric).removeprefix("/"): float(record[name]) for name in names}


def _sources_after(sources: Mapping[str, SourceView], record: Mapping[str, Any]) -> Mapping[str, SourceView]:
    """What was trained of each source after the step of a record."""
    if not any(name.startswith("data/pass/") for name in record):
        return sources
    losses, tokens, passes = (_by_source(record, name) for name in ("train/loss", "data/tokens", "data/pass"))
    after = dict(sources)
    for name in passes:
        if not name:
            continue  # of the data as a whole
        before = sources.get(name, SourceView())
        after[name] = SourceView(before.tokens + int(tokens.get(name, 0)), passes[name], losses.get(name, before.loss))
    return after


class Curve:
    """An evenly spaced selection of a series of unknown length, in bounded memory."""

    def __init__(self) -> None:
        self._points: list[float] = []
        self._stride = 1
        self._seen = 0

    def add(self, value: float) -> None:
        if self._seen % self._stride == 0:
            if len(self._points) == CURVE_POINTS:
                del self._points[1::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._points.append(value)
        self._seen += 1

    def points(self) -> tuple[float, ...]:
        return tuple(self._points)


def run_view(run_id: str, nodes: Iterable[NodeView], lost_member_ids: Set[str]) -> RunView:
    """The run of these nodes. A node is lost when another one said so of its newest membership."""

    def seen_by_others(node: NodeView) -> NodeView:
        is_lost = node.member_id in lost_member_ids and node.state in ("training", "recovering")
        return replace(node, state="lost") if is_lost else node

    return RunView(run_id, tuple(sorted(map(seen_by_others, nodes), key=lambda node: node.node_id)))

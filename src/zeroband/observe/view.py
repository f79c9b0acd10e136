"""What a run looks like from outside, as frozen views of its nodes and of all of them together. Pure."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import median_low
from typing import Any, Literal

NodeState = Literal[
    "starting", "joining", "training", "late", "paused", "leaving", "left", "lost", "failed", "finished"
]  # fmt: skip
AT_WORK: frozenset[NodeState] = frozenset(["training", "late", "paused", "leaving"])
"""States of a member."""
ENDED: frozenset[NodeState] = frozenset(["lost", "left", "finished", "failed"])
"""States of a node that has ended."""
SILENT_S = 120.0
"""Seconds without a line after which a node is taken for silent: one that trains writes one for every inner step."""

_KEY_BYTES, _KEY_DIGITS = 32, 43
"""Length of a public key, and in base64url without the `=` at its end."""


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
class JoinView:
    """Where a node stands on its way in."""

    state: str
    why: str = ""
    share: float | None = None
    """What is there and verified of the state that it fetches."""
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class WaitingFor:
    """Whom the run waits for, and why. No nodes: an order, or no particular one."""

    nodes: tuple[str, ...]
    since_s: float
    for_s: float
    """Seconds since then."""
    words: str


@dataclass(frozen=True)
class NodeView:
    """A node as its files show it. None and 0 where it has not said yet."""

    node_id: str
    state: NodeState = "starting"
    join: JoinView | None = None
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

    @property
    def is_at_work(self) -> bool:
        return self.state in AT_WORK

    @property
    def key(self) -> str | None:
        """Short form of the node's own key."""
        return None if self.member_id is None else short_key(self.member_id)


@dataclass(frozen=True)
class RunView:
    """A run as the files of its nodes show it."""

    run_id: str
    nodes: tuple[NodeView, ...] = ()
    """Ordered by node id."""

    unread: tuple[str, ...] = ()
    """What of it cannot be read now, in words."""
    skipped_lines: int = 0
    """Lines that could not be read."""
    has_all_machines: bool = field(default=True, compare=False)
    """Whether nodes of other machines would be among them."""
    disagreements: tuple[int, ...] = ()
    """Rounds after which two nodes held different outer states; must be empty, always."""
    loss_curve: tuple[float, ...] = ()
    """Mean losses of the nodes from the first to a recent step, evenly spaced."""
    events: tuple[EventView, ...] = field(default=(), compare=False)
    """What happened, newest last; the order between nodes is only as good as their clocks."""
    waiting: WaitingFor | None = field(default=None, compare=False)
    """Whom it waits for now; None: for no node, or that is not known."""

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
            return tuple(node.node_id for node in self.current if node.is_at_work)
        return tuple(node_id_of_member(m) for m in max(known, key=lambda n: n.epoch or 0).members)

    @property
    def step(self) -> int:
        """Inner steps of the node that is furthest."""
        return max((node.step for node in self.own), default=0)

    @property
    def total_steps(self) -> int | None:
        return max((node.total_steps for node in self.own if node.total_steps is not None), default=None)

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole run, by the node that knows of most."""
        return max((node.tokens for node in self.current or self.own), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        """Rate of all nodes that are at work, together."""
        rates = [node.tokens_per_s for node in self.own if node.is_at_work and node.tokens_per_s is not None]
        return sum(rates) if rates else None

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


@lru_cache(maxsize=4096)  # of the few names of a run, again and again
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

"""Frozen views of a run and its nodes, as their records show them. Pure."""

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
"""States of members."""
ENDED: frozenset[NodeState] = frozenset(["lost", "left", "finished", "failed"])
"""States of nodes that have ended."""
SILENT_S = 120.0
"""Seconds without a line before a node is shown as silent; a training node writes one per inner step."""

_KEY_BYTES, _KEY_DIGITS = 32, 43
"""Length of a public key, and of its unpadded base64url form."""


@dataclass(frozen=True)
class EventView:
    """An event of a node; `at_s` is that node's wall clock, for display only."""

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
    """In nats per token, by source; "" for the run's own held-out samples."""
    bits_per_byte: Mapping[str, float]


@dataclass(frozen=True)
class SourceView:
    """Training totals of a mixture's source."""

    tokens: int = 0
    """Tokens over all starts."""
    data_pass: float = 0.0
    """Passes of the run over it."""
    loss: float | None = None
    """In nats per token, in the newest step that contained it."""


@dataclass(frozen=True)
class JoinView:
    """Progress of a joining node."""

    state: str
    why: str = ""
    share: float | None = None
    """Fraction of the state that is fetched and verified."""
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class WaitingFor:
    """Which nodes the run waits for, and why; no nodes if it is paused or the cause is unknown."""

    nodes: tuple[str, ...]
    since_s: float
    for_s: float
    words: str


@dataclass(frozen=True)
class NodeView:
    """A node as its files show it; None or 0 for what is not recorded yet."""

    node_id: str
    state: NodeState = "starting"
    join: JoinView | None = None
    """None unless it is joining."""
    member_id: str | None = None
    starts: int = 0
    """Number of starts of its trainer."""
    step: int = 0
    """Finished inner steps."""
    total_steps: int | None = None
    parameters: int | None = None
    loss: float | None = None
    first_loss: float | None = None
    evaluation: EvaluationView | None = None
    sources: Mapping[str, SourceView] = field(default_factory=dict[str, SourceView])
    """By name; empty for a single source."""
    tokens: int = 0
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Model FLOP utilisation of its newest step."""
    memory_bytes: int | None = None
    """Peak memory of its GPU, else memory of its trainer."""
    detect_s: float | None = None
    """Its `fault.detect_s`."""
    store: tuple[int, str] | None = None
    """Generation and address of its store, in a run with several."""
    round: int | None = None
    epoch: int | None = None
    members: tuple[str, ...] = ()
    """Member ids of that epoch."""
    digest: str | None = None
    """Digest of the outer state after that round."""
    founding: str | None = None
    """The line of rounds that it is in; resuming and rolling back start another one."""
    founded_at_s: float | None = None
    """Wall clock of its first commit in that line."""
    follows: str | None = None
    """The line that this one continues."""
    sent_bytes: int = 0
    """Over all starts, like the two below."""
    received_bytes: int = 0
    ddp_bytes: int = 0
    """Bytes that per-step data parallel would have sent."""
    last_at_s: float | None = None
    """Wall clock of its newest line."""
    silent_s: float = field(default=0.0, compare=False)
    """Seconds since its newest line, by the reader's clock."""

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
    """What cannot be read now, each with the reason."""
    skipped_lines: int = 0
    """Lines that could not be read."""
    has_all_machines: bool = field(default=True, compare=False)
    """Whether nodes of other machines are included."""
    disagreements: tuple[int, ...] = ()
    """Rounds after which two nodes held different outer states; must stay empty."""
    loss_curve: tuple[float, ...] = ()
    """Mean losses of the nodes up to a recent step, evenly spaced."""
    events: tuple[EventView, ...] = field(default=(), compare=False)
    """Newest last; the order between nodes is as good as their clocks."""
    waiting: WaitingFor | None = field(default=None, compare=False)
    """None if the run waits for no node as far as known."""

    @cached_property
    def current(self) -> tuple[NodeView, ...]:
        """The nodes in the newest line of rounds, by the majority's clocks.

        The rest took part in an earlier run of this name, were lost before a rollback, or have not joined yet.
        """
        begun: dict[str, list[float]] = {}
        for node in self.nodes:
            if node.founding is not None:
                begun.setdefault(node.founding, []).append(node.founded_at_s or 0.0)
        line = max(begun, key=lambda name: (median_low(begun[name]), name), default=None)
        return tuple(node for node in self.nodes if node.founding == line)

    @cached_property
    def foreign_nodes(self) -> tuple[NodeView, ...]:
        """Running nodes whose rounds have another origin: another run of this name."""
        follows = {node.founding: node.follows for node in self.nodes if node.founding is not None}
        ours = origin_of(self.current[0].founding, follows) if self.current else None
        going_on = [node for node in self.nodes if node.founding is not None and node.state not in ENDED]
        return tuple(node for node in going_on if origin_of(node.founding, follows) != ours)

    @cached_property
    def own(self) -> tuple[NodeView, ...]:
        """All nodes except foreign ones."""
        return tuple(node for node in self.nodes if node not in self.foreign_nodes)

    @cached_property
    def newest(self) -> NodeView | None:
        """The node that committed the newest round."""
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
        """Node ids of the newest epoch; without [outer], the training nodes."""
        known = [node for node in self.current if node.epoch is not None]
        if not known:
            return tuple(node.node_id for node in self.current if node.is_at_work)
        return tuple(node_id_of_member(m) for m in max(known, key=lambda n: n.epoch or 0).members)

    @property
    def step(self) -> int:
        """Inner steps of the most advanced node."""
        return max((node.step for node in self.own), default=0)

    @property
    def total_steps(self) -> int | None:
        return max((node.total_steps for node in self.own if node.total_steps is not None), default=None)

    @property
    def tokens(self) -> int | None:
        """Tokens of the run, by the node with the highest count."""
        return max((node.tokens for node in self.current or self.own), default=None)

    @property
    def tokens_per_s(self) -> float | None:
        """Total rate of the members."""
        rates = [node.tokens_per_s for node in self.own if node.is_at_work and node.tokens_per_s is not None]
        return sum(rates) if rates else None

    @property
    def store(self) -> str | None:
        """The store in use as text, for a run with several."""
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
        """Mean of the nodes' first losses, in nats per token; None before training."""
        return _mean(node.first_loss for node in self._counted)

    @cached_property
    def loss(self) -> float | None:
        """Mean of the nodes' newest losses."""
        return _mean(node.loss for node in self._counted)

    @property
    def _counted(self) -> Sequence[NodeView]:
        """The members, or all nodes of this run if there are none."""
        current = self.current or self.own
        return [node for node in current if node.node_id in self.members] or current

    @cached_property
    def sources(self) -> Mapping[str, SourceView]:
        """Totals by source over all nodes: the sum of tokens, most passes, mean of the newest losses."""
        by_name: dict[str, list[SourceView]] = {}
        for node in self.current:
            for name, source in node.sources.items():
                by_name.setdefault(name, []).append(source)
        return {name: _of_all_nodes(views) for name, views in by_name.items()}


def _mean(losses: Iterable[float | None]) -> float | None:
    """Return the mean of the finite losses; None without any."""
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    return sum(known) / len(known) if known else None


def _of_all_nodes(views: Sequence[SourceView]) -> SourceView:
    return SourceView(
        sum(view.tokens for view in views),
        max(view.data_pass for view in views),
        _mean(view.loss for view in views),
    )


def node_id_of_member(member_id: str) -> str:
    """Return the node id in a member id."""
    return member_id.rpartition("#")[0] or member_id


@lru_cache(maxsize=4096)  # a run has few names, asked for often
def public_key_in(name: str) -> bytes | None:
    """Return the 32-byte public key at the end of a member id or node name; None without one.

    Only the canonical form of a key is accepted: different names carry different keys.
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
    """Return the first 8 hexadecimal digits of the public key in a name."""
    key = public_key_in(name)
    return None if key is None else key[:4].hex()


def origin_of(line: str | None, follows: Mapping[str, str | None]) -> str | None:
    """Return the first line of rounds in a chain. `follows`: the predecessor of each known line."""
    seen: set[str] = set()
    while line is not None and line not in seen and (before := follows.get(line)) is not None:
        seen.add(line)
        line = before
    return line


def number_of(record: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number in a record, else None. Raises ValueError for text that is not a number."""
    value = record.get(name)
    if value is None or isinstance(value, (bool, list, dict)):
        return None
    number = float(value)
    return number if math.isfinite(number) else None

"""JSON documents for the page, from a run's history. Pure.

Parts that do not change between documents are encoded and compressed once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from statistics import fmean
from typing import Any, Generic, TypeVar

from zeroband import __version__
from zeroband.observe.events import EVENTS
from zeroband.observe.history import Axis, RunHistory, StateSpan
from zeroband.observe.lines import RoundView
from zeroband.observe.node_history import LinkView
from zeroband.observe.status import foreign_in_words, human_count, lacking_in_words, nodes_in_words
from zeroband.observe.view import AT_WORK, EventView, JoinView, NodeView, RunView
from zeroband.observe.words import JOIN_WORDS, age, event_in_words, listed

SHOWN_ROUNDS = 120
SHOWN_EVENTS = 200
SHOWN_CHECKPOINTS = 20
_PACE_ROUNDS = 20
"""Newest rounds used to estimate the remaining time."""
_PARTS = ("end_s", "compute_s", "wait_s", "transfer_s", "apply_s")
_STALLED_S = 60.0
"""Silence of all members after which the run is shown as stalled."""
_GZIP_HEAD = bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 0xFF])
_GZIP_END = bytes([3, 0])
"""An empty last block."""

T = TypeVar("T")


@dataclass(frozen=True)
class EncodedPart:
    """A part of an answer, compressed separately."""

    body: bytes
    deflated: bytes
    digest: bytes

    @staticmethod
    def of(body: bytes) -> EncodedPart:
        squeezed = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
        deflated = squeezed.compress(body) + squeezed.flush(zlib.Z_FULL_FLUSH)  # other parts can be appended
        return EncodedPart(body, deflated, hashlib.blake2b(body, digest_size=16).digest())


@dataclass(frozen=True)
class Answer:
    """A response body, plain and compressed."""

    pieces: tuple[EncodedPart, ...]

    @staticmethod
    def of(body: bytes) -> Answer:
        return Answer((EncodedPart.of(body),))

    @cached_property
    def body(self) -> bytes:
        return b"".join(piece.body for piece in self.pieces)

    @cached_property
    def gzipped(self) -> bytes:
        crc, size = 0, 0
        for piece in self.pieces:
            crc, size = zlib.crc32(piece.body, crc), size + len(piece.body)
        end = crc.to_bytes(4, "little") + (size % 2**32).to_bytes(4, "little")
        return b"".join([_GZIP_HEAD, *(piece.deflated for piece in self.pieces), _GZIP_END, end])

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.blake2b(b"".join(piece.digest for piece in self.pieces), digest_size=12).hexdigest()}"'


class _EncodedList(Generic[T]):
    """A list in a document; elements are encoded again only if their object changed.

    `documents_of`: returns the elements for a key and its object.
    """

    def __init__(self, name: str, documents_of: Callable[[Any, T], Sequence[Any]]) -> None:
        self._name = name
        self._documents_of = documents_of
        self._kept: dict[Any, tuple[T, bytes]] = {}
        self._piece: EncodedPart | None = None

    def piece(self, items: Mapping[Any, T]) -> EncodedPart:
        """Encode the list of these objects by key."""
        kept = self._kept
        are_same = len(items) == len(kept) and all(map(is_, items.values(), (item for item, _ in kept.values())))
        if self._piece is None or not are_same:
            self._kept = {}
            for key, item in items.items():
                known = kept.get(key)
                if known is None or known[0] is not item:
                    known = (item, encode(self._documents_of(key, item))[1:-1])
                self._kept[key] = known
            encoded = b",".join(part for _, part in self._kept.values())
            self._piece = EncodedPart.of(f',"{self._name}":['.encode() + encoded + b"]")
        return self._piece


@dataclass(frozen=True)
class RunContext:
    """Information about a run that is not in its facts."""

    place: str = ""
    config_words: str = ""
    price_per_hour: float | None = None
    """Price of a node."""
    currency: str = "USD"
    orders_allowed: bool = False
    orders_why: str = ""
    has_all_machines: bool = True
    """Whether nodes of other machines are included."""


class Encoder:
    """Encodes the state documents of successive times."""

    def __init__(self) -> None:
        self._rounds = _EncodedList[RoundView]("rounds", lambda _, view: [_round(view)])
        self._membership = _EncodedList[tuple[StateSpan, ...]](
            "membership", lambda node_id, spans: [_stays(node_id, spans)]
        )
        self._events = _EncodedList[EventView]("events", lambda _, event: [_event(event)])
        self._links = _EncodedList[tuple[LinkView, ...]]("links", lambda _, links: [_link(link) for link in links])
        self._end = EncodedPart.of(b"}")

    def state(
        self, history: RunHistory | None, run_id: str | None, setting: RunContext, *, now_s: float, age_s: float | None,
        at_s: float | None, problem: str | None,
    ) -> Answer:  # fmt: skip
        """Return the document of /api/state. `age_s`: seconds since the newest fact arrived."""
        known = history if history is not None else RunHistory("")
        heading = {"run_id": run_id, "now_s": now_s, "age_s": age_s, "problem": problem}
        made = heading | _standing(known, setting, age_s, at_s, is_unread=problem is not None)
        return Answer(
            (
                EncodedPart.of(encode(made)[:-1]),
                self._rounds.piece({id(view): view for view in known.rounds(at_s, most=SHOWN_ROUNDS)}),
                self._membership.piece(known.membership(at_s)),
                self._events.piece({id(event): event for event in known.events(at_s)[-SHOWN_EVENTS:]}),
                self._links.piece(known.links(at_s)),
                self._end,
            )
        )


def encode(value: object) -> bytes:
    """Encode strict JSON; non-finite numbers become null."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    return text.encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        return {str(key): _plain(item) for key, item in items.items()}
    if isinstance(value, (list, tuple)):
        sequence: Sequence[Any] = value
        return [_plain(item) for item in sequence]
    return value


def _standing(
    known: RunHistory, setting: RunContext, age_s: float | None, at_s: float | None, *, is_unread: bool
) -> dict[str, Any]:
    """Return the state document without the long lists."""
    to_s = known.to_s
    view = known.view(at_s)
    waiting = known.waiting_for(to_s + age_s) if at_s is None and to_s is not None and age_s is not None else None
    state, words = _run_state(view, None if at_s is not None else age_s, waiting is not None)
    if not view.nodes and is_unread:
        words = "Nothing of this run could be read yet."
    if lacking := lacking_in_words(replace(view, has_all_machines=setting.has_all_machines)):
        before = "" if state == "training" else f"{words} "  # the local counts would mislead
        words = f"{before}{lacking}; --store shows all."
    if view.foreign_nodes:
        words += f" {foreign_in_words(view)}."
    sample = known.sample(at_s)
    return {
        "place": setting.place,
        "version": __version__,
        "at_s": to_s if at_s is None else at_s,
        "from_s": known.from_s,
        "to_s": to_s,
        "run": {"state": state, "words": words, **_numbers(known, view, setting, at_s)},
        "nodes": [_node(known, node, at_s) for node in view.nodes],
        "waiting_for": None if waiting is None else _chosen(waiting, "nodes", "since_s", "words"),
        "guarantees": [_chosen(one, "key", "title", "state", "words", "evidence") for one in known.guarantees(at_s)],
        "checkpoints": [
            {**_chosen(one, "step", "round", "bytes", "took_s"), "at_s": _ms(one.at_s)}
            for one in known.checkpoints(at_s)[-SHOWN_CHECKPOINTS:]
        ],
        "sample": None if sample is None else {**_chosen(sample, "node_id", "at_s"), **sample.fields},
        "orders": {"allowed": setting.orders_allowed, "why": setting.orders_why},
    }


def _chosen(view: object, *names: str) -> dict[str, Any]:
    """Return fields of a view by name."""
    return {name: getattr(view, name) for name in names}


def _stays(node_id: str, spans: Sequence[StateSpan]) -> dict[str, Any]:
    return {"id": node_id, "spans": [[_ms(span.from_s), _ms(span.to_s), span.state] for span in spans]}


def _event(event: EventView) -> dict[str, Any]:
    return {
        **_chosen(event, "node_id", "kind"),
        "at_s": _ms(event.at_s),
        "words": event_in_words(event),
        "level": _level(event.kind),
    }


def _link(link: LinkView) -> dict[str, Any]:
    return {"from": link.from_id, "to": link.to_id, **_chosen(link, "mbit_s", "rtt_ms", "is_cut_off")}


def _round(view: RoundView) -> dict[str, Any]:
    return {
        **_chosen(view, "round", "epoch", "members", "retries"),
        "committed_at_s": _ms(view.committed_at_s),
        "nodes": {
            node_id: {name: _ms(seconds) for name, seconds in _chosen(part, *_PARTS).items()}
            for node_id, part in view.nodes.items()
        },
    }


def series_document(history: RunHistory | None, by: Axis, points: int) -> bytes:
    """Return the document of /api/series."""
    found = () if history is None else history.series(by, points=points)
    return encode({"by": by, "series": [_chosen(one, "key", "title", "unit", "x", "y") for one in found]})


def _level(kind: str) -> str:
    """Return the severity of an event: info, warning or error."""
    level = EVENTS[kind].level if kind in EVENTS else logging.INFO
    return "error" if level >= logging.ERROR else "warning" if level >= logging.WARNING else "info"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _run_state(view: RunView, age_s: float | None, is_waiting: bool) -> tuple[str, str]:
    """Return the state of the run as a word and as a sentence."""
    states = [node.state for node in view.own if node.last_at_s is not None]
    at_work = [state for state in states if state in AT_WORK]
    if not states:
        return "waiting", "No node has recorded anything yet."
    if "paused" in at_work:
        return "paused", f"{nodes_in_words(at_work.count('paused'))} paused by an operator at the round boundary."
    if at_work and is_waiting and age_s is not None and age_s > _STALLED_S:
        return "stalled", f"No node has recorded anything for {age(age_s)}."
    if at_work:
        return "training", f"{nodes_in_words(len(at_work))} in, {nodes_in_words(len(states))} seen."
    if "finished" in states:  # checked before "starting": a node that died early stays in that state
        return "finished", "All inner steps are done."
    if "joining" in states or "starting" in states:
        return "waiting", "Nodes are joining; none trains yet."
    if "failed" in states:
        failed = [node.node_id for node in view.own if node.state == "failed"]
        return "failed", f"No node is training; {listed(failed)} failed."
    return "stalled", f"No node is training: all {len(states)} left or were lost. The newest round is {view.round}."


def _numbers(known: RunHistory, view: RunView, setting: RunContext, at_s: float | None) -> dict[str, Any]:
    current = view.current or view.own
    at_work = [node for node in view.own if node.is_at_work]
    step, total = max((node.step for node in current), default=None), view.total_steps
    mfus = [node.mfu for node in at_work if node.mfu is not None]
    held_out = [node.evaluation for node in current if node.evaluation is not None]
    parameters = max((node.parameters for node in view.own if node.parameters is not None), default=None)
    shape = [f"{human_count(parameters)} parameters"] if parameters is not None else []
    return {
        "step": step,
        "total_steps": total,
        "round": view.round,
        "epoch": view.epoch,
        "store": view.store,
        "tokens": view.tokens,
        "tokens_per_s": known.mean_rate(view) if at_s is None and not at_work else view.tokens_per_s,
        "mfu": fmean(mfus) if mfus else None,
        "left_s": _left_s(known, step, total, at_s) if at_work else None,
        "parameters": parameters,
        "loss": view.loss,
        "held_out": max(held_out, key=lambda one: one.step).losses.get("") if held_out else None,
        "config_words": ", ".join([*shape, *([setting.config_words] if setting.config_words else [])]),
        "cost": _cost(known, view, len(at_work), setting, at_s),
        "sent_bytes": view.sent_bytes,
        "ddp_bytes": view.ddp_bytes,
    }


def _left_s(known: RunHistory, step: int | None, total: int | None, at_s: float | None) -> float | None:
    """Estimate the remaining seconds from the newest rounds, or from the step time without rounds."""
    if step is None or total is None or step >= total:
        return None
    rounds = [view for view in known.rounds(at_s, most=_PACE_ROUNDS) if view.round > 0 and view.step is not None]
    if len(rounds) > 1:
        first, last = rounds[0], rounds[-1]
        steps, took_s = (last.step or 0) - (first.step or 0), last.committed_at_s - first.committed_at_s
        if steps > 0 and took_s > 0:
            return (total - step) * took_s / steps
    step_s = known.usual_step_s() if at_s is None else None
    return None if step_s is None else (total - step) * step_s


def _cost(
    known: RunHistory, view: RunView, nodes: int, setting: RunContext, at_s: float | None
) -> dict[str, Any] | None:
    """Return the cost of the nodes by their time in the run."""
    price = setting.price_per_hour
    if price is None or known.to_s is None:
        return None
    hours = known.node_hours([node.node_id for node in view.own], at_s)
    return {"so_far": hours * price, "per_hour": nodes * price, "currency": setting.currency}


def _join(join: JoinView) -> dict[str, Any]:
    percent = None if join.share is None else 100 * join.share
    return {"state": JOIN_WORDS.get(join.state, join.state), "percent": percent, "bytes_per_s": join.bytes_per_s}


def _node(known: RunHistory, node: NodeView, at_s: float | None) -> dict[str, Any]:
    span = known.standing(node.node_id, at_s)
    is_on_its_way = node.state in ("joining", "starting") and at_s is None
    return {
        "id": node.node_id,
        "why": "" if span is None else span.why,
        "join": _join(node.join) if node.join is not None and is_on_its_way else None,
        "tokens_per_s": node.tokens_per_s if node.is_at_work else None,
        "mfu": node.mfu if node.is_at_work else None,
        "last_at_s": None if node.last_at_s is None else node.last_at_s - known.offsets().get(node.node_id, 0.0),
        **_chosen(node, "key", "state", "step", "loss", "round", "digest", "starts"),
        **_chosen(node, "sent_bytes", "received_bytes", "memory_bytes"),
    }

"""What the page shows, as JSON documents made of a run's history. Pure; docs/operations.md describes them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from zeroband import __version__
from zeroband.observe.events import EVENTS
from zeroband.observe.history import Axis, JoinView, LinkView, RoundView, RunHistory, Span
from zeroband.observe.status import human_count
from zeroband.observe.view import EventView, NodeView, RunView
from zeroband.observe.words import JOIN_WORDS, event_in_words

SHOWN_ROUNDS = 120
SHOWN_EVENTS = 200
SHOWN_CHECKPOINTS = 20
_STALLED_S = 60.0
"""How long all members must be silent for the run to be called stalled."""
_AT_WORK = ("training", "late", "paused", "leaving")


@dataclass(frozen=True)
class Setting:
    """What is known of a run beside its facts."""

    place: str = ""
    detect_s: float | None = None
    config_words: str = ""
    price_per_hour: float | None = None
    """What a node costs, in US dollars."""
    orders_allowed: bool = False
    orders_why: str = ""
    sample: tuple[str, float, str] | None = None
    """Node, when, text."""


@dataclass
class Encoder:
    """Makes documents; a round is encoded once, as long as it stays the same."""

    _rounds: dict[tuple[int, float], tuple[RoundView, bytes]] = field(
        default_factory=dict[tuple[int, float], tuple[RoundView, bytes]]
    )

    def state(
        self, history: RunHistory | None, run_id: str | None, setting: Setting, *, now_s: float, age_s: float | None,
        at_s: float | None, problem: str | None,
    ) -> bytes:  # fmt: skip
        """The document of /api/state. `age_s`: of the newest fact, as this process saw it come."""
        made = state_document(history, run_id, setting, now_s=now_s, age_s=age_s, at_s=at_s, problem=problem)
        rounds = [] if history is None else history.rounds(at_s, most=SHOWN_ROUNDS)
        made.pop("rounds")
        kept: dict[tuple[int, float], tuple[RoundView, bytes]] = {}
        for view in rounds:
            key = (view.round, view.committed_at_s)
            known = self._rounds.get(key)
            same = known is not None and known[0] == view
            kept[key] = known if same and known is not None else (view, encode(round_document(view)))
        if at_s is None:
            self._rounds = kept
        parts = b",".join(part for _, part in kept.values())
        return encode(made)[:-1] + b',"rounds":[' + parts + b"]}"


def encode(value: object) -> bytes:
    """Strict JSON; numbers that it lacks are null."""
    return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False).encode()


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


def state_document(
    history: RunHistory | None, run_id: str | None, setting: Setting, *, now_s: float, age_s: float | None,
    at_s: float | None, problem: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The document of /api/state as a dictionary, its rounds empty."""
    known = history if history is not None else RunHistory("")
    to_s = known.to_s
    shown_s = to_s if at_s is None else at_s
    view = known.view(at_s)
    spans = {node.node_id: known.standing(node.node_id, at_s) for node in view.nodes}
    waiting = known.waiting_for(to_s + age_s) if at_s is None and to_s is not None and age_s is not None else None
    state, words = _run_state(view, spans, None if at_s is not None else age_s, waiting is not None)
    return {
        "run_id": run_id,
        "place": setting.place,
        "version": __version__,
        "now_s": now_s,
        "at_s": shown_s,
        "from_s": known.from_s,
        "to_s": to_s,
        "age_s": age_s,
        "problem": problem,
        "run": {"state": state, "words": words, **_numbers(known, view, spans, setting, shown_s)},
        "nodes": [_node(known, node, spans[node.node_id], at_s) for node in view.nodes],
        "waiting_for": None if waiting is None else asdict(waiting),
        "promises": [asdict(one) for one in known.promises(detect_s=setting.detect_s)],
        "links": [_link(link) for link in known.links()],
        "rounds": [],
        "membership": [
            {"id": node_id, "spans": [[_ms(s.from_s), _ms(s.to_s), s.standing] for s in stays]}
            for node_id, stays in known.membership().items()
        ],
        "events": [_event(event) for event in known.events(at_s)[-SHOWN_EVENTS:]],
        "checkpoints": [
            {"step": one.step, "round": one.round, "at_s": _ms(one.at_s), "bytes": one.bytes, "took_s": one.took_s}
            for one in known.checkpoints(at_s)[-SHOWN_CHECKPOINTS:]
        ],
        "sample": None
        if setting.sample is None
        else dict(zip(("node_id", "at_s", "text"), setting.sample, strict=True)),
        "orders": {"allowed": setting.orders_allowed, "why": setting.orders_why},
    }


def _event(event: EventView) -> dict[str, Any]:
    return {
        "at_s": _ms(event.at_s),
        "node_id": event.node_id,
        "kind": event.kind,
        "words": event_in_words(event),
        "level": level_of(event.kind),
    }


def _link(link: LinkView) -> dict[str, Any]:
    return {
        "from": link.from_id,
        "to": link.to_id,
        "mbit_s": link.mbit_s,
        "rtt_ms": link.rtt_ms,
        "is_cut_off": link.is_cut_off,
    }


def round_document(view: RoundView) -> dict[str, Any]:
    """A round as the page draws it."""
    return {
        "round": view.round,
        "epoch": view.epoch,
        "committed_at_s": _ms(view.committed_at_s),
        "members": view.members,
        "retries": view.retries,
        "nodes": {
            node_id: {
                "end_s": _ms(part.end_s),
                "compute_s": _ms(part.compute_s),
                "wait_s": _ms(part.wait_s),
                "transfer_s": _ms(part.transfer_s),
                "apply_s": _ms(part.apply_s),
            }
            for node_id, part in view.nodes.items()
        },
    }


def series_document(history: RunHistory | None, by: Axis, points: int) -> bytes:
    """The document of /api/series."""
    found = () if history is None else history.series(by, points=points)
    series = [{"key": one.key, "title": one.title, "unit": one.unit, "x": one.x, "y": one.y} for one in found]
    return encode({"by": by, "series": series})


def level_of(kind: str) -> str:
    """How much an event of this kind asks for attention: info, warning or error."""
    level = EVENTS[kind].level if kind in EVENTS else logging.INFO
    return "error" if level >= logging.ERROR else "warning" if level >= logging.WARNING else "info"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _run_state(
    view: RunView, spans: Mapping[str, Span | None], age_s: float | None, is_waiting: bool
) -> tuple[str, str]:
    """The state of the run in one word, and in a sentence."""
    standings = [span.standing for span in spans.values() if span is not None]
    at_work = [standing for standing in standings if standing in _AT_WORK]
    if not standings:
        return "waiting", "No node has recorded anything yet."
    if "paused" in at_work:
        return "paused", f"{at_work.count('paused')} nodes wait at their boundary, as an operator ordered."
    if at_work and is_waiting and age_s is not None and age_s > _STALLED_S:
        return "stalled", f"No node has recorded anything for {age_s:.0f} s."
    if at_work:
        return "training", f"{_nodes(len(at_work))} in, {_nodes(len(standings))} seen."
    if "finished" in standings:  # one that died as it started says nothing more
        return "finished", "All inner steps are done."
    if "joining" in standings or "starting" in standings:
        return "waiting", "Nodes are on their way in; none trains yet."
    if "failed" in standings:
        failed = sorted(node_id for node_id, span in spans.items() if span is not None and span.standing == "failed")
        return "failed", f"No node trains any more; {', '.join(failed[:4])} failed."
    return (
        "stalled",
        f"No node trains any more: all {len(standings)} left or were lost; round {view.round} is the newest.",
    )


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _numbers(
    known: RunHistory, view: RunView, spans: Mapping[str, Span | None], setting: Setting, shown_s: float | None
) -> dict[str, Any]:
    """The numbers of the run."""
    current = view.current or view.nodes
    at_work = [node for node in view.nodes if (span := spans[node.node_id]) and span.standing in _AT_WORK]
    step = max((node.step for node in current), default=None)
    total = max((node.total_steps for node in view.nodes if node.total_steps is not None), default=None)
    losses = [node.loss for node in at_work or current if node.loss is not None]
    rates = [node.tokens_per_s for node in at_work if node.tokens_per_s is not None]
    mfus = [mfu for node in at_work if (mfu := known.mfu_of(node.node_id)) is not None]
    held_out = [node.evaluation for node in current if node.evaluation is not None]
    parameters = max((node.parameters for node in view.nodes if node.parameters is not None), default=None)
    shape = [f"{human_count(parameters)} parameters"] if parameters is not None else []
    return {
        "step": step,
        "total_steps": total,
        "round": view.round,
        "epoch": view.epoch,
        "tokens": max((node.tokens for node in current), default=None),
        "tokens_per_s": sum(rates) if rates else None,
        "mfu": fmean(mfus) if mfus else None,
        "left_s": _left_s(known, step, total, shown_s) if at_work else None,
        "parameters": parameters,
        "loss": fmean(losses) if losses else None,
        "held_out": max(held_out, key=lambda one: one.step).losses.get("") if held_out else None,
        "config_words": ", ".join([*shape, *([setting.config_words] if setting.config_words else [])]),
        "cost": _cost(known, len(at_work), setting.price_per_hour, shown_s),
        "sent_bytes": view.sent_bytes,
        "ddp_bytes": view.ddp_bytes,
    }


def _left_s(known: RunHistory, step: int | None, total: int | None, shown_s: float | None) -> float | None:
    """Seconds that the rest takes at the pace of the newest rounds, or of a step where there are none."""
    if step is None or total is None or step >= total:
        return None
    rounds = [view for view in known.rounds(shown_s) if view.round > 0]
    first = next((view for view in rounds[-20:]), None)
    if first is not None and len(rounds) > 1 and rounds[-1].round > first.round:
        done = known.view(first.committed_at_s).nodes
        begun = max((node.step for node in done), default=0)
        took_s = rounds[-1].committed_at_s - first.committed_at_s
        if step > begun and took_s > 0:
            return (total - step) * took_s / (step - begun)
    step_s = known.usual_step_s()
    return None if step_s is None else (total - step) * step_s


def _cost(known: RunHistory, nodes: int, price: float | None, shown_s: float | None) -> dict[str, Any] | None:
    """What the nodes cost since they started, by the time that each was there."""
    if price is None or shown_s is None:
        return None
    hours = 0.0
    for spans in known.membership().values():
        for span in spans:
            if span.standing not in ("left", "lost", "failed", "finished"):
                end_s = shown_s if span.to_s is None else min(span.to_s, shown_s)
                hours += max(0.0, end_s - span.from_s) / 3600
    return {"so_far": hours * price, "per_hour": nodes * price, "currency": "USD"}


def _join(join: JoinView) -> dict[str, Any]:
    percent = None if join.share is None else 100 * join.share
    return {"state": JOIN_WORDS.get(join.state, join.state), "percent": percent, "bytes_per_s": join.bytes_per_s}


def _node(known: RunHistory, node: NodeView, span: Span | None, at_s: float | None) -> dict[str, Any]:
    standing = "starting" if span is None else span.standing
    join = known.join_of(node.node_id) if at_s is None and standing in ("joining", "starting") else None
    is_at_work = standing in _AT_WORK
    return {
        "id": node.node_id,
        "state": standing,
        "why": "" if span is None else span.why,
        "join": None if join is None else _join(join),
        "step": node.step,
        "loss": node.loss,
        "tokens_per_s": node.tokens_per_s if is_at_work else None,
        "mfu": known.mfu_of(node.node_id) if is_at_work else None,
        "round": node.round,
        "digest": node.digest,
        "sent_bytes": node.sent_bytes,
        "received_bytes": node.received_bytes,
        "memory_bytes": known.memory_of(node.node_id),
        "last_at_s": None if node.last_at_s is None else node.last_at_s - known.offsets().get(node.node_id, 0.0),
        "starts": node.starts,
    }

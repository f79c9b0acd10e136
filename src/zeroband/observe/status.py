"""The status of a run as text for a terminal (`tools/status.py`). Read-only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from zeroband.observe.facts import FactSource
from zeroband.observe.history import RunHistory
from zeroband.observe.log import format_fields
from zeroband.observe.view import ENDED, SILENT_S, EventView, NodeView, RunView, SourceView
from zeroband.observe.words import aligned, human_bytes, human_count, listed

_SHOWN_EVENTS = 8


class RunReader:
    """Folds a run's facts into its view. `clock`: monotonic seconds."""

    def __init__(self, facts: FactSource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._facts = facts
        self._clock = clock
        self._history = RunHistory(facts.run_id)
        self._heard_at_s: dict[str, float] = {}

    def read(self) -> RunView:
        """Return the run as it is now, reading only new facts. Raises as the source does."""
        history, facts, now_s = self._history, self._facts.read(), self._clock()
        history.take(self._facts.node_ids(), facts)
        self._heard_at_s |= {fact.node_id: now_s for fact in facts if fact.node_id in self._heard_at_s}
        view = history.view()
        new = [node.node_id for node in view.nodes if node.node_id not in self._heard_at_s]
        ages_s = self._facts.ages_s() if new else {}
        self._heard_at_s |= {node_id: now_s - ages_s.get(node_id, 0.0) for node_id in new}
        nodes = [replace(node, silent_s=now_s - self._heard_at_s[node.node_id]) for node in view.nodes]
        age_s = min((node.silent_s for node in nodes), default=0.0)
        return replace(
            view,
            nodes=tuple(nodes),
            loss_curve=history.loss_curve(),
            skipped_lines=history.invalid_lines + sum(self._facts.skipped_lines().values()),
            events=history.events(),
            waiting=None if history.to_s is None else history.waiting_for(history.to_s + age_s),
            unread=tuple(self._facts.unread()),
            has_all_machines=self._facts.has_all_machines,
        )


def render(view: RunView, *, now: Callable[[], float] = time.time) -> str:
    """Return the run as text: a table of nodes, a summary, the newest events. `now`: wall clock in seconds."""
    columns = ("node", "state", "step", "loss", "tokens/s", "round", "epoch", "digest", "sent by it", "as DDP", "key")
    now_s = now()
    rows = [columns, *(_row(node, now_s) for node in view.nodes)]
    lines = [
        *aligned(rows),
        "",
        f"run {view.run_id}, {nodes_in_words(len(view.members))} in: {', '.join(view.members) or '-'}",
    ]
    if view.store is not None:
        lines.append(f"store {view.store}")
    if view.sent_bytes and view.ddp_bytes:
        lines.append(f"sent {sent_in_words(view)}")
    if view.sources:
        lines.append(f"trained by all nodes: {', '.join(_source_in_words(*item) for item in view.sources.items())}")
    lines += [_evaluation_line(node) for node in view.nodes if node.evaluation is not None]
    if view.disagreements:
        rounds = ", ".join(map(str, view.disagreements))
        lines.append(f"DIVERGED: nodes hold different outer states after round {rounds}")
    lines += problems_of(view)
    return "\n".join([*lines, "", *map(_event_line, view.events[-_SHOWN_EVENTS:])]).rstrip()


def problems_of(view: RunView) -> list[str]:
    """Return lines about what could not be read or is not counted."""
    lines = [f"{view.skipped_lines} lines could not be read"] if view.skipped_lines else []
    lines += [f"cannot read {listed(view.unread)}"] if view.unread else []
    lines += [f"{lacking}; --store shows all"] if (lacking := lacking_in_words(view)) else []
    return lines + ([foreign_in_words(view)] if view.foreign_nodes else [])


def lacking_in_words(view: RunView) -> str:
    """Return how many members' files are missing because they are on other machines; empty if none."""
    here = sum(node.node_id in view.members for node in view.nodes)
    if view.has_all_machines or here == len(view.members):
        return ""
    verb = "is" if len(view.members) == 1 else "are"
    return f"{nodes_in_words(len(view.members))} {verb} in; files of {here} are here"


def nodes_in_words(count: int) -> str:
    """Return "1 node" or "2 nodes"."""
    return "1 node" if count == 1 else f"{count} nodes"


def foreign_in_words(view: RunView) -> str:
    """Return which nodes belong to another run."""
    names = [node.node_id for node in view.foreign_nodes]
    belong, are = ("belongs", "is") if len(names) == 1 else ("belong", "are")
    return f"{listed(names)} {belong} to another run named {view.run_id} and {are} not counted"


def _row(node: NodeView, now_s: float) -> tuple[str, ...]:
    def shown(value: object) -> str:
        return "-" if value is None else str(value)

    silent = _silent_since(node, now_s)
    losses = "-" if node.loss is None or node.first_loss is None else f"{node.first_loss:.3f} -> {node.loss:.3f}"
    return (
        node.node_id,
        _state_in_words(node) if silent is None else f"{_state_in_words(node)}, silent since {silent}",
        str(node.step) if node.total_steps is None else f"{node.step}/{node.total_steps}",
        losses,
        "-" if node.tokens_per_s is None or silent else human_count(node.tokens_per_s),
        shown(node.round),
        shown(node.epoch),
        node.digest[:12] if node.digest else "-",
        human_bytes(node.sent_bytes),
        human_bytes(node.ddp_bytes),
        shown(node.key),
    )


def _source_in_words(name: str, source: SourceView) -> str:
    loss = "" if source.loss is None else f", loss {source.loss:.4f}"
    return f"{name} {human_count(source.tokens)} tokens (pass {source.data_pass:.3g}{loss})"


def _evaluation_line(node: NodeView) -> str:
    """Return the newest held-out losses of a node, those of the run's outer parameters."""
    seen = node.evaluation
    assert seen is not None
    shown: list[str] = []
    for source, loss in seen.losses.items():
        bits = f" ({seen.bits_per_byte[source]:.3f} bits/byte)" if source in seen.bits_per_byte else ""
        shown.append(f"{f'{source} ' if source else ''}{loss:.4f}{bits}")
    return f"held out, by {node.node_id} at step {seen.step}: loss {', '.join(shown)}"


def _state_in_words(node: NodeView) -> str:
    return f"{node.state}: {node.join.state}" if node.join is not None and node.state not in ENDED else node.state


def _silent_since(node: NodeView, now_s: float) -> str | None:
    """Return the time of a running node's newest line if that is long ago."""
    if node.state in ENDED or not SILENT_S <= node.silent_s < math.inf:
        return None
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(now_s - node.silent_s))


def _event_line(event: EventView) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.at_s))
    return f"{at} {event.node_id} {event.kind} {format_fields(event.fields)}".rstrip()


def sent_in_words(view: RunView) -> str:
    """Return the bytes that all nodes sent, compared with per-step data parallel."""
    if not view.sent_bytes:
        return "nothing"
    sent, ddp, ratio = human_bytes(view.sent_bytes), human_bytes(view.ddp_bytes), view.ddp_bytes / view.sent_bytes
    return f"{sent} by all nodes; per-step data parallel would have sent {ddp}, {ratio:.3g} times as much"

"""What the audience sees at one moment, and the events of a run in plain words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from zeroband.observe.view import EventView, NodeView, RunView, node_id_of_member

_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Note:
    """Something that happened; `at_s` counts from the start of the demo."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Scene:
    """One moment of the demo."""

    run: RunView
    elapsed_s: float
    node_ids: tuple[str, ...]
    """Nodes that belong to the story, whether or not they have written anything yet."""
    down: frozenset[str]
    """Nodes that were killed and not started again."""
    total_steps: int
    total_rounds: int
    notes: tuple[Note, ...]
    """Newest last."""
    next_act: str
    """What will happen next, in words."""

    @property
    def step(self) -> int:
        """Inner steps of the node that is furthest."""
        return max((node.step for node in self.run.nodes), default=0)

    @property
    def undisturbed(self) -> list[NodeView]:
        """The nodes that trained from the beginning without a break: their losses belong to the same steps."""
        return [node for node in self.run.nodes if node.starts == 1 and node.node_id not in self.down]


class Chronicle:
    """Turns the events of all nodes into notes, each thing once although several nodes report it.

    `started_at_s`: wall clock of this machine, which all nodes of the demo share.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._told: set[tuple[object, ...]] = set()
        self._notes: list[Note] = []

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(self._notes)

    def add(self, events: Iterable[EventView]) -> None:
        """Tell of those events that were not told yet."""
        for event in events:
            words = _WORDS.get(event.kind)
            if words is None:
                continue
            about, text = words(event.node_id, event.fields)
            if (event.kind, *about) not in self._told:
                self._told.add((event.kind, *about))
                self.say(event.at_s, text)

    def say(self, at_s: float, text: str) -> None:
        """Add a note of one's own; `at_s` is wall clock."""
        self._notes.append(Note(max(0.0, at_s - self._started_at_s), text))


_Told = tuple[tuple[object, ...], str]
"""What an event is about, so that it is told once, and its words."""


def _epoch_changed(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    members = names(fields["members"])
    return (fields["epoch"],), f"epoch {fields['epoch']}: {members} are in"


def _peer_lost(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    lost = tuple(fields["member_ids"])
    return lost, f"outer step {fields['round']} goes on without {names(lost)}; the others lose no inner step"


def _joined(node_id: str, fields: Mapping[str, Any]) -> _Told:
    if fields["round"] == 0:
        return ("founded",), "the nodes agree on the initial state and found the run"
    return (fields["member_id"],), f"{node_id} is back: outer step {fields['round']} counts it as a member"


def _recovered(node_id: str, fields: Mapping[str, Any]) -> _Told:
    digest = str(fields["digest"])[:8]
    text = f"{node_id} fetched the state of outer step {fields['round']} and verified it: {digest}"
    return (node_id, fields["round"]), text


def _fenced(node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (node_id, fields["reason"]), f"{node_id} was away too long and comes back by the join path"


def _run_failed(node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (node_id, fields["error"]), f"{node_id} failed: {fields['error']}"


_WORDS: Mapping[str, Callable[[str, Mapping[str, Any]], _Told]] = {
    "epoch_changed": _epoch_changed,
    "peer_lost": _peer_lost,
    "joined": _joined,
    "recovered": _recovered,
    "fenced": _fenced,
    "run_failed": _run_failed,
}


def names(member_ids: Sequence[str]) -> str:
    """The nodes behind memberships, for a sentence."""
    return ", ".join(sorted(node_id_of_member(member) for member in member_ids))


def mean_curve(curves: Sequence[Sequence[float]], width: int) -> list[float]:
    """Several series of about the same length as one of at most `width` points: the mean over series and stretches."""
    length = max((len(curve) for curve in curves), default=0)
    points = min(width, length)
    bounds = [i * length // points for i in range(points + 1)] if points else [0]
    means: list[float] = []
    for start, stop in pairwise(bounds):
        if values := [value for curve in curves for value in curve[start:stop]]:
            means.append(fmean(values))
    return means


def bars(values: Sequence[float], height: int) -> list[str]:
    """A series as columns of block characters, `height` lines from the top; the lowest is one eighth high."""
    if not values:
        return [""] * height
    low, high = min(values), max(values)
    span = high - low or 1.0
    eighths = [1 + round((value - low) / span * (8 * height - 1)) for value in values]
    rows = range(height - 1, -1, -1)
    return ["".join(_BLOCKS[min(8, max(0, eighth - 8 * row))] for eighth in eighths) for row in rows]

"""The state of a run to draw, and its events as text. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from zeroband.observe.view import EventView, NodeView, RunView
from zeroband.observe.words import JOIN_WORDS, event_in_words

_BLOCKS = " ▁▂▃▄▅▆▇█"
_KEPT_NOTES = 500
_KEPT_TOLD = 20_000
"""Remembered notes for removing duplicates; more than the newest events of a hundred nodes."""


@dataclass(frozen=True)
class Note:
    """A line about an event; `at_s` is on the scene's clock."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Scene:
    """The state of a run at one time."""

    title: str
    run: RunView
    elapsed_s: float
    """Current time on the scene's clock."""
    node_ids: tuple[str, ...]
    """All nodes of the run, including those without facts."""
    notes: tuple[Note, ...]
    """Newest last; old ones are dropped."""
    said: int
    """Number of notes so far, dropped ones included."""
    footer: str
    """What comes next, or what the user can do."""
    total_rounds: int | None = None
    down: frozenset[str] = frozenset()
    """Nodes that were killed and not restarted."""
    starting: Mapping[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    """Activity and seconds of nodes without an event since their start."""
    is_wall_clock: bool = False
    """Whether the scene's clock is the wall clock; otherwise it starts at 0."""

    @property
    def waits(self) -> str:
        """The nodes that the others wait for, and for how long; empty if none."""
        waiting = self.run.waiting
        return f"{', '.join(waiting.nodes)}, for {waiting.for_s:.0f} s" if waiting is not None and waiting.nodes else ""


class Chronicle:
    """Turns the events of all nodes into notes without duplicates; keeps the newest.

    `started_at_s`: wall clock that is 0 for notes.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._told: dict[tuple[str, str | None], None] = {}
        self._notes: deque[Note] = deque(maxlen=_KEPT_NOTES)
        self.said = 0
        """Number of notes so far."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """The kept notes, newest last."""
        return tuple(self._notes)

    def add(self, events: Iterable[EventView]) -> None:
        """Add notes for new events."""
        for event in events:
            if event.kind not in _TOLD:
                continue
            is_founding = event.kind == "joined" and event.fields.get("round") == 0
            text = _FOUNDED if is_founding else event_in_words(event)
            returned = event.fields.get("member_id") if event.kind == "joined" and not is_founding else None
            if (text, returned) not in self._told:
                self._told[text, returned] = None
                self.say(event.at_s, text)
        while len(self._told) > _KEPT_TOLD:
            del self._told[next(iter(self._told))]

    def say(self, at_s: float, text: str) -> None:
        """Add a note; `at_s` is wall clock."""
        self._notes.append(Note(max(0.0, at_s - self._started_at_s), " ".join(text.split())))
        self.said += 1


_FOUNDED = "The nodes agreed on the initial state and founded the run."
_TOLD = frozenset(
    [
        *("epoch_changed", "peer_lost", "joined", "recovered", "fenced", "run_failed", "round_retried"),
        *("transfer_stalled", "blamed", "update_refused", "payload_refused", "impostor", "paused", "resumed"),
        *("drained", "rolled_back", "resumed_from", "run_abandoned", "checkpoint_committed", "checkpoint_failed"),
        *("evaluated", "left", "run_finished"),
    ]
)
"""Events that become notes."""


def on_its_way(node: NodeView) -> str | None:
    """Describe a node before its first inner step by its events; None once it trains."""
    if node.join is not None and node.state in ("starting", "joining"):
        return JOIN_WORDS.get(node.join.state, node.join.state)
    if node.state == "starting" and node.starts:
        return "model and data loaded"
    return "joined; first inner step" if node.state == "training" and node.step == 0 else None


def range_means(values: Sequence[float], width: int) -> list[float]:
    """Downsample a series to at most `width` means of ranges of similar length."""
    points = min(width, len(values))
    bounds = [i * len(values) // points for i in range(points + 1)] if points else [0]
    return [fmean(values[start:stop]) for start, stop in pairwise(bounds)]


def bars(values: Sequence[float], height: int) -> list[str]:
    """Draw a series as `height` lines of block characters, from the top; the lowest value is one eighth high."""
    if not values:
        return [""] * height
    low, high = min(values), max(values)
    span = high - low or 1.0
    eighths = [1 + round((value - low) / span * (8 * height - 1)) for value in values]
    rows = range(height - 1, -1, -1)
    return ["".join(_BLOCKS[min(8, max(0, eighth - 8 * row))] for eighth in eighths) for row in rows]

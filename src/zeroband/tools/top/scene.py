"""What is shown of a run at one moment, and its events in plain words. Pure."""

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
"""Things that are not told twice; more than the newest events of a hundred nodes."""


@dataclass(frozen=True)
class Note:
    """Something that happened; `at_s` counts from where the clock of its scene starts."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Scene:
    """One moment of a run."""

    title: str
    run: RunView
    elapsed_s: float
    """Now, as notes count."""
    node_ids: tuple[str, ...]
    """Nodes that belong to the run, whether or not they have written anything yet."""
    notes: tuple[Note, ...]
    """Newest last; the oldest may be missing."""
    said: int
    """Number of notes so far, with those that are missing."""
    footer: str
    """What comes next, or what the user can do."""
    total_rounds: int | None = None
    """None: not known."""
    down: frozenset[str] = frozenset()
    """Nodes that were killed and not started again."""
    starting: Mapping[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    """What nodes do that have not written an event since they were started, in words, and for how many seconds."""
    is_wall_clock: bool = False
    """Whether times are those of the wall clock. False: they count from the beginning."""

    @property
    def waits(self) -> str:
        """Whom the others wait for, and for how long; empty: for none of the nodes."""
        waiting = self.run.waiting
        return f"{', '.join(waiting.nodes)}, for {waiting.for_s:.0f} s" if waiting is not None and waiting.nodes else ""


class Chronicle:
    """Turns the events of all nodes into notes, each thing once although several nodes report it.

    `started_at_s`: wall clock of this machine from which notes count. Memory is bounded: the newest notes are kept.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._told: dict[tuple[str, str | None], None] = {}
        self._notes: deque[Note] = deque(maxlen=_KEPT_NOTES)
        self.said = 0
        """Number of notes so far."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """The newest ones, newest last."""
        return tuple(self._notes)

    def add(self, events: Iterable[EventView]) -> None:
        """Tell of those events that were not told yet."""
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


_FOUNDED = "The nodes agree on the initial state and found the run."
_TOLD = frozenset(
    [
        *("epoch_changed", "peer_lost", "joined", "recovered", "fenced", "run_failed", "round_retried"),
        *("transfer_stalled", "blamed", "update_refused", "payload_refused", "impostor", "paused", "resumed"),
        *("drained", "rolled_back", "resumed_from", "run_abandoned", "checkpoint_committed", "checkpoint_failed"),
        *("evaluated", "left", "run_finished"),
    ]
)
"""Events that a screen tells of; the others are rounds, and steps to one of these."""


def on_its_way(node: NodeView) -> str | None:
    """What a node does that has not finished an inner step of this start, as its own events say; None: it trains."""
    if node.join is not None and node.state in ("starting", "joining"):
        return JOIN_WORDS.get(node.join.state, node.join.state)
    if node.state == "starting" and node.starts:
        return "knows its model and data"
    return "in; first inner step" if node.state == "training" and node.step == 0 else None


def stretch_means(values: Sequence[float], width: int) -> list[float]:
    """A series as at most `width` points: the means of stretches of about the same length."""
    points = min(width, len(values))
    bounds = [i * len(values) // points for i in range(points + 1)] if points else [0]
    return [fmean(values[start:stop]) for start, stop in pairwise(bounds)]


def bars(values: Sequence[float], height: int) -> list[str]:
    """A series as columns of block characters, `height` lines from the top; the lowest is one eighth high."""
    if not values:
        return [""] * height
    low, high = min(values), max(values)
    span = high - low or 1.0
    eighths = [1 + round((value - low) / span * (8 * height - 1)) for value in values]
    rows = range(height - 1, -1, -1)
    return ["".join(_BLOCKS[min(8, max(0, eighth - 8 * row))] for eighth in eighths) for row in rows]

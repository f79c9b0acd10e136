"""The state of a run to draw, and its events as text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from zeroband.observe.view import EventView, NodeView, RunView
from zeroband.observe.words import JOIN_WORDS, event_in_words

_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Note:
    """A line about an event; `at_s` is on the scene's clock.

    Notes are equal whatever their times, as several nodes record an event, and their clocks may be corrected later.
    """

    at_s: float = field(compare=False)
    text: str
    member_id: str | None = None
    """The member that has joined: a node may return to the same round."""


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
    """Each once, newest last; old ones are dropped."""
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


def notes_of(events: Iterable[EventView], started_at_s: float = 0.0) -> tuple[Note, ...]:
    """Return the notes about events, without duplicates. `started_at_s`: wall clock that is 0 for notes."""
    return tuple(dict.fromkeys(_note_of(event, started_at_s) for event in events if event.kind in _TOLD))


def _note_of(event: EventView, started_at_s: float) -> Note:
    is_joined = event.kind == "joined"
    at_s = max(0.0, event.at_s - started_at_s)
    if is_joined and event.fields.get("round") == 0:
        return Note(at_s, _FOUNDED)
    text = " ".join(event_in_words(event).split())
    return Note(at_s, text, event.fields.get("member_id") if is_joined else None)


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

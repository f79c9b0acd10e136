"""What is shown of a run at one moment, and its events in plain words. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from zeroband.observe.status import human_bytes
from zeroband.observe.view import EventView, NodeView, RunView, node_id_of_member
from zeroband.observe.words import JOIN_WORDS

_BLOCKS = " ▁▂▃▄▅▆▇█"
_KEPT_NOTES = 500
_KEPT_TOLD = 20_000
"""Things that are not told twice; more than the newest events of a hundred nodes."""
_STILL_S = 5.0


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
    total_steps: int | None
    """None: no node has said yet."""
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
    waits: str = ""
    """Whom everybody waits for, in words; empty: nobody waits."""
    is_wall_clock: bool = False
    """Whether times are those of the wall clock. False: they count from the beginning."""

    @property
    def step(self) -> int:
        """Inner steps of the node that is furthest."""
        return max((node.step for node in self.run.own), default=0)

    @property
    def undisturbed(self) -> list[NodeView]:
        """The nodes that trained from the beginning without a break: their losses belong to the same steps.

        All of them where there is none.
        """
        first = [node for node in self.run.own if node.starts == 1 and node.node_id not in self.down]
        return first if any(node.loss_curve for node in first) else list(self.run.own)


class Chronicle:
    """Turns the events of all nodes into notes, each thing once although several nodes report it.

    `started_at_s`: wall clock of this machine from which notes count. Memory is bounded: the newest notes are kept.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._told: dict[tuple[object, ...], None] = {}
        self._notes: deque[Note] = deque(maxlen=_KEPT_NOTES)
        self.said = 0
        """Number of notes so far."""

    @property
    def notes(self) -> tuple[Note, ...]:
        """The newest ones, newest last."""
        return tuple(self._notes)

    def add(self, events: Iterable[EventView]) -> None:
        """Tell of those events that were not told yet. One that lacks a field is passed over."""
        for event in events:
            words = _WORDS.get(event.kind)
            if words is None:
                continue
            try:
                about, text = words(event.node_id, event.fields)
            except (KeyError, TypeError, ValueError):  # of another version
                continue
            if (event.kind, *about) not in self._told:
                self._told[event.kind, *about] = None
                self.say(event.at_s, text)
        while len(self._told) > _KEPT_TOLD:
            del self._told[next(iter(self._told))]

    def say(self, at_s: float, text: str) -> None:
        """Add a note of one's own; `at_s` is wall clock."""
        self._notes.append(Note(max(0.0, at_s - self._started_at_s), " ".join(text.split())))
        self.said += 1


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
    return (fields["member_id"],), f"{node_id} is in: outer step {fields['round']} counts it as a member"


def _recovered(node_id: str, fields: Mapping[str, Any]) -> _Told:
    digest = str(fields["digest"])[:8]
    text = f"{node_id} fetched the state of outer step {fields['round']} and verified it: {digest}"
    return (node_id, fields["round"]), text


def _fenced(node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (node_id, fields["reason"]), f"{node_id} was away too long and comes back by the join path"


def _run_failed(node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (node_id, fields["error"]), f"{node_id} failed: {fields['error']}"


def _round_retried(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (fields["round"], fields["reason"]), f"outer step {fields['round']} is tried again: {fields['reason']}"


def _transfer_stalled(node_id: str, fields: Mapping[str, Any]) -> _Told:
    text = f"{node_id} gets nothing from {names(fields['waiting_for'])} for {float(fields['since_s']):.0f} s"
    return (node_id, fields["round"]), f"{text}, in outer step {fields['round']}"


def _blamed(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    who, how = names(fields["member_ids"]), fields["consequence"]
    text = {"named": f"{who} kept it from its end", "apart": f"{who} contradict each other and take turns"}
    said = text.get(how, f"{who} is put out")
    return (fields["round"], who, how), f"outer step {fields['round']}: {said}: {fields['reason']}"


def _left_out(node_id: str, fields: Mapping[str, Any]) -> _Told:
    who = names([fields["member_id"]]) if "member_id" in fields else node_id
    return (who, fields["round"]), f"outer step {fields['round']} leaves out what {who} learned: {fields['reason']}"


def _impostor(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    who = names([fields["member_id"]])
    return (who, fields["where"]), f"another node posed as {who} ({fields['where']}), without effect"


def _paused(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (fields["round"],), f"paused before outer step {fields['round']}, as was ordered"


def _resumed(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (fields["round"],), f"goes on with outer step {fields['round']}"


def _drained(node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (node_id, fields["round"]), f"{node_id} leaves after outer step {fields['round']}, as was ordered"


def _rolled_back(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (fields["round"], fields["step"]), f"the run went back to the checkpoint of step {fields['step']}"


def _resumed_from(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (fields["round"], fields["step"]), f"the run begins again on the checkpoint of step {fields['step']}"


def _abandoned(node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (node_id, fields["until"]), f"no member of the run lives; {node_id} waits {float(fields['wait_s']):.0f} s"


def _checkpoint(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    size = human_bytes(fields["bytes"])
    return (fields["round"], fields["step"]), f"checkpoint of step {fields['step']} is durable, {size}"


def _checkpoint_failed(node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (node_id, fields["step"]), f"checkpoint of step {fields['step']} failed on {node_id}: {fields['reason']}"


def _evaluated(node_id: str, fields: Mapping[str, Any]) -> _Told:
    loss = fields["loss"]
    return (fields["step"],), f"held out at step {fields['step']}: loss {'-' if loss is None else f'{loss:.4f}'}"


def _left(node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (node_id, fields["reason"]), f"{node_id} left: {fields['reason']}"


def _run_finished(_node_id: str, fields: Mapping[str, Any]) -> _Told:
    return (fields["step"],), f"finished: all {fields['step']} inner steps are done"


_WORDS: Mapping[str, Callable[[str, Mapping[str, Any]], _Told]] = {
    "epoch_changed": _epoch_changed,
    "peer_lost": _peer_lost,
    "joined": _joined,
    "recovered": _recovered,
    "fenced": _fenced,
    "run_failed": _run_failed,
    "round_retried": _round_retried,
    "transfer_stalled": _transfer_stalled,
    "blamed": _blamed,
    "update_refused": _left_out,
    "payload_refused": _left_out,
    "impostor": _impostor,
    "paused": _paused,
    "resumed": _resumed,
    "drained": _drained,
    "rolled_back": _rolled_back,
    "resumed_from": _resumed_from,
    "run_abandoned": _abandoned,
    "checkpoint_committed": _checkpoint,
    "checkpoint_failed": _checkpoint_failed,
    "evaluated": _evaluated,
    "left": _left,
    "run_finished": _run_finished,
}


def on_its_way(node: NodeView) -> str | None:
    """What a node does that has not finished an inner step of this start, as its own events say; None: it trains."""
    if node.join_state is not None and node.state in ("starting", "recovering", "fenced"):
        return JOIN_WORDS.get(node.join_state, node.join_state)
    if node.state == "starting" and node.starts:
        return "knows its model and data"
    return "in; first inner step" if node.state == "training" and node.step == 0 else None


def waited_for(run: RunView) -> tuple[tuple[str, ...], float] | None:
    """Find whom the others wait for: the members behind, where those in front stand still. With the seconds so far.

    In front: most inner steps. Still: nothing came from them for three of their steps, and for 5 s.
    """
    known = {node.node_id: node for node in run.own}
    training = [known[node_id] for node_id in run.members if node_id in known and known[node_id].state == "training"]
    most = max((node.step for node in training), default=0)
    front = [node for node in training if node.step == most]
    behind = tuple(node.node_id for node in training if node.step < most)
    if not behind:
        return None
    silent_s = min(node.silent_s for node in front)
    return (behind, silent_s) if silent_s >= max(_STILL_S, *(3 * _step_s(node) for node in front)) else None


def _step_s(node: NodeView) -> float:
    return node.tokens / node.step / node.tokens_per_s if node.step and node.tokens_per_s else 0.0


def in_words(waits: tuple[tuple[str, ...], float] | None) -> str:
    """Whom the others wait for, as a screen shows it."""
    return "" if waits is None else f"{', '.join(waits[0])}, for {waits[1]:.0f} s"


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

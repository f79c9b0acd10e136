"""The demo's two screens: one that redraws itself on a terminal, and plain lines for everything else."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Protocol, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zeroband.observe.status import human_bytes, human_count
from zeroband.observe.view import NodeView
from zeroband.tools.demo.scene import Scene, bars, mean_curve

_SHOWN_NOTES = 7
_CURVE_HEIGHT = 5
_CURVE_MAX_WIDTH = 60
_BESIDE_CURVE = 53
"""Columns that everything beside the curve needs: then nothing wraps on a terminal of 80."""
_DIGEST_CHARS = 8

_STATE_STYLES = {
    "training": "green",
    "finished": "bold green",
    "recovering": "yellow",
    "fenced": "yellow",
    "lost": "red",
    "failed": "bold red",
    "killed": "bold white on red",
}


class Screen(Protocol):
    """Where scenes are shown, from the first to the last of a `with` block."""

    def show(self, scene: Scene) -> None: ...

    def __enter__(self) -> Screen: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_screen(stream: TextIO) -> Screen:
    """The redrawn screen where `stream` is a terminal that can show it, else plain lines.

    What the environment says of colours (FORCE_COLOR, NO_COLOR) makes no terminal of a file, and none of no TERM.
    """
    console = Console(file=stream)
    can_redraw = stream.isatty() and bool(os.environ.get("TERM")) and not console.is_dumb_terminal
    return LiveScreen(console) if can_redraw and console.encoding.startswith("utf") else PlainScreen(stream)


class LiveScreen:
    """One screen, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def show(self, scene: Scene) -> None:
        """Draw a scene over the last one."""
        self._live.update(draw(scene, self._live.console.width), refresh=True)

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


class PlainScreen:
    """A line for each note and for each outer step, nothing drawn twice."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = 0
        self._round: int | None = None
        self._next_act = ""

    def show(self, scene: Scene) -> None:
        """Write what is new since the last scene."""
        for note in scene.notes[self._told :]:
            self._line(note.at_s, note.text)
        self._told = len(scene.notes)
        if scene.run.round not in (None, 0, self._round):
            self._round = scene.run.round
            self._line(scene.elapsed_s, progress_line(scene))
        if scene.next_act != self._next_act:
            self._next_act = scene.next_act
            self._line(scene.elapsed_s, scene.next_act)

    def _line(self, at_s: float, text: str) -> None:
        print(f"{clock(at_s)}  {text}", file=self._stream, flush=True)

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()


def clock(elapsed_s: float) -> str:
    """Minutes and seconds."""
    return f"{int(elapsed_s) // 60:02}:{int(elapsed_s) % 60:02}"


def traffic(scene: Scene) -> str:
    """What the nodes sent, against what per-step data parallel would have sent."""
    run = scene.run
    if not run.sent_bytes:
        return "nothing sent yet"
    ratio = run.ddp_bytes / run.sent_bytes
    sent, ddp = human_bytes(run.sent_bytes), human_bytes(run.ddp_bytes)
    return f"all nodes sent {sent} so far; per-step data parallel: {ddp}, {ratio:.0f}x"


def progress_line(scene: Scene) -> str:
    """The state of the run in one line."""
    run = scene.run
    losses = [node.loss for node in run.nodes if node.loss is not None and node.node_id in run.members]
    loss = f"loss {sum(losses) / len(losses):.3f}" if losses else "no loss yet"
    return (
        f"outer step {run.round}/{scene.total_rounds}  step {scene.step}/{scene.total_steps}  {loss}  "
        f"epoch {run.epoch}  {len(run.members)} nodes in  {traffic(scene)}"
    )


def draw(scene: Scene, width: int) -> RenderableType:
    """A scene as one panel of `width` columns."""
    curve_width = max(10, min(_CURVE_MAX_WIDTH, width - _BESIDE_CURVE))
    body = Group(
        _nodes(scene), "", _middle(scene, curve_width), "", _notes(scene), "", Text(scene.next_act, style="bold cyan")
    )
    return Panel(body, title="zeroband demo", subtitle=clock(scene.elapsed_s), box=box.ROUNDED, padding=(1, 2))


def _nodes(scene: Scene) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    for justify in ("left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(ratio=1, min_width=10)
    for _ in range(4):
        table.add_column(justify="right", no_wrap=True)
    known = {node.node_id: node for node in scene.run.nodes}
    for node_id in scene.node_ids:
        table.add_row(*_node_row(known.get(node_id, NodeView(node_id)), scene))
    return table


def _node_row(node: NodeView, scene: Scene) -> list[RenderableType]:
    state = "killed" if node.node_id in scene.down else node.state
    is_working = state in ("training", "finished")
    bar = ProgressBar(
        total=scene.total_steps,
        completed=node.step,
        complete_style="green" if is_working else "red" if state == "killed" else "yellow",
        finished_style="bold green",
    )
    return [
        Text(node.node_id, style="bold"),
        Text(f" {state} " if state == "killed" else state, style=_STATE_STYLES.get(state, "dim")),
        bar,
        f"{node.step}/{scene.total_steps}",
        "" if node.loss is None else f"loss {node.loss:.2f}",
        "" if node.tokens_per_s is None or state != "training" else f"{human_count(node.tokens_per_s)} tok/s",
        Text((node.digest or "")[:_DIGEST_CHARS], style="magenta"),
    ]


def _middle(scene: Scene, curve_width: int) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row(_loss(scene, curve_width), _facts(scene))
    return table


def _loss(scene: Scene, width: int) -> Table:
    curve = mean_curve([node.loss_curve for node in scene.undisturbed], width)
    rows = bars(curve, _CURVE_HEIGHT)
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", width=5)
    table.add_column(width=width, no_wrap=True)
    for number, row in enumerate(rows):
        label = ""
        if curve and number in (0, _CURVE_HEIGHT - 1):
            label = f"{max(curve) if number == 0 else min(curve):.2f}"
        table.add_row(Text(label, style="dim"), Text(row, style="cyan"))
    table.add_row("", Text("loss over the steps", style="dim"))
    return table


def _facts(scene: Scene) -> Table:
    run = scene.run
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("outer step", f"{run.round or 0} of {scene.total_rounds}")
    table.add_row("epoch", "-" if run.epoch is None else f"{run.epoch}")
    table.add_row("who is in", " ".join(run.members) or "-")
    table.add_row("sent by all", human_bytes(run.sent_bytes))
    table.add_row("per-step DDP", human_bytes(run.ddp_bytes))
    if run.disagreements:
        table.add_row("DIVERGED", Text(f"after outer steps {run.disagreements}", style="bold red"))
    elif run.newest and run.newest.digest:
        digest = run.newest.digest[:_DIGEST_CHARS]
        table.add_row("outer state", Text(f"{digest}, equal on all", style="magenta"))
    return table


def _notes(scene: Scene) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for note in scene.notes[-_SHOWN_NOTES:]:
        table.add_row(clock(note.at_s), note.text)
    for _ in range(_SHOWN_NOTES - len(scene.notes)):  # a screen that does not jump
        table.add_row("", "")
    return table

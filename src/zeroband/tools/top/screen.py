"""Two screens for a run: redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zeroband.observe.status import human_bytes, human_count, nodes_in_words
from zeroband.observe.view import AT_WORK, NodeView
from zeroband.tools.top.scene import Note, Scene, bars, on_its_way, range_means

MIN_WIDTH, MIN_HEIGHT = 80, 24
"""Minimum size of the redrawn screen."""
_MAX_NOTES, _MIN_NOTES = 16, 3
_MIN_CURVE_HEIGHT, _MAX_CURVE_HEIGHT = 7, 16
_MAX_CURVE_WIDTH = 110
_BESIDE_CURVE = 51
"""Columns to the right of the curve."""
_BETWEEN_BLOCKS = 4
"""Blank lines between the blocks, and the footer."""
_COUNTED_FROM = 8
"""Number of members above which their count is shown."""
_CALM = ("training", "finished")
_DIGEST_CHARS = 8
_WIDE = 100
"""Width from which nodes show their keys, and nodes with long names their digests."""
_ID_CHARS = 16
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPINS_PER_S = 4

_STATE_STYLES = {
    "training": "green",
    "finished": "bold green",
    "joining": "yellow",
    "late": "yellow",
    "paused": "yellow",
    "leaving": "yellow",
    "lost": "red",
    "failed": "bold red",
    "killed": "bold white on red",
}


def open_screen(stream: TextIO, *, alternate: bool = False) -> Screen:
    """Return the redrawn screen if `stream` is a capable terminal, else plain lines, also with NO_COLOR.

    FORCE_COLOR does not turn files into terminals. `alternate`: use the terminal's alternate screen.
    """
    console = Console(file=stream)
    can_redraw = stream.isatty() and bool(os.environ.get("TERM")) and not console.is_dumb_terminal
    is_wanted = not os.environ.get("NO_COLOR") and console.encoding.startswith("utf")
    return LiveScreen(console, alternate=alternate) if can_redraw and is_wanted else PlainScreen(stream)


class LiveScreen:
    """A screen that is redrawn in place inside a `with` block."""

    def __init__(self, console: Console, *, alternate: bool = False) -> None:
        self._live = Live(console=console, screen=alternate, auto_refresh=False, vertical_overflow="crop")

    def show(self, scene: Scene) -> None:
        """Draw a scene."""
        size = self._live.console.size
        self._live.update(draw(scene, size.width, size.height), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._live.stop()


class PlainScreen:
    """Prints a line for each note, outer step and new activity of a node."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told: Sequence[Note] = ()
        self._round: int | None = None
        self._footer = ""
        self._waits = False
        self._doing: dict[str, str] = {}

    def show(self, scene: Scene) -> None:
        """Print what is new since the last scene."""
        told = {*self._told}
        for note in scene.notes:
            if note not in told:
                self._line(scene, note.at_s, note.text)
        self._told = scene.notes
        for node_id, (doing, _) in _doing(scene).items():
            if doing != self._doing.get(node_id):
                self._line(scene, scene.elapsed_s, f"{node_id}: {doing}")
            self._doing[node_id] = doing
        if scene.run.round not in (None, 0, self._round):
            self._round = scene.run.round
            self._line(scene, scene.elapsed_s, progress_line(scene))
        if scene.waits and not self._waits:
            self._line(scene, scene.elapsed_s, f"waiting for {scene.waits}")
        self._waits = bool(scene.waits)
        if scene.footer != self._footer:
            self._footer = scene.footer
            if scene.footer:
                self._line(scene, scene.elapsed_s, scene.footer)

    def _line(self, scene: Scene, at_s: float, text: str) -> None:
        print(f"{_stamp(scene, at_s)}  {text}", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None: ...


Screen = LiveScreen | PlainScreen


def clock(elapsed_s: float) -> str:
    """Format minutes and seconds."""
    return f"{int(elapsed_s) // 60:02}:{int(elapsed_s) % 60:02}"


def _stamp(scene: Scene, at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s)) if scene.is_wall_clock else clock(at_s)


def traffic(scene: Scene) -> str:
    """Return the bytes that the nodes sent, compared with per-step data parallel."""
    run = scene.run
    is_known = all(node.round for node in run.current if node.node_id in run.members)  # after everyone's first round
    if not run.sent_bytes or not is_known:
        return "nothing sent yet"
    ratio = run.ddp_bytes / run.sent_bytes
    sent, ddp = human_bytes(run.sent_bytes), human_bytes(run.ddp_bytes)
    return f"all nodes sent {sent} so far; per-step data parallel: {ddp}, {ratio:.0f}x"


def progress_line(scene: Scene) -> str:
    """Return the state of the run in one line."""
    run = scene.run
    loss = "no loss yet" if run.loss is None else f"loss {run.loss:.3f}"
    return (
        f"outer step {_of(run.round or 0, scene.total_rounds)}  step {_of(run.step, run.total_steps)}  {loss}  "
        f"epoch {'-' if run.epoch is None else run.epoch}  {nodes_in_words(len(run.members))} in  {traffic(scene)}"
    )


def _of(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done}/{total}"


def draw(scene: Scene, width: int, height: int) -> RenderableType:
    """Draw a scene as one panel of `width` columns and at most `height` lines; nodes without space are counted.

    Below MIN_WIDTH x MIN_HEIGHT it only prints the state of the run.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return _too_small(scene, width, height)
    room = height - 2 - _BETWEEN_BLOCKS
    most_nodes = max(1, room - _MIN_NOTES - _MIN_CURVE_HEIGHT - 1)
    nodes = min(max(1, len(scene.node_ids)), most_nodes)
    spare = room - nodes - _MIN_NOTES - _MIN_CURVE_HEIGHT - 1
    curve_height = min(_MAX_CURVE_HEIGHT, _MIN_CURVE_HEIGHT + spare // 3)
    notes = min(_MAX_NOTES, room - nodes - curve_height - 1)
    body = Group(
        _nodes(scene, nodes, width),
        "",
        _middle(scene, max(10, min(_MAX_CURVE_WIDTH, width - _BESIDE_CURVE)), curve_height),
        "",
        _notes(scene, notes),
        "",
        Text(scene.footer, style="bold cyan", no_wrap=True, overflow="ellipsis"),
    )
    stamp = _stamp(scene, scene.elapsed_s)
    return Panel(body, title=Text(scene.title), subtitle=stamp, box=box.ROUNDED, padding=(0, 1))


def _too_small(scene: Scene, width: int, height: int) -> RenderableType:
    words = [
        f"{width}x{height} is too small, {MIN_WIDTH}x{MIN_HEIGHT} is needed",
        *progress_line(scene).split("  "),
        *([f"waiting for {scene.waits}"] if scene.waits else ()),
        scene.footer,
    ]
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in words]
    return Group(*lines[: max(1, height)])


def _doing(scene: Scene) -> Mapping[str, tuple[str, float | None]]:
    """Return the activity of nodes that do not train yet, with seconds if known."""
    known = {node.node_id: on_its_way(node) for node in scene.run.nodes if node.node_id not in scene.down}
    return {**{node_id: (words, None) for node_id, words in known.items() if words}, **scene.starting}


def _nodes(scene: Scene, lines: int, width: int) -> RenderableType:
    """Return a line per node; if there are too many, those with problems first, and a count of the rest."""
    known = {node.node_id: node for node in scene.run.nodes}
    nodes = [known.get(node_id, NodeView(node_id)) for node_id in scene.node_ids]
    rest: list[NodeView] = []
    if len(nodes) > lines:
        by_need = sorted(nodes, key=lambda node: (_state(node, scene) in _CALM, node.node_id))
        chosen = {node.node_id for node in by_need[: lines - 1]}
        rest = by_need[lines - 1 :]
        nodes = [node for node in nodes if node.node_id in chosen]
    doing = _doing(scene)
    rows = [_node_cells(node, scene) for node in nodes if node.node_id not in doing]
    id_width = min(_ID_CHARS, max((len(node.node_id) for node in nodes), default=0))
    state_width = max((cell_len(_state(node, scene)) + 2 * (node.node_id in scene.down) for node in nodes), default=0)
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(5)]
    if width < _WIDE:  # no keys there, and no digests next to long names
        widths = widths[: 3 if id_width > _DIGEST_CHARS else 4]
    lined: list[RenderableType] = []
    for node in nodes:
        line = _grid([id_width, state_width], 2)
        head = [Text(node.node_id, style="bold", no_wrap=True, overflow="ellipsis"), _state_cell(node, scene)]
        if node.node_id in doing:
            line.add_row(*head, _doing_cell(scene, *doing[node.node_id]))
        else:
            cells = [(cell, wide) for cell, wide in zip(_node_cells(node, scene), widths, strict=False) if wide]
            for _, wide in cells:
                line.add_column(width=wide, justify="right", no_wrap=True)
            line.add_row(*head, _bar(node, scene), *(cell for cell, _ in cells))
        lined.append(line)
    if rest:
        states = Counter(_state(node, scene) for node in rest)
        counted = ", ".join(f"{number} {state}" for state, number in states.most_common())
        lined.append(Text(f"and {len(rest)} more: {counted}", no_wrap=True, overflow="ellipsis"))
    if not nodes:
        lined.append(Text(f"{_spin(scene)} no node has recorded anything yet"))
    return Group(*lined)


def _grid(widths: Sequence[int], padding: int) -> Table:
    """Return a table whose last column takes the remaining width."""
    table = Table.grid(padding=(0, padding), expand=True)
    for width in widths:
        table.add_column(width=width, no_wrap=True, overflow="ellipsis")
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    return table


def _spin(scene: Scene) -> str:
    return _SPINNER[int(scene.elapsed_s * _SPINS_PER_S) % len(_SPINNER)]


def _state(node: NodeView, scene: Scene) -> str:
    return "killed" if node.node_id in scene.down else "starting" if node.node_id in scene.starting else node.state


def _state_cell(node: NodeView, scene: Scene) -> Text:
    state = _state(node, scene)
    return Text(f" {state} " if state == "killed" else state, style=_STATE_STYLES.get(state, "dim"))


def _doing_cell(scene: Scene, words: str, for_s: float | None) -> Text:
    lasting = "" if for_s is None else f"{for_s:.0f} s: "
    return Text(f"{_spin(scene)} {lasting}{words}", style="yellow", no_wrap=True, overflow="ellipsis")


def _bar(node: NodeView, scene: Scene) -> ProgressBar:
    state, total = _state(node, scene), scene.run.total_steps or node.total_steps
    return ProgressBar(
        total=total or 1,
        completed=node.step if total else 0,
        complete_style="green" if state in _CALM else "red" if state == "killed" else "yellow",
        finished_style="bold green",
    )


def _node_cells(node: NodeView, scene: Scene) -> list[Text]:
    """Return the cells after a node's bar."""
    is_fast = node.tokens_per_s is not None and _state(node, scene) in AT_WORK
    return [
        Text(_of(node.step, scene.run.total_steps or node.total_steps)),
        Text("" if node.loss is None else f"loss {node.loss:.2f}"),
        Text(f"{human_count(node.tokens_per_s or 0.0)} tok/s" if is_fast else ""),
        Text((node.digest or "")[:_DIGEST_CHARS], style="magenta"),
        Text(node.key or "", style="dim"),
    ]


def _middle(scene: Scene, curve_width: int, curve_height: int) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, width=curve_width + 6)
    table.add_column(no_wrap=True, ratio=1)
    table.add_row(_loss(scene, curve_width, curve_height), _facts(scene))
    return table


def _loss(scene: Scene, width: int, height: int) -> Table:
    curve = range_means(scene.run.loss_curve, width)
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", width=5, no_wrap=True)
    table.add_column(width=width, no_wrap=True)
    for number, row in enumerate(bars(curve, height)):
        label = ""
        if curve and number in (0, height - 1):
            label = f"{max(curve) if number == 0 else min(curve):.2f}"
        table.add_row(Text(label, style="dim"), Text(row, style="cyan"))
    table.add_row("", Text("loss over steps", style="dim"))
    return table


def _facts(scene: Scene) -> Table:
    run = scene.run
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    rounds = f"{run.round or 0}" if scene.total_rounds is None else f"{run.round or 0} of {scene.total_rounds}"
    names = " ".join(run.members)
    table.add_row("outer step", f"{rounds}, epoch {'-' if run.epoch is None else run.epoch}")
    table.add_row("members", f"{len(run.members)}: {names}" if len(run.members) > _COUNTED_FROM else names or "-")
    if run.store is not None:
        table.add_row("store", run.store)
    table.add_row("tokens/s", "-" if run.tokens_per_s is None else human_count(run.tokens_per_s))
    table.add_row("sent by all", human_bytes(run.sent_bytes))
    ratio = f", {run.ddp_bytes / run.sent_bytes:.3g}x" if run.sent_bytes else ""
    table.add_row("per-step DDP", human_bytes(run.ddp_bytes) + ratio)
    table.add_row("waiting for", Text(scene.waits or "-", style="yellow" if scene.waits else ""))
    if run.disagreements:
        rounds = ", ".join(map(str, run.disagreements))
        table.add_row("DIVERGED", Text(f"after outer steps {rounds}", style="bold red"))
    elif run.newest and run.newest.digest:
        digest = run.newest.digest[:_DIGEST_CHARS]
        table.add_row("outer state", Text(f"{digest}, equal on all", style="magenta"))
    return table


def _notes(scene: Scene, lines: int) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    shown = scene.notes[-lines:]
    for note in shown:
        table.add_row(_stamp(scene, note.at_s), Text(note.text))
    for _ in range(lines - len(shown)):  # keep the layout stable
        table.add_row("", "")
    return table

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.tools.conftest import node as make_node

from zeroband.observe.view import JoinView, RunView, WaitingFor
from zeroband.tools.top.scene import Note, Scene
from zeroband.tools.top.screen import LiveScreen, PlainScreen, clock, draw, open_screen


def _drawn(scene: Scene, width: int = 110, height: int = 30) -> str:
    """What stands on a terminal of this size; rich cuts what has no place, as a terminal would scroll it away."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(draw(scene, width, height))
    return capture.get()


def _line(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.lstrip("│ ").startswith(start))


@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("node0", ("training", "40/120", "loss 2.50", "2.1k tok/s", "01234567")),
        ("node2", ("killed", "30/120", "d3")),
    ],
)
def test_draw_shows_each_node_with_its_progress(
    make_scene: Callable[..., Scene], where: str, shown: tuple[str, ...]
) -> None:
    line = _line(_drawn(make_scene()), where)
    assert [part for part in shown if part not in line] == []


@pytest.mark.parametrize(
    "shown",
    [
        "4 of 12, epoch 2",
        "node0 node1 node3",
        "4 MB",
        "80 MB, 20x",
        "01234567, equal on all",
        "5.50",
        "2.50",
        "01:00  node2 is gone",
        "Next: it comes back.",
        "01:01",
    ],
)
def test_draw_shows_the_facts_of_the_run(make_scene: Callable[..., Scene], shown: str) -> None:
    assert shown in _drawn(make_scene())


def test_draw_shows_the_bar_as_long_as_the_share_that_is_done(make_scene: Callable[..., Scene]) -> None:
    def done(scene: Scene) -> int:
        console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system="truecolor")
        with console.capture() as capture:
            console.print(draw(scene, 140, 40))
        line = _line(capture.get(), "\x1b[1mnode0")
        return line.split("━\x1b")[0].count("━") + 1

    scene = make_scene()
    ahead = replace(scene.run.nodes[0], step=80)
    further = replace(scene, run=replace(scene.run, nodes=(ahead, *scene.run.nodes[1:])))
    assert done(further) == pytest.approx(2 * done(scene), abs=2)


def test_draw_calls_a_divergence_by_its_name(make_scene: Callable[..., Scene], run: RunView) -> None:
    text = _drawn(make_scene(run=replace(run, disagreements=(4,))))
    assert "DIVERGED" in text
    assert "equal on all" not in text


def _busy(make_scene: Callable[..., Scene], nodes: int, name: str = "node") -> Scene:
    """A run with as much to show as there can be: many nodes with long names, long lines, a wait, a divergence."""
    members = tuple(f"{name}{number}#a" for number in range(nodes))
    view = {"members": members, "total_steps": 120_000, "step": 98_765}
    views = [make_node(member.removesuffix("#a"), **view) for member in members]
    notes = tuple(Note(float(i), f"note {i} " + "of many words " * 20) for i in range(300))
    ids = tuple(node.node_id for node in views)
    waiting = WaitingFor(ids, 1.0, 5.0, "They are late.")
    disagreements, curve = (4,) if nodes > 1 else (), tuple(map(float, range(256))) if nodes else ()
    run = RunView("demo", tuple(views), disagreements=disagreements, waiting=waiting, loss_curve=curve)
    footer = "Next: " + "this and that, " * 20
    return make_scene(run=run, node_ids=ids, down=frozenset(), notes=notes, footer=footer)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 60)])
@pytest.mark.parametrize("nodes", [0, 1, 4, 64])
@pytest.mark.parametrize("name", ["node", "a-machine-in-a-rack-far-away.example.org-"])
def test_draw_fits_the_terminal_with_all_its_borders(
    make_scene: Callable[..., Scene], width: int, height: int, nodes: int, name: str
) -> None:
    lines = _drawn(_busy(make_scene, nodes, name), width, height).splitlines()
    assert len(lines) <= height
    assert {len(line) for line in lines} == {width}
    assert lines[0].startswith("╭") and lines[-1].startswith("╰")
    assert all(line.startswith("│") and line.endswith("│") for line in lines[1:-1])
    assert any("Next: this" in line for line in lines)
    assert any("note 299" in line for line in lines)
    assert any("loss over steps" in line for line in lines)
    assert any("waiting for" in line for line in lines)


@pytest.mark.parametrize(("height", "shown"), [(24, 6), (30, 12), (60, 42)])
def test_draw_counts_the_nodes_that_have_no_line(make_scene: Callable[..., Scene], height: int, shown: int) -> None:
    text = _drawn(_busy(make_scene, 64), 80, height)
    (rest,) = (line for line in text.splitlines() if " more: " in line)
    lines = sum("loss 2.50" in line for line in text.splitlines())
    assert f"and {64 - lines} more: {64 - lines} training" in rest
    assert lines == shown


def test_draw_shows_nodes_in_trouble_where_not_all_have_a_line(make_scene: Callable[..., Scene]) -> None:
    scene = _busy(make_scene, 64)
    nodes = [replace(node, state="lost") if node.node_id == "node63" else node for node in scene.run.nodes]
    assert "lost" in _line(_drawn(replace(scene, run=replace(scene.run, nodes=tuple(nodes))), 80, 24), "node63")


@pytest.mark.parametrize(("width", "height"), [(40, 10), (79, 24), (80, 23), (20, 2), (1, 1)])
def test_draw_says_that_a_terminal_is_too_small_and_still_how_the_run_stands(
    make_scene: Callable[..., Scene], width: int, height: int
) -> None:
    lines = _drawn(_busy(make_scene, 64), width, height).splitlines()
    assert 0 < len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith(f"{width}x{height} is too"[: width - 1])
    if (width, height) == (40, 10):
        assert any("step 98765/120" in line for line in lines)


def test_draw_keeps_its_height_whatever_there_is_to_say(make_scene: Callable[..., Scene]) -> None:
    heights = {len(_drawn(_busy(make_scene, nodes), 80, 24).splitlines()) for nodes in (4, 8, 9, 64)}
    assert heights == {24}
    first = make_scene(run=RunView("demo"), notes=(Note(0.0, "starting"),), down=frozenset())
    last = make_scene(notes=tuple(Note(float(i), f"note {i}") for i in range(30)))
    assert len(_drawn(first).splitlines()) == len(_drawn(last).splitlines())


def test_draw_shows_what_a_node_does_that_has_said_nothing_yet(make_scene: Callable[..., Scene]) -> None:
    empty = make_scene(run=RunView("demo"), notes=(), down=frozenset(), elapsed_s=0.0)
    starting = {"node1": ("its launcher starts Python", 3.2)}
    line = _line(_drawn(replace(empty, starting=starting), 80, 24), "node1")
    assert "starting" in line and "3 s: its launcher" in line
    assert _drawn(replace(empty, starting=starting)) != _drawn(replace(empty, starting=starting, elapsed_s=0.3))


def test_draw_shows_where_a_node_stands_on_its_way(make_scene: Callable[..., Scene]) -> None:
    run = RunView("demo", (make_node("node0", state="joining", join=JoinView("fetching")),))
    assert "fetching the state" in _line(_drawn(make_scene(run=run, node_ids=("node0",))), "node0")


def test_live_screen_draws_in_place_and_leaves_the_last_scene(make_scene: Callable[..., Scene]) -> None:
    file = io.StringIO()
    with LiveScreen(Console(file=file, force_terminal=True, width=100, height=40)) as screen:
        screen.show(make_scene())
        screen.show(make_scene(footer="the end"))
    assert "\x1b[1A" in file.getvalue()  # moves up to draw over the first scene
    assert "the end" in file.getvalue().rpartition("\x1b[1A")[2]


class _Terminal(io.StringIO):
    encoding = "utf-8"  # pyright: ignore[reportAssignmentType]

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "encoding", "kind"),
    [
        (_Terminal, {}, "utf-8", LiveScreen),
        (_Terminal, {"TERM": "dumb"}, "utf-8", PlainScreen),
        (_Terminal, {"TERM": ""}, "utf-8", PlainScreen),
        (_Terminal, {}, "ascii", PlainScreen),
        (_Terminal, {"NO_COLOR": "1"}, "utf-8", PlainScreen),
        (io.StringIO, {}, "utf-8", PlainScreen),
        *((io.StringIO, {name: "1"}, "utf-8", PlainScreen) for name in ("FORCE_COLOR", "TTY_COMPATIBLE")),
        (io.StringIO, {"TTY_INTERACTIVE": "1"}, "utf-8", PlainScreen),
    ],
)
def test_open_screen_draws_only_on_a_terminal_that_can_show_it_whatever_the_environment_claims(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], environ: dict[str, str], encoding: str, kind: type
) -> None:
    monkeypatch.setattr(_Terminal, "encoding", encoding)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert isinstance(open_screen(stream()), kind)


def test_plain_screen_writes_each_thing_that_a_node_does_once_and_every_wait(
    make_scene: Callable[..., Scene],
) -> None:
    file = io.StringIO()
    scene = make_scene(run=RunView("demo"), notes=(), footer="")
    with PlainScreen(file) as screen:
        for elapsed_s, words in ((1.0, "starts Python"), (2.0, "starts Python"), (3.0, "loads torch")):
            screen.show(replace(scene, elapsed_s=elapsed_s, starting={"node0": (words, elapsed_s)}))
        waits = WaitingFor(("node2",), 0.0, 5.0, "It is late.")
        for elapsed_s, waiting in ((4.0, waits), (5.0, replace(waits, for_s=6.0)), (6.0, None)):
            screen.show(replace(scene, elapsed_s=elapsed_s, run=RunView("demo", waiting=waiting)))
    assert file.getvalue().splitlines() == [
        "00:01  node0: starts Python",
        "00:03  node0: loads torch",
        "00:04  waiting for node2, for 5 s",
    ]


def test_plain_screen_goes_on_where_old_notes_were_dropped(make_scene: Callable[..., Scene]) -> None:
    file = io.StringIO()
    with PlainScreen(file) as screen:
        screen.show(make_scene(run=RunView("demo"), notes=(Note(1.0, "a"), Note(2.0, "b")), footer=""))
        screen.show(make_scene(run=RunView("demo"), notes=(Note(2.5, "b"), Note(3.0, "c")), footer=""))
    assert [line[7:] for line in file.getvalue().splitlines()] == ["a", "b", "c"]


def test_plain_screen_writes_notes_and_outer_steps_once(make_scene: Callable[..., Scene]) -> None:
    file = io.StringIO()
    scene = make_scene()
    with PlainScreen(file) as screen:
        screen.show(scene)
        screen.show(scene)
        screen.show(make_scene(notes=(*scene.notes, Note(62.0, "and more")), footer="the end"))
    assert file.getvalue().splitlines() == [
        "00:03  the beginning",
        "01:00  node2 is gone",
        "01:01  outer step 4/12  step 40/120  loss 2.500  epoch 2  3 nodes in  "
        "all nodes sent 4 MB so far; per-step data parallel: 80 MB, 20x",
        "01:01  Next: it comes back.",
        "01:02  and more",
        "01:01  the end",
    ]


def test_plain_screen_writes_no_outer_step_before_the_first(make_scene: Callable[..., Scene]) -> None:
    file = io.StringIO()
    with PlainScreen(file) as screen:
        screen.show(make_scene(run=RunView("demo"), notes=(), footer="wait"))
    assert file.getvalue() == "01:01  wait\n"


@pytest.mark.parametrize(("elapsed_s", "shown"), [(0.0, "00:00"), (59.9, "00:59"), (61.0, "01:01"), (3600.0, "60:00")])
def test_clock_shows_minutes_and_seconds(elapsed_s: float, shown: str) -> None:
    assert clock(elapsed_s) == shown

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from zeroband.observe.view import RunView
from zeroband.tools.demo.scene import Note, Scene
from zeroband.tools.demo.screen import LiveScreen, PlainScreen, clock, draw, open_screen


def _drawn(scene: Scene, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(draw(scene, width))
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
        "4 of 12",
        "node0 node1 node3",
        "4 MB",
        "80 MB",
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
            console.print(draw(scene, 140))
        line = _line(capture.get(), "\x1b[1mnode0")
        return line.split("━\x1b")[0].count("━") + 1

    scene = make_scene()
    ahead = replace(scene.run.nodes[0], step=80)
    further = replace(scene, run=replace(scene.run, nodes=(ahead, *scene.run.nodes[1:])))
    assert done(further) == pytest.approx(2 * done(scene), abs=2)


def test_draw_wraps_nothing_on_a_terminal_of_80_columns(make_scene: Callable[..., Scene], run: RunView) -> None:
    members = tuple(f"node{number}#a" for number in range(4))
    full = replace(run, nodes=tuple(replace(node, members=members) for node in run.nodes))
    scene = make_scene(run=full, down=frozenset())
    assert len(_drawn(scene, 80).splitlines()) == len(_drawn(scene, 140).splitlines())
    assert "node0 node1 node2 node3" in _drawn(scene, 80)


def test_draw_calls_a_divergence_by_its_name(make_scene: Callable[..., Scene], run: RunView) -> None:
    other = replace(run.nodes[1], digests={4: "another"})
    text = _drawn(make_scene(run=replace(run, nodes=(run.nodes[0], other))))
    assert "DIVERGED" in text
    assert "equal on all" not in text


def test_draw_keeps_its_height_from_the_first_scene_to_the_last(make_scene: Callable[..., Scene]) -> None:
    first = make_scene(run=RunView("demo"), notes=(Note(0.0, "starting"),), down=frozenset())
    last = make_scene(notes=tuple(Note(float(i), f"note {i}") for i in range(30)))
    assert len(_drawn(first).splitlines()) == len(_drawn(last).splitlines())


@pytest.mark.parametrize("width", [60, 80, 200])
def test_draw_fits_the_terminal(make_scene: Callable[..., Scene], width: int) -> None:
    assert {len(line) for line in _drawn(make_scene(), width).splitlines()} == {width}


def test_live_screen_draws_in_place_and_leaves_the_last_scene(make_scene: Callable[..., Scene]) -> None:
    file = io.StringIO()
    with LiveScreen(Console(file=file, force_terminal=True, width=100, height=40)) as screen:
        screen.show(make_scene())
        screen.show(make_scene(next_act="the end"))
    assert "\x1b[1A" in file.getvalue()  # moves up to draw over the first scene
    assert "the end" in file.getvalue().rpartition("\x1b[1A")[2]


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_open_screen_gives_plain_lines_where_there_is_no_terminal_whatever_the_environment_claims(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(open_screen(io.StringIO()), PlainScreen)
    monkeypatch.setenv(name, "1")
    assert isinstance(open_screen(io.StringIO()), PlainScreen)


class _Terminal(io.StringIO):
    encoding = "utf-8"  # pyright: ignore[reportAssignmentType]

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("term", "encoding", "kind"),
    [
        ("xterm-256color", "utf-8", LiveScreen),
        ("dumb", "utf-8", PlainScreen),
        ("", "utf-8", PlainScreen),
        ("xterm", "ascii", PlainScreen),
    ],
)
def test_open_screen_draws_only_on_a_terminal_that_can_show_it(
    monkeypatch: pytest.MonkeyPatch, term: str, encoding: str, kind: type
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(_Terminal, "encoding", encoding)
    assert isinstance(open_screen(_Terminal()), kind)


def test_plain_screen_writes_notes_and_outer_steps_once(make_scene: Callable[..., Scene]) -> None:
    file = io.StringIO()
    scene = make_scene()
    with PlainScreen(file) as screen:
        screen.show(scene)
        screen.show(scene)
        screen.show(make_scene(notes=(*scene.notes, Note(62.0, "and more")), next_act="the end"))
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
        screen.show(make_scene(run=RunView("demo"), notes=(), next_act="wait"))
    assert file.getvalue() == "01:01  wait\n"


@pytest.mark.parametrize(("elapsed_s", "shown"), [(0.0, "00:00"), (59.9, "00:59"), (61.0, "01:01"), (3600.0, "60:00")])
def test_clock_shows_minutes_and_seconds(elapsed_s: float, shown: str) -> None:
    assert clock(elapsed_s) == shown

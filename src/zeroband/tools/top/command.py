"""`zeroband top [RUN_DIR | --store URL --run-id ID]`: a live view of a run on a terminal; plain lines elsewhere.

Read-only. Ends with q or Ctrl-C; without a terminal, with the run. Exit codes: 0 shown, 1 the store is unreachable, 2
wrong arguments, 3 the run diverged.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.facts import FactSource, FolderFacts, newest_run
from zeroband.observe.status import RunReader, problems_of
from zeroband.observe.view import ENDED, RunView
from zeroband.tools.arguments import add_source, is_in_store, open_source, parser_of, run_command
from zeroband.tools.top.scene import Scene, notes_of
from zeroband.tools.top.screen import LiveScreen, Screen, open_screen

_FRAME_S = 0.5
_EXIT_DIVERGED = 3
_HINT = "q: end"
_TORCH = "libtorch"


def main(argv: Sequence[str]) -> int:
    """Show a run until the user quits. Returns the exit code."""
    text = "Show a run on this terminal; for a folder of runs, the newest one. Default: ./runs."
    parser = parser_of("top", text)
    add_source(parser)
    options = parser.parse_args(argv)

    def work() -> int:
        if not is_in_store(options):
            run_dir = newest_run(options.run_dir or Path("runs"))
            with closing(FolderFacts(run_dir)) as facts:
                return show(facts, lambda known: folder_words(run_dir, known))
        with closing(open_source(options)) as facts:
            facts.node_ids()  # report a wrong address or token at once
            return show(facts)

    return run_command("top", work)


def show(facts: FactSource, starting: Callable[[Sequence[str]], dict[str, tuple[str, float]]] | None = None) -> int:
    """Show the run of these facts until the user quits. Returns the exit code.

    `starting`: describes nodes without facts, given the nodes with facts; None: unknown.
    """
    with open_screen(sys.stdout, alternate=True) as screen:
        is_live = isinstance(screen, LiveScreen)
        watch = TopWatch(facts, starting or (lambda known: {}), hint=_HINT if is_live else "")
        with key_presses() as is_pressed, suppress(KeyboardInterrupt):
            watch.play(screen, lambda: is_pressed("q", _FRAME_S), ends_with_run=not is_live)
    return _EXIT_DIVERGED if watch.run.disagreements else 0


class TopWatch:
    """Shows a run scene by scene. `hint`: for the footer; `now`: wall clock in seconds; `clock`: monotonic."""

    def __init__(
        self,
        facts: FactSource,
        starting: Callable[[Sequence[str]], dict[str, tuple[str, float]]],
        *,
        hint: str = _HINT,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._reader = RunReader(facts, clock=clock)
        self._starting = starting
        self._hint = hint
        self._now = now
        self.run = RunView(facts.run_id)
        """The newest view."""

    def play(self, screen: Screen, is_enough: Callable[[], bool], *, ends_with_run: bool) -> None:
        """Show scenes until `is_enough`, which waits until the next scene is due."""
        while True:
            screen.show(self.scene())
            if (ends_with_run and is_over(self.run)) or is_enough():
                return

    def scene(self) -> Scene:
        """Return the run now; if it cannot be read, the last view with an error."""
        problem = ""
        try:
            self.run = self._reader.read()
        except (ConfigError, StoreLost, OSError) as error:
            problem = f"cannot read {self._facts.place}: {error}"
        run = self.run
        known = [node.node_id for node in run.nodes]
        starting = self._starting(known)
        return Scene(
            title=f"zeroband top: {run.run_id}",
            run=run,
            elapsed_s=self._now(),
            node_ids=tuple(sorted({*known, *starting})),
            notes=notes_of(run.events),
            footer="; ".join(filter(None, [problem or self._hint, *problems_of(run)])),
            starting=starting,
            is_wall_clock=True,
        )


def is_over(run: RunView) -> bool:
    """Return whether every node has ended; once others finished, nodes that died while starting count as ended."""
    states = {node.state for node in run.own}
    return bool(states) and states <= {*ENDED, *(("starting",) if "finished" in states else ())}


@contextmanager
def key_presses() -> Generator[Callable[[str, float], bool]]:
    """Give a function that waits for a key and returns whether it was pressed; without a terminal it only waits."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield lambda _key, within_s: bool(time.sleep(within_s))
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield lambda key, within_s: _is_pressed(terminal, key, within_s)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _is_pressed(terminal: int, key: str, within_s: float) -> bool:
    ready, _, _ = select.select([terminal], [], [], within_s)
    return bool(ready) and key.encode() in os.read(terminal, 64).lower()


# -- what a node does before its first event -------------------------------------------------------------------------


def process_words(rank_pids: Sequence[int]) -> str:
    """Describe a starting node by its ranks. Linux: inspects the first rank's memory mappings."""
    if not rank_pids:
        return "launcher is starting Python"
    try:
        with Path(f"/proc/{rank_pids[0]}/maps").open(errors="replace") as maps:
            has_torch = any(_TORCH in line for line in maps)
    except OSError:  # it has just ended
        return "rank has exited"
    return "rank is creating model and data" if has_torch else "rank is checking the configuration and loading torch"


def folder_words(run_dir: Path, known: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Describe the nodes with a folder but without events, with seconds. `known`: nodes with events."""
    words: dict[str, tuple[str, float]] = {}
    try:
        folders = [path for path in run_dir.iterdir() if path.name not in known and (path / "rank0.log").exists()]
        for path in folders:
            since_s = max(0.0, time.time() - (path / "rank0.log").stat().st_mtime)
            words[path.name] = ("configuration loaded; no event yet", since_s)
    except OSError:  # removed meanwhile
        return {}
    return words

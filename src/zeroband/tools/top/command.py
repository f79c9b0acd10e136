"""`zeroband top [RUN_DIR | --store URL --run-id ID]`: a run on a terminal, redrawn in place; plain lines elsewhere.

Touches nothing. Ends with q or Ctrl-C; where its output is no terminal, with the run. Exit codes: 0 shown, 1 the store
is out of reach, 2 the arguments are wrong, 3 the run diverged.
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
from zeroband.observe.facts import FactSource, FolderFacts
from zeroband.observe.status import RunReader, problems_of
from zeroband.observe.view import ENDED, RunView
from zeroband.tools.arguments import add_source, is_in_store, open_source, parser_of, run_command
from zeroband.tools.runs import newest_run
from zeroband.tools.top.scene import Chronicle, Scene
from zeroband.tools.top.screen import LiveScreen, Screen, open_screen

_FRAME_S = 0.5
_EXIT_DIVERGED = 3
_HINT = "q: end"
_TORCH = "libtorch"


def main(argv: Sequence[str]) -> int:
    """Show a run until the user has seen enough. Returns the exit code."""
    text = "Show a run on this terminal; of a folder of runs the newest one. Without arguments: of ./runs."
    parser = parser_of("top", text)
    add_source(parser)
    options = parser.parse_args(argv)

    def work() -> int:
        if not is_in_store(options):
            run_dir = newest_run(options.run_dir or Path("runs"))
            with closing(FolderFacts(run_dir)) as facts:
                return show(facts, lambda known: folder_words(run_dir, known))
        with closing(open_source(options)) as facts:
            facts.node_ids()  # what is wrong with address or token is said at once
            return show(facts)

    return run_command("top", work)


def show(facts: FactSource, starting: Callable[[Sequence[str]], dict[str, tuple[str, float]]] | None = None) -> int:
    """Show the run of these facts until the user wants no more. Returns the exit code.

    `starting`: what nodes do that have said nothing yet, given those that have; None: that is not known.
    """
    with open_screen(sys.stdout, alternate=True) as screen:
        is_live = isinstance(screen, LiveScreen)
        watch = TopWatch(facts, starting or (lambda known: {}), hint=_HINT if is_live else "")
        with key_presses() as is_pressed, suppress(KeyboardInterrupt):
            watch.play(screen, lambda: is_pressed("q", _FRAME_S), ends_with_run=not is_live)
    return _EXIT_DIVERGED if watch.run.disagreements else 0


class TopWatch:
    """A run, scene by scene. `hint`: what the user can do; `now`: wall clock in seconds; `clock`: one of no jumps."""

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
        self._chronicle = Chronicle(0.0)
        self.run = RunView(facts.run_id)
        """As it was seen last."""

    def play(self, screen: Screen, is_enough: Callable[[], bool], *, ends_with_run: bool) -> None:
        """Show scenes until somebody has seen enough; `is_enough` waits for that until the next scene is due."""
        while True:
            screen.show(self.scene())
            if (ends_with_run and is_over(self.run)) or is_enough():
                return

    def scene(self) -> Scene:
        """The run now. What cannot be read is said; then the run stands as it was seen last."""
        problem = ""
        try:
            self.run = self._reader.read()
        except (ConfigError, StoreLost, OSError) as error:
            problem = f"cannot read {self._facts.place}: {error}"
        run = self.run
        self._chronicle.add(run.events)
        known = [node.node_id for node in run.nodes]
        starting = self._starting(known)
        return Scene(
            title=f"zeroband top: {run.run_id}",
            run=run,
            elapsed_s=self._now(),
            node_ids=tuple(sorted({*known, *starting})),
            notes=self._chronicle.notes,
            said=self._chronicle.said,
            footer="; ".join(filter(None, [problem or self._hint, *problems_of(run)])),
            starting=starting,
            is_wall_clock=True,
        )


def is_over(run: RunView) -> bool:
    """Whether every node has ended; one that died as it started, and so never says so, counts where others finished."""
    states = {node.state for node in run.own}
    return bool(states) and states <= {*ENDED, *(("starting",) if "finished" in states else ())}


@contextmanager
def key_presses() -> Generator[Callable[[str, float], bool]]:
    """Give a question: was this key pressed within these seconds? Without a terminal it waits."""
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
    """What a node does whose launcher runs with these ranks. Linux: looks at what the first rank has mapped."""
    if not rank_pids:
        return "its launcher starts Python"
    try:
        with Path(f"/proc/{rank_pids[0]}/maps").open(errors="replace") as maps:
            has_torch = any(_TORCH in line for line in maps)
    except OSError:  # it has just ended
        return "its rank has ended"
    return "its rank has torch, makes model and data" if has_torch else "its rank checks the configuration, loads torch"


def folder_words(run_dir: Path, known: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Tell what those nodes do that have a folder in the run directory and no event in it, and for how many seconds.

    `known`: the nodes that have one.
    """
    words: dict[str, tuple[str, float]] = {}
    try:
        folders = [path for path in run_dir.iterdir() if path.name not in known and (path / "rank0.log").exists()]
        for path in folders:
            since_s = max(0.0, time.time() - (path / "rank0.log").stat().st_mtime)
            words[path.name] = ("its configuration is read; no event yet", since_s)
    except OSError:  # removed meanwhile
        return {}
    return words

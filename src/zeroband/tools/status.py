"""`zeroband status RUN_DIR | --store URL --run-id ID`: show a run from its nodes' files or from its store.

Read-only. Exit codes: 0 shown, 3 the run diverged, 2 wrong arguments, 1 the store is unreachable.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing

from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.facts import FactSource
from zeroband.observe.status import RunReader, render
from zeroband.observe.view import RunView
from zeroband.tools.arguments import add_source, bounded, open_source, parser_of, run_command

_EXIT_DIVERGED = 3


def main(argv: Sequence[str]) -> int:
    """Print the run, with --follow repeatedly. Returns the exit code."""
    parser = parser_of("status", "Show a run from what its nodes recorded.")
    add_source(parser)
    parser.add_argument("--follow", action="store_true", help="print it again after every change, until Ctrl-C")
    every = bounded(float, ge=0)
    parser.add_argument("--every-s", type=every, default=2.0, help="polling interval in seconds (default: 2)")
    options = parser.parse_args(argv)
    return run_command("status", lambda: _open_and_show(options))


def _open_and_show(options: argparse.Namespace) -> int:
    with closing(open_source(options)) as facts:
        view = _show(facts, every_s=options.every_s if options.follow else None)
    return _EXIT_DIVERGED if view.disagreements else 0


def _show(facts: FactSource, *, every_s: float | None) -> RunView:
    """Print the run, with `every_s` after every change until Ctrl-C. Returns its newest view. Raises StoreLost."""
    reader = RunReader(facts)
    view = reader.read()
    if not view.nodes:
        raise ConfigError(f"no node of run.id={facts.run_id!r} recorded anything in {facts.place}; check both names")
    shown = render(view)
    print(shown)
    try:
        while every_s is not None:
            time.sleep(every_s)
            try:
                view = reader.read()
                new = render(view)
            except StoreLost as error:  # continue when the store is back
                new = str(error)
            if new != shown:
                print(f"\n{new}", flush=True)
            shown = new
    except KeyboardInterrupt:
        pass
    return view

"""The `zeroband` command: lists the subcommands and loads only the chosen one."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from zeroband import __version__
from zeroband.errors import ConfigError
from zeroband.node.launched import exit_on_signals, torch_variable_errors
from zeroband.node.process_start import (
    ensure_home,
    ignore_closed_streams,
    load_uncollected,
    open_standard_streams,
    redirect_to_null,
)

_EXIT_FAILED, _EXIT_CONFIG = 1, 2
_EXIT_INTERRUPTED = 128 + signal.SIGINT
_EXIT_UNHEARD = 128 + signal.SIGPIPE


class _Command(NamedTuple):
    module: str
    """Module below the package; its `main(argv)` returns the exit code."""
    meaning: str
    works: bool = False
    """Whether it continues when its output is closed; other commands exist for their output."""


_COMMANDS = {
    "train": _Command("train", "train on this machine, one process; launch starts several", works=True),
    "launch": _Command(
        "node.launch", "torchrun's work on this machine without its ports: starts SCRIPT on each rank", works=True
    ),
    "join": _Command("tools.join", "URL --run-id ID --token-file F: take part in a run, as its store says", works=True),
    "simulate": _Command(
        "tools.cluster.simulate", "NODES RANKS @config: a run of several nodes on this machine", works=True
    ),
    "demo": _Command("tools.demo.story", "4 nodes train a small model here; one is killed and comes back", works=True),
    "chaos": _Command(
        "tools.chaos.command", "faults at random for minutes, what must hold checked, and a report", works=True
    ),
    "data": _Command("tools.data.command", "prepare | inspect | audit: ids of text, made once; what a run trained"),
    "doctor": _Command("tools.doctor.command", "whether this machine can take part, and what its links carry"),
    "compare": _Command(
        "tools.compare.command", "methods side by side from one warm start: a table and figures", works=True
    ),
    "plan": _Command("tools.plan.command", "what fits: the memory of GPUs, and a link with each algorithm"),
    "ctl": _Command(
        "tools.ctl", "pause | resume | drain, ban NODE | rollback --step N | status: orders to a whole run"
    ),
    "status": _Command("tools.status", "RUN_DIR | --store URL --run-id ID: how a run goes, from files or its store"),
    "top": _Command("tools.top.command", "[RUN_DIR | --store URL --run-id ID]: the same, redrawn until q"),
    "runs": _Command("tools.runs", "[DIR]: the runs of a folder, newest first"),
    "board": _Command("tools.board.command", "a page that shows a run: its nodes, rounds, curves, events and promises"),
    "report": _Command("tools.report.command", "RUN_DIR: the page of a run as one HTML file, for later"),
    "store": _Command("tools.store", "serve as the store of a run, and print what its machines type", works=True),
    "health": _Command("tools.health", "whether the trainers on this machine live and get on, for health checks"),
    "export": _Command("tools.offline.export", "CKPT OUT: a directory that transformers and vLLM load", works=True),
    "eval": _Command("tools.offline.evaluate", "CKPT: loss and bits per byte on text held out of training"),
    "sample": _Command("tools.offline.sample", "CKPT --prompt TEXT: text from a trained model"),
    "chat": _Command("tools.offline.chat", "CKPT: talk to a trained model, line by line"),
    "config": _Command("tools.config", "@file.toml --flags ...: the configuration that `train` would run with"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 2 for wrong input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    chosen: str = _parser().parse_args(arguments[:1]).command
    ignore_closed_streams(stdout=_COMMANDS[chosen].works or arguments[:2] == ["data", "prepare"])
    if said := ensure_home(os.environ):
        print(said, file=sys.stderr)
    try:
        code = _load(chosen)(arguments[1:])
        return code if _is_written() else code or _EXIT_FAILED
    except ConfigError as error:  # torch could not be loaded; commands print their own errors
        print(f"zeroband: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _is_unheard():
            raise
        redirect_to_null(sys.stdout)
        return _EXIT_UNHEARD


def _is_written() -> bool:
    """Flush the output; return whether that succeeded, and print why not. Raises BrokenPipeError."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"zeroband: cannot write to standard output: {error.strerror}", file=sys.stderr)
        redirect_to_null(sys.stdout)
        return False
    return True


def _is_unheard() -> bool:
    """Whether the reader of the output is gone, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(found & select.POLLERR for _, found in poll.poll(0))


def _load(command: str) -> Callable[[Sequence[str]], int]:
    """Import a command's `main`. Loading torch takes seconds, during which signals end the process silently."""
    numbers = exit_on_signals()
    try:
        with torch_variable_errors():
            return cast(Callable[[Sequence[str]], int], load_uncollected(f"zeroband.{_COMMANDS[command].module}").main)
    finally:
        for number, handler in numbers.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<10}{command.meaning}" for name, command in _COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="zeroband",
        description="Elastic training of language models over unreliable machines and ordinary internet links.",
        epilog="\n".join(["commands:", *lines, "", "`zeroband COMMAND --help` says more about each."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zeroband {__version__}")
    parser.add_argument("command", choices=list(_COMMANDS), metavar="COMMAND", help="one of those below")
    return parser


if __name__ == "__main__":
    sys.exit(main())

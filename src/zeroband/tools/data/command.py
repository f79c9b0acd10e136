"""`zeroband data`: prepare, inspect and audit data.

zeroband data prepare SOURCE... OUT --tokenizer T    tokenize text once for all runs
zeroband data inspect OUT                            describe and verify prepared ids
zeroband data audit RUN_DIR                          check that a run trained every sample exactly once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from zeroband.tools.arguments import parser_of, run_command

_ACTIONS = ("prepare", "inspect", "audit")


def main(argv: Sequence[str]) -> int:
    """Run an action; only its module is imported. Returns the exit code: 2 for wrong arguments."""
    parser = parser_of("data", __doc__)
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help="see `ACTION --help`")
    action: str = parser.parse_args(argv[:1]).action
    run = cast(Callable[[Sequence[str]], int], import_module(f"zeroband.tools.data.{action}").main)
    return run_command(f"data {action}", lambda: run(argv[1:]))

"""`zeroband data`: names what there is to do with data, and loads only the part that does it.

zeroband data prepare SOURCE... OUT --tokenizer T    token ids of text, made once
zeroband data inspect OUT                            what prepared ids are, and whether they are whole
zeroband data audit RUN_DIR                          whether every sample of a run was trained exactly once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from zeroband.tools.arguments import parser_of, run_command

_ACTIONS = ("prepare", "inspect", "audit")


def main(argv: Sequence[str]) -> int:
    """Run one of them with all that follows it. Returns the exit code: 2 where the user's input is wrong."""
    parser = parser_of("data", __doc__)
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help="one of them; `ACTION --help` says more")
    action: str = parser.parse_args(argv[:1]).action
    run = cast(Callable[[Sequence[str]], int], import_module(f"zeroband.tools.data.{action}").main)
    return run_command(f"data {action}", lambda: run(argv[1:]))

"""`zeroband data`: names what there is to do with data, and loads only the part that does it.

zeroband data prepare SOURCE... OUT --tokenizer T    token ids of text, made once
zeroband data inspect OUT                            what prepared ids are, and whether they are whole
zeroband data audit RUN_DIR                          whether every sample of a run was trained exactly once
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from zeroband.errors import ConfigError

_ACTIONS = ("prepare", "inspect", "audit")
_EXIT_CONFIG = 2


def main(argv: Sequence[str]) -> int:
    """Run one of them with all that follows it. Returns the exit code: 2 where the user's input is wrong."""
    parser = argparse.ArgumentParser(
        prog="zeroband data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help="one of them; `ACTION --help` says more")
    action: str = parser.parse_args(argv[:1]).action
    run = cast(Callable[[Sequence[str]], int], import_module(f"zeroband.tools.data.{action}").main)
    try:
        return run(argv[1:])
    except ConfigError as error:
        print(f"zeroband data {action}: {error}", file=sys.stderr)
        return _EXIT_CONFIG

"""`zeroband chat CKPT`: talk to a trained model, a line at a time, until Ctrl-D.

A model that was trained on conversations answers as the assistant, and remembers the conversation; any other one
continues the text so far. CKPT is the folder or URL of one checkpoint, the root of a run's checkpoints (its latest
one), or an exported directory. Exit codes: 0 done, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroband.tools.arguments import run_command
from zeroband.tools.offline.opened import device_of, open_asked
from zeroband.tools.offline.sample import Sampler, parser_for_sampling

if TYPE_CHECKING:
    from zeroband.data.chat import Message


def main(argv: Sequence[str]) -> int:
    """Talk until the input ends. Returns the exit code."""
    options = parser_for_sampling("chat", __doc__).parse_args(argv)
    return run_command("chat", lambda: _chat(options))


def _chat(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    sampler = Sampler(open_asked(options, "chat").model, device, options)
    what = "answers" if sampler.is_chat else "continues your text"
    print(f"The model {what}; Ctrl-D ends.", file=sys.stderr)
    messages: list[Message] = []
    text = ""
    while (line := _line()) is not None:
        if sampler.is_chat:
            answer = sampler.continuation(line, messages)
            messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
        else:
            text += line + "\n"
            answer = sampler.continuation(text)
            text += answer
        print(answer, flush=True)
        options.seed += 1  # the same line may be answered otherwise
    return 0


def _line() -> str | None:
    """Return the next line that is typed; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None

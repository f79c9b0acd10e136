"""`zeroband sample CKPT --prompt TEXT`: text from a trained model, to standard output.

CKPT is the folder or URL of one checkpoint, the root of a run's checkpoints (its latest one), or an exported directory.
The prompt begins a document, as in training; sampling ends with the document. Exit codes: 0 done, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zeroband.tools.arguments import bounded, run_command
from zeroband.tools.offline.opened import device_of, open_asked, parser_for_checkpoint


def main(argv: Sequence[str]) -> int:
    """Generate and print. Returns the exit code."""
    parser = parser_for_checkpoint("sample", __doc__)
    parser.add_argument("--prompt", default="", help="text to continue (default: none, a document from its start)")
    add = parser.add_argument
    add("--tokens", type=bounded(int, ge=1), default=256, help="most tokens to generate (default: 256)")
    add("--temperature", type=bounded(float, ge=0), default=0.8, help="0: the likeliest token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    options = parser.parse_args(argv)
    return run_command("sample", lambda: _sample(options))


def _sample(options: argparse.Namespace) -> int:
    from zeroband.tools.offline.continuation import continuation  # torch, for right arguments only

    device = device_of(options.device)
    model = open_asked(options, "sample").model
    text = continuation(
        model, options.prompt, device, tokens=options.tokens, temperature=options.temperature, seed=options.seed
    )
    print(f"{options.prompt}{text}")
    return 0

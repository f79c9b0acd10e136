"""`zeroband sample CKPT --prompt TEXT`: text from a trained model, to standard output.

CKPT is the folder or URL of one checkpoint, the root of a run's checkpoints (its latest one), or an exported directory.
The prompt begins a document, as in training; sampling ends with the document. Exit codes: 0 done, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from zeroband.errors import ZerobandError
from zeroband.tools.offline.arguments import EXIT_CONFIG, add_checkpoint, add_device, open_asked, positive


def main(argv: Sequence[str]) -> int:
    """Generate and print. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="zeroband sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_checkpoint(parser)
    add_device(parser)
    parser.add_argument("--prompt", default="", help="text to continue (default: none, a document from its start)")
    parser.add_argument("--tokens", type=positive, default=256, help="most tokens to generate (default: 256)")
    parser.add_argument("--temperature", type=_temperature, default=0.8, help="0: the likeliest token (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    options = parser.parse_args(argv)
    try:
        text = _sample(options)
    except ZerobandError as error:
        print(f"zeroband sample: {error}", file=sys.stderr)
        return EXIT_CONFIG
    print(f"{options.prompt}{text}")
    return 0


def _sample(options: argparse.Namespace) -> str:
    from zeroband.tools.offline.continuation import continuation  # torch, for right arguments only
    from zeroband.tools.offline.device import device_of

    device = device_of(options.device)
    model = open_asked(options, "sample").model
    return continuation(
        model, options.prompt, device, tokens=options.tokens, temperature=options.temperature, seed=options.seed
    )


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a number above it")
    return value

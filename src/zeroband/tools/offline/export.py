"""`zeroband export CKPT OUT`: export a model with its tokenizer for transformers' AutoModelForCausalLM and vLLM.

CKPT is the folder or URL of one checkpoint, or the root of a run's checkpoints (its latest one). If transformers is
installed (extra `hf`), its output from OUT is compared with ours from CKPT.
Exit codes: 0 exported, 1 exported but transformers' output differs, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zeroband.config.schema import EXPORT_DTYPES
from zeroband.tools.arguments import run_command
from zeroband.tools.offline.opened import open_asked, parser_for_checkpoint

_EXIT_DIFFERS = 1


def main(argv: Sequence[str]) -> int:
    """Export, compare and print. Returns the exit code."""
    parser = parser_for_checkpoint("export", __doc__, computes=False)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create; must be missing or empty")
    parser.add_argument(
        "--dtype", choices=EXPORT_DTYPES, default="bfloat16", help="type of the weights (default: bfloat16)"
    )
    parser.add_argument("--no-parity", action="store_true", help="do not compare with transformers")
    options = parser.parse_args(argv)
    return run_command("export", lambda: _export(options))


def _export(options: argparse.Namespace) -> int:
    from zeroband.export.directory import (  # imported lazily: loads torch
        check_parity,
        describe,
        require_free,
        write_directory,
    )

    require_free(options.out)
    opened = open_asked(options, "export")
    size = write_directory(opened.model, options.out, options.dtype)
    print(f"exported  {opened.what} as {options.dtype} to {options.out}: {size / 1e6:.1f} MB")
    if options.no_parity:
        print("parity    not checked (--no-parity)")
        return 0
    parity = check_parity(opened.model, options.out, options.dtype)
    print(f"parity    {describe(parity)}")
    return 0 if parity is None or parity.is_equal else _EXIT_DIFFERS

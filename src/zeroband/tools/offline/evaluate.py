"""`zeroband eval CKPT`: loss and bits per byte on held-out text.

    zeroband eval runs/checkpoints/my-run                              the run's own data, recorded in its checkpoint
    zeroband eval runs/checkpoints/my-run/step_00001000 @other.toml    the data of another configuration

CKPT is the folder or URL of one checkpoint, the root of a run's checkpoints (its latest one), or an exported directory.
Only [data] and run.seed of a configuration count; flags such as --data.hold_out override it. An exported directory has
its own tokenizer, so data.tokenizer is ignored.
Exit codes: 0 done, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroband.tools.arguments import bounded, run_command
from zeroband.tools.offline.opened import device_of, open_asked, parser_for_checkpoint

if TYPE_CHECKING:
    from zeroband.data.index import SampleIndex
    from zeroband.export.evaluation import Evaluation


def main(argv: Sequence[str]) -> int:
    """Evaluate and print. Returns the exit code."""
    parser = parser_for_checkpoint("eval", __doc__)
    positive = bounded(int, ge=1)
    parser.add_argument("--samples", type=positive, default=512, help="maximum held-out samples (default: 512)")
    parser.add_argument("--batch-size", type=positive, default=8, help="samples per forward pass (default: 8)")
    options, rest = parser.parse_known_args(argv)
    return run_command("eval", lambda: _evaluate(options, rest))


def _evaluate(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from zeroband.export.evaluation import losses_of, open_held_out  # imported lazily: loads torch

    device = device_of(options.device)
    opened = open_asked(options, "eval")
    held_out = open_held_out(opened, rest)
    results = losses_of(opened, held_out, device, samples=options.samples, batch_size=options.batch_size)
    print(f"checkpoint       {opened.what}")
    for source in held_out.dataset.sources:
        if source.name:
            print(f"source           {source.name}")
        _show(source.index, results[source.name])
    return 0


def _show(index: SampleIndex, result: Evaluation) -> None:
    print(f"held out         {index.n_held_out} samples of {index.seq_length} tokens, {result.samples} used")
    print(f"targets          {result.targets} tokens, {result.text_bytes} bytes of text")
    print(f"loss             {result.loss:.6f} nats per token")
    bits = f"{result.bits_per_byte:.6f}" if result.text_bytes else "none: the ids do not map to text"
    print(f"bits per byte    {bits}")

"""`zeroband eval CKPT`: loss and bits per byte on the text that the run held out.

    zeroband eval runs/checkpoints/my-run                              the run's own data, as its checkpoint records it
    zeroband eval runs/checkpoints/my-run/step_00001000 @other.toml    the data of another configuration

CKPT is the folder or URL of one checkpoint, the root of a run's checkpoints (its latest one), or an exported directory.
Of a configuration, only [data] and run.seed count; flags such as --data.hold_out change it. A directory has its
own tokenizer, which gives the ids that its model was trained with, so data.tokenizer does not count there.
Exit codes: 0 done, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from zeroband.config import load_config
from zeroband.config.schema import DataConfig
from zeroband.data.index import SampleIndex
from zeroband.data.loader import Loader
from zeroband.data.tokenizer import open_tokenizer
from zeroband.data.tokens import TokenStore, prepare
from zeroband.errors import ConfigError, ZerobandError
from zeroband.offline.arguments import EXIT_CONFIG, add_checkpoint, add_device, device_of, positive
from zeroband.offline.evaluation import Evaluation, evaluate
from zeroband.offline.opened import Opened, open_trained

_ALONE = ("--outer=none", "--store.url=none")
"""Nobody is joined here, whatever the configuration says."""


def main(argv: Sequence[str]) -> int:
    """Evaluate and print. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="zeroband eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_checkpoint(parser)
    add_device(parser)
    parser.add_argument("--samples", type=positive, default=512, help="most held-out samples to use (default: 512)")
    parser.add_argument("--batch-size", type=positive, default=8, help="samples in one forward pass (default: 8)")
    options, rest = parser.parse_known_args(argv)
    try:
        _evaluate(options, rest)
    except ZerobandError as error:
        print(f"zeroband eval: {error}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


def _evaluate(options: argparse.Namespace, rest: Sequence[str]) -> None:
    device = device_of(options.device)
    opened = open_trained(options.checkpoint)
    tokens, index, config = _held_out(opened, rest)
    result = _result(opened, tokens, index, config, device, samples=options.samples, batch_size=options.batch_size)
    print(f"checkpoint       {opened.what}")
    print(f"held out         {index.n_held_out} samples of {index.seq_length} tokens, {result.samples} used")
    print(f"targets          {result.targets} tokens, {result.text_bytes} bytes of text")
    print(f"loss             {result.loss:.6f} nats per token")
    print(f"bits per byte    {result.bits_per_byte:.6f}")


def evaluate_checkpoint(where: str, device: torch.device, *, samples: int, batch_size: int = 8) -> Evaluation:
    """The loss of a checkpoint, of its outer parameters where nodes trained together, on what its run held out.

    Raises: ConfigError, CheckpointDamaged, RecoveryFailed as `open_trained` does.
    """
    opened = open_trained(where)
    tokens, index, config = _held_out(opened, ())
    return _result(opened, tokens, index, config, device, samples=samples, batch_size=batch_size)


def _result(
    opened: Opened,
    tokens: TokenStore,
    index: SampleIndex,
    config: DataConfig,
    device: torch.device,
    *,
    samples: int,
    batch_size: int,
) -> Evaluation:
    loader = Loader(
        tokens,
        index,
        batch_size=batch_size,
        micro_bs=batch_size,
        local_rank=0,
        local_world_size=1,
        document_mask=config.document_mask,
    )
    model = opened.model.build(device)
    return evaluate(model, loader.held_out_batches(samples, batch_size), opened.model.tokenizer, device)


def _held_out(opened: Opened, rest: Sequence[str]) -> tuple[TokenStore, SampleIndex, DataConfig]:
    """The corpus and which samples of it were held out. Raises ConfigError where they are not what was asked for."""
    recorded = opened.corpus
    if rest and not any(argument.startswith("@") for argument in rest):
        raise ConfigError(f"{' '.join(rest)} changes a configuration, and none is named; add @config.toml")
    if rest:
        config = load_config([*rest, *_ALONE])
        data, seed = config.data, config.run.seed
    elif recorded is not None:
        data, seed = recorded.data, recorded.seed
    else:
        raise ConfigError(f"{opened.what} does not record its data; add the run's @config.toml")
    if recorded is None:
        data = data.model_copy(update={"tokenizer": opened.tokenizer})
    elif open_tokenizer(data.tokenizer).fingerprint != opened.model.tokenizer.fingerprint:
        raise ConfigError(f"data.tokenizer={data.tokenizer!r} is not the tokenizer that {opened.what} was trained with")
    tokens = prepare(data, seed)
    if not rest and recorded is not None and tokens.fingerprint != recorded.fingerprint:
        raise ConfigError(
            f"data.source holds another text now than when {opened.what} was trained, so what it held out then may "
            "have been trained; bring the text back, or choose the data with @config.toml"
        )
    index = SampleIndex(len(tokens), data.seq_length, seed, data.hold_out)
    if not index.n_held_out:
        raise ConfigError(f"data.hold_out={data.hold_out:g} keeps no sample back; evaluate on other data")
    return tokens, index, data

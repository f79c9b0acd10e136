"""Arguments that the offline commands share. Loads no torch, so that wrong ones are answered at once."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zeroband.config.token_file import read_token

if TYPE_CHECKING:
    from zeroband.export.opened import Opened

EXIT_CONFIG = 2


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The checkpoint to open."""
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint, root of a run's checkpoints, or exported model")


def open_asked(options: argparse.Namespace, command: str) -> Opened:
    """Open the checkpoint that was asked for; say what of its authenticity is not checked.

    A token that the environment holds, or the file that it names, must vouch for it.
    Raises: ConfigError, CheckpointDamaged, RecoveryFailed as `open_trained` does.
    """
    from zeroband.checkpoint.authenticity import Trust
    from zeroband.export.opened import open_trained  # torch

    token, file = os.environ.get("ZERO_BAND_RUN__TOKEN"), os.environ.get("ZERO_BAND_RUN__TOKEN_FILE")
    if token is None and file is not None:
        token = read_token(Path(file)).get_secret_value()
    opened = open_trained(options.checkpoint, Trust(token))
    if opened.remark is not None:
        print(f"zeroband {command}: authenticity of {opened.what}: {opened.remark}", file=sys.stderr)
    return opened


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where to compute."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")


def positive(text: str) -> int:
    """An integer above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value

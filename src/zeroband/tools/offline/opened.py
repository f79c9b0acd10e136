"""What the offline commands share: the checkpoint to open, and where to compute. Loads torch when it is asked to."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from zeroband.errors import ConfigError
from zeroband.tools.arguments import parser_of, token_of

if TYPE_CHECKING:
    import torch

    from zeroband.export.opened import OpenedModel


def parser_for_checkpoint(command: str, text: str | None, *, computes: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a command that opens a checkpoint, and computes with it where it `computes`."""
    parser = parser_of(command, text)
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint, root of a run's checkpoints, or exported model")
    if computes:
        parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    return parser


def open_asked(options: argparse.Namespace, command: str) -> OpenedModel:
    """Open the checkpoint that was asked for; say what of its authenticity is not checked.

    A token that the environment holds, or the file that it names, must vouch for it.
    Raises: ConfigError, CheckpointDamaged, RecoveryFailed as `open_trained` does.
    """
    from zeroband.checkpoint.authenticity import Trust
    from zeroband.export.opened import open_trained

    opened = open_trained(options.checkpoint, Trust(token_of(options)))
    if opened.remark is not None:
        print(f"zeroband {command}: authenticity of {opened.what}: {opened.remark}", file=sys.stderr)
    return opened


def device_of(name: str | None) -> torch.device:
    """The device that was asked for. Raises ConfigError where it is not here."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise ConfigError(f"--device={name}: {str(error).splitlines()[0]}") from error
    return device

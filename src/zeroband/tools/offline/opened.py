"""Shared by the offline commands: opening a checkpoint and choosing a device. Loads torch only when called."""

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
    """Return the parser of a command that opens a checkpoint; with `computes`, it also has --device."""
    parser = parser_of(command, text)
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint, root of a run's checkpoints, or exported model")
    if computes:
        parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    return parser


def open_asked(options: argparse.Namespace, command: str) -> OpenedModel:
    """Open the checkpoint, and print what of its authenticity was not checked.

    A token in the environment, or in the file that it names, must authenticate the checkpoint.
    Raises ConfigError, CheckpointDamaged, RecoveryFailed as `open_trained` does.
    """
    from zeroband.checkpoint.manifest import Trust
    from zeroband.export.opened import open_trained

    opened = open_trained(options.checkpoint, Trust(token_of(options)))
    if opened.remark is not None:
        print(f"zeroband {command}: authenticity of {opened.what}: {opened.remark}", file=sys.stderr)
    return opened


def device_of(name: str | None) -> torch.device:
    """Return the device, by default a GPU if there is one. Raises ConfigError if it is unavailable."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises AssertionError
        raise ConfigError(f"--device={name}: {str(error).splitlines()[0]}") from error
    return device

"""Arguments that the offline commands share."""

from __future__ import annotations

import argparse

import torch

from zeroband.errors import ConfigError

EXIT_CONFIG = 2


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The checkpoint to open."""
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint, root of a run's checkpoints, or exported model")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where to compute."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")


def device_of(name: str | None) -> torch.device:
    """The device that was asked for. Raises ConfigError where it is not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise ConfigError(f"--device={name}: {str(error).splitlines()[0]}") from error
    return device


def positive(text: str) -> int:
    """An integer above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value

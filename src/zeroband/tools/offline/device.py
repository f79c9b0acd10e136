"""Where the offline commands compute."""

from __future__ import annotations

import torch

from zeroband.errors import ConfigError


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

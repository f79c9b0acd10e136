"""Which GPUs a simulated node sees. Asks the driver's tool, not torch: the launcher stays light and holds no device."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

_DRIVER_DEADLINE_S = 20.0


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The machine's GPUs as names for CUDA_VISIBLE_DEVICES; those of the environment where it names some."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA stops reading there
        return tuple(names[:end])
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_DRIVER_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.stdout.splitlines() if line.strip().isdigit())


def share_of(gpus: Sequence[str], *, first_rank: int, ranks: int) -> tuple[str, ...]:
    """The GPUs of a node whose ranks have the numbers first_rank, first_rank + 1, ... among those of all nodes.

    Round robin: nodes, then ranks, share GPUs where there are fewer than ranks. Empty without GPUs.
    """
    numbers = range(first_rank, first_rank + ranks)
    return tuple(dict.fromkeys(gpus[number % len(gpus)] for number in numbers)) if gpus else ()

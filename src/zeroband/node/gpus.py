"""The GPUs of a node's ranks: identified on the whole machine, and divided among simulated nodes.

A device index is local to a process: if a launcher shows each rank one GPU, each has index 0. So cards have UUIDs, and
each rank knows all cards: common decisions must not depend on one of them. Launchers ask nvidia-smi instead of torch,
to stay light and hold no device.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroband.errors import ConfigError

if TYPE_CHECKING:
    import torch

_DRIVER_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Card:
    """The GPU of a rank, or a MIG slice of one."""

    name: str
    uuid: str
    """Unique per slice."""
    bus: str
    """PCI address, by which NCCL identifies GPUs; slices of one GPU share it."""
    total_bytes: int


def card_of(device: torch.device) -> Card | None:
    """Return the card of a device; None for CPUs and Apple's GPUs."""
    if device.type != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(device)
    uuid = str(getattr(found, "uuid", device.index))
    place = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    bus = uuid if None in place else ":".join(map(str, place))
    return Card(found.name, uuid, bus, found.total_memory)


def cards_of(found: Sequence[Card | None]) -> tuple[Card, ...]:
    """Return the cards of a node's ranks; none on CPUs. Raises ConfigError if only some ranks have a GPU."""
    with_gpu = [rank for rank, card in enumerate(found) if card is not None]
    if with_gpu and len(with_gpu) < len(found):
        without = next(rank for rank, card in enumerate(found) if card is None)
        raise ConfigError(
            f"rank {with_gpu[0]} of this node computes on a GPU, and rank {without} finds none; show each rank the "
            'same GPUs (CUDA_VISIBLE_DEVICES), or a separate one, or set train.device = "cpu"'
        )
    return tuple(card for card in found if card is not None)


def have_own_gpus(cards: Sequence[Card]) -> bool:
    """Whether each rank has a GPU of its own, as NCCL requires."""
    return bool(cards) and len({card.bus for card in cards}) == len(cards)


def smallest_share(cards: Sequence[Card]) -> int | None:
    """Return the smallest memory share of a rank, with equal shares of a card; None on CPUs."""
    ranks = Counter(card.uuid for card in cards)
    return min((card.total_bytes // ranks[card.uuid] for card in cards), default=None)


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the visible GPUs as names for CUDA_VISIBLE_DEVICES: those that it names, else all."""
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
    """Return the GPUs of a node whose ranks are first_rank, first_rank + 1, ... of all nodes' ranks.

    Round robin: with fewer GPUs than ranks, nodes, then ranks, share them. Empty without GPUs.
    """
    numbers = range(first_rank, first_rank + ranks)
    return tuple(dict.fromkeys(gpus[number % len(gpus)] for number in numbers)) if gpus else ()

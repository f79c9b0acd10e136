"""The GPUs of a node's ranks: told apart on the whole machine, and shared out among simulated nodes.

An index is each process's own: where a launcher shows each rank one GPU, all of them call theirs the first. What ranks
do together must not depend on the card of one of them, so each rank knows the cards of all. Launchers ask the driver's
tool, not torch: they stay light and hold no device.
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
    """A GPU that a rank computes on, or the slice of one."""

    name: str
    uuid: str
    """A slice has its own."""
    bus: str
    """Where it sits in the machine: slices of one GPU share it. By this NCCL tells GPUs apart."""
    total_bytes: int


def card_of(device: torch.device) -> Card | None:
    """Return the card behind a device; None: a CPU, or a GPU of Apple's."""
    if device.type != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(device)
    uuid = str(getattr(found, "uuid", device.index))
    place = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    bus = uuid if None in place else ":".join(map(str, place))
    return Card(found.name, uuid, bus, found.total_memory)


def cards_of(found: Sequence[Card | None]) -> tuple[Card, ...]:
    """Return the cards of a node's ranks; none where all compute on CPUs.

    Raises ConfigError where some ranks found a GPU and others did not.
    """
    with_gpu = [rank for rank, card in enumerate(found) if card is not None]
    if with_gpu and len(with_gpu) < len(found):
        without = next(rank for rank, card in enumerate(found) if card is None)
        raise ConfigError(
            f"rank {with_gpu[0]} of this node computes on a GPU, and rank {without} finds none; show each rank the "
            'same GPUs (CUDA_VISIBLE_DEVICES), or a separate one, or set train.device = "cpu"'
        )
    return tuple(card for card in found if card is not None)


def are_apart(cards: Sequence[Card]) -> bool:
    """Whether each rank has a GPU, and to itself, as NCCL requires."""
    return bool(cards) and len({card.bus for card in cards}) == len(cards)


def least_share(cards: Sequence[Card]) -> int | None:
    """Return the memory of the rank that has the least, where ranks share a card in equal parts; None: on CPUs."""
    ranks = Counter(card.uuid for card in cards)
    return min((card.total_bytes // ranks[card.uuid] for card in cards), default=None)


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

"""The GPUs of a node's ranks, told apart on the whole machine: an index is each process's own.

Where a launcher shows each rank one GPU, all of them call theirs the first. What ranks do together must not depend on
the card of one of them, so each rank knows the cards of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroband.errors import ConfigError


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
            'same GPUs (CUDA_VISIBLE_DEVICES), or one of its own, or set train.device = "cpu"'
        )
    return tuple(card for card in found if card is not None)


def are_apart(cards: Sequence[Card]) -> bool:
    """Whether each rank has a GPU, and to itself, as NCCL requires."""
    return bool(cards) and len({card.bus for card in cards}) == len(cards)


def least_share(cards: Sequence[Card]) -> int | None:
    """Return the memory of the rank that has the least, where ranks share a card in equal parts; None: on CPUs."""
    ranks = Counter(card.uuid for card in cards)
    return min((card.total_bytes // ranks[card.uuid] for card in cards), default=None)

"""Fragments: ranges of the flat state that are synchronised together. Pure; equal on all nodes.

Source: Streaming DiLoCo, arXiv:2501.18512: a fragment is a set of transformer blocks, better strided than neighbours.
The paper does not place embedding, last norm and head. As in torchft and MaxText, the embedding belongs to the first
fragment, everything else outside the layers to the last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from torch import Tensor

from zeroband.errors import ConfigError
from zeroband.state.flat import FlatLayout
from zeroband.state.slot import Slot

Pattern = Literal["strided", "sequential"]
"""strided: layers i, i + P, i + 2 P ... of P fragments. sequential: neighbours."""

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_EMBEDDING = re.compile("embed|wte|wpe")


@dataclass(frozen=True)
class Fragment:
    """Some parameters of the flat state."""

    names: tuple[str, ...]
    """Parameter names."""
    ranges: tuple[tuple[int, int], ...]
    """(start, stop) in elements, ascending, neighbours joined."""

    @property
    def numel(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Return views of a flat buffer, one per range."""
        return [buffer[start:stop] for start, stop in self.ranges]


def whole(layout: FlatLayout) -> tuple[Fragment, ...]:
    """Return the whole flat state as one fragment."""
    return (Fragment(tuple(slot.name for slot in layout.slots), ((0, layout.numel),)),)


def arranged(layout: FlatLayout, fragments: Sequence[Fragment]) -> FlatLayout:
    """Return the layout with the fragments in sequence, so that each is one range."""
    slots = {slot.name: slot for slot in layout.slots}
    moved: list[Slot] = []
    start = 0
    for slot in (slots[name] for fragment in fragments for name in fragment.names):
        moved.append(Slot(slot.name, slot.shape, start))
        start += slot.numel
    return FlatLayout(tuple(moved))


def bounds_of(fragments: Sequence[Fragment]) -> list[slice]:
    """Return the range of each fragment in the layout of `arranged`."""
    starts = list(accumulate((fragment.numel for fragment in fragments), initial=0))
    return [slice(start, stop) for start, stop in pairwise(starts)]


def layer_of(name: str) -> int | None:
    """Return a parameter's layer, the first number in its dotted name; None outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def fragments_of(layout: FlatLayout, count: int, pattern: Pattern = "strided") -> tuple[Fragment, ...]:
    """Partition the flat state into `count` fragments. Raises ConfigError with fewer layers than fragments."""
    layers = sorted({layer for slot in layout.slots if (layer := layer_of(slot.name)) is not None})
    if count < 1 or (count > 1 and count > len(layers)):
        raise ConfigError(
            f"outer.fragments={count} of a model with {len(layers)} layers; set 1 to {max(len(layers), 1)}"
        )
    place = {layer: _fragment_of(i, len(layers), count, pattern) for i, layer in enumerate(layers)}
    chosen: list[list[Slot]] = [[] for _ in range(count)]
    for slot in layout.slots:
        layer = layer_of(slot.name)
        outside = 0 if _EMBEDDING.search(slot.name) else count - 1
        chosen[outside if layer is None else place[layer]].append(slot)
    return tuple(Fragment(tuple(slot.name for slot in slots), _joined(slots)) for slots in chosen)


def _fragment_of(index: int, layers: int, count: int, pattern: Pattern) -> int:
    return index % count if pattern == "strided" else index * count // layers


def _joined(slots: Sequence[Slot]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if ranges and ranges[-1][1] == slot.start:
            ranges[-1] = (ranges[-1][0], slot.start + slot.numel)
        elif slot.numel:
            ranges.append((slot.start, slot.start + slot.numel))
    return tuple(ranges)

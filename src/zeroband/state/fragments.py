"""Fragments: which ranges of the flat state are synchronised together. Pure; the same on all nodes.

Source: Streaming DiLoCo, arXiv:2501.18512: a fragment is a set of transformer blocks, better strided than neighbours.
The paper does not say where embedding, last norm and head go. Here they go as in torchft and MaxText: the embedding
with the first fragment, all others outside the layers with the last.
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
    """A part of the flat state."""

    names: tuple[str, ...]
    """Names of its parameters."""
    ranges: tuple[tuple[int, int], ...]
    """(start, stop) in elements, ascending, neighbours joined."""

    @property
    def numel(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Views of a flat buffer, one for each range."""
        return [buffer[start:stop] for start, stop in self.ranges]


def whole(layout: FlatLayout) -> tuple[Fragment, ...]:
    """One fragment, which is all of the flat state."""
    return (Fragment(tuple(slot.name for slot in layout.slots), ((0, layout.numel),)),)


def arranged(layout: FlatLayout, fragments: Sequence[Fragment]) -> FlatLayout:
    """Return the layout with the fragments one after the other, so that each of them is one range."""
    slots = {slot.name: slot for slot in layout.slots}
    moved: list[Slot] = []
    start = 0
    for slot in (slots[name] for fragment in fragments for name in fragment.names):
        moved.append(Slot(slot.name, slot.shape, start))
        start += slot.numel
    return FlatLayout(tuple(moved))


def bounds_of(fragments: Sequence[Fragment]) -> list[slice]:
    """Where each fragment lies where they are arranged one after the other."""
    starts = list(accumulate((fragment.numel for fragment in fragments), initial=0))
    return [slice(start, stop) for start, stop in pairwise(starts)]


def layer_of(name: str) -> int | None:
    """The layer that a parameter belongs to: the first number in its dotted name. None: it is outside the layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def fragments_of(layout: FlatLayout, count: int, pattern: Pattern = "strided") -> tuple[Fragment, ...]:
    """Divide the flat state into `count` fragments that cover it without overlap.

    Raises: ConfigError when there are fewer layers than fragments.
    """
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

"""Fragments and their schedule."""

from __future__ import annotations

import pytest
import torch
from tests.oracles.problem import layout_of

from zeroband.errors import ConfigError
from zeroband.outer.merge import mix
from zeroband.state.fragments import fragments_of, layer_of

LAYOUT = layout_of(
    {f"layers.{i}.{part}": (2, 3) for i in range(12) for part in ("attention.q_proj.weight", "norm.weight")}
    | {"embed_tokens.weight": (5, 3), "norm.weight": (3,)}
)


def layers_of(pattern: str, count: int) -> list[list[int]]:
    fragments = fragments_of(LAYOUT, count, "strided" if pattern == "strided" else "sequential")
    return [sorted({layer for name in f.names if (layer := layer_of(name)) is not None}) for f in fragments]


def test_fragments_are_strided_or_neighbours() -> None:
    assert layers_of("strided", 4) == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert layers_of("sequential", 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [len(layers) for layers in layers_of("sequential", 5)] == [3, 2, 3, 2, 2]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("pattern", ["strided", "sequential"])
def test_fragments_cover_the_state_once(count: int, pattern: str) -> None:
    fragments = fragments_of(LAYOUT, count, "strided" if pattern == "strided" else "sequential")
    covered = sorted(place for f in fragments for start, stop in f.ranges for place in range(start, stop))
    assert covered == list(range(LAYOUT.numel))
    assert sum(f.numel for f in fragments) == LAYOUT.numel
    numbers = torch.arange(LAYOUT.numel)
    assert [len(torch.cat(f.parts(numbers))) for f in fragments] == [f.numel for f in fragments]
    assert all(a[1] < b[0] for f in fragments for a, b in zip(f.ranges, f.ranges[1:], strict=False))


def test_embeddings_go_with_the_first_fragment_and_the_norm_with_the_last() -> None:
    fragments = fragments_of(LAYOUT, 3)
    assert "embed_tokens.weight" in fragments[0].names
    assert "norm.weight" in fragments[2].names


@pytest.mark.parametrize(
    ("count", "message"), [(13, "fragments=13 of a model with 12 layers; set 1 to 12"), (0, "fragments=0")]
)
def test_impossible_fragments_are_refused(count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fragments_of(LAYOUT, count)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("layers.3.norm.weight", 3), ("transformer.h.11.attn.bias", 11), ("head.weight", None), ("0.w", 0)],
)
def test_layer_is_the_first_number_of_a_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_mixing_takes_either_side_bit_for_bit_at_its_ends() -> None:
    inner, outer = torch.tensor([1e-8, 3.0, -0.0]), torch.tensor([0.1, -1.0, 5.0])
    for alpha, expected in ((0.0, outer), (1.0, inner), (0.5, 0.5 * inner + 0.5 * outer)):
        mixed = inner.clone()
        mix(mixed, outer, alpha=alpha)
        assert torch.equal(mixed, expected)

"""Fragments and their schedule."""

from __future__ import annotations

import pytest
import torch
from tests.oracles.problem import layout_of

from zeroband.errors import ConfigError
from zeroband.outer.fragments import fragments_of, layer_of
from zeroband.outer.overlap import mix
from zeroband.outer.schedule import StreamingSchedule

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


def test_embeddings_go_where_it_is_said() -> None:
    fragments = fragments_of(LAYOUT, 3)
    assert "embed_tokens.weight" in fragments[0].names
    assert "norm.weight" in fragments[2].names
    moved = fragments_of(LAYOUT, 3, outside={"embed*": 1, "norm.*": 1})
    assert {"embed_tokens.weight", "norm.weight"} <= set(moved[1].names)


@pytest.mark.parametrize(
    ("count", "outside", "message"),
    [
        (13, {"*": 0}, "fragments=13 of a model with 12 layers; set 1 to 12"),
        (0, {"*": 0}, "fragments=0"),
        (3, {"norm*": 0}, "embed_tokens.weight is outside the layers and in no fragment"),
        (3, {"*": 3}, "placed in fragment 3 of 3; set -3 to 2"),
    ],
)
def test_impossible_fragments_are_refused(count: int, outside: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fragments_of(LAYOUT, count, outside=outside)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("layers.3.norm.weight", 3), ("transformer.h.11.attn.bias", 11), ("head.weight", None), ("0.w", 0)],
)
def test_layer_is_the_first_number_of_a_name(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_schedule_is_that_of_the_papers_example() -> None:
    schedule = StreamingSchedule(100, 2, overlap=5)
    sent = [(step, p) for step in range(1, 401) if (p := schedule.sent_after(step)) is not None]
    assert sent == [(100, 0), (150, 1), (200, 0), (250, 1), (300, 0), (350, 1), (400, 0)]
    applied = [(step, p) for step in range(1, 401) if (p := schedule.applied_after(step)) is not None]
    assert applied == [(step + 5, p) for step, p in sent if step + 5 <= 400]


def test_unsynchronised_fragments_are_those_with_steps_that_were_not_sent() -> None:
    schedule = StreamingSchedule(4, 2)
    assert [[p for p in (0, 1) if schedule.is_unsynchronised(p, step)] for step in (2, 4, 5, 6, 8)] == [
        [0, 1],
        [1],
        [0, 1],
        [0],
        [1],
    ]


@pytest.mark.parametrize(
    ("overlap", "together", "peak"), [(0, 0, 40), (1, 1, 40), (25, 1, 40), (26, 2, 70), (100, 4, 100)]
)
def test_peak_is_what_travels_at_the_same_time(overlap: int, together: int, peak: int) -> None:
    schedule = StreamingSchedule(100, 4, overlap)
    assert schedule.most_in_flight == together
    assert schedule.peak_bytes([10, 20, 30, 40]) == peak
    rate = schedule.peak_bytes_per_s([10, 20, 30, 40], step_s=0.5)
    assert rate == (peak / (overlap * 0.5) if overlap else float("inf"))


def test_link_of_the_promised_peak_carries_all_fragments_in_time() -> None:
    """A link of that rate, first come, first served, step by step."""
    sizes, schedule = [10, 50, 30, 40], StreamingSchedule(40, 4, 23)
    rate, queue, late = schedule.peak_bytes_per_s(sizes, step_s=1.0), list[tuple[int, float]](), 0
    for step in range(1, 1000):
        budget = rate
        while queue and budget > 0:
            deadline, left = queue[0]
            late += step > deadline and left > 1e-6
            budget, rest = budget - left, left - budget
            queue = queue[1:] if rest <= 1e-9 else [(deadline, rest), *queue[1:]]
        if (sent := schedule.sent_after(step)) is not None:
            queue.append((step + schedule.overlap, float(sizes[sent])))
    assert late == 0


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ((100, 8, 0), "inner_steps=100 is not a multiple of outer.fragments=8; nearest: 96 or 104"),
        ((4, 8, 0), "nearest: 8"),
        ((100, 2, 101), "overlap=101 is outside 0 to outer.inner_steps=100"),
        ((100, 2, -1), "overlap=-1"),
        ((0, 1, 0), "must be 1 or more"),
    ],
)
def test_impossible_schedule_is_refused(knobs: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingSchedule(*knobs)


def test_peak_of_other_fragments_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes of 3 fragments, the schedule has 2"):
        StreamingSchedule(4, 2).peak_bytes([1, 2, 3])


def test_mixing_takes_either_side_bit_for_bit_at_its_ends() -> None:
    inner, outer = torch.tensor([1e-8, 3.0, -0.0]), torch.tensor([0.1, -1.0, 5.0])
    for alpha, expected in ((0.0, outer), (1.0, inner), (0.5, 0.5 * inner + 0.5 * outer)):
        mixed = inner.clone()
        mix(mixed, outer, alpha=alpha)
        assert torch.equal(mixed, expected)

from __future__ import annotations

import bisect
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.data.mixture import Mixture, SourceShare

THREE = (SourceShare("code", 0.2, 40), SourceShare("math", 0.05, 10), SourceShare("web", 0.75, 1000))
weights = st.lists(st.integers(1, 1000).map(lambda n: n / 100), min_size=1, max_size=6)


def mixture(*shares: float) -> Mixture:
    return Mixture([SourceShare(str(number), share, 100) for number, share in enumerate(shares)])


@given(shares=weights, start=st.integers(0, 10**7), length=st.integers(1, 300))
def test_each_source_gives_its_samples_in_order_without_a_gap(shares: list[float], start: int, length: int) -> None:
    mixed = mixture(*shares)
    located = mixed.locate(range(start, start + length))
    before, after = mixed.counts(start), mixed.counts(start + length)
    for source in range(len(shares)):
        assert located.indices[located.sources == source].tolist() == list(range(before[source], after[source]))


@given(shares=weights, n=st.integers(1, 10**6))
def test_counts_are_what_the_weights_say_at_any_time(shares: list[float], n: int) -> None:
    counts = mixture(*shares).counts(n)
    assert sum(counts) == n
    for share, count in zip(shares, counts, strict=True):
        assert abs(count - n * share / sum(shares)) <= len(shares)


@pytest.mark.parametrize(
    "shares",
    [
        *[(0.123456, 0.876544), (1 / 3, 1 / 7, 1 / 11), (1e-5, 1.5e-5, 1.0), (1e-7, 1.0), (1.0, 1e-3, 1e6)],
        (0.1234567890123, 1.0, 2e8),
    ],
)
def test_shares_however_small_are_met_within_a_hundredth(shares: tuple[float, ...]) -> None:
    n = round(1000 * sum(shares) / min(shares)) + 1  # a thousand samples of the lightest
    mixed, half = mixture(*shares), n // 2
    for share, count, by_half in zip(shares, mixed.counts(n), mixed.counts(half), strict=True):
        assert count == pytest.approx(n * share / sum(shares), rel=0.01)
        assert by_half == pytest.approx(half * share / sum(shares), rel=0.01)
    located = mixed.locate(range(n - 100, n))
    assert np.bincount(located.sources, minlength=len(shares)).tolist() == [
        after - before for before, after in zip(mixed.counts(n - 100), mixed.counts(n), strict=True)
    ]


def test_light_source_comes_in_even_steps() -> None:
    located = mixture(1e-4, 0.3, 0.7).locate(range(100_000))
    assert np.diff(np.flatnonzero(located.sources == 0)).tolist() == pytest.approx([10_001] * 9, abs=1)


@given(shares=weights, limit=st.integers(1, 100))
def test_stretch_ends_with_the_last_sample_that_a_limit_allows(shares: list[float], limit: int) -> None:
    limited = [SourceShare("limited", shares[0], limit, 1), *(SourceShare(str(w), w, 100) for w in (1.0, *shares[1:]))]
    mixed = Mixture(limited)
    end = bisect.bisect_left(range(10**6), limit, key=lambda n: mixed.counts(n)[0])
    assert mixed.locate([end - 1]).sources.tolist() == [0] and mixed.counts(10 * end + 1000)[0] == limit


def test_parts_that_nodes_are_dealt_are_those_of_the_whole() -> None:
    mixed = Mixture(THREE)
    whole = mixed.locate(range(600))
    parts = [mixed.locate(range(start, min(start + 77, 600))) for start in range(0, 600, 77)]
    assert np.concatenate([part.sources for part in parts]).tolist() == whole.sources.tolist()
    assert np.concatenate([part.indices for part in parts]).tolist() == whole.indices.tolist()


def test_every_part_of_a_hundred_samples_has_the_shares() -> None:
    sources = Mixture(THREE).locate(range(5000)).sources.tolist()
    for part in itertools.batched(sources, 100) if hasattr(itertools, "batched") else [sources[:100], sources[700:800]]:
        counts = Counter(part)
        assert (counts[0], counts[1], counts[2]) == pytest.approx((20, 5, 75), abs=1)


def test_source_at_its_limit_gives_its_share_to_the_others() -> None:
    limited = [SourceShare("a", 0.5, 100, max_passes=1.5), SourceShare("b", 0.3, 100), SourceShare("c", 0.2, 100)]
    mixed = Mixture(limited)
    located = mixed.locate(range(2000))
    assert int((located.sources == 0).sum()) == 150
    last = int(np.flatnonzero(located.sources == 0)[-1])
    assert last == pytest.approx(299, abs=2)
    rest = Counter(located.sources[last + 1 :].tolist())
    assert rest[1] / rest[2] == pytest.approx(1.5, rel=0.01) and rest[0] == 0
    assert mixed.counts(2000) == (150, int((located.sources == 1).sum()), int((located.sources == 2).sum()))


def test_all_sources_but_one_may_come_to_their_limits() -> None:
    limited = [SourceShare("a", 1, 10, 1), SourceShare("b", 1, 20, 1), SourceShare("c", 1, 5)]
    counts = Mixture(limited).counts(1000)
    assert counts == (10, 20, 970)


def test_phases_change_the_weights_where_they_begin() -> None:
    mixed = Mixture(THREE, [(1000, {"code": 0, "math": 1, "web": 1}), (2000, {"code": 1, "math": 0, "web": 0})])
    assert mixed.counts(1000) == (200, 50, 750)
    assert mixed.counts(2000) == (200, 550, 1250)
    assert mixed.counts(2100) == (300, 550, 1250)
    located = mixed.locate([999, 1000, 1001, 1999, 2000, 2001])
    assert set(located.sources[1:4].tolist()) <= {1, 2} and located.sources[4:].tolist() == [0, 0]
    assert located.indices[4:].tolist() == [200, 201]


def test_limit_that_is_reached_in_a_phase_holds_in_the_next() -> None:
    limited = [SourceShare("a", 1, 100, 1), SourceShare("b", 1, 100)]
    mixed = Mixture(limited, [(1000, {"a": 5, "b": 1})])
    assert mixed.counts(5000) == (100, 4900)

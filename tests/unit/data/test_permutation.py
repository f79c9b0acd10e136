from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroband.data.index import Permutation


@settings(max_examples=30)
@given(size=st.integers(1, 2000), key=st.text(max_size=8))
def test_permutation_hits_every_value_once_for_any_size_and_key(size: int, key: str) -> None:
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1 << 40, (1 << 61) + 12345])
def test_permutation_stays_in_range_and_collides_nowhere_for_huge_sizes(size: int) -> None:
    values = np.concatenate([np.arange(500), np.arange(size - 500, size)])
    images = Permutation(size, "k")(values)
    assert images.min() >= 0
    assert images.max() < size
    assert len(np.unique(images)) == len(values)


def test_permutation_gives_one_value_the_image_it_has_among_many() -> None:
    shuffle = Permutation(1000, "k")
    assert [int(shuffle(i)[0]) for i in range(50)] == shuffle(np.arange(50)).tolist()


def test_permutation_is_another_for_another_key() -> None:
    values = np.arange(1000)
    fixed_points = (Permutation(1000, "a")(values) == Permutation(1000, "b")(values)).sum()
    assert fixed_points < 10


def test_permutation_scatters_neighbours_like_a_random_shuffle() -> None:
    size = 10_000
    images = Permutation(size, "k")(np.arange(size))
    mean_jump = np.abs(np.diff(images)).mean() / size
    assert mean_jump == pytest.approx(1 / 3, rel=0.03)
    assert abs(np.corrcoef(np.arange(size), images)[0, 1]) < 0.03


def test_permutation_never_changes_its_order_between_releases() -> None:
    """A run that is resumed with a later version must not see samples twice."""
    assert Permutation(100, "order/0/0")(np.arange(8)).tolist() == [86, 7, 56, 13, 99, 95, 78, 35]

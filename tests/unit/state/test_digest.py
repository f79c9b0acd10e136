"""Equal digests stand for equal bits, however many threads compute them; digests of older checkpoints still count."""

from __future__ import annotations

import pytest
import torch
import xxhash

from zeroband.state import digest as digests
from zeroband.state.digest import digest_of, has_digest
from zeroband.state.slot import bytes_of

PIECE_VALUES = digests.PIECE_BYTES // 4
SECTIONS = (torch.arange(2 * PIECE_VALUES + 5, dtype=torch.float32), torch.ones(7))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_digest_does_not_depend_on_the_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digest_of(*SECTIONS)
    monkeypatch.setattr(digests, "usable_processors", lambda: threads)
    assert digest_of(*SECTIONS) == expected


@pytest.mark.parametrize("place", [0, PIECE_VALUES - 1, PIECE_VALUES, 2 * PIECE_VALUES + 4])
def test_every_value_counts_in_its_place(place: int) -> None:
    other = SECTIONS[0].clone()
    other[place] += 1
    assert digest_of(other, SECTIONS[1]) != digest_of(*SECTIONS) != digest_of(SECTIONS[1], SECTIONS[0])
    swapped = torch.cat([SECTIONS[0][PIECE_VALUES:], SECTIONS[0][:PIECE_VALUES]])
    assert digest_of(swapped, SECTIONS[1]) != digest_of(*SECTIONS)


def test_digest_of_an_older_version_is_compared_in_its_own_form() -> None:
    seen = xxhash.xxh3_128()
    for section in SECTIONS:
        seen.update(bytes_of(section))
    assert has_digest(seen.hexdigest(), *SECTIONS) and has_digest(digest_of(*SECTIONS), *SECTIONS)
    assert not has_digest(seen.hexdigest(), SECTIONS[0]) and not has_digest(digest_of(SECTIONS[0]), *SECTIONS)
    assert not has_digest("", *SECTIONS)


def test_digest_of_no_values() -> None:
    assert digest_of() == digest_of(torch.empty(0)) != digest_of(torch.zeros(1)) != digest_of(-torch.zeros(1))

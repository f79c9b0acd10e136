"""Combinations that bear liars, compared with the plain ones of tests/oracles/robust.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import robust as oracle
from torch import Tensor

from zeroband.kernels import native
from zeroband.kernels.codec import CODECS, Codec
from zeroband.kernels.robust import PIECE, RobustRule, combine, decode_cosines, encode_cosines

INT8, FP32 = CODECS["int8"], CODECS["fp32"]
CLIP, TRIMMED, CENTERED = (
    RobustRule("clip"),
    RobustRule("trimmed", trim=0.25),
    RobustRule("centered_clip", iterations=2),
)
RULES = [CLIP, TRIMMED, CENTERED]
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
NAN, INF = float("nan"), float("inf")


def noise(n: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(n, generator=torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def combined(rule: RobustRule, sources: Sequence[Tensor], codec: Codec = FP32, shares: Sequence[float] = ()) -> Tensor:
    """The combination of contributions that may hold anything: float32's encoding refuses what is not finite."""
    parts = [x.view(torch.uint8) if codec is FP32 else codec.encode(x) for x in sources]
    return combine(rule, codec, parts, shares or [1 / len(sources)] * len(sources), len(sources[0]))[0]


@EACH_RULE
@pytest.mark.parametrize("codec", [FP32, INT8, CODECS["int4"]], ids=lambda codec: codec.name)
@pytest.mark.parametrize("shares", [(0.25,), (0.5, 0.5), (0.5, 0.2, 0.3), (0.1, 0.0, 0.3, 0.4, 0.2, 0.2)], ids=len)
def test_every_instruction_set_gives_the_bits_of_the_plain_one(
    rule: RobustRule, codec: Codec, shares: Sequence[float]
) -> None:
    n = PIECE + 259
    sources = [noise(n, seed, 10.0 ** (seed - 2)) for seed in range(len(shares))]
    parts = [codec.encode(source) for source in sources]
    pieces = [[bytes(codec.encode(piece).numpy()) for piece in source.split(PIECE)] for source in sources]
    plain = [
        oracle.Part(data, codec.decode(part, n).numpy(), np.float32(share))
        for data, part, share in zip(pieces, parts, shares, strict=True)
    ]
    expected = torch.from_numpy(oracle.combined(rule.name, plain, trim=rule.trim, iterations=rule.iterations))
    for variant in range(len(native.variants())):
        found, _ = combine(rule, codec, parts, shares, n, variant=variant)
        assert torch.equal(bits(found), bits(expected)), native.variants()[variant]


@EACH_RULE
@pytest.mark.parametrize("codec", [FP32, INT8, CODECS["int4"]], ids=lambda codec: codec.name)
def test_piece_is_combined_by_itself_as_with_the_others(rule: RobustRule, codec: Codec) -> None:
    """So whoever audits an owner needs no more than the piece. The pieces' order by their bytes is not the whole's."""
    sources = [noise(2 * PIECE + 300, seed, 10.0**seed) for seed in range(4)]
    sources[0][:PIECE], sources[3][:PIECE] = sources[3][:PIECE].clone(), sources[0][:PIECE].clone()
    shares, whole = [0.4, 0.1, 0.3, 0.2], combined(rule, sources, codec, [0.4, 0.1, 0.3, 0.2])
    alone = [
        combined(rule, [x.contiguous() for x in part], codec, shares)
        for part in zip(*(s.split(PIECE) for s in sources), strict=True)
    ]
    assert torch.equal(bits(torch.cat(alone)), bits(whole))


@EACH_RULE
def test_equal_contributions_come_out_as_they_are(rule: RobustRule) -> None:
    """What all agree on is the mean, however many they are and whatever they count."""
    x = noise(2 * PIECE, 1)
    for shares in ((1.0,), (0.5, 0.5), (0.2, 0.5, 0.3), (0.125,) * 8):
        torch.testing.assert_close(combined(rule, [x] * len(shares), FP32, shares), x, rtol=1e-6, atol=1e-7)


@EACH_RULE
@pytest.mark.parametrize("codec", [FP32, INT8], ids=lambda codec: codec.name)
def test_copies_of_a_contribution_count_once_and_agree_alike(rule: RobustRule, codec: Codec) -> None:
    """So those who copy one member do not double what its data count."""
    sources = [noise(PIECE + 9, seed) for seed in range(5)]
    copied = [*sources, sources[2], sources[2]]
    shares = [0.1, 0.1, 0.2, 0.1, 0.1]
    alone, found = combined(rule, sources, codec, shares), combined(rule, copied, codec, [*shares, 0.15, 0.15])
    torch.testing.assert_close(found * sum(shares), alone * (sum(shares) + 0.3), rtol=1e-5, atol=1e-6)
    parts = [x.view(torch.uint8) if codec is FP32 else codec.encode(x) for x in copied]
    _, measured = combine(rule, codec, parts, [1 / 7] * 7, PIECE + 9)
    cosines = measured.cosines()
    assert cosines[2] == cosines[5] == cosines[6]


@EACH_RULE
def test_zeros_are_no_copies_of_each_other(rule: RobustRule) -> None:
    """Most members may have seen nothing of some values, and one of them something."""
    found = combined(rule, [*[torch.zeros(9)] * 6, torch.ones(9)])
    assert float(found.abs().max()) <= 1 / 7 + 1e-6


@EACH_RULE
def test_order_of_the_members_does_not_show_in_the_bits(rule: RobustRule) -> None:
    sources = [noise(300, seed) for seed in range(3)]
    sources.append(-sources[0])  # as long as another one
    shares = [0.25, 0.25, 0.2, 0.3]
    results = [
        combined(rule, [sources[i] for i in order], INT8, [shares[i] for i in order])
        for order in itertools.permutations(range(4))
    ]
    assert all(torch.equal(bits(result), bits(results[0])) for result in results)


@EACH_RULE
@settings(deadline=None, max_examples=25)
@given(lie=st.lists(st.floats(width=32), min_size=8, max_size=8), n=st.integers(4, 9), seed=st.integers(0, 99))
def test_one_liar_moves_the_result_at_most_as_far_as_the_honest_are_apart(
    rule: RobustRule, lie: list[float], n: int, seed: int
) -> None:
    """Whatever it sends: no value of the result leaves what the honest allow by more than they differ."""
    honest = [noise(8, seed + 1) + 0.3 * noise(8, 100 * seed + member) for member in range(2, n + 1)]
    found = combined(rule, [*honest, torch.tensor(lie)])
    mean, longest = torch.stack(honest).mean(dim=0), max(float(x.norm()) for x in honest)
    apart = max(float((x - y).norm()) for x in honest for y in honest)
    bound = {"clip": 2 * longest, "trimmed": apart * 8**0.5, "centered_clip": 4 * apart}[rule.name]
    assert float((found - mean).norm()) <= bound + 1e-4


@EACH_RULE
@pytest.mark.parametrize("lie", [NAN, INF, 3e38], ids=str)
def test_what_is_not_finite_or_too_large_does_not_reach_the_result(rule: RobustRule, lie: float) -> None:
    honest = [noise(2 * PIECE, seed) for seed in range(4)]
    spoilt = honest[3].clone()
    spoilt[5] = lie
    found = combined(rule, [*honest[:3], spoilt])
    assert torch.isfinite(found).all() and float(found.norm()) < 2 * float(honest[0].norm())
    whole = combined(rule, honest)
    assert torch.equal(found[PIECE:], whole[PIECE:]), "the other piece of it is as good as any"


@EACH_RULE
def test_nothing_that_counts_gives_zeros(rule: RobustRule) -> None:
    x = torch.full((9,), NAN)
    assert torch.equal(combined(rule, [x, x, x]), torch.zeros(9))
    assert torch.equal(combined(rule, [x, x, x], FP32, (0.0, 0.0, 0.0)), torch.zeros(9))


def test_trimmed_leaves_out_a_part_of_those_that_are_there() -> None:
    sources = [torch.full((3,), float(value)) for value in (0, 1, 2, 3, 4, 5, 6, 100)]
    for trim, expected in ((0.0, (1 + 2 + 3 + 4 + 5 + 6) / 6), (0.25, 3.5), (0.4, 3.5)):
        assert combined(RobustRule("trimmed", trim=trim), sources)[0] == pytest.approx(expected)
    assert combined(RobustRule("trimmed", trim=0.25), sources[-2:])[0] == 53.0, "of two nothing is left out"


def test_clip_scales_down_to_the_median_norm() -> None:
    x = noise(100, 1)
    found = combined(CLIP, [x, 2 * x, 3 * x, 100 * x])
    torch.testing.assert_close(found, (x + 2 * x + 2 * x + 2 * x) / 4, rtol=1e-5, atol=1e-6)


@EACH_RULE
def test_shares_that_add_up_to_more_make_the_result_longer(rule: RobustRule) -> None:
    sources = [noise(50, seed) for seed in range(3)]
    once, twice = combined(rule, sources, FP32, (0.25, 0.25, 0.5)), combined(rule, sources, FP32, (0.5, 0.5, 1.0))
    torch.testing.assert_close(twice, 2 * once)


def test_cosines_say_who_agrees_with_the_result() -> None:
    x = noise(PIECE, 1)
    spoilt = x.clone()
    spoilt[0] = NAN
    parts = [part.view(torch.uint8) for part in (x, 5 * x, -x, spoilt, x)]
    _, measured = combine(CLIP, FP32, parts, (0.3, 0.3, 0.2, 0.2, 0.0), PIECE)
    cosines = measured.cosines()
    assert cosines[:4] == pytest.approx([1.0, 1.0, -1.0, -1.0], abs=1e-5)
    assert cosines[4] is None, "it did not count"


def test_cosines_travel_in_a_byte_each() -> None:
    cosines = [None, -1.0, 1.0, 0.0, 0.3]
    found = decode_cosines(encode_cosines(cosines))
    assert found[:4] == cosines[:4] and math.isclose(found[4] or 0.0, 0.3, abs_tol=1 / 254)
    every = decode_cosines(torch.arange(256).to(torch.uint8))
    assert all(cosine is None or -1.0 <= cosine <= 1.0 for cosine in every)


def test_parts_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="5 values take 20"):
        combine(CLIP, FP32, [torch.zeros(19, dtype=torch.uint8)], [1.0], 5)


@EACH_RULE
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e18, 1e30], ids=str)
def test_values_whose_squares_float32_does_not_hold_are_combined_as_others(rule: RobustRule, scale: float) -> None:
    """On every instruction set, with the bits of the plain one, and with the cosines of values of a usual size."""
    n, shares = 2 * PIECE, [0.25] * 4
    sources = [noise(n, 1) + 0.5 * noise(n, seed + 2) for seed in range(4)]
    parts = [(scale * source).view(torch.uint8) for source in sources]
    plain = [
        oracle.Part(
            [bytes(p.numpy()) for p in part.split(4 * PIECE)], part.view(torch.float32).numpy(), np.float32(0.25)
        )
        for part in parts
    ]
    expected = torch.from_numpy(oracle.combined(rule.name, plain, trim=rule.trim, iterations=rule.iterations))
    usual = combine(rule, FP32, [source.view(torch.uint8) for source in sources], shares, n)[1].cosines()
    for variant in range(len(native.variants())):
        found, measured = combine(rule, FP32, parts, shares, n, variant=variant)
        assert torch.equal(bits(found), bits(expected)), native.variants()[variant]
        assert measured.cosines() == pytest.approx(usual, abs=1e-4)

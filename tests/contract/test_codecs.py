"""What every codec promises, on every instruction set that the kernels are built for and this machine has."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zeroband.kernels import codec as codecs
from zeroband.kernels import native, reference
from zeroband.kernels.codec import CODECS, Codec

VARIANTS = native.variants() if native.problem() is None else []
EACH_CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
EACH_KERNEL = pytest.mark.parametrize(
    ("codec", "variant"),
    [pytest.param(c, i, id=f"{c.name}-{v}") for c in CODECS.values() for i, v in enumerate(VARIANTS)],
)
LARGEST = torch.finfo(torch.float32).max
PRIMES = (3, 97, 1009, 2053)


def sizes_of(codec: Codec) -> tuple[int, ...]:
    block = codec.block or 256
    return (0, 1, 2, block - 1, block, block + 1, 2 * block - 1, *PRIMES)


def noise(n: int, *, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + 7919 * n))


def with_outliers(n: int) -> Tensor:
    x = noise(n)
    x[::101] = 1e6
    x[50::101] = -1e6
    return x


def with_blocks_of_next_to_nothing(n: int) -> Tensor:
    """Blocks just below, just above and at the size from which they count, beside ordinary ones."""
    sizes = torch.tensor([reference.TINY, reference.TINY / 2, 1.0, reference.TINY * 1.5, 2.0**-140])
    return noise(n).clamp(-1, 1) * sizes[torch.arange(n) // 128 % len(sizes)]


def halfway(n: int, levels: int) -> Tensor:
    """Between two levels of a quantiser, as nearly as float32 can say it: rounding decides about every value."""
    generator = torch.Generator().manual_seed(n)
    top = (1 + torch.rand(-(-n // 128), generator=generator)).repeat_interleave(128)[:n]
    q = torch.randint(0, levels, (n,), generator=generator).double() + 0.5
    x = (q * top.double() / levels).float()
    x[::128] = top[::128]
    return x


def between_halves(n: int, bits: int) -> Tensor:
    """In [-2, -1] and [1, 2], where a half with so many bits behind the point ends, and half a unit further."""
    steps = torch.randint(0, 1 << (bits + 1), (n,), generator=torch.Generator().manual_seed(n))
    return (1 + steps / (1 << (bits + 1))) * (-1.0) ** torch.arange(n)


INPUTS: dict[str, Callable[[int], Tensor]] = {
    "zeros": torch.zeros,
    "negative zeros": lambda n: -torch.zeros(n),
    "a constant": lambda n: torch.full((n,), -0.3),
    "noise": noise,
    "denormals": lambda n: noise(n) * 2.0**-140,
    "noise and denormals": lambda n: noise(n) * (2.0**-140) ** (torch.arange(n) % 2),
    "outliers of 1e6": with_outliers,
    "all positive": lambda n: noise(n).abs() + 0.1,
    "near the largest float32": lambda n: LARGEST * (1 - noise(n).abs() / 64).clamp(-1, 1) * (-1.0) ** torch.arange(n),
    "the largest float32": lambda n: torch.full((n,), LARGEST),
    "blocks of next to nothing": with_blocks_of_next_to_nothing,
    "halfway between levels of int8": lambda n: halfway(n, 127),
    "halfway between levels of int4": lambda n: halfway(n, 7),
    "halfway between values of bf16": lambda n: between_halves(n, 7),
    "halfway between values of fp16": lambda n: between_halves(n, 10),
}
EACH_INPUT = pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS.keys())


def is_same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, so that 0 and -0 differ."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def excess(codec: Codec, x: Tensor, decoded: Tensor) -> float:
    """By how much the worst value is further off than the bound allows; not positive when all keep it."""
    return float(((decoded.double() - x.double()).abs() - codec.error_bound(x)).max()) if x.numel() else 0.0


@EACH_INPUT
@EACH_KERNEL
def test_values_come_back_within_the_error_bound(codec: Codec, variant: int, make: Callable[[int], Tensor]) -> None:
    for n in sizes_of(codec):
        x = make(n)
        decoded = codec.decode(codec.encode(x, variant=variant), n, variant=variant)
        assert decoded.shape == x.shape and bool(decoded.isfinite().all()), n
        assert excess(codec, x, decoded) <= 0, n


@EACH_INPUT
@EACH_KERNEL
def test_bytes_and_decoded_bits_are_those_of_the_reference(
    codec: Codec, variant: int, make: Callable[[int], Tensor]
) -> None:
    for n in sizes_of(codec):
        x = make(n)
        data = codec.encode(x, variant=variant)
        assert data.dtype == torch.uint8 and data.numel() == codec.encoded_size(n), n
        assert torch.equal(data, codec.encode_reference(x)), n
        assert is_same(codec.decode(data, n, variant=variant), codec.decode_reference(data, n)), n


@EACH_INPUT
@EACH_CODEC
def test_all_variants_give_the_same_bytes_and_bits(codec: Codec, make: Callable[[int], Tensor]) -> None:
    """Also where the reference is left out: machines of different makes are in one run."""
    for n in sizes_of(codec):
        x = make(n)
        encoded = [codec.encode(x, variant=variant) for variant in range(len(VARIANTS))]
        assert all(torch.equal(data, encoded[0]) for data in encoded), n
        decoded = [codec.decode(encoded[0], n, variant=variant) for variant in range(len(VARIANTS))]
        assert all(is_same(values, decoded[0]) for values in decoded), n


@EACH_CODEC
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40), st.integers(0, 12))
def test_any_finite_values_keep_all_promises_of_a_codec(codec: Codec, values: list[float], repeats: int) -> None:
    x = torch.tensor(values, dtype=torch.float32).repeat(2**repeats)[:1500]
    expected = codec.encode_reference(x)
    for variant in range(len(VARIANTS)):
        data = codec.encode(x, variant=variant)
        assert torch.equal(data, expected)
        decoded = codec.decode(data, x.numel(), variant=variant)
        assert is_same(decoded, codec.decode_reference(data, x.numel()))
        assert excess(codec, x, decoded) <= 0


@pytest.mark.slow
def test_ten_million_values_are_encoded_as_the_reference_does() -> None:
    counts = {"int8": 4_000_000, "fp16": 2_500_000, "bf16": 2_500_000, "int4": 1_000_000}
    for name, n in counts.items():
        codec, x = CODECS[name], noise(n)
        data = codec.encode_reference(x)
        differing = [int((codec.encode(x, variant=variant) != data).sum()) for variant in range(len(VARIANTS))]
        assert differing == [0] * len(VARIANTS), name
        assert excess(codec, x, codec.decode(data, n)) <= 0, name


@EACH_KERNEL
def test_weighted_sum_adds_what_is_decoded(codec: Codec, variant: int) -> None:
    library, weight = native.load(), 0.3
    for n in sizes_of(codec):
        data, before = codec.encode(noise(n)), noise(n, seed=1)
        total = before.clone()
        library.zb_add(codec.number, variant, data.data_ptr(), n, weight, total.data_ptr())
        expected = before.double() + weight * codec.decode(data, n).double()
        assert torch.allclose(total.double(), expected, rtol=1e-6, atol=1e-6), n
        same = before.clone()
        library.zb_add(codec.number, 0, data.data_ptr(), n, weight, same.data_ptr())
        assert is_same(total, same), n


@EACH_KERNEL
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_not_finite_is_refused_with_its_index(codec: Codec, variant: int, bad: float) -> None:
    n = 3 * (codec.block or 256) + 5
    for index in (0, 1, n // 2, n - 6, n - 1):
        x = noise(n)
        x[index] = bad
        with pytest.raises(ValueError, match=rf"^value {index} of {n} is {re.escape(str(bad))},"):
            codec.encode(x, variant=variant)


@EACH_KERNEL
def test_first_of_several_values_that_are_not_finite_is_named(codec: Codec, variant: int) -> None:
    x = noise(1000)
    x[[999, 400, 401]] = float("nan")
    with pytest.raises(ValueError, match=r"^value 400 of 1000 is nan"):
        codec.encode(x, variant=variant)


@pytest.mark.parametrize(
    ("name", "ratio"), [("fp32", 1.0), ("bf16", 2.0), ("fp16", 1.9845), ("int8", 3.9385), ("int4", 7.5294)]
)
def test_ratio_is_that_of_long_buffers(name: str, ratio: float) -> None:
    codec, n = CODECS[name], 1 << 20
    assert codec.ratio == pytest.approx(ratio, abs=1e-4)
    assert 4 * n / codec.encode(torch.zeros(n)).numel() == pytest.approx(codec.ratio)


@EACH_CODEC
@given(n=st.integers(0, 1 << 40))
def test_size_is_the_same_in_the_kernels(codec: Codec, n: int) -> None:
    assert native.load().zb_encoded_size(codec.number, n) == codec.encoded_size(n)


def test_numbers_and_names_of_codecs_are_their_own() -> None:
    assert [codec.number for codec in CODECS.values()] == list(range(len(CODECS)))
    assert all(name == codec.name for name, codec in CODECS.items())
    assert native.load().zb_encoded_size(len(CODECS), 1) == -1


@EACH_CODEC
@pytest.mark.parametrize("extra", [-1, 1])
def test_wrong_number_of_bytes_is_refused(codec: Codec, extra: int) -> None:
    needed = codec.encoded_size(300)
    with pytest.raises(
        ValueError, match=rf"^300 values take {needed} bytes in {codec.name}, there are {needed + extra}"
    ):
        codec.decode(torch.zeros(needed + extra, dtype=torch.uint8), 300)


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without a compiler."""
    monkeypatch.setattr(native, "problem", lambda: "the native library was not built")
    codecs.is_native.cache_clear()
    yield
    codecs.is_native.cache_clear()


@EACH_CODEC
def test_plain_torch_serves_where_there_is_no_library(
    codec: Codec, monkeypatch: pytest.MonkeyPatch, without_library: None
) -> None:
    x = noise(1009)
    codecs.is_native.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(native, "problem", lambda: None)
        data = codec.encode(x)
        decoded = codec.decode(data, 1009)
    codecs.is_native.cache_clear()
    monkeypatch.setattr(native, "load", lambda: pytest.fail("the library is not there"))
    assert torch.equal(codec.encode(x), data)
    assert is_same(codec.decode(data, 1009), decoded)


@EACH_CODEC
@pytest.mark.parametrize("index", [0, 500, 1008])
def test_plain_torch_refuses_what_the_kernels_refuse(codec: Codec, index: int, without_library: None) -> None:
    x = noise(1009)
    x[index] = float("inf")
    with pytest.raises(ValueError, match=rf"^value {index} of 1009 is inf, which has no encoding"):
        codec.encode(x)


def test_missing_library_is_said_once(caplog: pytest.LogCaptureFixture, without_library: None) -> None:
    with caplog.at_level(logging.WARNING):
        for codec in CODECS.values():
            codec.decode(codec.encode(noise(10)), 10)
    assert [record.getMessage() for record in caplog.records] == [
        "codecs run in plain torch: the native library was not built"
    ]

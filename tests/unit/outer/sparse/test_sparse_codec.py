"""Payloads: their size, what they decode to, who makes them, and what bytes from elsewhere can do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.oracles.problem import layout_of
from tests.unit.outer.sparse.layouts import LAYOUT, codec_of, noise
from torch import Tensor

from zeroband.config.outer import SparseLocoConfig
from zeroband.errors import ConfigError, MalformedPayload
from zeroband.outer.sparse import sparse_codec as module
from zeroband.outer.sparse.bits import pack
from zeroband.outer.sparse.combine import check_combined, combine, decode_combined
from zeroband.outer.sparse.residual import SparseResidual
from zeroband.outer.sparse.sparse_codec import HEADER, Divisor, SparseCodec, SparseRule, norm_of
from zeroband.outer.sparseloco import error_rule
from zeroband.state.flat import ShardMap

VALUES = ["float32", "bfloat16", "sign", "two_bit"]
EACH_CODING = pytest.mark.parametrize("values", VALUES)


@pytest.mark.parametrize(
    ("rule", "bits"),
    [
        (SparseRule(k=4, values="sign"), 4 * (12 + 1)),
        (SparseRule(k=8, values="sign"), 8 * (12 + 1)),
        (SparseRule(k=1, values="sign"), 12 + 2),  # with a single value a zero must be sayable
        (SparseRule(k=32, values="float32"), 32 * (12 + 32)),
        (SparseRule(k=32, values="bfloat16"), 32 * (12 + 16)),
        (SparseRule(k=64, values="two_bit", transform=None), 64 * (12 + 2) + 4),  # two bfloat16 for 8 chunks
        (SparseRule(k=4096, values="sign"), 4096 * 2),
    ],
)
def test_payload_has_the_bytes_that_the_formula_says(rule: SparseRule, bits: int) -> None:
    codec = SparseCodec(layout_of({"w": (1024, 512)}), rule)
    chunks = 1024 * 512 // 4096
    assert codec.nbytes == HEADER.size + chunks * bits // 8
    assert codec.encode(noise(0, codec.numel)).payload.shape == (codec.nbytes,)


def test_four_signs_of_a_chunk_are_above_the_published_ratio() -> None:
    codec = SparseCodec(layout_of({"w": (1024, 1024)}), SparseRule(k=4, values="sign"))
    assert 2 * codec.numel / codec.nbytes == pytest.approx(1260, rel=0.02)


@EACH_CODING
@pytest.mark.parametrize("transform", ["dct", None])
@pytest.mark.parametrize("k", [1, 4, 4096])
def test_decoding_gives_what_the_sender_took_out(k: int, transform: str | None, values: str) -> None:
    codec, x = codec_of(k=k, values=values, transform=transform), noise(0)
    encoded = codec.encode(x)
    decoded = torch.full_like(x, torch.nan)
    codec.decode([codec.check(encoded.payload)], decoded)
    left = x.clone()
    codec.add(left, encoded.taken, -1.0)
    if values != "sign":
        torch.testing.assert_close(x - left, decoded, rtol=0, atol=4e-6)  # float32 sums beside exact ones
    assert left.norm() < x.norm()
    if k == 4096 and values != "two_bit":
        torch.testing.assert_close(left, torch.zeros_like(left), rtol=0, atol=0.01 if values == "bfloat16" else 1e-5)


@EACH_CODING
@pytest.mark.parametrize("world_size", [3, 8])
def test_ranks_of_a_node_make_the_payload_of_one_rank(
    world_size: int, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, x = codec_of(values=values), noise(0)
    expected = codec.encode(x).payload
    monkeypatch.setattr(module, "BLOCK_NUMEL", 9 * 4096)
    codec = codec_of(values=values)
    shared, decoded, alone = torch.zeros_like(expected), torch.zeros_like(x), torch.zeros_like(x)
    left = x.clone()
    for rank in range(world_size):
        taken = codec.encode(x, out=shared, rank=rank, world_size=world_size).taken
        codec.add(left, taken, -1.0)
    assert torch.equal(shared, expected)
    for rank in range(world_size):
        codec.decode([codec.check(shared)] * 2, decoded, rank=rank, world_size=world_size)
    monkeypatch.undo()
    codec = codec_of(values=values)
    codec.decode([codec.check(expected)] * 2, alone)
    assert torch.equal(decoded, alone)
    whole = x.clone()
    codec.add(whole, codec.encode(x).taken, -1.0)
    assert torch.equal(left, whole)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_sharded_parameters_make_the_payload_of_whole_ones(world_size: int) -> None:
    flat = noise(3)
    named = {slot.name: flat[slot.start : slot.start + slot.numel].view(slot.shape) for slot in LAYOUT.slots}
    shared = torch.zeros(LAYOUT.numel)
    for rank in range(world_size):  # FSDP2 cuts dim 0 like torch.chunk
        shards = {
            name: tensor if tensor.dim() == 0 else (*tensor.chunk(world_size), *[tensor[:0]] * world_size)[rank]
            for name, tensor in named.items()
            if tensor.dim() or rank == 0
        }
        ShardMap(LAYOUT, rank, world_size).store(shards, shared)
    codec = codec_of(values="sign")
    payload = torch.zeros(codec.nbytes, dtype=torch.uint8)
    for rank in range(world_size):
        codec.encode(shared, out=payload, rank=rank, world_size=world_size)
    assert torch.equal(payload, codec.encode(flat).payload)


def test_weights_and_senders_divide_as_they_say() -> None:
    layout = layout_of({"v": (4,)})
    codec = SparseCodec(layout, SparseRule(k=2, chunk=4, transform=None))
    rows = [[5.0, 3.0, 0.5, 0.0], [0.0, 1.0, 2.0, 0.0]]
    payloads = [codec.check(codec.encode(torch.tensor(row)).payload) for row in rows]
    out = torch.empty(4)
    for weights, divisor, expected in (
        (None, "none", [5.0, 4.0, 2.0, 0.0]),
        ([0.5, 0.5], "none", [2.5, 2.0, 1.0, 0.0]),
        (None, "senders", [5.0, 2.0, 2.0, 0.0]),
        ([3.0, 1.0], "senders", [5.0, 2.5, 2.0, 0.0]),
    ):
        codec.decode(payloads, out, weights=weights, divisor="senders" if divisor == "senders" else "none")
        assert out.tolist() == expected
    codec.decode([], out)
    assert out.tolist() == [0.0] * 4


def test_chunk_of_zeros_says_nothing_although_a_bit_has_no_zero() -> None:
    x = noise(0)
    for slot in LAYOUT.slots:
        if slot.name in ("square", "bias", "one"):
            x[slot.start : slot.start + slot.numel] = 0
    for k in (1, 4, 4096):
        codec, out = codec_of(k=k, values="sign"), torch.empty_like(x)
        codec.decode([codec.check(codec.encode(x).payload)], out)
        silent = torch.cat(
            [out[s.start : s.start + s.numel] for s in LAYOUT.slots if s.name in ("square", "bias", "one")]
        )
        assert not silent.any()
        assert out.any()


def test_smaller_chunks_keep_the_density_where_the_rule_says_so() -> None:
    assert [SparseRule(k=64, keeps_density=True).k_of(n) for n in (4096, 2048, 100, 1)] == [64, 32, 2, 1]
    assert [SparseRule(k=64).k_of(n) for n in (4096, 100, 1)] == [64, 64, 1]


@pytest.mark.parametrize(
    ("knobs", "what"),
    [({"k": 0}, "k=0"), ({"chunk": 129}, "chunk=129"), ({"chunk": 300, "transform": None}, "65536")],
)
def test_impossible_rule_is_refused(knobs: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        codec_of(**knobs)


def test_value_that_is_not_finite_is_refused_with_its_parameter() -> None:
    x = noise(0)
    x[LAYOUT.slots[2].start + 5000] = torch.nan
    with pytest.raises(ValueError, match="embed has a value that is not finite"):
        codec_of().encode(x)


@pytest.mark.slow
@EACH_CODING
def test_no_change_of_a_byte_reaches_beyond_a_chunk(values: str) -> None:
    """Whatever is changed, it is refused or decodes to finite values."""
    layout = layout_of({"a": (10, 10), "b": (7,)})
    codec = SparseCodec(layout, SparseRule(k=3, chunk=5, values=values))
    payload = codec.encode(noise(0, layout.numel)).payload
    refused = 0
    for at in range(len(payload)):
        for change in (1, 0x80):
            data = payload.clone()
            data[at] ^= change
            try:
                checked = codec.check(data)
                out = torch.empty(layout.numel)
                codec.decode([checked], out)
                assert out.isfinite().all()
            except MalformedPayload:
                refused += 1
    assert refused >= 2 * HEADER.size


@pytest.mark.parametrize("seed", range(2))
def test_foreign_bytes_are_refused(seed: int) -> None:
    codec = codec_of()
    generator = torch.Generator().manual_seed(seed)
    with pytest.raises(MalformedPayload, match="header"):
        codec.check(torch.randint(0, 256, (codec.nbytes,), generator=generator).to(torch.uint8))
    body = torch.randint(0, 256, (codec.nbytes,), generator=generator).to(torch.uint8)
    body[: HEADER.size] = codec.encode(noise(0)).payload[: HEADER.size]
    with pytest.raises(MalformedPayload, match="place"):
        codec.check(body)


@pytest.mark.parametrize(
    ("places", "why"), [((3, 25), "place 25 in chunks of 25"), ((3, 31), "place 31"), ((7, 7), "do not ascend")]
)
@pytest.mark.parametrize("values", ["float32", "sign"])
def test_place_outside_its_chunk_is_refused(values: str, places: tuple[int, int], why: str) -> None:
    codec = SparseCodec(
        layout_of({"a": (5, 5)}), SparseRule(k=2, chunk=5, values="sign" if values == "sign" else "float32")
    )
    data = codec.encode(noise(0, 25)).payload
    data[HEADER.size : HEADER.size + 2] = pack(torch.tensor([places]), 5)[0]
    with pytest.raises(MalformedPayload, match=why):
        codec.check(data)


def test_payload_of_another_length_layout_or_rule_is_refused() -> None:
    codec, payload = codec_of(), codec_of().encode(noise(0)).payload
    for data, why in (
        (payload[:-1], "bytes, expected"),
        (torch.cat([payload, payload[:1]]), "bytes, expected"),
        (payload[:10], "bytes, expected"),
        (payload.view(1, -1), "no row of bytes"),
        (payload.float(), "no row of bytes"),
        (codec_of(uneven="divide").encode(noise(0)).payload, "bytes, expected|another rule"),
    ):
        with pytest.raises(MalformedPayload, match=why):
            codec.check(data)
    other = SparseCodec(layout_of({"v": (LAYOUT.numel,)}), codec.rule)
    with pytest.raises(MalformedPayload):
        other.check(payload)


def test_sum_that_overflows_is_refused() -> None:
    codec = codec_of(transform=None)
    payload = codec.check(codec.encode(torch.full((LAYOUT.numel,), 3e38)).payload)
    with pytest.raises(MalformedPayload, match="not finite"):
        codec.decode([payload, payload], torch.empty(LAYOUT.numel))


@EACH_CODING
def test_restored_contribution_leaves_the_memory_as_if_it_had_not_been_sent(values: str) -> None:
    feedback = SparseResidual(codec_of(values=values), decay=0.9, share=0.7)
    memory, never_sent = noise(0), noise(0)
    taken = feedback.extract(memory).taken
    assert not torch.allclose(memory, never_sent, atol=1e-3)
    for seed in (1, 2):
        for buffer in (memory, never_sent):
            feedback.accumulate(buffer, noise(seed), scale=0.3)
    feedback.restore(memory, taken, rounds=2)
    torch.testing.assert_close(memory, never_sent, rtol=0, atol=2e-6)


def test_accumulate_gives_the_same_bits_however_the_buffer_is_cut() -> None:
    feedback = SparseResidual(codec_of(), decay=0.95)
    whole, cut, new = noise(0), noise(0), noise(1)
    feedback.accumulate(whole, new, scale=0.3)
    for a, b in zip(cut.split(1001), new.split(1001), strict=True):
        feedback.accumulate(a, b, scale=0.3)
    assert torch.equal(whole, cut)


def test_norm_is_that_of_the_values() -> None:
    feedback = error_rule(SparseLocoConfig(type="sparseloco", values="float32"), LAYOUT)
    payloads = [feedback.codec.check(feedback.codec.encode(s * noise(0)).payload) for s in (1.0, 2.0, 50.0, 0.0)]
    decoded, norms = torch.empty(LAYOUT.numel), [norm_of(feedback.codec, payload) for payload in payloads]
    feedback.codec.decode(payloads[:1], decoded)
    assert norms[0] == pytest.approx(float(decoded.norm()), rel=1e-5)
    assert norms[1:] == pytest.approx([2 * norms[0], 50 * norms[0], 0.0], rel=1e-4)


def test_two_bit_values_of_the_default_rule_lose_little() -> None:
    feedback = error_rule(SparseLocoConfig(type="sparseloco"), LAYOUT)
    x, exact, coarse = noise(0), torch.empty(LAYOUT.numel), torch.empty(LAYOUT.numel)
    feedback.codec.decode([feedback.codec.check(feedback.codec.encode(x).payload)], coarse)
    plain = error_rule(SparseLocoConfig(type="sparseloco", values="float32"), LAYOUT).codec
    plain.decode([plain.check(plain.encode(x).payload)], exact)
    assert (coarse - exact).norm() / exact.norm() < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@EACH_CODING
def test_gpu_takes_the_same_coefficients_and_one_payload_decodes_to_the_same_bits(values: str) -> None:
    """What a GPU sends is near the exact transform, since it computes in float32; decoding is exact everywhere."""
    codec, x = codec_of(values=values), noise(0)
    here, there = (codec.check(codec.encode(buffer).payload) for buffer in (x, x.cuda()))
    sent_here, sent_there, on_gpu = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x).cuda()
    codec.decode([here], sent_here)
    codec.decode([codec.check(there.data.cpu())], sent_there)
    torch.testing.assert_close(sent_there, sent_here, rtol=2**-8, atol=2e-6 * float(sent_here.abs().max()))
    for payload, out in ((there.data.cpu(), sent_there), (there.data, on_gpu)):
        codec.decode([codec.check(payload)] * 3, out, weights=[0.5, 0.3, 0.2], divisor="senders")
    assert torch.equal(on_gpu.cpu(), sent_there)


@pytest.mark.parametrize("transform", ["dct", None])
def test_payloads_are_added_up_and_transformed_on_the_gpu_and_come_back_once(
    monkeypatch: pytest.MonkeyPatch, transform: Any
) -> None:
    """A GPU by name: what is moved to it stays where it is, and is noted."""
    gpu, plain, x = torch.device("cuda", 0), codec_of(values="sign", transform=transform), noise(0)
    codec, payload, to, zeros = (
        SparseCodec(LAYOUT, plain.rule, device=gpu),
        plain.encode(x).payload,
        Tensor.to,
        torch.zeros,
    )
    moved, made = list[int](), list[int]()

    def note(tensor: Tensor, target: Any, *rest: Any, **named: Any) -> Tensor:
        if target != gpu:
            return to(tensor, target, *rest, **named)
        moved.append(tensor.nbytes)
        return tensor

    def make(*shape: Any, device: Any = None, **named: Any) -> Tensor:
        if device == gpu:
            made.append(shape[1] * shape[2])
        return zeros(*shape, device=None if device == gpu else device, **named)

    monkeypatch.setattr(Tensor, "to", note)
    monkeypatch.setattr(torch, "zeros", make)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    expected, found = torch.empty_like(x), torch.empty_like(x)
    plain.decode([plain.check(payload)] * 2, expected, divisor="senders")
    assert not moved and not made
    codec.decode([codec.check(payload)] * 2, found, divisor="senders")
    assert torch.equal(found, expected)
    chunked = sum(section.group.chunks * section.group.numel for section in codec.sections)
    assert sum(made) == chunked and sum(moved) == 2 * (codec.nbytes - HEADER.size) + 4 * chunked


def test_other_gpus_than_those_of_cuda_are_left_out() -> None:
    """Apple's have no float64, in which waves are added up."""
    codec, x = SparseCodec(LAYOUT, codec_of().rule, device=torch.device("mps")), noise(0)
    codec.decode([codec.check(codec.encode(x).payload)], torch.empty_like(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@EACH_CODING
@pytest.mark.parametrize("transform", ["dct", None])
def test_memory_on_the_host_with_its_codec_on_a_gpu_decodes_as_without(values: str, transform: Any) -> None:
    x, plain = noise(0), codec_of(values=values, transform=transform)
    on_gpu = SparseCodec(LAYOUT, plain.rule, device=torch.device("cuda", 0))
    payloads = [plain.check(plain.encode(s * x).payload) for s in (1.0, -0.5, 3.0)]
    divisors: tuple[Divisor, ...] = ("none", "senders")
    for divisor in divisors:
        out = [torch.empty_like(x), torch.empty_like(x)]
        for codec, buffer in zip((plain, on_gpu), out, strict=True):
            codec.decode(payloads, buffer, weights=[0.5, 0.3, 0.2], divisor=divisor)
        assert torch.equal(out[1], out[0])
    combined = check_combined(plain, combine(plain, payloads))
    out = [torch.empty_like(x), torch.empty_like(x)]
    for codec, buffer in zip((plain, on_gpu), out, strict=True):
        decode_combined(codec, combined, buffer)
    assert torch.equal(out[1], out[0])
    if transform is None:
        assert torch.equal(on_gpu.encode(x).payload, plain.encode(x).payload)
    else:
        on_gpu.check(on_gpu.encode(x).payload)

"""Combined payloads decode to the same bits as those that they are made of."""

from __future__ import annotations

import pytest
import torch
from tests.oracles.problem import layout_of
from tests.unit.outer.sparse.layouts import LAYOUT, codec_of, noise

from zeroband.errors import MalformedPayload
from zeroband.outer.sparse.bits import pack
from zeroband.outer.sparse.combine import check_combined, combine, combined_bytes, decode_combined
from zeroband.outer.sparse.sparse_codec import HEADER, Divisor, Payload, SparseCodec, SparseRule


def payloads_of(codec: SparseCodec, count: int) -> list[Payload]:
    """Of nodes that partly see the same."""
    common = noise(0, codec.numel)
    return [codec.check(codec.encode(common + noise(m + 1, codec.numel)).payload) for m in range(count)]


@pytest.mark.parametrize("divisor", ["none", "senders"])
@pytest.mark.parametrize("weights", [None, [0.5, 0.25, 0.25]])
@pytest.mark.parametrize("values", ["float32", "sign", "two_bit"])
def test_combined_payload_decodes_to_the_same_bits(values: str, weights: list[float] | None, divisor: Divisor) -> None:
    codec = codec_of(values=values)
    payloads = payloads_of(codec, 3)
    expected, got = torch.empty(LAYOUT.numel), torch.empty(LAYOUT.numel)
    codec.decode(payloads, expected, weights=weights, divisor=divisor)
    data = combine(codec, payloads, weights=weights, divisor=divisor)
    assert len(data) <= combined_bytes(codec, 3, divisor=divisor, weighted=weights is not None)
    combined = check_combined(codec, data)
    for rank in range(3):
        decode_combined(codec, combined, got, rank=rank, world_size=3)
    assert torch.equal(got, expected)


def test_bound_of_the_size_is_met_where_no_two_nodes_chose_the_same() -> None:
    codec = SparseCodec(layout_of({"v": (6,)}), SparseRule(k=2, chunk=8, transform=None))
    rows = [[1.0, 1, 0, 0, 0, 0], [0, 0, 1.0, 1, 0, 0], [0, 0, 0, 0, 1.0, 1]]
    payloads = [codec.check(codec.encode(torch.tensor(row)).payload) for row in rows]
    assert len(combine(codec, payloads)) == combined_bytes(codec, 3) == HEADER.size + 1 + 3 + 6 * 4


@pytest.mark.parametrize("count", [0, 1 << 15])
def test_too_few_or_too_many_payloads_are_refused(count: int) -> None:
    codec = codec_of()
    with pytest.raises(ValueError, match=f"{count} payloads cannot be combined"):
        combine(codec, payloads_of(codec, 1) * count)


@pytest.mark.slow
@pytest.mark.parametrize(("values", "divisor"), [("float32", "none"), ("sign", "none"), ("sign", "senders")])
def test_no_change_of_a_byte_reaches_beyond_a_chunk(values: str, divisor: Divisor) -> None:
    layout = layout_of({"a": (5, 10), "b": (7,)})
    codec = SparseCodec(layout, SparseRule(k=2, chunk=5, values="sign" if values == "sign" else "float32"))
    good = combine(codec, payloads_of(codec, 3), divisor=divisor)
    changed = [good[:at] for at in range(0, len(good), 7)] + [torch.cat([good, good[:1]])]
    for at in range(len(good)):
        for change in (1, 0x80):
            changed.append(good.clone())
            changed[-1][at] ^= change
    refused = 0
    for data in changed:
        try:
            out = torch.empty(layout.numel)
            decode_combined(codec, check_combined(codec, data), out)
            assert out.isfinite().all()
        except MalformedPayload:
            refused += 1
    assert refused >= 2 * HEADER.size


@pytest.mark.parametrize(
    ("places", "why"), [((3, 25), "place 25 in chunks of 25"), ((3, 31), "place 31"), ((7, 7), "do not ascend")]
)
def test_place_outside_its_chunk_is_refused(places: tuple[int, int], why: str) -> None:
    codec = SparseCodec(layout_of({"a": (5, 5)}), SparseRule(k=2, chunk=5))
    data = combine(codec, payloads_of(codec, 1))
    data[HEADER.size + 1 : HEADER.size + 3] = pack(torch.tensor([places]), 5)[0]  # behind the chunk's count
    with pytest.raises(MalformedPayload, match=why):
        check_combined(codec, data)


def test_payload_of_a_node_is_no_combined_payload_and_the_other_way_round() -> None:
    codec = codec_of()
    own = payloads_of(codec, 1)
    with pytest.raises(MalformedPayload, match="header"):
        check_combined(codec, own[0].data)
    with pytest.raises(MalformedPayload):
        codec.check(combine(codec, own))

"""Reductions whose owners combine contributions so that a minority of liars moves them only so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.unit.elastic.conftest import KeptNet, Net, ends_of, noise, split_into
from torch import Tensor

from zeroband.elastic.transport.engine import Encoded, State
from zeroband.elastic.transport.shape import Shape
from zeroband.kernels.codec import CODECS, Codec
from zeroband.kernels.robust import Robustly, RobustRule, combine

INT8, FP32 = CODECS["int8"], CODECS["fp32"]
RULES = [RobustRule("clip"), RobustRule("trimmed", trim=0.25), RobustRule("centered_clip", iterations=1)]
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
CHUNK, NUMEL = 4096, 20_011


def shape_of_four(codec: Codec, weights: Sequence[int] = (1, 2, 0, 3)) -> Shape:
    return split_into(NUMEL, codec, weights, is_ring=False, chunk_numel=CHUNK)


def reduced(
    net: Net, shape: Shape, rule: RobustRule, sources: Sequence[Tensor], encoded: Sequence[Encoded | None] = ()
) -> tuple[list[Tensor], list[Robustly]]:
    """What every member has then, and what it measured."""
    operation, results = net.next_operation(), [torch.full((NUMEL,), float("nan")) for _ in sources]
    robustly = [Robustly(rule, net.world) for _ in sources]
    running = [
        net.operate(
            operation,
            shape,
            member,
            sources[member],
            results[member],
            encoded=encoded[member] if encoded else None,
            robust=robustly[member],
        )
        for member in range(net.world)
    ]
    assert ends_of(running) == [State.DONE] * net.world
    for one in running:
        one.close()
    return results, robustly


@EACH_RULE
@pytest.mark.parametrize("codec", [FP32, INT8], ids=lambda codec: codec.name)
def test_all_members_hold_what_the_owners_make_of_their_shards(
    kept_net: KeptNet, rule: RobustRule, codec: Codec
) -> None:
    sources, shape = [noise(NUMEL, seed=seed, scale=10.0**seed) for seed in range(4)], shape_of_four(codec)
    results, robustly = reduced(kept_net(4, True), shape, rule, sources)
    expected = torch.empty(NUMEL)
    for owner in range(4):
        for start in range(shape.bounds[owner], shape.bounds[owner + 1], CHUNK):
            stop = min(start + CHUNK, shape.bounds[owner + 1])
            parts = [codec.encode(source[start:stop].contiguous()) for source in sources]
            made, _ = combine(rule, codec, parts, shape.shares, stop - start)
            expected[start:stop] = codec.decode(codec.encode(made), stop - start)
    assert all(torch.equal(result.view(torch.int32), expected.view(torch.int32)) for result in results)
    for told in robustly:
        cosines = told.measured.cosines()
        assert cosines[2] is None and all(cosine is not None for cosine in (cosines[0], cosines[1], cosines[3]))


@EACH_RULE
def test_contributions_that_are_encoded_already_give_the_same_bits(kept_net: KeptNet, rule: RobustRule) -> None:
    """As `outer.state_device = "cuda"` has them; the GPU steps by the encoded result."""
    sources, shape, net = [noise(NUMEL, seed=seed) for seed in range(4)], shape_of_four(INT8), kept_net(4, True)
    expected, plainly = reduced(net, shape, rule, sources)
    sent = [
        Encoded(INT8.encode(source), torch.zeros(INT8.encoded_size(NUMEL), dtype=torch.uint8)) for source in sources
    ]
    results, robustly = reduced(net, shape, rule, [torch.full((NUMEL,), float("nan"))] * 4, sent)
    for result, one in zip(results, sent, strict=True):
        assert torch.equal(result.view(torch.int32), expected[0].view(torch.int32))
        assert torch.equal(INT8.decode(one.result, NUMEL).view(torch.int32), result.view(torch.int32))
    for told, before in zip(robustly, plainly, strict=True):
        assert told.measured.cosines() == before.measured.cosines()


@EACH_RULE
def test_bytes_that_decode_to_no_number_do_not_reach_the_result(kept_net: KeptNet, rule: RobustRule) -> None:
    """An honest node refuses to encode them, so a liar writes the bytes itself."""
    sources, shape = [noise(NUMEL, seed=seed) for seed in range(4)], shape_of_four(INT8, (1, 1, 1, 1))
    data = [INT8.encode(source) for source in sources]
    data[3][:4] = torch.tensor([float("nan")]).view(torch.uint8)  # the scale of its first block
    results, robustly = reduced(
        kept_net(4, False), shape, rule, sources, [Encoded(one, torch.empty_like(one)) for one in data]
    )
    assert all(torch.equal(result, results[0]) and torch.isfinite(result).all() for result in results)
    assert robustly[0].measured.cosines()[3] == -1.0


def test_ring_and_unknown_rules_are_refused(kept_net: KeptNet) -> None:
    net, source, shape = kept_net(4, False), noise(NUMEL), shape_of_four(INT8)
    for bad, rule in (
        (replace(shape, is_ring=True), RULES[0]),
        (replace(shape, chain=(1, 1, 2, 3), bounds=(0, 0, *shape.bounds[2:])), RULES[0]),
        (shape, RobustRule("trimmed", trim=0.5)),
    ):
        with pytest.raises(ValueError, match="no reduction has this shape"):
            net.operate(net.next_operation(), bad, 0, source, torch.empty(NUMEL), robust=Robustly(rule, 4))

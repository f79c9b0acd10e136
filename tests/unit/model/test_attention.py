"""Attention against slow, obvious references."""

import math

import pytest
import torch

from zeroband.model.attention import attend, document_attention_mask, rope_table, rotate


def naive_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ids: torch.Tensor | None
) -> torch.Tensor:
    """One score at a time: query head h uses key head h // groups, position i sees j <= i of its own document."""
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                seen = [j for j in range(i + 1) if ids is None or ids[b, j] == ids[b, i]]
                keys, values = key[b, h // groups, seen], value[b, h // groups, seen]
                out[b, h, i] = torch.softmax(keys @ query[b, h, i] / math.sqrt(size), dim=0) @ values
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("ids", [None, torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]], dtype=torch.int32)])
def test_attend_equals_naive_attention_for_every_grouping(kv_heads: int, ids: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 6, 8, generator=generator)
    key, value = (torch.randn(2, kv_heads, 6, 8, generator=generator) for _ in range(2))
    mask = None if ids is None else document_attention_mask(ids)
    torch.testing.assert_close(attend(query, key, value, mask), naive_attention(query, key, value, ids))


def test_document_mask_separates_equal_ids_only_by_causality() -> None:
    mask = document_attention_mask(torch.tensor([[7, 7, 9]], dtype=torch.int32))
    assert mask.shape == (1, 1, 3, 3)
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def test_rope_scores_depend_only_on_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 16, generator=generator)
    rope = rope_table(32, 16, 10_000.0, torch.device("cpu"))
    queries, keys = (rotate(x.expand(1, 1, 32, 16), rope)[0, 0] for x in (query, key))
    scores = queries @ keys.T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores.diagonal(-1)[0], scores.diagonal(-7)[0], atol=1e-2)


def test_rope_turns_pair_by_its_own_frequency() -> None:
    rope = rope_table(3, 4, 100.0, torch.device("cpu"))
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    turned = rotate(x, rope)[0, 0, 2]
    expected = torch.tensor([math.cos(2.0), math.cos(0.2), math.sin(2.0), math.sin(0.2)])
    torch.testing.assert_close(turned, expected)


def test_rotate_keeps_bfloat16_but_computes_in_float32() -> None:
    rope = rope_table(64, 16, 10_000.0, torch.device("cpu"))
    x = torch.randn(1, 1, 64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotate(x, rope)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), rope).bfloat16())

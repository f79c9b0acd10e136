"""Attention against slow, obvious references."""

import importlib
import math

import pytest
import torch

from zeroband.config.model import LlamaConfig
from zeroband.model import attention
from zeroband.model.attention import attend_plain, attention_on, rope_table, rotate


def naive_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ids: torch.Tensor | None
) -> torch.Tensor:
    """One score at a time: query head h uses key head h // groups, position i sees j <= i of its own document."""
    batch, length, heads, size = query.shape
    groups = heads // key.shape[2]
    out = torch.zeros_like(query)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                seen = [j for j in range(i + 1) if ids is None or ids[b, j] == ids[b, i]]
                keys, values = key[b, seen, h // groups], value[b, seen, h // groups]
                out[b, i, h] = torch.softmax(keys @ query[b, i, h] / math.sqrt(size), dim=0) @ values
    return out


def cu_seqlens_of(ids: torch.Tensor) -> torch.Tensor:
    """Borders of documents that have equal ids, (b, t), in rows laid end to end."""
    flat = (ids + 1000 * torch.arange(len(ids))[:, None]).flatten()
    begins = torch.cat((torch.tensor([True]), flat[1:] != flat[:-1]))
    return torch.cat((begins.nonzero().flatten(), torch.tensor([flat.numel()]))).to(torch.int32)


def heads_of(length: int, kv_heads: int, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, length, 4, 8, generator=generator)
    key, value = (torch.randn(batch, length, kv_heads, 8, generator=generator) for _ in range(2))
    return query, key, value


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("ids", [None, torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]], dtype=torch.int32)])
def test_plain_attention_equals_naive_attention_for_every_grouping(kv_heads: int, ids: torch.Tensor | None) -> None:
    heads = heads_of(6, kv_heads)
    borders = None if ids is None else cu_seqlens_of(ids)
    torch.testing.assert_close(attend_plain(*heads, borders), naive_attention(*heads, ids))


def test_documents_longer_than_the_rows_masked_at_a_time_are_whole() -> None:
    ids = torch.tensor([[0] * 300 + [1] * 290, [0] * 590])
    query, key, value = heads_of(590, 2)
    packed = attend_plain(query, key, value, cu_seqlens_of(ids))
    for row, span in ((0, slice(0, 300)), (0, slice(300, 590)), (1, slice(0, 590))):
        alone = attend_plain(*(heads[row : row + 1, span] for heads in (query, key, value)), None)
        torch.testing.assert_close(packed[row : row + 1, span], alone)


def test_another_first_document_changes_no_bit_of_the_second() -> None:
    ids = torch.tensor([[0] * 270 + [1] * 60])
    borders = cu_seqlens_of(ids)
    first = heads_of(330, 2, batch=1)
    second = tuple(heads.clone() for heads in first)
    for ours, theirs in zip(second, heads_of(330, 2, batch=1, seed=1), strict=True):
        ours[:, :270] = theirs[:, :270]
    before, after = attend_plain(*first, borders), attend_plain(*second, borders)
    assert torch.equal(before[:, 270:], after[:, 270:])
    assert not torch.equal(before[:, 260:270], after[:, 260:270])


def test_a_cpu_takes_the_plain_path_and_says_nothing() -> None:
    assert attention_on(torch.device("cpu"), torch.bfloat16, LlamaConfig()) == (attend_plain, "")


class Kernels:
    """Torch's registry of attention kernels, whose third version is off by a factor, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, factor: float, error: Exception | None = None) -> None:
        self.factor, self.error, self.scale = factor, error, 1.0
        real = importlib.import_module

        def attend(query: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
            return attend_plain(query, *others) * self.scale

        monkeypatch.setattr(
            attention.importlib, "import_module", lambda n: self if n == "torch.nn.attention" else real(n)
        )
        monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name == "flash_attn_interface" or None)
        monkeypatch.setattr(attention, "attention_on", lambda *_: (attend, ""))
        monkeypatch.setattr(attention, "is_hopper", lambda _: True)

    def activate_flash_attention_impl(self, name: str) -> None:
        assert name == "FA3"
        if self.error is not None:
            raise self.error
        self.scale = self.factor

    def restore_flash_attention_impl(self) -> None:
        self.scale = 1.0


@pytest.mark.parametrize(
    ("factor", "error", "expected"),
    [
        (1.001, None, "used"),
        (1.1, None, "not used: it differs from torch's kernels by 0.1"),
        (1.0, RuntimeError("no kernels"), "not used: it fails: RuntimeError: no kernels"),
    ],
)
def test_flash_attention_3_is_used_where_it_agrees_with_torchs_kernels(
    monkeypatch: pytest.MonkeyPatch, factor: float, error: Exception | None, expected: str
) -> None:
    kernels, config = Kernels(monkeypatch, factor, error), LlamaConfig(d_model=32, n_heads=4, n_kv_heads=2)
    assert attention.activate_flash_3(torch.device("cpu"), torch.bfloat16, config) == expected
    assert kernels.scale == (factor if expected == "used" else 1.0)


def test_flash_attention_is_had_by_its_name() -> None:
    """Drivers outside of the package trace a GPU's path by it: `from zeroband.model.attention import attend_varlen`."""
    assert attention.attend_varlen.__name__ == "attend_varlen"
    with pytest.raises(AttributeError, match="has no attribute 'attend_other'"):
        _ = attention.attend_other


def test_rope_scores_depend_only_on_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 16, generator=generator)
    rope = rope_table(32, 16, 10_000.0, torch.device("cpu"))
    queries, keys = (rotate(x.expand(1, 32, 1, 16), rope)[0, :, 0] for x in (query, key))
    scores = queries @ keys.T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores.diagonal(-1)[0], scores.diagonal(-7)[0], atol=1e-2)


def test_rope_turns_pair_by_its_own_frequency() -> None:
    rope = rope_table(3, 4, 100.0, torch.device("cpu"))
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 3, 1, 4)
    turned = rotate(x, rope)[0, 2, 0]
    expected = torch.tensor([math.cos(2.0), math.cos(0.2), math.sin(2.0), math.sin(0.2)])
    torch.testing.assert_close(turned, expected)


def test_rotate_keeps_bfloat16_but_computes_in_float32() -> None:
    rope = rope_table(64, 16, 10_000.0, torch.device("cpu"))
    x = torch.randn(1, 64, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotate(x, rope)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), rope).bfloat16())

"""Initial weights depend on the seed and the parameter's name, on nothing else."""

import hashlib
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroband.config.model import LlamaConfig
from zeroband.model import Transformer, init, init_weights
from zeroband.model.init import STD
from zeroband.node.sharding import chunk_rows, local_rows

CONFIG = LlamaConfig(d_model=64, n_layers=2, n_heads=4)


def weights(seed: int, config: LlamaConfig = CONFIG) -> dict[str, torch.Tensor]:
    model = Transformer(config, 128)
    init_weights(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_init_is_a_function_of_seed() -> None:
    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].ndim == 2)


def test_init_neither_reads_nor_moves_the_global_random_state() -> None:
    model = Transformer(CONFIG, 128)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    init_weights(model, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    expected = weights(0)
    assert all(torch.equal(expected[name], parameter) for name, parameter in model.named_parameters())


def test_init_of_a_layer_does_not_depend_on_the_other_layers() -> None:
    shallow, deep = weights(0), weights(0, CONFIG.model_copy(update={"n_layers": 3}))
    assert torch.equal(shallow["layers.1.mlp.up_proj.weight"], deep["layers.1.mlp.up_proj.weight"])


def test_init_gives_each_matrix_its_own_values_of_the_stated_deviation() -> None:
    values = weights(0)
    matrices = [value for value in values.values() if value.ndim == 2]
    assert len({tuple(value.flatten()[:4].tolist()) for value in matrices}) == len(matrices)
    for name, value in values.items():
        if value.ndim == 1:
            assert torch.equal(value, torch.ones_like(value))
            continue
        into_residual = "o_proj" in name or "down_proj" in name
        expected = STD / math.sqrt(2 * CONFIG.n_layers) if into_residual else STD
        assert value.std().item() == pytest.approx(expected, rel=0.05), name


def test_init_after_meta_equals_direct_init() -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG, 128)
    model.to_empty(device="cpu")
    init_weights(model, 0)
    direct = weights(0)
    assert all(torch.equal(direct[name], parameter) for name, parameter in model.named_parameters())


def test_init_on_meta_says_what_to_do() -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG, 128)
    with pytest.raises(ValueError, match="to_empty"):
        init_weights(model, 0)


@given(
    rows=st.integers(1, 40), width=st.integers(1, 9), world_size=st.integers(1, 5), piece=st.sampled_from([16, 32, 96])
)
def test_rows_of_all_ranks_are_those_of_one_draw(rows: int, width: int, world_size: int, piece: int) -> None:
    """Whatever the pieces in which a rank draws, and without those behind its rows."""
    digest = hashlib.blake2b(b"3/name", digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    whole = torch.empty(rows, width).normal_(0.0, STD, generator=generator)
    for rank in range(world_size):
        kept = chunk_rows(rows, rank, world_size)
        shard = torch.empty(kept.stop - kept.start, width)
        held = {"local_rows": mock.Mock(return_value=kept), "local_shard": mock.Mock(return_value=shard)}
        with mock.patch.multiple(init, PIECE=piece, **held):
            init.draw_rows("name", torch.nn.Parameter(torch.empty(rows, width)), seed=3, n_layers=2)
        assert torch.equal(shard, whole[kept])


@given(rows=st.integers(1, 40), world_size=st.integers(1, 9))
def test_chunk_rows_cuts_like_torch_chunk(rows: int, world_size: int) -> None:
    values = torch.arange(rows)
    expected = [chunk.tolist() for chunk in values.chunk(world_size)]
    expected += [[]] * (world_size - len(expected))
    assert [values[chunk_rows(rows, rank, world_size)].tolist() for rank in range(world_size)] == expected


def test_local_rows_of_a_plain_tensor_are_all() -> None:
    assert local_rows(torch.zeros(5, 2)) == slice(0, 5)

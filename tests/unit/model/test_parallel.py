"""A model on a mesh of one rank; tests/integration/test_parallel.py has what needs a second process."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zeroband.config.model import LlamaConfig
from zeroband.config.training import Placement, TrainConfig
from zeroband.errors import ConfigError
from zeroband.model import Transformer, evaluating, generate, init_weights, next_token_loss, parallel
from zeroband.model.init import local_shard
from zeroband.model.parallel import allocate, begin_micro_batch, clip_grad_norm_, compiles, parallelize, widest_float
from zeroband.node.gpus import Card
from zeroband.node.mesh import LocalMesh, init_local_mesh

CONFIG = LlamaConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)
VOCAB = 61
TOKENS = torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))
RESHARDS = Placement(reshard_after_forward=True, reduces_micro_batches=False)


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()


def plain(config: LlamaConfig = CONFIG) -> Transformer:
    model = Transformer(config, VOCAB)
    init_weights(model, seed=0)
    return model


def sharded(mesh: LocalMesh, config: LlamaConfig = CONFIG, **train: object) -> Transformer:
    model = plain(config)
    parallelize(model, TrainConfig(**{"dtype": "float32", **train}), mesh)
    return model


def backward(model: nn.Module, tokens: torch.Tensor = TOKENS) -> None:
    next_token_loss(model(tokens), tokens).objective.backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_shard(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def test_ranks_on_unequal_cards_place_a_model_alike(mesh: LocalMesh) -> None:
    """A card on which all is kept, beside one on which nothing is: what each would do alone deadlocks in FSDP2."""
    large, small = Card("LARGE", "l", "1", 1 << 40), Card("SMALL", "s", "2", 1 << 10)
    alone = [parallelize(plain(), TrainConfig(), replace(mesh, cards=(card,))) for card in (large, small)]
    together = [
        parallelize(plain(), TrainConfig(), replace(mesh, cards=cards)) for cards in ((large, small), (small, large))
    ]
    assert alone[0] != alone[1] == together[0] == together[1]


@pytest.mark.parametrize(("others", "is_on"), [(True, True), (False, False)])
def test_what_the_card_of_one_rank_cannot_do_no_rank_does(
    mesh: LocalMesh, monkeypatch: pytest.MonkeyPatch, others: bool, is_on: bool
) -> None:
    """Compiled ranks fill up micro-batches and others do not, so they would exchange different numbers of them."""
    on_gpu = replace(mesh, device=torch.device("cuda", 0))
    monkeypatch.setattr(parallel, "triton_problem", lambda device: "")
    monkeypatch.setattr(parallel, "all_ok", lambda flag, mesh: flag and others)
    assert compiles(TrainConfig(), on_gpu) == is_on


def test_mps_computes_in_float32_only(mesh: LocalMesh) -> None:
    on_mps, train = replace(mesh, device=torch.device("mps")), TrainConfig(dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"train.dtype='bfloat16': mps supports float32 only"):
        parallelize(plain(), train, on_mps)
    parallelize(plain(), TrainConfig(dtype="float32"), on_mps)
    assert widest_float(on_mps.device) == torch.float32


def test_parallelize_shards_root_and_each_block_and_keeps_names(mesh: LocalMesh) -> None:
    model = sharded(mesh, dtype="bfloat16", activation_checkpointing="full")
    assert isinstance(model, FSDPModule)
    assert all(isinstance(block, FSDPModule) for block in model.layers)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain().named_parameters()]


def test_one_rank_in_float32_is_left_as_it_is(mesh: LocalMesh) -> None:
    model = sharded(mesh)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("activation_checkpointing", ["none", "selective", "full"])
def test_fsdp_on_one_rank_gives_gradients_of_the_plain_model(mesh: LocalMesh, activation_checkpointing: str) -> None:
    reference, model = sharded(mesh, activation_checkpointing=activation_checkpointing), plain()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh.mesh)
    for number in range(3):  # one after the other into the same gradient
        backward(reference)
        begin_micro_batch(model, RESHARDS, is_last=number == 2)
        backward(model)
    expected, got = gradients(reference), gradients(model)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parallelize_before_init_on_meta_equals_after(mesh: LocalMesh, dtype: str) -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG, VOCAB)
    parallelize(model, TrainConfig(dtype=dtype), mesh)
    allocate(model, mesh)
    init_weights(model, seed=0)
    assert torch.equal(model(TOKENS), sharded(mesh, dtype=dtype)(TOKENS))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(mesh: LocalMesh) -> None:
    model = sharded(mesh, dtype="bfloat16")
    assert model(TOKENS).dtype == torch.bfloat16
    backward(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}


def test_bfloat16_accumulates_micro_batches_in_float32(mesh: LocalMesh) -> None:
    model = sharded(mesh, dtype="bfloat16")
    by_batch: list[dict[str, torch.Tensor]] = []
    for tokens in TOKENS.split(1):
        backward(model, tokens)
        by_batch.append(gradients(model))
        model.zero_grad()
    for index, tokens in enumerate(TOKENS.split(1)):
        begin_micro_batch(model, RESHARDS, is_last=index == 3)
        backward(model, tokens)
    for name, total in gradients(model).items():
        assert torch.equal(total, sum((batch[name] for batch in by_batch[1:]), start=by_batch[0][name])), name


def test_gradient_sync_off_leaves_shards_without_gradient(mesh: LocalMesh) -> None:
    model = sharded(mesh, dtype="bfloat16")
    begin_micro_batch(model, RESHARDS, is_last=False)
    backward(model)
    assert not gradients(model)
    begin_micro_batch(model, RESHARDS, is_last=True)
    backward(model)
    once = sharded(mesh, dtype="bfloat16")
    backward(once)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, 2 * gradients(once)[name])


@pytest.mark.parametrize("keeps", [False, True])
def test_parameters_that_are_kept_gathered_stay_so_until_the_last_micro_batch(mesh: LocalMesh, keeps: bool) -> None:
    model, placed = sharded(mesh, dtype="bfloat16"), Placement(not keeps, False)
    for is_last in (False, False, True):
        begin_micro_batch(model, placed, is_last=is_last)
        backward(model)
        gathered = [not isinstance(parameter, DTensor) for parameter in model.parameters()]
        assert set(gathered) == {keeps and not is_last}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_written_into_shards_after_accumulation_are_used(mesh: LocalMesh, dtype: str) -> None:
    model = sharded(mesh, dtype=dtype)
    shard = local_shard(model.embed_tokens.weight)
    for is_last in (False, True):
        begin_micro_batch(model, RESHARDS, is_last=is_last)
        backward(model)
    shard.zero_()
    assert model(TOKENS).count_nonzero() == 0


@pytest.mark.parametrize("forward_only", ["evaluating", "generate"])
def test_values_written_into_shards_after_forward_only_are_used(mesh: LocalMesh, forward_only: str) -> None:
    model = sharded(mesh, dtype="bfloat16")
    shard = local_shard(model.embed_tokens.weight)
    if forward_only == "generate":
        generate(model, TOKENS[0], max_new_tokens=1, temperature=0.0, seed=0, context=4)
    else:
        with evaluating(model):
            assert not model(TOKENS).requires_grad
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    shard.zero_()
    assert model(TOKENS).count_nonzero() == 0


def test_clip_scales_down_to_the_limit(mesh: LocalMesh) -> None:
    model = sharded(mesh)
    backward(model)
    expected = torch.cat([gradient.flatten() for gradient in gradients(model).values()]).norm().item()
    assert clip_grad_norm_(model, None).item() == pytest.approx(expected, rel=1e-5)
    assert clip_grad_norm_(model, expected * 2).item() == pytest.approx(expected, rel=1e-5)  # below the limit
    assert clip_grad_norm_(model, 0.5).item() == pytest.approx(expected, rel=1e-5)
    assert clip_grad_norm_(model, 0.5).item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("max_norm", [0.3, 1e-3, 1e6])
def test_clip_scales_by_a_number_that_was_rounded_once_and_not_at_all_below_the_limit(max_norm: float) -> None:
    model = nn.Linear(40, 30)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    scale = min(1.0, max_norm / clip_grad_norm_(model, max_norm).item())
    assert all(torch.equal(g * scale, p.grad) for g, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_clip_returns_a_norm_that_is_not_finite_and_touches_nothing(mesh: LocalMesh, poison: float) -> None:
    model = sharded(mesh)
    backward(model)
    gradients(model)["norm.weight"][0] = poison
    before = {name: gradient.clone() for name, gradient in gradients(model).items()}
    assert not clip_grad_norm_(model, 0.5).isfinite()
    assert all(torch.equal(gradients(model)[name], value) for name, value in before.items() if name != "norm.weight")


@pytest.mark.soak
@pytest.mark.slow
def test_machine_code_of_inductor_gives_the_gradients_of_eager(mesh: LocalMesh) -> None:
    """It takes a C++ compiler its time; that the compiler traces the model is tested every day, with the model."""
    config = CONFIG.model_copy(update={"n_layers": 1})
    eager, compiled = sharded(mesh, config), sharded(mesh, config, compile=True)
    backward(eager)
    backward(compiled)
    assert gradients(compiled).keys() == gradients(eager).keys()
    for name, gradient in gradients(compiled).items():
        torch.testing.assert_close(gradient, gradients(eager)[name], rtol=1e-4, atol=1e-4)

"""A mesh of one rank: all of `parallel` except what needs a second process (see tests/integration/test_parallel.py)."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zeroband.config.model import LlamaConfig
from zeroband.config.training import Placement, TrainConfig
from zeroband.errors import ConfigError
from zeroband.model import Transformer, evaluating, generate, init_weights, next_token_loss
from zeroband.model.init import local_shard
from zeroband.node import mesh as parallel
from zeroband.node.gpus import Card
from zeroband.node.launched import RANKS_FILE
from zeroband.node.mesh import (
    LocalMesh,
    all_ok,
    allocate,
    barrier,
    begin_micro_batch,
    broadcast_json,
    clip_grad_norm_,
    compiles,
    device_kind,
    init_local_mesh,
    join_local_mesh,
    parallelize,
    widest_float,
)

CONFIG = LlamaConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2)
VOCAB = 61
TOKENS = torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(0))


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


RESHARDS = Placement(reshard_after_forward=True, reduces_micro_batches=False)
OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", RANKS_FILE: "a file"}


def backward(model: nn.Module, tokens: torch.Tensor = TOKENS) -> None:
    next_token_loss(model(tokens), tokens).objective.backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_shard(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.defect(10)
def test_mesh_without_torchrun_is_one_rank(mesh: LocalMesh) -> None:
    assert (mesh.rank, mesh.world_size, mesh.mesh.size()) == (0, 1, 1)
    assert dist.get_backend(mesh.control) == "gloo"


@pytest.mark.defect(12)
def test_mesh_refuses_torchrun_over_several_nodes() -> None:
    with pytest.raises(ConfigError, match="--nnodes 1"):
        init_local_mesh({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})


def test_mesh_in_a_program_with_groups_of_its_own_closes_only_what_it_made(mesh: LocalMesh) -> None:
    lent = join_local_mesh(torch.device("cpu"))
    twin = lent.twin()
    assert (lent.rank, lent.world_size, all_ok(True, lent), all_ok(True, twin)) == (0, 1, True, True)
    lent.close()
    lent.close()
    for closed in (lent, twin):
        with pytest.raises(KeyError):  # unknown to torch by now
            dist.get_process_group_ranks(closed.control)
    assert all_ok(True, mesh)


def test_one_process_keeps_the_gpu_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs by name: a machine of the tests has none."""
    current: list[torch.device] = []
    options: list[dict[str, object]] = []

    def ignore(*_: object, **given: object) -> None:
        options.append(given)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for replaced, name in ((dist, "init_process_group"), (parallel, "init_device_mesh"), (parallel, "_control_group")):
        monkeypatch.setattr(replaced, name, ignore)
    card = SimpleNamespace(name="CARD", total_memory=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    on_second = torch.device("cuda", 1)
    second = join_local_mesh(on_second)
    assert (second.device, second.gpu_bytes) == (on_second, 80)
    assert join_local_mesh(torch.device("cpu")).device == init_local_mesh({}).device == torch.device("cuda", 0)
    assert current == [on_second, torch.device("cuda", 0), torch.device("cuda", 0)]
    assert [given["device_id"] for given in options if "device_id" in given] == current


@pytest.fixture
def start_rank_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[LocalMesh, dict[str, Any]]]:
    """start(sees, other=...): rank 1 of 2 on a machine with these cards, beside a rank 0 that has told its own.

    Returns its mesh, and how the process groups were asked for.
    """
    asked: dict[str, Any] = {}

    def note(name: str, made: object = None) -> Callable[..., object]:
        def called(*positional: object, **given: object) -> object:
            asked[name] = {"positional": positional, **given}
            return made

        return called

    def start(sees: Sequence[Card], *, other: Card | None) -> tuple[LocalMesh, dict[str, Any]]:
        def properties_of(device: torch.device) -> SimpleNamespace:
            card = sees[device.index]
            place = {"pci_domain_id": 0, "pci_bus_id": card.bus, "pci_device_id": 0}
            return SimpleNamespace(name=card.name, uuid=card.uuid, total_memory=card.total_bytes, **place)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sees))
        monkeypatch.setattr(torch.cuda, "set_device", note("set"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
        monkeypatch.setattr(dist, "init_process_group", note("default"))
        monkeypatch.setattr(dist, "new_group", note("control", dist.ProcessGroup(1, 2)))
        monkeypatch.setattr(parallel, "init_device_mesh", note("mesh"))
        first = dist.FileStore(str(tmp_path / "ranks"), 2)
        first.set("here0", "")
        first.set("card/0", json.dumps(other and asdict(replace(other, bus=f"0:{other.bus}:0"))))
        mesh = init_local_mesh(OF_TWO | {RANKS_FILE: str(tmp_path / "ranks")})
        return mesh, asked

    return start


A, B, SMALL = Card("CARD", "a", "1", 80), Card("CARD", "b", "2", 80), Card("SMALL", "s", "3", 24)
SLICES = Card("CARD MIG", "a1", "1", 40), Card("CARD MIG", "a2", "1", 40)


@pytest.mark.parametrize(
    ("sees", "other", "bound", "gpu_bytes"),
    [
        pytest.param([A, B], A, torch.device("cuda", 1), 80, id="one each"),
        pytest.param([B], A, torch.device("cuda", 0), 80, id="one each, and sees no other"),
        pytest.param([A], A, None, 40, id="one for both"),
        pytest.param([A], SMALL, torch.device("cuda", 0), 24, id="unequal"),
        pytest.param([SMALL], A, torch.device("cuda", 0), 24, id="unequal, the other way round"),
        pytest.param([SLICES[0]], SLICES[1], None, 40, id="two slices of one"),
        pytest.param([], None, None, None, id="none"),
    ],
)
def test_ranks_go_by_the_cards_of_all_and_by_the_least_of_them(
    start_rank_1: Callable[..., tuple[LocalMesh, dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
    sees: Sequence[Card],
    other: Card | None,
    bound: torch.device | None,
    gpu_bytes: int | None,
) -> None:
    """Those that share a GPU, or have none, talk through gloo, and the control group waits for days."""
    mesh, asked = start_rank_1(sees, other=other)
    assert asked["default"]["device_id"] == bound
    assert asked["default"]["positional"] == (("cpu:gloo,cuda:nccl",) if bound else ("gloo",))
    assert asked["default"]["timeout"] == timedelta(minutes=10)
    assert asked["control"]["timeout"] == timedelta(days=7)
    assert mesh.gpu_bytes == gpu_bytes


@pytest.mark.parametrize(("sees", "other"), [([A], None), ([], A)])
def test_node_of_which_one_rank_sees_no_gpu_is_refused(
    start_rank_1: Callable[..., tuple[LocalMesh, dict[str, Any]]], sees: Sequence[Card], other: Card | None
) -> None:
    without = 1 if other else 0
    with pytest.raises(
        ConfigError, match=f"rank {1 - without} of this node computes on a GPU, and rank {without} finds none"
    ):
        start_rank_1(sees, other=other)


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


def with_devices(monkeypatch: pytest.MonkeyPatch, *, gpus: int = 0, has_mps: bool = False) -> None:
    """Devices by name: a machine of the tests has none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)


@pytest.mark.parametrize(
    ("gpus", "has_mps", "wanted", "kind"),
    [
        *((2, False, None, "cuda"), (0, True, None, "mps"), (0, False, None, "cpu")),
        *((2, False, "cpu", "cpu"), (0, True, "cpu", "cpu"), (2, True, "mps", "mps"), (2, True, "cuda", "cuda")),
    ],
)
def test_node_computes_on_what_it_is_told_or_on_the_fastest_that_is_there(
    monkeypatch: pytest.MonkeyPatch, gpus: int, has_mps: bool, wanted: Any, kind: str
) -> None:
    with_devices(monkeypatch, gpus=gpus, has_mps=has_mps)
    assert device_kind(wanted) == kind


@pytest.mark.parametrize(("wanted", "gpus", "found"), [("cuda", 0, "cpu"), ("mps", 1, "cuda, cpu")])
def test_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, gpus: int, found: str
) -> None:
    with_devices(monkeypatch, gpus=gpus)
    with pytest.raises(ConfigError, match=f"train.device='{wanted}': torch .* none on this machine, but {found};"):
        init_local_mesh({}, kind=wanted)


@pytest.mark.parametrize(("wanted", "device"), [("cpu", "cpu"), ("mps", "mps")])
def test_rank_that_leaves_the_gpus_alone_talks_through_gloo(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, device: str
) -> None:
    asked: list[Any] = []
    with_devices(monkeypatch, gpus=2, has_mps=True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("it was to stay off"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: asked.append((backend, given)))
    monkeypatch.setattr(dist, "new_group", lambda **_: dist.ProcessGroup(0, 1))
    monkeypatch.setattr(parallel, "init_device_mesh", lambda over, *_, **__: asked.append(over))
    local = init_local_mesh({}, kind=wanted)
    assert (local.device, local.gpu_bytes) == (torch.device(device), None)
    assert asked[0][0] == "gloo" and asked[0][1]["device_id"] is None
    assert asked[1] == "cpu"


def test_mps_is_for_one_rank_in_float32(monkeypatch: pytest.MonkeyPatch, mesh: LocalMesh) -> None:
    with_devices(monkeypatch, has_mps=True)
    environ = OF_TWO
    with pytest.raises(ConfigError, match=r"train.device='mps': 2 ranks cannot share parameters on it"):
        init_local_mesh(environ)
    on_mps, train = replace(mesh, device=torch.device("mps")), TrainConfig(dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"train.dtype='bfloat16': mps supports float32 only"):
        parallelize(plain(), train, on_mps)
    parallelize(plain(), TrainConfig(dtype="float32"), on_mps)
    assert widest_float(on_mps.device) == torch.float32


def test_decisions_of_one_rank_are_its_own(mesh: LocalMesh) -> None:
    assert broadcast_json({"a": (1, 2), "ü": None}, mesh) == {"a": [1, 2], "ü": None}
    assert all_ok(True, mesh)
    assert not all_ok(False, mesh)
    barrier(mesh)


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

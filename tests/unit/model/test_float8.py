"""Products in float8 by torchao, which emulates them here: it rounds as a GPU does, and multiplies in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeroband.config.model import LlamaConfig
from zeroband.config.training import Float8Recipe, TrainConfig
from zeroband.model import Transformer, init_weights, parallel
from zeroband.model.parallel import allocate, float8_problem, parallelize
from zeroband.node.mesh import LocalMesh, init_local_mesh
from zeroband.state.flat import FlatLayout

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs the extra torchao")

CONFIG, VOCAB = LlamaConfig(d_model=32, n_layers=2, n_heads=2, d_ff=48), 61
TOKENS = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this device multiplied in float8."""
    torchao = pytest.importorskip("torchao.float8")
    recipe = torchao.Float8LinearConfig.from_recipe_name
    emulated = staticmethod(lambda name: replace(recipe(name), emulate=True))
    monkeypatch.setattr(torchao.Float8LinearConfig, "from_recipe_name", emulated)
    monkeypatch.setattr(parallel, "float8_problem", lambda _device: "")


def model_of(mesh: LocalMesh, **train: object) -> Transformer:
    with torch.device("meta"):
        model = Transformer(CONFIG, VOCAB)
    parallelize(model, TrainConfig(**train), mesh)
    allocate(model, mesh)
    init_weights(model, seed=0)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(TOKENS, None, TOKENS).objective.backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}


def float8_layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_rounds_products_of_the_blocks_alone_and_keeps_the_state(
    mesh: LocalMesh, anywhere: None, recipe: Float8Recipe
) -> None:
    plain, rounded = model_of(mesh), model_of(mesh, float8=recipe)
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert float8_layers(rounded) == linear and all(name.startswith("layers.") for name in linear)
    assert FlatLayout.of(rounded).digest() == FlatLayout.of(plain).digest()
    for (name, ours), (_, theirs) in zip(rounded.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(ours, DTensor) and ours.dtype == torch.float32, name
        assert torch.equal(ours.full_tensor(), theirs.full_tensor()), name
    found, expected = gradients(rounded), gradients(plain)
    assert found.keys() == expected.keys() == dict(plain.named_parameters()).keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert 0 < error < 0.2, name


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_activations_that_are_made_again_are_rounded_as_before(
    mesh: LocalMesh, anywhere: None, checkpointing: str
) -> None:
    kept = gradients(model_of(mesh, float8="tensorwise"))
    again = gradients(model_of(mesh, float8="tensorwise", activation_checkpointing=checkpointing))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.slow
def test_blocks_in_float8_compile_whole(mesh: LocalMesh, anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compiled = gradients(model_of(mesh, float8="tensorwise", compile=True))
    plain = gradients(model_of(mesh, float8="tensorwise"))
    assert counter.frame_count == 2
    for name, gradient in compiled.items():
        torch.testing.assert_close(gradient, plain[name], rtol=2e-2, atol=2e-2)


def test_device_without_float8_multiplies_as_before(mesh: LocalMesh) -> None:
    assert float8_layers(model_of(mesh, float8="rowwise")) == set()


def test_cards_from_ada_on_multiply_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(capability=(8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    cuda = torch.device("cuda")
    assert float8_problem(cuda) == ""
    card.capability = (8, 0)
    assert float8_problem(cuda) == "NVIDIA A100 is older than compute capability 8.9"
    assert float8_problem(torch.device("cpu")) == "there is no GPU"

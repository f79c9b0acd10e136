"""AdamW with moments in bfloat16 and int8 by torchao: bytes, steps beside float32, what checkpoints keep."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, cast

import pytest
import torch
import xxhash
from tests.unit.model.tiny import OPTIM, train, values
from torch import Tensor, nn

from zeroband.checkpoint.layout import inner_header
from zeroband.checkpoint.manifest import StoredFile
from zeroband.checkpoint.own_state import load_inner
from zeroband.checks.needs import Needs
from zeroband.config.model import LlamaConfig
from zeroband.config.optim import AdamWConfig, MuonConfig, StateDtype
from zeroband.config.schema import RunConfig
from zeroband.model.init import init_weights
from zeroband.model.low_bit import LowBitAdamW, low_bit_zeros
from zeroband.model.optim import InnerOptimizer
from zeroband.model.transformer import Transformer
from zeroband.node.async_copy import HostCopier
from zeroband.state.flat import FlatLayout, ShardMap

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs the extra torchao")

LLAMA = LlamaConfig(d_model=64, n_layers=1, n_heads=2, d_ff=128)
VOCAB = 128


class Wide(nn.Module):
    """A matrix of whole blocks, one that is too small, one of no whole blocks, a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.small, self.odd = (nn.Parameter(values(*shape)) for shape in ((80, 64), (16, 16), (71, 63)))
        self.norm = nn.Parameter(values(64, seed=1))


def made(state_dtype: StateDtype = "int8", model: nn.Module | None = None) -> tuple[nn.Module, InnerOptimizer]:
    optim = OPTIM.model_copy(update={"state_dtype": state_dtype, "adamw": AdamWConfig(lr=0.01)})
    model = model or Wide()
    return model, InnerOptimizer(model, optim, total_steps=20)


def plain(optimizer: InnerOptimizer) -> dict[str, Tensor]:
    return {name: moment.dequantize().clone() for name, moment in optimizer.named_moments().items()}


def stored_bytes(tensor: Tensor) -> int:
    names, _ = tensor.__tensor_flatten__() if hasattr(tensor, "__tensor_flatten__") else ([], None)
    return sum(getattr(tensor, name).untyped_storage().nbytes() for name in names if name != "qmap") or tensor.nbytes


def test_moments_take_a_half_and_a_quarter_of_their_bytes_as_predicted() -> None:
    sizes: dict[str, int] = {}
    for dtype in ("float32", "bfloat16", "int8"):
        model, optimizer = made(dtype, Transformer(LLAMA, VOCAB))
        sizes[dtype] = sum(map(stored_bytes, optimizer.named_moments().values()))
        config = RunConfig.model_validate({"model": LLAMA.model_dump(), "optim": {"state_dtype": dtype}})
        needs = Needs(config, VOCAB)
        assert needs.params == sum(parameter.numel() for parameter in model.parameters())
        norms = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
        assert needs.moment_bytes <= sizes[dtype] <= needs.moment_bytes + 6 * norms
        assert needs.training_bytes == 8 * needs.params + needs.moment_bytes
    whole = sizes["float32"]
    assert whole == 8 * needs.params and sizes["bfloat16"] < 0.505 * whole and sizes["int8"] < 0.26 * whole


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.003), ("int8", 0.02)])
def test_steps_follow_those_with_moments_in_float32(dtype: StateDtype, bound: float) -> None:
    (model, optimizer), (exact, reference), (fresh, _) = made(dtype), made("float32"), made()
    train(model, optimizer, 0, 10)
    train(exact, reference, 0, 10)
    assert optimizer.update_count == reference.update_count == optimizer.step_count == 10
    for name, parameter in model.named_parameters():
        moved = (exact.get_parameter(name) - fresh.get_parameter(name)).norm()
        error = float((parameter - exact.get_parameter(name)).detach().norm() / moved.detach())
        assert 0 < error < bound if name == "matrix" else error < 1e-5, (name, error)


def test_matrices_of_whole_blocks_are_in_int8_and_decay() -> None:
    model, optimizer = made()
    kinds = {name: type(moment).__name__ for name, moment in optimizer.named_moments().items()}
    assert {name for name, kind in kinds.items() if kind == "OptimState8bit"} == {"exp_avg.matrix", "exp_avg_sq.matrix"}
    before, lr = model.get_parameter("matrix").detach().clone(), optimizer.lr
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.get_parameter("matrix").detach(), before * (1 - 0.1 * lr))


def test_chunks_make_the_same_step_as_the_whole() -> None:
    stepped: list[tuple[Tensor, Tensor]] = []
    for chunk in (4096, 1 << 20):
        parameter, update = values(80, 64), LowBitAdamW(AdamWConfig(), compiled=False, chunk=chunk)
        moments = [low_bit_zeros(parameter, "int8", signed=signed) for signed in (True, False)]
        update.step(parameter, values(80, 64, seed=2), moments, torch.ones(()), 0.1, 0.1)
        stepped.append((parameter, moments[0].dequantize()))
    assert all(torch.equal(one, other) for one, other in zip(*stepped, strict=True))
    assert not torch.equal(stepped[0][0], values(80, 64))


def test_step_that_is_not_finite_changes_nothing_and_forgotten_moments_are_zero() -> None:
    model, optimizer = made()
    train(model, optimizer, 0, 2)
    before = {**plain(optimizer), **{name: p.detach().clone() for name, p in model.named_parameters()}}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step(found_inf=torch.ones(()))
    after = {**plain(optimizer), **dict(model.named_parameters())}
    assert (optimizer.step_count, optimizer.update_count) == (3, 2)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    shared = optimizer.moments()["exp_avg"]["matrix"]
    optimizer.forget_moments()
    assert not any(moment.any() for moment in (*plain(optimizer).values(), shared.dequantize()))
    assert (optimizer.step_count, optimizer.update_count) == (3, 0)


def test_muons_momentum_stays_in_float32() -> None:
    model = Transformer(LLAMA, VOCAB)
    init_weights(model, seed=0)  # its memory may hold anything, also what is not finite
    optim = OPTIM.model_copy(update={"state_dtype": "int8", "muon": MuonConfig(ns_steps=1)})
    optimizer = InnerOptimizer(model, optim, total_steps=20)
    low = {name for name, moment in optimizer.named_moments().items() if type(moment) is not Tensor}
    assert {name.split(".", 1)[1] for name in low} == {
        name for name, parameter in model.named_parameters() if parameter.ndim == 2 and not name.startswith("layers.")
    }
    train(model, optimizer, 0, 1)
    assert optimizer.update_count == 1 and all(parameter.isfinite().all() for parameter in model.parameters())
    config = {"model": LLAMA.model_dump(), "optim": {"state_dtype": "int8", "muon": {}}}
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    predicted = Needs(RunConfig.model_validate(config), VOCAB).moment_bytes
    assert predicted <= sum(map(stored_bytes, optimizer.named_moments().values())) <= predicted + 6 * norms


@pytest.mark.parametrize(
    ("saved", "loaded"), [("int8", "int8"), ("int8", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_checkpoint_goes_on_with_either_type(saved: StateDtype, loaded: StateDtype, tmp_path: Path) -> None:
    """The file holds float32, as a checkpoint's copier reads it from the moments."""
    (model, optimizer), (_, other) = made(saved), made(loaded)
    train(model, optimizer, 0, 3)
    layout = FlatLayout.of(model)
    buffers = {moment: torch.zeros(layout.numel) for moment in optimizer.moment_names}
    with ExitStack() as stack:
        copier = HostCopier(stack)
        copier.begin(
            [
                (part, shards[name].detach().reshape(-1))
                for moment, shards in optimizer.moments().items()
                for name, part in ShardMap(layout, 0, 1).parts(buffers[moment], shards)
            ]
        )
        copier.finish()
    data = inner_header(layout.slots, list(buffers)) + b"".join(flat.numpy().tobytes() for flat in buffers.values())
    (path := tmp_path / "inner").write_bytes(data)
    expected = StoredFile(len(data), xxhash.xxh3_128_hexdigest(data))
    load_inner(other.named_moments(), lambda: cast(BinaryIO, path.open("rb", buffering=0)), expected)
    for name, moment in plain(optimizer).items():
        again = plain(other)[name]
        exact = loaded == "float32" or saved == loaded == "bfloat16" or not name.endswith(".matrix")
        assert torch.equal(again, moment) if exact else (again - moment).norm() < 0.02 * moment.norm()

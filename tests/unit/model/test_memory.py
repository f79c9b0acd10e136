"""What lies in memory at the sizes of a GPU cluster, found with fake tensors, which have sizes and no bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroband.config.model import LlamaConfig
from zeroband.model import Transformer, attend_plain, linear_loss, next_token_loss, varlen_attention
from zeroband.model.attention import Attend

T, D, V = 8192, 4096, 128_256
"""Sequence length, width and vocabulary of configs/10B.toml."""


class Live(TorchDispatchMode):
    """Adds up the storages that live at a time; `square`: the side of the largest square in the last two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = self.square = 0
        self._known: set[int] = set()

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = StorageWeakRef(storage).cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor)
                self.square = max(self.square, min(tensor.shape[-2:], default=0) if tensor.ndim > 1 else 0)
        return result


def peak_of_head(use: Any, z_loss: float) -> int:
    """Bytes of head and loss, forward and backward, at the shape of the 10B preset: weight and gradients included."""
    with FakeTensorMode(), Live() as live:
        x = torch.empty(1, T, D, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(V, D, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(1, T, dtype=torch.int64)
        use(x, weight, targets, z_loss=z_loss).objective.mul(1e-3).backward()
        assert x.grad is not None and weight.grad is not None
    return live.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("z_loss", "by_target"), [(0.0, False), (1e-4, False), (1e-4, True)])
def test_head_and_loss_of_the_10b_model_take_at_most_four_gigabytes(z_loss: float, by_target: bool) -> None:
    assert peak_of_head(partial(linear_loss, by_target=by_target), z_loss) <= 4e9


@pytest.mark.slow
def test_loss_of_all_logits_at_once_would_take_five_times_as_much() -> None:
    def at_once(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **options: float) -> Any:
        return next_token_loss(x @ weight.T, targets, **options)

    assert peak_of_head(at_once, 1e-4) > 5 * peak_of_head(linear_loss, 1e-4)


HAS_CUDA, HAS_GPU = torch.version.cuda is not None, torch.cuda.is_available()


@pytest.mark.parametrize("attend_of", [varlen_attention, lambda: attend_plain], ids=["varlen", "plain"])
def test_no_path_of_attention_makes_a_mask_of_all_pairs_on_a_gpu(attend_of: Callable[[], Attend]) -> None:
    attend = attend_of()
    if HAS_CUDA != HAS_GPU or (attend is attend_plain and not HAS_GPU):
        pytest.skip("fake CUDA tensors need a torch without CUDA, and to choose among torch's kernels a GPU")
    with FakeTensorMode():
        query, key = (torch.empty(1, T, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8))
        borders = torch.empty(13, dtype=torch.int32, device="cuda")
        with Live() as live:
            assert attend(query, key, key, borders).shape == query.shape
    assert 0 < live.square < T / 4


@pytest.mark.slow
@pytest.mark.parametrize("attend_of", [varlen_attention, lambda: attend_plain], ids=["varlen", "plain"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_pass_of_the_model_makes_one_either(attend_of: Callable[[], Attend], device: str) -> None:
    if device == "cuda" and not HAS_GPU:
        pytest.skip("gradients of fake CUDA tensors need a GPU")
    config = LlamaConfig(d_model=64, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=64)
    with FakeTensorMode(), torch.device(device):
        model = Transformer(config, 64, attend_of())
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.to(torch.bfloat16)))
        tokens, borders = torch.empty(1, T, dtype=torch.int64), torch.empty(13, dtype=torch.int32)
        with Live() as live:
            model(tokens, borders, tokens).objective.backward()
        assert model.embed_tokens.weight.grad is not None
    assert config.head_size < live.square < T / 4

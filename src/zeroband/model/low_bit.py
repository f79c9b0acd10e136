"""AdamW with moments in bfloat16, or in int8 with a scale for each 256 values (arXiv:2110.02861), by torchao.

Calls the function behind torchao's AdamW8bit on local shards, since FSDP2 moves shards and the class knows them by
address. Imports torchao when called: it takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zeroband.config.optim import AdamWConfig, StateDtype
from zeroband.node.sharding import is_sharded, local_part

_BLOCK = 256
_LEAST_VALUES = 4096
CHUNK = 1 << 20
"""Values stepped together, a multiple of a block; bounds the temporaries where they are not compiled away."""


def fits_blocks(parameter: Tensor) -> bool:
    """Whether this rank's shard consists of whole blocks and is not small; torchao leaves others in float32."""
    numel = local_part(parameter).numel()
    return numel >= _LEAST_VALUES and numel % _BLOCK == 0


def low_bit_zeros(parameter: Tensor, dtype: StateDtype, *, signed: bool) -> Tensor:
    """Return a moment, sharded like its parameter; `copy_` rounds float32 into it, `dequantize` reads it."""
    if dtype != "int8":
        return torch.zeros_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
    torchao: Any = importlib.import_module("torchao.optim.subclass_8bit")  # has no types
    shard = local_part(parameter)
    moment = torchao.OptimState8bit.zeros(shard.shape, signed, _BLOCK, shard.device)
    if not is_sharded(parameter):
        return moment
    from torch.distributed.tensor import DTensor  # loaded already

    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    return DTensor.from_local(moment, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())


class LowBitAdamW:
    """torchao's update of one parameter, in float32 whatever the type of the moments.

    `compiled`: fused by torch.compile, in one graph for each length; otherwise by chunks, which is slower.
    """

    def __init__(self, config: AdamWConfig, *, compiled: bool, chunk: int = CHUNK) -> None:
        torchao: Any = importlib.import_module("torchao.optim.adam")  # has no types
        self._rule = torchao.single_param_adam
        self._config = config
        self._is_compiled, self._chunk = compiled, chunk
        if compiled:
            self._rule = torch.compile(self._rule, fullgraph=True, dynamic=False)

    def step(
        self, parameter: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor, lr: float, decay: float
    ) -> None:
        """Update local shards in place. `moments`: from `low_bit_zeros`. `count`: () float32, this step included."""
        flat = [tensor.reshape(-1) for tensor in (parameter, gradient, *moments)]
        size = parameter.numel() if self._is_compiled else self._chunk
        (beta1, beta2), eps, rate = self._config.betas, self._config.eps, torch.tensor(lr)
        with self._any_lengths():
            for start in range(0, parameter.numel(), size):
                p, g, first, second = (tensor[start : min(start + size, parameter.numel())] for tensor in flat)
                self._rule(p, g, count, first, second, None, rate, beta1, beta2, decay, eps, True, False)

    def _any_lengths(self) -> contextlib.AbstractContextManager[Any]:
        """Lift torch's limit of graphs: a model may have more lengths of shards, which are few and do not change."""
        if not self._is_compiled:
            return contextlib.nullcontext()
        return torch._dynamo.utils.disable_cache_limit()  # pyright: ignore[reportPrivateUsage]

"""Muon: steps of matrices by momentum orthogonalised with Newton-Schulz (Jordan 2024; arXiv:2502.16982).

torch.optim.Muon, its reference in tests, supports neither shards nor stacks of matrices, and loads torch's compiler at
its first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from zeroband.config.optim import MuonConfig
from zeroband.errors import ConfigError
from zeroband.kernels.one_rounding import exact_sqrt
from zeroband.model.language_model import LanguageModel
from zeroband.node.sharding import is_sharded, local_part, map_whole

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic: steep at 0, so that five steps suffice; singular values end between 0.7 and 1.2."""

_MIN_NORM = 1e-7
_FRACTION_BITS = 25
_CHUNK = 1 << 26
"""Elements of a stack of matrices that are processed together."""

_NOT_FOR_MUON = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def muon_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the matrices, and stacks of them (experts), of the blocks, except embeddings and convolutions.

    Embedding and head are left to AdamW; a module without blocks contributes all matrices. Raises ConfigError if there
    are none.
    """
    inside = (model.blocks if isinstance(model, LanguageModel) else ()) or [model]
    parts = [part for block in inside for part in block.modules() if not isinstance(part, _NOT_FOR_MUON)]
    of_parts = {id(one) for part in parts for one in part.parameters(recurse=False)}
    found = {
        name: one
        for name, one in model.named_parameters()
        if one.ndim in (2, 3) and one.requires_grad and id(one) in of_parts
    }
    if not found:
        raise ConfigError(
            "[optim.muon] applies to matrices between embedding and head, and this model has none; drop the section"
        )
    return found


def orthogonalized(matrices: Tensor, *, steps: int) -> Tensor:
    """Return approximately U V^T of each matrix U S V^T: singular values end between 0.7 and 1.2.

    Shapes: (..., m, n) of any float type; the result has the same.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_MIN_NORM)
    plus_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = plus_product(gram, gram, gram, beta=_B, alpha=_C)
        x = plus_product(x, polynomial, x, beta=_A)
    return x.mT if is_tall else x


def orthogonalized_exactly(matrices: Tensor, *, steps: int) -> Tensor:
    """Compute `orthogonalized` with the same bits on any device, number of threads and order of sums.

    Shapes: (..., m, n) float32; the result has the same. Factors are rounded to multiples of 2^-25. Singular values
    stay below 1.2, those of the polynomial below 2.9, so by Cauchy-Schwarz every partial sum of a product is below 4
    and a multiple of 2^-50, which float64 represents exactly. Slow on GPUs with little float64 throughput.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).double()
    x = _on_grid(x / _exact_norm(x))
    for _ in range(steps):
        gram = _on_grid(x @ x.mT)
        polynomial = _on_grid((gram @ gram) * _C + gram * _B)
        x = _on_grid(polynomial @ x + x * _A)
    return (x.mT if is_tall else x).float()


def _on_grid(x: Tensor) -> Tensor:
    return x.mul_(2.0**_FRACTION_BITS).round_().mul_(2.0**-_FRACTION_BITS)


def _exact_norm(x: Tensor) -> Tensor:
    """Return the Frobenius norm of each matrix as float64, from a sum of integers; infinite for zeros, to keep them."""
    largest = x.abs().amax((-2, -1), keepdim=True)
    bits = (62 - (x.shape[-2] * x.shape[-1]).bit_length()) // 2
    integers = (x / largest * 2.0**bits).round_().long()
    norm = exact_sqrt(integers.square().sum((-2, -1), keepdim=True).double()) * 2.0**-bits * largest
    return torch.where(largest > 0, norm, torch.inf)


def muon_step(
    parameters: Mapping[str, nn.Parameter],
    momenta: Mapping[str, Tensor],
    config: MuonConfig,
    *,
    lr: float,
    weight_decay: float,
    is_exact: bool = False,
    found_inf: Tensor | None = None,
) -> None:
    """Update this rank's shards of matrices and momenta from their gradients, in place.

    Each matrix is gathered on one rank for its iteration, in bfloat16 on GPUs. `is_exact`: same bits on any number of
    ranks and any device. `found_inf`: () float32 on the parameters' device; if 1, nothing changes. Called by all local
    ranks with gradients of the same parameters.
    """
    for group in _groups(parameters):
        directions = [_direction(parameters[name], momenta[name], config, found_inf) for name in group]
        updates = _orthogonalized_each([parameters[name] for name in group], directions, config, is_exact=is_exact)
        for name, update in zip(group, updates, strict=True):
            theta, scale = local_part(parameters[name].data), lr * _scale(config, parameters[name].shape)
            moved = theta * (1 - lr * weight_decay) - update.float().mul_(scale)  # one rounding for each operation
            theta.copy_(moved if found_inf is None else torch.where(found_inf > 0, theta, moved))


def _groups(parameters: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """Yield the names of parameters to process together: a stack, whose matrices FSDP2 keeps whole, or one per rank."""
    waiting: list[str] = []
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        parameter = parameters[name]
        if parameter.grad is None:
            continue
        if parameter.ndim == 3:
            yield [name]
            continue
        waiting.append(name)
        if len(waiting) == (parameter.device_mesh.size() if is_sharded(parameter) else 1):
            yield waiting
            waiting = []
    if waiting:
        yield waiting


def _direction(parameter: nn.Parameter, momentum: Tensor, config: MuonConfig, found_inf: Tensor | None) -> Tensor:
    """Update this rank's shard of the momentum and return its shard of the step before orthogonalisation."""
    assert parameter.grad is not None
    average, gradient = local_part(momentum), local_part(parameter.grad)
    fresh = gradient * (1 - config.momentum)  # as torch.optim.Muon: a mean of gradients, not their sum
    following = average * config.momentum + fresh
    if found_inf is not None:
        following = torch.where(found_inf > 0, average, following)
        fresh = torch.where(found_inf > 0, 0.0, fresh)
    average.copy_(following)
    return following * config.momentum + fresh if config.nesterov else following


def _orthogonalized_each(
    parameters: Sequence[nn.Parameter], directions: Sequence[Tensor], config: MuonConfig, *, is_exact: bool
) -> list[Tensor]:
    """Orthogonalise matrices, given and returned as this rank's shards."""
    if not is_exact and directions[0].is_cuda:
        directions = [direction.bfloat16() for direction in directions]
    orthogonal = partial(orthogonalized_exactly if is_exact else orthogonalized, steps=config.ns_steps)
    first = parameters[0]
    if first.ndim == 3:
        count = max(1, _CHUNK // (first.shape[1] * first.shape[2]))
        return [torch.cat([orthogonal(part) for part in stack.split(count)]) for stack in directions]
    if is_sharded(first) and first.device_mesh.size() > 1:
        return map_whole(directions, [one.shape[0] for one in parameters], first.device_mesh, orthogonal)
    return [orthogonal(matrix) for matrix in directions]


def _scale(config: MuonConfig, shape: torch.Size) -> float:
    """Return the learning rate's factor: to match AdamW's step size, or Muon's original one."""
    rows, columns = shape[-2:]
    return 0.2 * sqrt(max(rows, columns)) if config.adjust_lr == "match_rms_adamw" else sqrt(max(1.0, rows / columns))

"""A module that is not this package's as a language model: its layers found, its answers read, its values moved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroband.config.training import ActivationCheckpointing
from zeroband.errors import ConfigError
from zeroband.model.blueprint import Blueprint, ReadParameter
from zeroband.model.init import local_rows, local_shard
from zeroband.model.language_model import LanguageModel
from zeroband.model.loss import IGNORE_INDEX, TokenLoss
from zeroband.model.recompute import recomputed
from zeroband.node.mesh import LocalMesh
from zeroband.node.sharding import NamedParameters, fingerprint_of


class Answer(NamedTuple):
    """What a module made of a micro-batch; it has one of the first two at least."""

    logits: Tensor | None = None
    """(b, t, v) of any float type."""
    loss: Tensor | None = None
    """() mean over the targets that count, which is taken as it is."""
    auxiliary: Tensor | None = None
    """() what is learned besides, per target, such as the balance of experts; not part of the loss that is reported."""


class ForeignBlueprint(Blueprint):
    """How a module of somebody else is made."""

    @abstractmethod
    def save(self, read: ReadParameter, folder: Path, dtype: torch.dtype) -> None:
        """Write the model with these parameters into a folder, in its own layout. Raises OSError."""
        ...


class ForeignModel(LanguageModel):
    """A module of somebody else. Its parameters keep their names."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], ends: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.module = module
        self._blocks = tuple(blocks)  # known to `module` already: a ModuleList would give them a second name
        self._ends = tuple(ends)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self._blocks

    @property
    def ends(self) -> Sequence[nn.Module]:
        return self._ends

    def trained(self) -> NamedParameters:
        return NamedParameters({name: p for name, p in self.module.named_parameters() if p.requires_grad})

    def recompute(self, how: ActivationCheckpointing) -> None:
        if how != "none":
            for block in self._blocks:
                block.forward = partial(_recomputed, how, block.forward)

    @abstractmethod
    def answer(self, tokens: Tensor, cu_seqlens: Tensor | None, targets: Tensor | None) -> Answer:
        """Call the module. Shapes as in `forward`."""
        ...

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor | None = None, targets: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor | TokenLoss:
        """As `LanguageModel` says."""
        if targets is None:
            logits = self.answer(tokens, cu_seqlens, None).logits
            assert logits is not None, "whoever asks for logits has made sure that there are some"
            return logits
        counted = (targets != IGNORE_INDEX).sum()
        # a mean over no target would be no number
        asked = torch.where(counted > 0, targets, 0) if self.has_own_loss else targets
        answer = self.answer(tokens, cu_seqlens, asked)
        if answer.loss is not None:
            objective = answer.loss.float() * counted
            loss = TokenLoss(objective, objective.detach(), counted)
        else:
            assert answer.logits is not None, "a module gives logits or a loss"
            loss = self.logits_loss(answer.logits.flatten(0, -2), targets.flatten(), z_loss=z_loss)
        if answer.auxiliary is None or not torch.is_grad_enabled():
            return loss
        return loss._replace(objective=loss.objective + answer.auxiliary.float() * loss.targets)


def _recomputed(how: Literal["selective", "full"], forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return recomputed(how, partial(forward, **named), *args, draws=True)  # it may have dropout


def positions_of(cu_seqlens: Tensor, shape: torch.Size) -> Tensor:
    """Place of each token in its document, (b, t) int64, by the borders of all rows laid end to end."""
    places = torch.arange(shape.numel(), device=cu_seqlens.device)
    begins = cu_seqlens.long()
    return (places - begins[torch.searchsorted(begins, places, right=True) - 1]).view(shape)


def layers_of(module: nn.Module, kinds: Sequence[str] = ()) -> list[nn.Module]:
    """The layers of a module: those of the named classes, else the entries of its largest ModuleList; or none."""
    if named := [part for part in module.modules() if type(part).__name__ in kinds]:
        return named
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return list(max(lists, key=_numel)) if lists else []


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def require_trainable(module: nn.Module, what: str) -> None:
    """Raise ConfigError for what a run cannot train, or cannot keep. `what`: the key that the module came of."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError(f"{what}: no parameter of the model has requires_grad, so there is nothing to train")
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"{what}: parameter {name} is {parameter.dtype}; parameters are float32, and train.dtype is the type "
                "that is computed in: build the model in float32"
            )
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise ConfigError(
                f"{what}: {name} is a {type(part).__name__} with running statistics, which would differ between nodes "
                "and are in no checkpoint; take a norm without them, or track_running_stats=False"
            )


def emptied(module: nn.Module) -> None:
    """Put a module on the meta device, in place. What is tied stays tied."""
    seen: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            setattr(part, name, seen.setdefault(id(parameter), empty))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty_like(buffer, device="meta"))


Values = dict[str, Tensor]
"""Whole parameters and buffers by their names, on the CPU."""


def values_of(module: nn.Module) -> Values:
    """Every parameter and buffer of a module, not copied."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def digests_of(module: nn.Module) -> dict[str, str]:
    """Fingerprints of what nodes hold alike and never exchange: frozen parameters, and buffers that are saved."""
    kept = module.state_dict(keep_vars=True).keys()
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in kept]
    return {"model (frozen parameters)": fingerprint_of(frozen), "model (buffers)": fingerprint_of(buffers)}


def spread(module: nn.Module, values: Values, local: LocalMesh) -> None:
    """Give every parameter and buffer the value that the first rank has for it; each rank keeps its rows.

    Empties `values`, so that a big model is not held twice for longer than it takes. Called by all local ranks.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        whole = values.pop(name, None)
        if local.world_size > 1:
            if local.rank != 0 or whole is None:
                whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            whole = whole.contiguous()
            dist.broadcast(_as_bytes(whole), group_src=0, group=local.control)
        assert whole is not None, name
        with torch.no_grad():
            if isinstance(tensor, nn.Parameter):
                local_shard(tensor).copy_(whole[local_rows(tensor)] if whole.ndim else whole)
            else:
                tensor.copy_(whole)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)

"""Adapts external modules (transformers, user files) to LanguageModel: finds layers, reads outputs, moves values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroband.config.training import ActivationCheckpointing
from zeroband.errors import ConfigError
from zeroband.model.blueprint import Blueprint, ReadParameter
from zeroband.model.init import local_shard
from zeroband.model.language_model import LanguageModel
from zeroband.model.loss import IGNORE_INDEX, TokenLoss
from zeroband.model.recompute import recomputed
from zeroband.node.mesh import LocalMesh, broadcast_json
from zeroband.node.sharding import NamedParameters, fingerprint_of, local_rows


class ModelOutput(NamedTuple):
    """Output of a module; has logits, a loss or both."""

    logits: Tensor | None = None
    """(b, t, v) of any float type."""
    loss: Tensor | None = None
    """() mean over the targets, used unchanged."""
    auxiliary: Tensor | None = None
    """() auxiliary loss per target, such as load balancing of experts; not part of the reported loss."""


@dataclass(frozen=True)
class FirstValues:
    """The untrained part of a model, which is not in checkpoints: its seed, digests and persistent buffers."""

    seed: int = 0
    """Seed of randomly initialised values."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Result of `digests_of`; empty if unknown."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Persistent buffers."""
    is_recorded: bool = False
    """Whether they were read from a checkpoint."""

    @staticmethod
    def of(module: nn.Module, *, seed: int) -> FirstValues:
        """Capture them from a freshly initialised module."""
        buffers = {name: buffer.clone() for name, buffer in kept_buffers(module).items()}
        return FirstValues(seed, digests_of(module), buffers)

    def give(self, module: nn.Module) -> None:
        """Write the buffers into a module and verify its other untrained values.

        Raises ConfigError if frozen parameters differ, such as another base model below adapters.
        """
        held = dict(module.named_buffers())
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                held[name].copy_(buffer)
        found = digests_of(module)
        if differing := [key for key, digest in self.digests.items() if found[key] != digest]:
            raise ConfigError(
                f"{differing[0]} differ from those that this model was trained with, because its base model or "
                "model.file has changed; restore the original"
            )

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values."""
        buffers = {
            name: {"dtype": str(b.dtype).removeprefix("torch."), "shape": list(b.shape), "values": b.flatten().tolist()}
            for name, b in self.buffers.items()
        }
        return {"seed": self.seed, "digests": dict(self.digests), "buffers": buffers}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> FirstValues:
        """Parse a record. Raises LookupError, TypeError or ValueError for one of another version."""
        buffers = {
            name: torch.tensor(b["values"], dtype=getattr(torch, b["dtype"])).view(b["shape"])
            for name, b in record["buffers"].items()
        }
        return FirstValues(int(record["seed"]), dict(record["digests"]), buffers, is_recorded=True)


class ForeignModel(LanguageModel):
    """An external module. Its parameters keep their names."""

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], ends: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.module = module
        self._blocks = tuple(blocks)  # a ModuleList would register them under a second name
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
    def answer(self, tokens: Tensor, cu_seqlens: Tensor | None, targets: Tensor | None) -> ModelOutput:
        """Call the module. Shapes as for `forward`."""
        ...

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        z_loss: float = 0.0,
        by_target: bool = False,
    ) -> Tensor | TokenLoss:
        """Return logits, or the loss of targets, as `LanguageModel.forward` does."""
        if targets is None:
            logits = self.answer(tokens, cu_seqlens, None).logits
            assert logits is not None, "callers check gives_logits"
            return logits
        counted = (targets != IGNORE_INDEX).sum()
        # the module's mean over zero targets would be NaN
        given = torch.where(counted > 0, targets, 0) if self.has_own_loss else targets
        answer = self.answer(tokens, cu_seqlens, given)
        if answer.loss is not None:
            objective = answer.loss.float() * counted
            loss = TokenLoss(objective, objective.detach(), counted)
        else:
            assert answer.logits is not None, "a module returns logits or a loss"
            loss = self.logits_loss(answer.logits.flatten(0, -2), targets.flatten(), z_loss=z_loss, by_target=by_target)
        if answer.auxiliary is None or not torch.is_grad_enabled():
            return loss
        return loss._replace(objective=loss.objective + answer.auxiliary.float() * loss.targets)


class ForeignBlueprint(Blueprint):
    """Builds an external module. `what`: its configuration key, for messages."""

    def __init__(self, what: str, recorded: Mapping[str, Any] | None) -> None:
        self._what = what
        self._first = FirstValues() if recorded is None else FirstValues.from_record(recorded)

    @abstractmethod
    def _made(self, seed: int) -> ForeignModel:
        """Return the initialised model, float32 on the CPU."""
        ...

    @abstractmethod
    def save(self, read: ReadParameter, folder: Path, dtype: torch.dtype) -> None:
        """Write the model with these parameters into a folder, in its own format. Raises OSError."""
        ...

    def _untrained(self) -> ForeignModel:
        """Return the model with its untrained values; trained ones are overwritten by the caller."""
        return self._made(self._first.seed)

    def _keeps_documents_apart(self, model: ForeignModel) -> bool:
        return model.knows_documents

    def give_values(self, model: LanguageModel, seed: int, local: LocalMesh) -> Mapping[str, str]:
        """Initialise the model as `Blueprint.give_values` does; the first rank creates the values."""
        assert isinstance(model, ForeignModel)
        values, knows_documents = Values(), True
        if local.rank == 0:
            made = self._made(seed)
            values, self._first = values_of(made.module), FirstValues.of(made.module, seed=seed)
            knows_documents = self._keeps_documents_apart(made)
            del made
        spread(model.module, values, local)
        model.knows_documents = broadcast_json(knows_documents, local)
        return self._first.digests

    def build(self, read: ReadParameter, device: torch.device) -> ForeignModel:
        """Build the model as `Blueprint.build` does. Raises ConfigError if its untrained values have changed."""
        model = self._untrained()
        self._first.give(model.module)
        with torch.no_grad():
            for name, parameter in model.trained().named_parameters():
                parameter.copy_(read(name))
        return model.to(device).eval()


def _recomputed(how: Literal["selective", "full"], forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return recomputed(how, partial(forward, **named), *args, draws=True)  # the module may have dropout


def positions_of(cu_seqlens: Tensor, shape: torch.Size) -> Tensor:
    """Return each token's position in its document, (b, t) int64."""
    positions = torch.arange(shape.numel(), device=cu_seqlens.device)
    starts = cu_seqlens.long()
    return (positions - starts[torch.searchsorted(starts, positions, right=True) - 1]).view(shape)


def layers_of(module: nn.Module, kinds: Sequence[str] = ()) -> list[nn.Module]:
    """Find the layers of a module: parts of the named classes, else the entries of its largest ModuleList.

    Layers are distinct and not nested, and none holds an embedding, which may be tied to the head.
    """
    named = [part for part in module.modules() if type(part).__name__ in kinds and not _holds_embedding(part)]
    if named:
        inner = {id(part) for outer in named for part in outer.modules() if part is not outer}
        return [part for part in named if id(part) not in inner]
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return list(dict.fromkeys(max(lists, key=_numel))) if lists else []


def _holds_embedding(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Embedding) for part in module.modules())


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def require_trainable(module: nn.Module, what: str) -> None:
    """Raise ConfigError for a module that cannot be trained or checkpointed. `what`: its configuration key."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError(f"{what}: no parameter of the model has requires_grad, so there is nothing to train")
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"{what}: parameter {name} is {parameter.dtype}; build the model in float32, as train.dtype sets the "
                "compute type"
            )
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise ConfigError(
                f"{what}: {name} is a {type(part).__name__} with running statistics, which would differ between nodes "
                "and are not checkpointed; use a norm without them, or track_running_stats=False"
            )


def move_to_meta(module: nn.Module) -> None:
    """Move a module to the meta device in place, preserving tied tensors."""
    seen: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            setattr(part, name, seen.setdefault(id(parameter), empty))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffers.setdefault(id(buffer), torch.empty_like(buffer, device="meta")))


FROZEN, BUFFERS = "model (frozen parameters)", "model (buffers)"
"""Names of what differs, for a node that is refused."""

Values = dict[str, Tensor]
"""Whole parameters and buffers by name, on the CPU."""


def values_of(module: nn.Module) -> Values:
    """Return every parameter and buffer of a module, not copied."""
    return {name: tensor.detach() for name, tensor in _all_of(module)}


def _all_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters, and buffers under each of their names, as layers may share one."""
    return [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]


def kept_buffers(module: nn.Module) -> Values:
    """Return the persistent buffers."""
    kept = module.state_dict(keep_vars=True).keys()
    return {name: buffer.detach() for name, buffer in module.named_buffers() if name in kept}


def digests_of(module: nn.Module) -> dict[str, str]:
    """Fingerprint what nodes must have in common but never exchange: frozen parameters and persistent buffers."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    buffers = kept_buffers(module).items()
    return {FROZEN: fingerprint_of(frozen), BUFFERS: fingerprint_of(buffers)}


def spread(module: nn.Module, values: Values, local: LocalMesh) -> None:
    """Broadcast the first rank's values to every parameter and buffer; each rank keeps its rows.

    Empties `values` on the way, to limit peak memory. Called by all local ranks. Raises ConfigError on all of them if
    the module has a parameter or buffer without a value.
    """
    everything = _all_of(module)
    if missing := broadcast_json([name for name, _ in everything if name not in values], local):
        raise ConfigError(
            f"the model has {missing[0]}, which was missing when it was first built; register all buffers and "
            "parameters in the constructor, regardless of the call's arguments"
        )
    for name, tensor in everything:
        held = (
            values.pop(name)
            if local.rank == 0 or local.world_size == 1
            else torch.empty(tensor.shape, dtype=tensor.dtype)
        )
        whole = held.contiguous()
        if local.world_size > 1:
            dist.broadcast(whole.reshape(-1).view(torch.uint8), group_src=0, group=local.control)
        with torch.no_grad():
            if isinstance(tensor, nn.Parameter):
                local_shard(tensor).copy_(whole[local_rows(tensor)] if whole.ndim else whole)
            else:
                tensor.copy_(whole)

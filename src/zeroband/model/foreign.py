"""A module that is not this package's as a language model: its layers found, its answers read, its values moved."""

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
from zeroband.model.init import local_rows, local_shard
from zeroband.model.language_model import LanguageModel
from zeroband.model.loss import IGNORE_INDEX, TokenLoss
from zeroband.model.recompute import recomputed
from zeroband.node.mesh import LocalMesh, broadcast_json
from zeroband.node.sharding import NamedParameters, fingerprint_of


class ModelOutput(NamedTuple):
    """What a module made of a micro-batch; it has one of the first two at least."""

    logits: Tensor | None = None
    """(b, t, v) of any float type."""
    loss: Tensor | None = None
    """() mean over the targets that count, which is taken as it is."""
    auxiliary: Tensor | None = None
    """() what is learned besides, per target, such as the balance of experts; not part of the loss that is reported."""


@dataclass(frozen=True)
class FirstValues:
    """What is not trained of a model, and so in no checkpoint: where it came from, and what is small enough to keep."""

    seed: int = 0
    """What drawn values follow from."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """As `digests_of`; empty where they are not known."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Those that are saved with the module."""
    is_recorded: bool = False
    """Whether a checkpoint said so."""

    @staticmethod
    def of(module: nn.Module, *, seed: int) -> FirstValues:
        """Take them from a module that has its first values."""
        buffers = {name: buffer.clone() for name, buffer in kept_buffers(module).items()}
        return FirstValues(seed, digests_of(module), buffers)

    def give(self, module: nn.Module) -> None:
        """Write the buffers into a module of the same kind, and see that all else is what it was.

        Raises ConfigError where frozen parameters differ: the base of adapters is another one now.
        """
        held = dict(module.named_buffers())
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                held[name].copy_(buffer)
        found = digests_of(module)
        if differing := [key for key, digest in self.digests.items() if found[key] != digest]:
            raise ConfigError(
                f"{differing[0]} differ from those that this model was trained with: its base, or the file that builds "
                "it, is another one now; bring that back"
            )

    def to_record(self) -> dict[str, Any]:
        """As JSON."""
        buffers = {
            name: {"dtype": str(b.dtype).removeprefix("torch."), "shape": list(b.shape), "values": b.flatten().tolist()}
            for name, b in self.buffers.items()
        }
        return {"seed": self.seed, "digests": dict(self.digests), "buffers": buffers}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> FirstValues:
        """Raises LookupError, TypeError or ValueError for the record of another version."""
        buffers = {
            name: torch.tensor(b["values"], dtype=getattr(torch, b["dtype"])).view(b["shape"])
            for name, b in record["buffers"].items()
        }
        return FirstValues(int(record["seed"]), dict(record["digests"]), buffers, is_recorded=True)


class ForeignModel(LanguageModel):
    """A module that is not ours. Its parameters keep their names."""

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
    def answer(self, tokens: Tensor, cu_seqlens: Tensor | None, targets: Tensor | None) -> ModelOutput:
        """Call the module. Shapes as in `forward`."""
        ...

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        z_loss: float = 0.0,
        by_target: bool = False,
    ) -> Tensor | TokenLoss:
        """As `LanguageModel` says."""
        if targets is None:
            logits = self.answer(tokens, cu_seqlens, None).logits
            assert logits is not None, "callers that ask for logits have made sure that there are some"
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
            loss = self.logits_loss(answer.logits.flatten(0, -2), targets.flatten(), z_loss=z_loss, by_target=by_target)
        if answer.auxiliary is None or not torch.is_grad_enabled():
            return loss
        return loss._replace(objective=loss.objective + answer.auxiliary.float() * loss.targets)


class ForeignBlueprint(Blueprint):
    """How a module that is not ours is made. `what`: the key that it comes of, for messages."""

    def __init__(self, what: str, recorded: Mapping[str, Any] | None) -> None:
        self._what = what
        self._first = FirstValues() if recorded is None else FirstValues.from_record(recorded)

    @abstractmethod
    def _made(self, seed: int) -> ForeignModel:
        """The model with its first values, float32 on the CPU."""
        ...

    @abstractmethod
    def save(self, read: ReadParameter, folder: Path, dtype: torch.dtype) -> None:
        """Write the model with these parameters into a folder, in its own layout. Raises OSError."""
        ...

    def _untrained(self) -> ForeignModel:
        """The model in which what is not trained has its first values; all else will be read."""
        return self._made(self._first.seed)

    def _keeps_documents_apart(self, model: ForeignModel) -> bool:
        return model.knows_documents

    def give_values(self, model: LanguageModel, seed: int, local: LocalMesh) -> Mapping[str, str]:
        """As `Blueprint` says; the first rank makes them."""
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
        """As `Blueprint` says. Raises ConfigError where what is not trained is another than it was."""
        model = self._untrained()
        self._first.give(model.module)
        with torch.no_grad():
            for name, parameter in model.trained().named_parameters():
                parameter.copy_(read(name))
        return model.to(device).eval()


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
    """The layers of a module: those of the named classes, else the entries of its largest ModuleList; or none.

    Each once, none that lies in another, and none that holds an embedding, which the head may share.
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
    buffers: dict[int, Tensor] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            setattr(part, name, seen.setdefault(id(parameter), empty))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffers.setdefault(id(buffer), torch.empty_like(buffer, device="meta")))


FROZEN, BUFFERS = "model (frozen parameters)", "model (buffers)"
"""What a node is told whose model differs in them."""

Values = dict[str, Tensor]
"""Whole parameters and buffers by their names, on the CPU."""


def values_of(module: nn.Module) -> Values:
    """Every parameter and buffer of a module, not copied."""
    return {name: tensor.detach() for name, tensor in _all_of(module)}


def _all_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, and buffers under each of their names: layers may share one."""
    return [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]


def kept_buffers(module: nn.Module) -> Values:
    """The buffers that are saved with a module."""
    kept = module.state_dict(keep_vars=True).keys()
    return {name: buffer.detach() for name, buffer in module.named_buffers() if name in kept}


def digests_of(module: nn.Module) -> dict[str, str]:
    """Fingerprints of what nodes hold alike and never exchange: frozen parameters, and buffers that are saved."""
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    buffers = kept_buffers(module).items()
    return {FROZEN: fingerprint_of(frozen), BUFFERS: fingerprint_of(buffers)}


def spread(module: nn.Module, values: Values, local: LocalMesh) -> None:
    """Give every parameter and buffer the value that the first rank has for it; each rank keeps its rows.

    Empties `values`, so that a big model is not held twice for longer than it takes. Called by all local ranks. Raises
    ConfigError on all of them where the module has something that its twin had not.
    """
    everything = _all_of(module)
    if missing := broadcast_json([name for name, _ in everything if name not in values], local):
        raise ConfigError(
            f"the model has {missing[0]}, which it had not when it was built first: register buffers and parameters in "
            "the constructor, whatever the module is called with"
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

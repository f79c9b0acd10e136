"""A module from a user's file: `model.type = "custom"`.

The file defines `build(config)`, which receives a `BuildConfig` and returns a torch module. `forward` is called with
tokens, (b, t) int64, and with those of the following that its signature names:

    positions    (b, t) int64: position of each token in its document; None without data.document_mask
    cu_seqlens   (documents + 1,) int32: document boundaries in the flattened rows; None without data.document_mask
    targets      (b, t) int64: the next token, or -100 to ignore; None if logits are wanted

It returns logits (b, t, v), or with targets their mean loss (), or both as a tuple or by the names `logits` and `loss`;
its own loss takes precedence. The layers of its largest nn.ModuleList are sharded, compiled and recomputed one by one.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from zeroband.config.model import CustomModelConfig
from zeroband.errors import ConfigError
from zeroband.model.blueprint import FIRST, VOCAB_SIZE, ReadParameter
from zeroband.model.foreign import (
    ForeignBlueprint,
    ForeignModel,
    ModelOutput,
    layers_of,
    move_to_meta,
    positions_of,
    require_trainable,
)
from zeroband.node.user_file import load_file

_BUILD = "build"
_OFFERED = ("positions", "cu_seqlens", "targets")
_TRIED = 8
"""Tokens of the trial call."""


@dataclass(frozen=True)
class BuildConfig:
    """Argument of a file's `build`."""

    vocab_size: int
    """Minimum width of the logits: the tokenizer's vocabulary, rounded up to a multiple of 64."""
    seq_length: int
    """Tokens in one sample."""
    settings: Mapping[str, Any]
    """model.settings, by key."""


class CustomModel(ForeignModel):
    """A module built by a user's file."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, layers_of(module))
        parameters = inspect.signature(module.forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.taken = {name for name in _OFFERED if takes_all or name in parameters}
        self.needs_targets = "targets" in parameters and parameters["targets"].default is inspect.Parameter.empty
        self.knows_documents = bool(self.taken & {"positions", "cu_seqlens"})

    def answer(self, tokens: Tensor, cu_seqlens: Tensor | None, targets: Tensor | None) -> ModelOutput:
        offered = {"cu_seqlens": cu_seqlens, "targets": targets}
        if "positions" in self.taken:
            offered["positions"] = None if cu_seqlens is None else positions_of(cu_seqlens, tokens.shape)
        return _read(self.module(tokens, **{name: offered[name] for name in self.taken}))

    def flops_per_token(self, seq_length: int) -> int:
        """Return 6 per parameter outside embeddings (4 if frozen); attention is unknown and not counted."""
        looked_up = {id(part.weight) for part in self.module.modules() if isinstance(part, nn.Embedding)}
        counted = [p for p in self.module.parameters() if id(p) not in looked_up]
        return sum((6 if parameter.requires_grad else 4) * parameter.numel() for parameter in counted)


def _read(result: Any) -> ModelOutput:
    """Extract logits and loss from a module's return value."""
    if isinstance(result, Tensor):
        return ModelOutput(loss=result) if result.ndim == 0 else ModelOutput(logits=result)
    if isinstance(result, tuple | list):
        tensors = [part for part in result if isinstance(part, Tensor)]
        return ModelOutput(
            next((part for part in tensors if part.ndim == 3), None),
            next((part for part in tensors if part.ndim == 0), None),
        )
    if isinstance(result, Mapping):
        return ModelOutput(result.get("logits"), result.get("loss"))
    return ModelOutput(getattr(result, "logits", None), getattr(result, "loss", None))


class CustomBlueprint(ForeignBlueprint):
    """Builds a [model] section of type custom. Raises ConfigError if its file builds no trainable module."""

    def __init__(
        self, config: CustomModelConfig, *, vocab_size: int, seq_length: int, recorded: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"model.file={str(config.file)!r}", recorded)
        self._section = config
        self._file = load_file(config.file, "model.file")
        self._build: Callable[[BuildConfig], Any] | None = getattr(self._file.module, _BUILD, None)
        if not callable(self._build):
            raise ConfigError(f"{self._what} has no function {_BUILD}(config) that returns the module; add one")
        self._told = BuildConfig(vocab_size, seq_length, config.named_settings)

    def _module(self, seed: int) -> nn.Module:
        assert self._build is not None
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = self._build(self._told)
        except Exception as error:
            raise ConfigError(f"{self._what}: {_BUILD}(config) raised {error!r}") from error
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self._what}: {_BUILD}(config) returned {type(module).__name__}; it must return a torch.nn.Module"
            )
        return module

    def _tried(self, module: nn.Module) -> CustomModel:
        """Wrap the module after a trial call with a few tokens. Raises ConfigError for an unusable result."""
        length = min(_TRIED, self._told.seq_length)
        tokens, borders = torch.zeros(1, length, dtype=torch.int64), torch.tensor([0, length], dtype=torch.int32)
        modes, model = [(part, part.training) for part in module.modules()], CustomModel(module)
        module.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                learned = model.answer(tokens, borders, tokens)
                plain = ModelOutput() if model.needs_targets else model.answer(tokens, borders, None)
        except Exception as error:
            raise ConfigError(
                f"{self._what}: the module raised {error!r} when it was called with tokens of shape (1, {length})"
            ) from error
        for part, mode in modes:  # restore each mode, as some parts may be in evaluation mode
            part.training = mode
        if learned.loss is None:
            self._require_logits(learned.logits, length)
        model.has_own_loss = learned.loss is not None
        model.gives_logits = plain.logits is not None
        return model

    def _require_logits(self, logits: Tensor | None, length: int) -> None:
        ids = self._told.vocab_size
        if logits is None or logits.ndim != 3 or logits.shape[:2] != (1, length) or logits.shape[2] < ids:
            got = "neither logits nor a loss" if logits is None else f"a tensor of shape {tuple(logits.shape)}"
            raise ConfigError(
                f"{self._what}: the module gave {got} for tokens of shape (1, {length}); return logits of shape "
                f"(1, {length}, {ids} or more), or take `targets` and return their mean loss"
            )

    def on_meta(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> CustomModel:
        module = self._module(0)
        require_trainable(module, self._what)
        model = self._tried(module)
        move_to_meta(module)
        return model

    def _made(self, seed: int) -> CustomModel:
        return CustomModel(self._module(seed))

    def _untrained(self) -> CustomModel:
        return self._tried(self._module(self._first.seed))

    def save(self, read: ReadParameter, folder: Path, dtype: torch.dtype) -> None:
        """Write the module's state_dict, and the user's file as model.py."""
        held = self.build(read, torch.device("cpu")).module
        for parameter in held.parameters():
            parameter.data = parameter.data.to(dtype)
        save_model(held, str(folder / "model.safetensors"))
        shutil.copyfile(self._section.file, folder / "model.py")

    def to_record(self) -> dict[str, Any]:
        return {
            **self._section.model_dump(mode="json"),
            "file": str(self._section.file.absolute()),
            VOCAB_SIZE: self._told.vocab_size,
            FIRST: self._first.to_record(),
        }

    @property
    def shared(self) -> Mapping[str, str]:
        return {"model.file (content)": self._file.digest}

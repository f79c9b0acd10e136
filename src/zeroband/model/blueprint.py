"""Blueprints: how to build a model (built-in decoder, transformers, or a user's file) before it has values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zeroband.config.model import LlamaConfig
from zeroband.model.attention import Attend, attend_plain, attention_on
from zeroband.model.init import init_weights
from zeroband.model.language_model import LanguageModel
from zeroband.model.transformer import Transformer
from zeroband.node.mesh import LocalMesh

VOCAB_SIZE = "vocab_size"
"""Record key: width of the head."""

FIRST = "first_values"
"""Record key: untrained values of an external model."""

ReadParameter = Callable[[str], Tensor]
"""Returns the whole value of a trained parameter by name, float32."""


class Blueprint(ABC):
    """A model's architecture and initialisation."""

    @abstractmethod
    def on_meta(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> LanguageModel:
        """Build the model on the meta device. `device`, `dtype`: where and in which type it will compute."""
        ...

    @abstractmethod
    def give_values(self, model: LanguageModel, seed: int, local: LocalMesh) -> Mapping[str, str]:
        """Initialise a sharded, allocated model in place. Called by all local ranks.

        Returns on the first rank the fingerprints that nodes must agree on, by name for messages.
        """
        ...

    @abstractmethod
    def build(self, read: ReadParameter, device: torch.device) -> LanguageModel:
        """Build the unsharded float32 model with these parameters, in evaluation mode."""
        ...

    @abstractmethod
    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values for `blueprint_of_record`."""
        ...

    @property
    def shared(self) -> Mapping[str, str]:
        """What nodes must agree on, besides the configuration and the parameters' shapes."""
        return {}


class LlamaBlueprint(Blueprint):
    """The built-in decoder with random weights. `vocab_size`: width of its head."""

    def __init__(self, config: LlamaConfig, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size

    def on_meta(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Transformer:
        attend: Attend = attend_plain if device is None else attention_on(device, dtype, self.config)[0]
        with torch.device("meta"):
            return Transformer(self.config, self.vocab_size, attend)

    def give_values(self, model: LanguageModel, seed: int, local: LocalMesh) -> Mapping[str, str]:
        assert isinstance(model, Transformer)
        init_weights(model, seed)
        return {}

    def build(self, read: ReadParameter, device: torch.device) -> Transformer:
        model = self.on_meta().to_empty(device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = read(name)
                assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
                parameter.copy_(value)
        return model.eval()

    def to_record(self) -> dict[str, Any]:
        return {**self.config.model_dump(mode="json"), VOCAB_SIZE: self.vocab_size}

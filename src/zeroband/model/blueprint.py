"""How a model is made, before it has values: this package's decoder, one of transformers, or a file of the user's."""

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
"""Key of the head's width in the record of a model."""

FIRST = "first_values"
"""Key of what a record has to say of values that are not trained; only of models that are not this package's."""

ReadParameter = Callable[[str], Tensor]
"""The whole value of one of the trained parameters by its name, float32."""


class Blueprint(ABC):
    """One model's architecture, and where its first values come from."""

    @abstractmethod
    def on_meta(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> LanguageModel:
        """The model without values or memory; `device`, `dtype`: that it will compute on and in, None: any."""
        ...

    @abstractmethod
    def give_values(self, model: LanguageModel, seed: int, local: LocalMesh) -> Mapping[str, str]:
        """Give a model its first values, in place, when it is sharded and has room. Called by all local ranks.

        Returns, on the first rank, what nodes must agree on of them, by the name that a node which differs is told.
        """
        ...

    @abstractmethod
    def build(self, read: ReadParameter, device: torch.device) -> LanguageModel:
        """The model in float32 with these parameters, for evaluation, as one rank has it."""
        ...

    @abstractmethod
    def to_record(self) -> dict[str, Any]:
        """What `blueprint_of_record` makes the same of, as JSON."""
        ...

    @property
    def shared(self) -> Mapping[str, str]:
        """What nodes must agree on of the architecture, besides the configuration and the parameters' shapes."""
        return {}


class LlamaBlueprint(Blueprint):
    """The decoder of this package, with random weights. `vocab_size`: width of its head."""

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

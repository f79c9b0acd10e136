"""Causal language models of transformers, with weights from the hub and adapters of peft."""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroband.config.model import LoraConfig, TransformersConfig
from zeroband.config.section import NONE
from zeroband.data.hub import hub_hint, hub_options
from zeroband.errors import ConfigError, way_to_extra
from zeroband.model.blueprint import FIRST, VOCAB_SIZE, ReadParameter
from zeroband.model.foreign import (
    FirstValues,
    ForeignBlueprint,
    ForeignModel,
    ModelOutput,
    Values,
    layers_of,
    move_to_meta,
    positions_of,
    require_trainable,
    values_of,
)
from zeroband.model.generate import evaluating

_EVERY = "all-linear"
"""peft's name for every linear layer except the head."""

_TRIED, _LEAK = 8, 1e-4
"""Tokens per document in the isolation test, and its relative tolerance: experts sum in varying order."""

_NOT_COMPARED = {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"}
"""Configuration keys without influence on what the model computes."""


class HubModel(ForeignModel):
    """A causal `PreTrainedModel`, with or without adapters."""

    def __init__(self, module: Any) -> None:
        head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
        is_apart = head is not None and embedding is not None and head.weight is not embedding.weight
        ends: Any = [embedding, head] if is_apart else []
        kinds = tuple(_base_of(module)._no_split_modules or ())  # class names of its layers
        super().__init__(module, layers_of(module, kinds), ends)
        self._config: Any = module.config
        self.is_flash = "flash" in (getattr(self._config, "_attn_implementation", None) or "")

    def answer(self, tokens: Tensor, cu_seqlens: Tensor | None, targets: Tensor | None) -> ModelOutput:
        positions = None if cu_seqlens is None else positions_of(cu_seqlens, tokens.shape)
        shape = tokens.shape
        if positions is not None and self.is_flash:  # which separates documents within one row only
            tokens, positions = tokens.view(1, -1), positions.view(1, -1)
        found = self.module(input_ids=tokens, position_ids=positions, use_cache=False)
        balance = getattr(found, "aux_loss", None)
        share = getattr(self._config, "router_aux_loss_coef", 0.0)
        return ModelOutput(found.logits.view(*shape, -1), auxiliary=None if balance is None else share * balance)

    def flops_per_token(self, seq_length: int) -> int:
        """Return 6 per parameter that a token is multiplied with (4 if frozen), plus full attention.

        Experts count by the fraction of tokens routed to them; an embedding counts only if tied to the head.
        """
        config, total = self._config, 0.0
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        used = getattr(config, "num_experts_per_tok", None) or 1
        looked_up = self.ends[0].weight if self.ends else None
        for name, parameter in self.module.named_parameters():
            share = used / experts if experts and ".experts." in f".{name}" else 1.0
            each = 6 if parameter.requires_grad else 4
            total += 0 if parameter is looked_up else each * share * parameter.numel()
        heads = getattr(config, "num_attention_heads", 0)
        width = heads * (getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(heads, 1))
        return int(total) + 12 * getattr(config, "num_hidden_layers", 0) * width * seq_length


def _base_of(module: Any) -> Any:
    """Return the model without its adapters."""
    return module.get_base_model() if hasattr(module, "peft_config") else module


class TransformersBlueprint(ForeignBlueprint):
    """Builds a [model] section of type transformers. `ids`: size of the tokenizer.

    Raises ConfigError if transformers lacks the model, or the tokenizer or the samples do not fit it.
    """

    def __init__(
        self, config: TransformersConfig, *, ids: int, seq_length: int, recorded: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"model.name={config.name!r}" if config.name is not None else "[model.config]", recorded)
        self._section = config
        self._transformers = _library("transformers")
        self.hub_config: Any = self._open_config()
        longest = getattr(self.hub_config, "max_position_embeddings", None)
        if longest is not None and seq_length > longest:
            raise ConfigError(
                f"data.seq_length={seq_length} is longer than the {longest} positions of {self._what} "
                "(max_position_embeddings); make it shorter, or set model.config.max_position_embeddings"
            )
        rows = self._empty.get_input_embeddings().weight.shape[0]
        if ids > rows:
            raise ConfigError(
                f"data.tokenizer has {ids} ids but the embedding of {self._what} only {rows} rows; use the model's own "
                "tokenizer, or with random weights set model.config.vocab_size"
            )
        self.vocab_size = rows

    # -- transformers' side -------------------------------------------------------------------------------------

    def _open_config(self) -> Any:
        section, library = self._section, self._transformers
        overrides = {key: None if value == NONE else value for key, value in (section.config or {}).items()}
        try:
            if section.name is not None:
                options = hub_options(section.name, "model.name")
                return library.AutoConfig.from_pretrained(section.name, **options, **overrides)
            kind = overrides.pop("model_type")
            if kind not in library.CONFIG_MAPPING:
                close = difflib.get_close_matches(str(kind), list(library.CONFIG_MAPPING), n=1)
                hint = f"did you mean {close[0]!r}?" if close else "llama, qwen3, gemma3_text and mistral are some"
                raise ConfigError(
                    f"model.config.model_type={kind!r} is not an architecture of transformers {library.__version__}; "
                    f"{hint}"
                )
            if not self._first.is_recorded:
                self._require_known(overrides, library.CONFIG_MAPPING[kind], str(kind))
            return library.AutoConfig.for_model(kind, **overrides)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"transformers cannot open {self._what}: {_first_line(error)}{hub_hint()}") from error

    @staticmethod
    def _require_known(given: Mapping[str, Any], kind: Any, name: str) -> None:
        """Refuse likely typos: transformers accepts any key. Other unknown keys pass, as some models read them."""
        known = {*kind().to_dict(), *getattr(kind, "attribute_map", {})}
        for key in given:
            if key not in known and (close := difflib.get_close_matches(key, sorted(known), n=1)):
                raise ConfigError(
                    f"model.config.{key}: {name} of transformers has no such key; did you mean {close[0]}?"
                )

    @cached_property
    def _empty(self) -> Any:
        """The module on the meta device, for inspection."""
        with torch.device("meta"):
            return self._module()

    def _module(self) -> Any:
        """Build the module with random weights, from torch's generator and on its default device."""
        options: dict[str, Any] = (
            {} if self._section.attention is None else {"attn_implementation": self._section.attention}
        )
        try:
            return self._transformers.AutoModelForCausalLM.from_config(self.hub_config, dtype=torch.float32, **options)
        except Exception as error:
            raise ConfigError(
                f"{self._what} is not a causal language model of transformers {self._transformers.__version__}: "
                f"{_first_line(error)}"
            ) from error

    def _pretrained(self) -> Any:
        assert self._section.name is not None, "weights belong to a name"
        options: dict[str, Any] = {**hub_options(self._section.name, "model.name")}
        if self._section.attention is not None:
            options["attn_implementation"] = self._section.attention
        try:
            module, loaded = self._transformers.AutoModelForCausalLM.from_pretrained(
                self._section.name,
                config=self.hub_config,
                dtype=torch.float32,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot load the weights of {self._what}: {_first_line(error)}{hub_hint()}") from error
        if missing := sorted(loaded["missing_keys"]):
            raise ConfigError(
                f"the weights of {self._what} lack {missing[0]} and {len(missing) - 1} other parameters of the "
                'configuration; drop the changes in model.config, or set model.weights = "random"'
            )
        for name, values in module.named_parameters():
            if not bool(values.isfinite().all()):
                raise ConfigError(f"the weights of {self._what} are not finite in {name}; use other weights")
        return module

    # -- Blueprint ----------------------------------------------------------------------------------------------

    def _adapted(self, module: Any) -> Any:
        lora = self._section.lora
        return module if lora is None else _with_adapters(module, lora)

    def on_meta(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> HubModel:
        with torch.device("meta"):
            module = self._adapted(self._module())
        move_to_meta(module)  # some libraries ignore the default device
        return HubModel(module)

    def _made(self, seed: int) -> HubModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self._pretrained() if self._section.is_pretrained else self._module()
            module = self._adapted(module)
        require_trainable(module, self._what)
        return HubModel(module.float())

    def _untrained(self) -> HubModel:
        """Build the model; without adapters every parameter is trained, so pretrained weights are not needed."""
        return HubModel(self._module()) if self._section.lora is None else self._made(self._first.seed)

    def pretrained_values(self) -> Values:
        """Load the pretrained parameters. Raises ConfigError."""
        module = self._pretrained()
        self._first = FirstValues.of(module, seed=0)
        return values_of(module)

    def _keeps_documents_apart(self, model: ForeignModel) -> bool:
        """Test whether a document influences the next one, as some architectures ignore positions."""
        assert isinstance(model, HubModel)
        if model.is_flash:  # its kernels separate documents, and run on GPUs only
            return True
        second = torch.arange(_TRIED) % self.vocab_size
        rows = [torch.cat([(second + shift) % self.vocab_size, second])[None] for shift in (1, 2)]
        borders = torch.tensor([0, _TRIED, 2 * _TRIED], dtype=torch.int32)
        with evaluating(model):
            first, other = (model(row, borders)[:, _TRIED:] for row in rows)
        return bool((first - other).abs().max() <= _LEAK * first.abs().max())

    def save(self, read: ReadParameter, folder: Path, dtype: torch.dtype) -> None:
        """Write weights and configuration as transformers does, or adapters as peft does. Raises OSError."""
        module: Any = self.build(read, torch.device("cpu")).module
        module.to(dtype).save_pretrained(str(folder), safe_serialization=True)

    def to_record(self) -> dict[str, Any]:
        section = self._section
        described = json.loads(self.hub_config.to_json_string(use_diff=False))
        name = None if section.lora is None else section.name  # adapters need their base model
        if name is not None and Path(name).is_dir():
            name = str(Path(name).absolute())
        record = section.model_copy(update={"config": described, "attention": None, "name": name})
        return {**record.model_dump(mode="json"), VOCAB_SIZE: self.vocab_size, FIRST: self._first.to_record()}

    @property
    def shared(self) -> Mapping[str, str]:
        described = self.hub_config.to_dict()
        return {
            f"model.config {key}": json.dumps(value, sort_keys=True, default=str)
            for key, value in sorted(described.items())
            if key not in _NOT_COMPARED
        }


def _with_adapters(module: nn.Module, lora: LoraConfig) -> Any:
    peft = _library("peft")
    targets = _EVERY if lora.target_modules == (_EVERY,) else list(lora.target_modules)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
    )
    try:
        return peft.get_peft_model(module, settings)
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules={targets!r}: {_first_line(error)}") from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f'model.type="transformers" needs {name}: {way_to_extra("hf")} ({error})') from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]

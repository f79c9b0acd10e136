"""A trained model as a directory that transformers and vLLM load: weights, their configuration, the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zeroband.config.schema import ModelConfig
from zeroband.data.tokenizer import Tokenizer
from zeroband.errors import ConfigError
from zeroband.model.hf import hf_config
from zeroband.model.transformer import Transformer
from zeroband.model.weights import SHARD_BYTES, write_weights

ExportDtype = Literal["bfloat16", "float32"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TrainedModel:
    """A model's weights, and what they are of no use without."""

    config: ModelConfig
    tokenizer: Tokenizer
    seq_length: int
    """Tokens of one sample in training."""
    read: Callable[[str], Tensor]
    """The whole value of one of our parameters, float32 on any device."""

    def empty(self) -> Transformer:
        """The decoder without values or memory, on the meta device."""
        with torch.device("meta"):
            return Transformer(self.config, self.tokenizer.padded_vocab_size)

    def build(self, device: torch.device, *, rounded_to: torch.dtype = torch.float32) -> Transformer:
        """The decoder in float32 for evaluation, its weights rounded to another type before. Takes 4 bytes a value."""
        model = self.empty().to_empty(device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = self.read(name)
                assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
                parameter.copy_(value.to(rounded_to))
        return model.eval()


def require_free(out: Path) -> None:
    """Raise ConfigError where an export must not write: it replaces nothing."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and an export replaces nothing; remove it or name another folder")


def write_directory(model: TrainedModel, out: Path, dtype: ExportDtype, *, shard_bytes: int = SHARD_BYTES) -> int:
    """Write the directory under another name beside it, then rename it. Returns its bytes.

    Raises: ConfigError when `out` is there already or cannot be written.
    """
    require_free(out)
    draft = out.with_name(f"{out.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.empty().named_parameters()}
        write_weights(draft, shapes, model.read, DTYPES[dtype], shard_bytes=shard_bytes)
        end = model.tokenizer.end_of_document
        vocab_size = model.tokenizer.padded_vocab_size
        described = hf_config(
            model.config, vocab_size=vocab_size, seq_length=model.seq_length, end_of_document=end, dtype=dtype
        )
        _write_json(draft / "config.json", described)
        _write_json(draft / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        model.tokenizer.save(draft, seq_length=model.seq_length)
        size = sum(path.stat().st_size for path in draft.iterdir())
        draft.replace(out)
    except OSError as error:
        raise ConfigError(f"cannot write the export to {out}: {error}") from error
    return size


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

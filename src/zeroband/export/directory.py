"""A trained model as a directory that transformers and vLLM load: weights, their configuration, the tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zeroband.checkpoint.layout import MAX_FILE_BYTES, cut, file_names, hub_name, index_of
from zeroband.config.model import ModelConfig
from zeroband.config.schema import ExportDtype
from zeroband.data.tokenizer import Tokenizer
from zeroband.errors import ConfigError
from zeroband.export.hf import hf_config
from zeroband.export.hub_files import CONFIG_FILE, INDEX_FILE
from zeroband.model.transformer import Transformer
from zeroband.node.sharding import is_sharded
from zeroband.state.flat import FlatLayout

DTYPES: dict[ExportDtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TrainedModel:
    """A model's weights, and what they are of no use without."""

    config: ModelConfig
    vocab_size: int
    """Width of the head."""
    tokenizer: Tokenizer
    seq_length: int
    """Tokens of one sample in training."""
    read: Callable[[str], Tensor]
    """The whole value of one of our parameters, float32 on any device."""

    def empty(self) -> Transformer:
        """The decoder without values or memory, on the meta device."""
        with torch.device("meta"):
            return Transformer(self.config, self.vocab_size)

    def build(self, device: torch.device, *, rounded_to: torch.dtype = torch.float32) -> Transformer:
        """The decoder in float32 for evaluation, its weights rounded to another type before. Takes 4 bytes a value."""
        model = self.empty().to_empty(device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = self.read(name)
                assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
                parameter.copy_(value.to(rounded_to))
        return model.eval()


def whole_parameters(model: nn.Module, *, keeps: bool) -> dict[str, Tensor]:
    """Return a sharded model's parameters by name, float32 on the CPU. Called by all local ranks, between inner steps.

    A rank that does not keep them takes part, one parameter at a time, and gets none.
    """
    held: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if is_sharded(value) else value
        if keeps:
            held[name] = whole.cpu()
    return held


class FolderInUse(ConfigError):
    """An export would replace something."""


def require_free(out: Path) -> None:
    """Raise FolderInUse where an export must not write: it replaces nothing."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FolderInUse(f"{out} is there already, and an export replaces nothing; remove it or name another folder")


def write_directory(model: TrainedModel, out: Path, dtype: ExportDtype, *, max_bytes: int = MAX_FILE_BYTES) -> int:
    """Write the directory under another name beside it, then rename it. Returns its bytes.

    Raises: FolderInUse when `out` is there already, ConfigError when it cannot be written.
    """
    require_free(out)
    draft = out.with_name(f"{out.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        model.tokenizer.save(draft, seq_length=model.seq_length)  # first: a model without one is refused
        _write_weights(draft, model, DTYPES[dtype], max_bytes)
        end = model.tokenizer.end_of_document
        described = hf_config(
            model.config, vocab_size=model.vocab_size, seq_length=model.seq_length, end_of_document=end, dtype=dtype
        )
        _write_json(draft / CONFIG_FILE, described)
        _write_json(draft / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
        for path in draft.iterdir():  # save_file keeps weights from other users
            shutil.copymode(draft / CONFIG_FILE, path)
        size = sum(path.stat().st_size for path in draft.iterdir())
        draft.replace(out)
    except ConfigError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    except OSError as error:
        raise ConfigError(f"cannot write the export to {out}: {error}") from error
    return size


def _write_weights(folder: Path, model: TrainedModel, dtype: torch.dtype, max_bytes: int) -> None:
    """One file, or several and an index; one file's worth is in memory at a time."""
    cuts = cut(FlatLayout.of(model.empty()).slots, max_bytes, itemsize=dtype.itemsize)
    names = file_names("model", len(cuts))
    for name, slots in zip(names, cuts, strict=True):
        tensors = {hub_name(slot.name): model.read(slot.name).to("cpu", dtype).contiguous() for slot in slots}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(cuts) > 1:
        (folder / INDEX_FILE).write_bytes(index_of(names, cuts, itemsize=dtype.itemsize))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Reads weights from a Hugging Face folder's safetensors: one file, or several and an index. Never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zeroband.checkpoint.layout import hub_name
from zeroband.config.model import LlamaConfig
from zeroband.config.section import FileBelow
from zeroband.errors import ConfigError
from zeroband.export.hf import differences, is_derived, model_config_of
from zeroband.model.init import local_shard
from zeroband.model.transformer import Transformer
from zeroband.node.sharding import local_rows

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

CONFIG_FILE = "config.json"

_WEIGHT_MAP = TypeAdapter(dict[str, FileBelow])
_SHOWN_PROBLEMS = 5
_PIECE_BYTES = 16 << 20


class WeightFiles:
    """The tensors of a folder, mapped and read on demand. Raises ConfigError for a missing or damaged file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _file_of_each(folder)
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return some rows of a tensor, in the file's type."""
        return self._slice(name)[rows]

    def fingerprint(self) -> str:
        """Hash the bytes of all files."""
        seen = xxhash.xxh3_128()
        for file in sorted(set(self._file_of.values())):
            with (self.folder / file).open("rb") as opened:
                while piece := opened.read(_PIECE_BYTES):
                    seen.update(piece)
        return seen.hexdigest()

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = _opened(self.folder / file)
        try:
            return self._open[file].get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"{self.folder / file}: {name} cannot be read: {error}") from error


def _file_of_each(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    if index.exists():
        try:
            return _WEIGHT_MAP.validate_python(json.loads(index.read_bytes())["weight_map"], strict=True)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ConfigError(f"{index}: not an index of safetensors files in its folder: {_reason(error)}") from error
    if not (folder / WEIGHTS_FILE).exists():
        raise ConfigError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; other formats are not read: load them with "
            "transformers once and `save_pretrained` them"
        )
    return dict.fromkeys(_opened(folder / WEIGHTS_FILE).keys(), WEIGHTS_FILE)


def _reason(error: Exception) -> str:
    return error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a safetensors file that can be read: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a folder. Raises ConfigError without one."""
    path = folder / CONFIG_FILE
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read, so {folder} is not a model directory: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: not the configuration of a model")
    return cast("dict[str, Any]", record)


def start_from(model: Transformer, folder: Path, *, used_ids: int) -> WeightFiles:
    """Load a model's initial weights from a folder in Hugging Face's layout. Each rank reads its rows.

    Raises ConfigError for differences from the model's configuration, and for tensors that do not fit.
    """
    require_model(folder, model.config)
    files = WeightFiles(folder)
    load_weights(model, files, used_ids=used_ids)
    return files


def require_model(folder: Path, config: LlamaConfig) -> None:
    """Raise ConfigError if a folder in Hugging Face's layout has another model than [model]."""
    found = differences(model_config_of(read_config(folder), str(folder / CONFIG_FILE)), config)
    if found:
        raise ConfigError(f"train.init_from={str(folder)!r} holds another model: {'; '.join(found)}; set them equal")


def load_weights(model: Transformer, files: WeightFiles, *, used_ids: int) -> None:
    """Load every parameter in place; each rank reads only its rows.

    The files may have fewer rows of embedding and head than the model, if they cover the `used_ids` of the tokenizer:
    the other rows are unused padding, and keep their values. Raises ConfigError for tensors that are missing, have
    another shape, or are not in the model.
    """
    parameters = {hub_name(name): parameter for name, parameter in model.named_parameters()}
    problems = [f"{name} is missing" for name in parameters if name not in files.names]
    problems += [
        f"{name} has no place in this model"
        for name in sorted(files.names - parameters.keys())
        if not is_derived(name, model.config)
    ]
    for name, parameter in parameters.items():
        if name in files.names:
            problems += _shape_problems(name, files.shape(name), tuple(parameter.shape), used_ids)
    if problems:
        more = f", and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise ConfigError(f"{files.folder}: {'; '.join(problems[:_SHOWN_PROBLEMS])}{more}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            wanted, there = local_rows(parameter), files.shape(name)[0]
            held = slice(min(wanted.start, there), min(wanted.stop, there))
            rows = files.rows(name, held)
            if not bool(rows.isfinite().all()):
                raise ConfigError(f"{files.folder}: {name} holds values that are not finite; take other weights")
            local_shard(parameter)[: held.stop - held.start].copy_(rows)


def _shape_problems(name: str, there: tuple[int, ...], here: tuple[int, ...], used_ids: int) -> list[str]:
    if there == here:
        return []
    problem = f"{name} has shape {list(there)} there and {list(here)} here"
    if not name.endswith(("embed_tokens.weight", "lm_head.weight")) or there[1:] != here[1:]:
        return [problem]
    if used_ids <= there[0] < here[0]:
        return []
    return [f"{problem}: the model has a row for each of the {used_ids} ids of data.tokenizer, padded; is it another?"]

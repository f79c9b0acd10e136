"""Exports a trained model as a folder that transformers and vLLM load: weights, configuration, tokenizer."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zeroband.checkpoint.layout import MAX_FILE_BYTES, cut, file_names, hub_name, index_of
from zeroband.config.schema import ExportDtype
from zeroband.data.tokenizer import Tokenizer
from zeroband.errors import ConfigError, way_to_extra
from zeroband.export.hf import hf_config
from zeroband.export.hub_files import CONFIG_FILE, INDEX_FILE
from zeroband.model.blueprint import Blueprint, LlamaBlueprint
from zeroband.model.foreign import ForeignBlueprint
from zeroband.model.generate import evaluating
from zeroband.model.language_model import LanguageModel
from zeroband.node.sharding import Parameters, is_sharded
from zeroband.state.flat import FlatLayout

DTYPES: dict[ExportDtype, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class TrainedModel:
    """A model's weights, and what their use requires."""

    blueprint: Blueprint
    tokenizer: Tokenizer
    seq_length: int
    """Tokens per training sample."""
    read: Callable[[str], Tensor]
    """Returns a whole parameter, float32 on any device."""

    def build(self, device: torch.device, *, rounded_to: torch.dtype = torch.float32) -> LanguageModel:
        """Build the model in float32 for evaluation, with weights rounded to another type. Takes 4 bytes per value."""
        return self.blueprint.build(lambda name: self.read(name).to(rounded_to), device)


def whole_parameters(model: Parameters, *, keeps: bool) -> dict[str, Tensor]:
    """Return a sharded model's parameters by name, float32 on the CPU. Called by all local ranks, between inner steps.

    A rank with keeps=False takes part, one parameter at a time, and gets none.
    """
    held: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if is_sharded(value) else value
        if keeps:
            held[name] = whole.cpu()
    return held


class FolderInUse(ConfigError):
    """An export would overwrite something."""


def require_free(out: Path) -> None:
    """Raise FolderInUse if the path exists."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FolderInUse(f"{out} exists already, and an export never overwrites; remove it or name another folder")


def write_directory(model: TrainedModel, out: Path, dtype: ExportDtype, *, max_bytes: int = MAX_FILE_BYTES) -> int:
    """Write the folder under a temporary name, then rename it. Returns its bytes.

    Raises FolderInUse if `out` exists, ConfigError if it cannot be written.
    """
    require_free(out)
    draft = out.with_name(f"{out.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        model.tokenizer.save(draft, seq_length=model.seq_length)  # first, since it may refuse to be saved
        match model.blueprint:
            case LlamaBlueprint() as llama:
                _write_llama(draft, llama, model, dtype, max_bytes)
            case blueprint:
                assert isinstance(blueprint, ForeignBlueprint)
                blueprint.save(model.read, draft, DTYPES[dtype])
        _let_all_read(draft)
        size = sum(path.stat().st_size for path in draft.iterdir())
        draft.replace(out)
    except ConfigError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    except OSError as error:
        raise ConfigError(f"cannot write the export to {out}: {error}") from error
    return size


def _let_all_read(folder: Path) -> None:
    """Set the default permissions: safetensors makes its files private."""
    sample = folder / "permissions"
    sample.touch()
    for path in folder.iterdir():
        shutil.copymode(sample, path)
    sample.unlink()


def _write_llama(folder: Path, blueprint: LlamaBlueprint, model: TrainedModel, dtype: ExportDtype, most: int) -> None:
    _write_weights(folder, blueprint, model, DTYPES[dtype], most)
    end = model.tokenizer.end_of_document
    described = hf_config(
        blueprint.config,
        vocab_size=blueprint.vocab_size,
        seq_length=model.seq_length,
        end_of_document=end,
        dtype=dtype,
    )
    _write_json(folder / CONFIG_FILE, described)
    _write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})


def _write_weights(
    folder: Path, blueprint: LlamaBlueprint, model: TrainedModel, dtype: torch.dtype, max_bytes: int
) -> None:
    """Write one file, or several and an index; keeps one file's worth in memory."""
    cuts = cut(FlatLayout.of(blueprint.on_meta()).slots, max_bytes, itemsize=dtype.itemsize)
    names = file_names("model", len(cuts))
    for name, slots in zip(names, cuts, strict=True):
        tensors = {hub_name(slot.name): model.read(slot.name).to("cpu", dtype).contiguous() for slot in slots}
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(cuts) > 1:
        (folder / INDEX_FILE).write_bytes(index_of(names, cuts, itemsize=dtype.itemsize))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# -- whether transformers computes the same from it -------------------------------------------------------------------

TOLERANCE = 1e-5
"""Largest difference of logits up to 1, and relative difference of larger ones, within float32's precision."""

_ROWS, _LENGTH = 2, 64

_TEXTS = ("def main():\n    return 0\n", " naïve → 𝄞\t\r\n", "")


@dataclass(frozen=True)
class Parity:
    """Comparison of two implementations on the same tokens in float32."""

    difference: float
    """Largest absolute difference of logits."""
    largest: float
    """Largest absolute logit."""
    logits: int
    """Number of compared logits."""
    texts_differ: tuple[str, ...]
    """Texts for which the exported tokenizer gives other ids."""

    @property
    def is_equal(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.largest) and not self.texts_differ


def check_parity(model: TrainedModel, directory: Path, dtype: ExportDtype) -> Parity | None:
    """Load an export with transformers, and compare logits and ids.

    None if transformers is not installed, or the export is a user's own module. Both compute in float32 on the CPU,
    from weights rounded as exported: 8 bytes per parameter.
    """
    transformers = _transformers()
    if transformers is None or not (directory / CONFIG_FILE).is_file():
        return None
    ids = torch.randint(
        model.tokenizer.vocab_size, (_ROWS, min(_LENGTH, model.seq_length)), generator=torch.Generator().manual_seed(0)
    )  # (b, t)
    ours = _logits(model.build(torch.device("cpu"), rounded_to=DTYPES[dtype]), ids)
    theirs = _logits(transformers.AutoModelForCausalLM.from_pretrained(str(directory)).float().eval(), ids)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    return Parity(
        difference=(ours - theirs).abs().max().item(),
        largest=ours.abs().max().item(),
        logits=ours.numel(),
        texts_differ=tuple(
            text for text in _TEXTS if tokenizer(text)["input_ids"] != model.tokenizer.encode(text).tolist()
        ),
    )


def describe(parity: Parity | None) -> str:
    """Describe the comparison."""
    if parity is None and _transformers() is not None:
        return "not checked: adapters alone, or your own module"
    if parity is None:
        return f"not checked: transformers is not installed; {way_to_extra('hf')}"
    verdict = "equal" if parity.is_equal else "NOT EQUAL"
    line = (
        f"{verdict} to transformers in float32: max |difference| {parity.difference:.2e} over {parity.logits} logits "
        f"up to {parity.largest:.1f}"
    )
    if not parity.texts_differ:
        return line
    return f"{line}; the exported tokenizer gives other ids to {', '.join(map(repr, parity.texts_differ))}"


def _logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with evaluating(model):
        result = model(ids)
    return result if isinstance(result, Tensor) else result.logits


def _transformers() -> Any:
    """Import the library, if installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        return None

"""Whether transformers computes the same from an exported directory as we do from the weights that went into it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroband.errors import way_to_extra
from zeroband.export.directory import DTYPES, ExportDtype, TrainedModel
from zeroband.export.hub_files import CONFIG_FILE
from zeroband.model.generate import evaluating

TOLERANCE = 1e-5
"""Largest difference of logits up to 1; of larger ones the same share, because float32 has no more digits."""

_ROWS, _LENGTH = 2, 64

_TEXTS = ("def main():\n    return 0\n", " naïve → 𝄞\t\r\n", "")


@dataclass(frozen=True)
class Parity:
    """What two implementations made of the same tokens, in float32."""

    difference: float
    """Largest absolute difference of a logit."""
    largest: float
    """Largest absolute logit."""
    logits: int
    """How many were compared."""
    texts_differ: tuple[str, ...]
    """Texts to which the exported tokenizer gives other ids than training did."""

    @property
    def is_equal(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.largest) and not self.texts_differ


def check_parity(model: TrainedModel, directory: Path, dtype: ExportDtype) -> Parity | None:
    """Load an exported directory with transformers, and compare logits and ids.

    None where it is not installed, or the directory is not in its layout: that of a module of the user's own.

    Both compute in float32 on the CPU, from weights rounded as they were written: 8 bytes a parameter are needed.
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
    """What the comparison showed, in words."""
    if parity is None and _transformers() is not None:
        return "not checked: adapters alone, or a module of one's own"
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
    """The library, or None."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        return None

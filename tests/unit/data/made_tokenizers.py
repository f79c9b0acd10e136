"""Tokenizers of Hugging Face that are made here: byte-level, as files that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def byte_level(
    out: Path,
    more: Mapping[str, int],
    merges: Sequence[tuple[str, str]] = (),
    *,
    end: str,
    single: tuple[str, str] | None = None,
    **options: Any,
) -> Path:
    """Write one to a folder: a token for each byte, and `more`. `single`: a token before each text, and how."""
    tokenizers: Any = pytest.importorskip("tokenizers", reason="needs the extra hf")
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")
    vocabulary = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))} | dict(more)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if single is not None:
        special = [(single[0], more[single[0]])]
        backend.post_processor = tokenizers.processors.TemplateProcessing(single=single[1], special_tokens=special)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, **options).save_pretrained(out)
    return out

"""Tiny corpora on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zeroband.config.data import DataConfig, TextSource
from zeroband.data.token_store import TokenStore
from zeroband.data.tokens import prepare


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., TokenStore]:
    """Tokenise documents, one file each, with the byte tokenizer."""

    def make(*texts: bytes) -> TokenStore:
        folder = tmp_path / "corpus"
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number:03}.txt").write_bytes(text)
        source = TextSource(paths=(f"{folder}/*.txt",))
        return prepare(DataConfig(source=source, cache_dir=tmp_path / "cache"), seed=0)

    return make

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zeroband.config.data import DataConfig, SyntheticTokensSource
from zeroband.data.synthetic_tokens import SyntheticTokens
from zeroband.data.tokenizer import tokenizer_of
from zeroband.data.tokens import is_prepared, prepare
from zeroband.errors import ConfigError

SOURCE = SyntheticTokensSource(type="synthetic-tokens", tokens=1_000_000, mean_document_length=50)


@pytest.fixture
def config() -> DataConfig:
    return DataConfig(source=SOURCE, tokenizer="some/tokenizer-that-is-not-here", vocab_size=1000)


def test_ids_depend_on_the_position_alone_and_not_on_how_they_are_read() -> None:
    tokens = SyntheticTokens(SOURCE, seed=0, vocab_size=1000)
    whole = tokens.read(0, 1000).tolist()
    assert tokens.read(400, 500).tolist() == whole[400:500]
    assert tokens.read(7, 7).tolist() == []
    assert whole[:8] == [0, 0, 11, 25, 2, 7, 13, 732]  # on every machine


@pytest.mark.parametrize("vocab_size", [2, 3, 257, 1000, 32_000, 128_256])
def test_ids_fill_the_vocabulary_by_zipfs_law_with_documents_of_the_mean_length(vocab_size: int) -> None:
    tokens = SyntheticTokens(SOURCE, seed=0, vocab_size=vocab_size).read(0, 200_000)
    counts = np.bincount(tokens, minlength=vocab_size)
    assert len(counts) == vocab_size
    assert len(tokens) / counts[-1] == pytest.approx(50, rel=0.05)
    octaves = [
        counts[first : min(2 * first + 1, vocab_size - 1)].sum() for first in (0, 1, 3, 7) if first < vocab_size - 1
    ]
    assert octaves == pytest.approx([len(tokens) * 0.98 / (vocab_size - 1).bit_length()] * len(octaves), rel=0.05)
    assert tokens.max() >= 0.98 * (vocab_size - 1)


def test_the_end_of_a_long_corpus_is_as_near_as_its_beginning() -> None:
    source = SyntheticTokensSource(type="synthetic-tokens", tokens=10**12)
    tokens = SyntheticTokens(source, seed=0, vocab_size=1000)
    assert len(set(tokens.read(10**12 - 1000, 10**12).tolist())) > 100
    with pytest.raises(AssertionError):
        tokens.read(10**12 - 1, 10**12 + 1)


def test_fingerprint_tells_apart_what_gives_other_ids() -> None:
    def fingerprint(seed: int = 0, vocab_size: int = 1000, **settings: int) -> str:
        return SyntheticTokens(SOURCE.model_copy(update=settings), seed, vocab_size).fingerprint

    others = [
        fingerprint(seed=1),
        fingerprint(vocab_size=999),
        fingerprint(tokens=9),
        fingerprint(mean_document_length=9),
    ]
    assert fingerprint() == fingerprint()
    assert len({fingerprint(), *others}) == 5


def test_made_up_tokens_need_neither_the_tokenizer_nor_a_cache(config: DataConfig) -> None:
    assert is_prepared(config, seed=0)
    tokens, tokenizer = prepare(config, seed=0), tokenizer_of(config)
    assert (len(tokens), tokens.end_of_document) == (1_000_000, tokenizer.end_of_document)
    assert tokenizer.padded_vocab_size == 1024
    assert tokenizer.count_bytes([1, 2]) == 0


def test_made_up_ids_are_refused_where_text_is_needed(config: DataConfig, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(config)
    with pytest.raises(ConfigError, match="its ids have no text"):
        tokenizer.encode("a")
    with pytest.raises(ConfigError, match="its ids have no text"):
        tokenizer.decode([1])
    with pytest.raises(ConfigError, match="its ids have no text"):
        tokenizer.save(tmp_path, seq_length=8)

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.config.data import DataConfig, MixtureSource, SyntheticTokensSource
from zeroband.data.tokenizer import ByteTokenizer, NoTokenizer, open_tokenizer, tokenizer_of
from zeroband.errors import ConfigError


@given(text=st.text())
def test_byte_tokenizer_decodes_what_it_encoded(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_byte_tokenizer_encodes_unicode_as_its_utf8_bytes() -> None:
    ids = ByteTokenizer().encode("é→𝄞")
    assert ids.tolist() == list("é→𝄞".encode())
    assert ids.dtype == np.uint32


def test_byte_tokenizer_takes_bytes_that_are_no_utf8() -> None:
    assert ByteTokenizer().encode(b"\xff\x00\x80").tolist() == [255, 0, 128]


def test_byte_tokenizer_decodes_special_padded_and_broken_ids_without_raising() -> None:
    assert ByteTokenizer().decode([72, 256, 105, 319, 0xC3]) == "Hi\N{REPLACEMENT CHARACTER}"


def test_byte_tokenizer_encodes_a_batch_as_each_text_alone() -> None:
    tokenizer = ByteTokenizer()
    batch = tokenizer.encode_batch(["a", b"", "bc"])
    assert [ids.tolist() for ids in batch] == [[97], [], [98, 99]]


def test_padded_vocab_size_is_the_next_multiple_of_64() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padded_vocab_size) == (257, 256, 320)
    tokenizer.vocab_size = 128
    assert tokenizer.padded_vocab_size == 128


def test_room_widens_the_model_and_must_hold_every_id_of_the_tokenizer() -> None:
    assert tokenizer_of(DataConfig(vocab_size=257)).padded_vocab_size == 320
    assert tokenizer_of(DataConfig(vocab_size=32_001)).padded_vocab_size == 32_064
    with pytest.raises(ConfigError, match=r"data\.vocab_size=256 has no room for the 257 ids of data.tokenizer='byte'"):
        tokenizer_of(DataConfig(vocab_size=256))


def test_made_up_ids_have_no_tokenizer_in_a_mixture_either() -> None:
    made_up = SyntheticTokensSource(type="synthetic-tokens", tokens=1000)
    mixed = tuple(MixtureSource(name=name, weight=1, source=made_up) for name in "ab")
    tokenizer = tokenizer_of(DataConfig(sources=mixed, vocab_size=100, tokenizer="no such tokenizer"))
    assert isinstance(tokenizer, NoTokenizer) and tokenizer.fingerprint == NoTokenizer(100).fingerprint


def test_open_tokenizer_gives_bytes_by_name() -> None:
    assert isinstance(open_tokenizer("byte"), ByteTokenizer)


def test_open_tokenizer_names_the_extra_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"data\.tokenizer='gpt2'.*extra `hf`"):
        open_tokenizer("gpt2")

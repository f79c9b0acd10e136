from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.data.made_tokenizers import byte_level

from zeroband.config.data import DataConfig, MixtureSource, SyntheticTokensSource
from zeroband.data.tokenizer import ByteTokenizer, NoTokenizer, open_tokenizer, tokenizer_of
from zeroband.errors import ConfigError


@given(text=st.text())
def test_byte_tokenizer_decodes_what_it_encoded(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_byte_tokenizer_encodes_utf8_and_any_bytes_and_decodes_whatever_ids() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("é→𝄞")
    assert ids.tolist() == list("é→𝄞".encode()) and ids.dtype == np.uint32
    assert tokenizer.encode(b"\xff\x00\x80").tolist() == [255, 0, 128]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["a", b"", "bc"])] == [[97], [], [98, 99]]
    assert tokenizer.decode([72, 256, 105, 319, 0xC3]) == "Hi\N{REPLACEMENT CHARACTER}"
    assert tokenizer.count_bytes([*"é→".encode(), 256, 319]) == 5


def test_padded_vocab_size_is_the_next_multiple_of_64() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padded_vocab_size) == (257, 256, 320)
    tokenizer.vocab_size = 128
    assert tokenizer.padded_vocab_size == 128


def test_room_widens_the_model_and_must_hold_every_id_of_the_tokenizer() -> None:
    assert tokenizer_of(DataConfig(vocab_size=257)).padded_vocab_size == 320
    assert tokenizer_of(DataConfig(vocab_size=32_001)).padded_vocab_size == 32_064
    with pytest.raises(ConfigError, match=r"data\.vocab_size=256 is less than the 257 ids of data.tokenizer='byte'"):
        tokenizer_of(DataConfig(vocab_size=256))


def test_made_up_ids_have_no_tokenizer_in_a_mixture_either() -> None:
    made_up = SyntheticTokensSource(type="synthetic-tokens", tokens=1000)
    mixed = tuple(MixtureSource(name=name, weight=1, source=made_up) for name in "ab")
    tokenizer = tokenizer_of(DataConfig(sources=mixed, vocab_size=100, tokenizer="no such tokenizer"))
    assert isinstance(tokenizer, NoTokenizer) and tokenizer.fingerprint == NoTokenizer(100).fingerprint


def test_open_tokenizer_gives_bytes_by_name_and_names_the_extra_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(open_tokenizer("byte"), ByteTokenizer)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"data\.tokenizer='gpt2'.*extra `hf`"):
        open_tokenizer("gpt2")


# -- exported: the same ids as in training, from transformers' AutoTokenizer and from the JSON alone -------------------

TEXTS = ("plain", "naïve → 𝄞\n\t\r\x00 two  spaces ", "".join(map(chr, range(0x300))), "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ByteTokenizer().save(tmp_path, seq_length=128)
    return tmp_path


def test_byte_vocabulary_gives_each_byte_a_character_of_its_own(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert all(len(character) == 1 and character.isprintable() for character in vocabulary)
    assert [vocabulary[c] for c in "a~!ÿĀĠ"] == [ord("a"), ord("~"), ord("!"), 255, 0, ord(" ")]


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_gives_the_same_ids_through_transformers(text: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    exported = transformers.AutoTokenizer.from_pretrained(str(folder))
    ids = ByteTokenizer().encode(text).tolist()
    assert exported(text)["input_ids"] == ids
    assert exported.decode(ids) == text
    assert (exported.eos_token_id, exported.bos_token_id) == (256, 256)
    assert (len(exported), exported.model_max_length) == (257, 128)
    assert exported.decode([72, 105, 256], skip_special_tokens=True) == "Hi"
    assert sorted(exported("Hi")) == ["attention_mask", "input_ids"]  # a Llama takes nothing else


@pytest.mark.slow
def test_tokenizer_that_adds_tokens_is_saved_as_training_used_it(tmp_path: Path) -> None:
    """As those of Llama and Mistral do: <s> before every text."""
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")
    begins = {"single": ("<s>", "<s> $A"), "bos_token": "<s>", "add_bos_token": True}
    greeting = byte_level(tmp_path / "greeting", {"<s>": 256, "</s>": 257}, end="</s>", **begins)
    assert transformers.AutoTokenizer.from_pretrained(str(greeting))("a")["input_ids"][0] == 256
    tokenizer, out = open_tokenizer(str(greeting)), tmp_path / "out"
    tokenizer.save(out, seq_length=64)
    exported = transformers.AutoTokenizer.from_pretrained(str(out))
    assert exported("naïve → 𝄞")["input_ids"] == tokenizer.encode("naïve → 𝄞").tolist()
    assert (exported.bos_token_id, exported.eos_token_id, exported.model_max_length) == (257, 257, 64)
    assert open_tokenizer(str(out)).end_of_document == tokenizer.end_of_document == 257
    assert tokenizer.count_bytes([*tokenizer.encode("naïve").tolist(), 257]) == len("naïve".encode())

"""Exported tokenizers: the same ids as in training, from transformers' AutoTokenizer and from the JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroband.data.tokenizer import ByteTokenizer, open_tokenizer

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


def test_byte_tokenizer_counts_bytes_of_text_alone() -> None:
    assert ByteTokenizer().count_bytes([*"é→".encode(), 256, 319]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_byte_tokenizer_gives_the_same_ids_through_transformers(text: str, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    exported = transformers.AutoTokenizer.from_pretrained(str(folder))
    ids = ByteTokenizer().encode(text).tolist()
    assert exported(text)["input_ids"] == ids
    assert exported.decode(ids) == text


@pytest.mark.slow
def test_byte_tokenizer_ends_documents_through_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    exported = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert (exported.eos_token_id, exported.bos_token_id, len(exported), exported.model_max_length) == (
        256,
        256,
        257,
        128,
    )
    assert exported.decode([72, 105, 256], skip_special_tokens=True) == "Hi"
    assert sorted(exported("Hi")) == ["attention_mask", "input_ids"]  # a Llama takes nothing else


@pytest.fixture
def greeting(tmp_path: Path) -> Path:
    """A tokenizer that adds <s> to every text, as those of Llama and Mistral do."""
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", add_bos_token=True
    )
    fast.save_pretrained(tmp_path / "greeting")
    assert transformers.AutoTokenizer.from_pretrained(str(tmp_path / "greeting"))("a")["input_ids"][0] == 256
    return tmp_path / "greeting"


@pytest.mark.slow
def test_tokenizer_that_adds_tokens_is_saved_as_training_used_it(greeting: Path, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs the extra hf")
    tokenizer, out = open_tokenizer(str(greeting)), tmp_path / "out"
    tokenizer.save(out, seq_length=64)
    exported = transformers.AutoTokenizer.from_pretrained(str(out))
    assert exported("naïve → 𝄞")["input_ids"] == tokenizer.encode("naïve → 𝄞").tolist()
    assert (exported.bos_token_id, exported.eos_token_id, exported.model_max_length) == (257, 257, 64)
    assert open_tokenizer(str(out)).end_of_document == tokenizer.end_of_document == 257


@pytest.mark.slow
def test_bytes_of_hugging_face_ids_are_those_of_their_text(greeting: Path) -> None:
    tokenizer = open_tokenizer(str(greeting))
    assert tokenizer.count_bytes([*tokenizer.encode("naïve").tolist(), 257]) == len("naïve".encode())

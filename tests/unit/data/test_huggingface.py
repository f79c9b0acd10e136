"""The extra `hf` on local files, with every way to the network cut."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.unit.data.made_tokenizers import byte_level

from zeroband.config.data import DataConfig, HuggingFaceSource
from zeroband.data.sources import documents, source_identity
from zeroband.data.tokenizer import HuggingFaceTokenizer, Tokenizer, open_tokenizer
from zeroband.data.tokens import prepare
from zeroband.errors import ConfigError

datasets = pytest.importorskip("datasets", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError("the network is off in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def source(tmp_path: Path) -> HuggingFaceSource:
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [{"text": "ünï", "id": 0}, {"text": None, "id": 1}, {"text": "last", "id": 2}]
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return HuggingFaceSource(type="huggingface", name=str(folder))


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """One without merges, its end of sequence behind a gap in the ids."""
    return byte_level(tmp_path / "tokenizer", {"<end>": 300}, end="<end>")


@pytest.fixture
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return open_tokenizer(str(tokenizer_dir))


def test_data_set_gives_one_document_a_row(source: HuggingFaceSource) -> None:
    assert [document.text for document in documents(source, 0)] == ["ünï", "", "last"]


def test_data_set_names_the_columns_that_there_are(source: HuggingFaceSource) -> None:
    with pytest.raises(ConfigError, match=r"no column 'body' .*it has 'text', 'id'"):
        list(documents(source.model_copy(update={"column": "body"}), 0))


@pytest.mark.parametrize("update", [{"split": "nosuch"}, {"name": "/nosuch/folder"}, {"subset": "nosuch"}])
def test_data_set_names_what_cannot_be_loaded(source: HuggingFaceSource, update: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"cannot load the data set .*nosuch"):
        documents(source.model_copy(update=update), 0)


def test_identity_of_a_data_set_follows_its_files(source: HuggingFaceSource) -> None:
    before = source_identity(source, 0)
    assert json.loads(json.dumps(source_identity(source, 0))) == before
    (Path(source.name) / "train.jsonl").write_text('{"text": "ünï", "id": 0}\n' * 3)
    assert source_identity(source, 0) != before


def test_tokenizer_encodes_and_decodes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("naïve → 𝄞\n")
    assert tokenizer.decode(ids.tolist()) == "naïve → 𝄞\n"
    assert tokenizer.encode("naïve → 𝄞\n".encode()).tolist() == ids.tolist()
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.padded_vocab_size) == (301, 300, 320)
    named = tokenizer.encode("a<end>b").tolist()
    assert tokenizer.end_of_document not in named and tokenizer.decode(named) == "a<end>b", "it is plain text"
    assert tokenizer.decode([*tokenizer.encode("Hi").tolist(), 300, 319]) == "Hi", "special and padded ids"
    with pytest.raises(UnicodeError, match="surrogates not allowed"):
        tokenizer.encode_batch(["fine", "\ud800"])


TEXTS = ["", " ", "a<end>b", "<end>", "naïve → 𝄞\n", "a\r\n\tb  c", "[PAD] <unk> ##", "\0", "x" * 5000]
TEXTS += ["한국어 العربية 🏳️‍🌈"]


@pytest.fixture
def trained_dir(tmp_path: Path) -> Path:
    """A tokenizer as models have them: merges, a normalizer, special tokens, a post-processor that adds one, limits."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<end>", "[PAD]"], show_progress=False
    )
    backend.train_from_iterator([__doc__ or "", Path(__file__).read_text()], trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 1)])
    backend.enable_truncation(7)
    backend.enable_padding(length=9, pad_token="[PAD]", pad_id=2)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="[PAD]")
    fast.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def test_tokenizer_gives_the_ids_of_transformers_call(trained_dir: Path) -> None:
    ours = open_tokenizer(str(trained_dir))
    theirs = transformers.AutoTokenizer.from_pretrained(str(trained_dir))
    expected = theirs(TEXTS, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS)] == expected
    assert all(ids.dtype == np.uint32 for ids in ours.encode_batch(TEXTS))
    assert theirs(TEXTS[2], add_special_tokens=False)["input_ids"] != expected[2], "a special token in text counts"
    assert [ours.end_of_document in ids for ids in expected] == [False] * len(TEXTS)


def test_chats_and_texts_do_not_change_each_others_ids(trained_dir: Path) -> None:
    ours = open_tokenizer(str(trained_dir))
    text, chat = ours.encode("a<end>b").tolist(), ours.encode_chat("a<end>b")[0].tolist()
    assert text != chat and chat.count(ours.end_of_document) == 1
    assert (ours.encode("a<end>b").tolist(), ours.encode_chat("a<end>b")[0].tolist()) == (text, chat)


def test_tokenizer_fingerprint_follows_the_content(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    assert open_tokenizer(str(tokenizer_dir)).fingerprint == tokenizer.fingerprint
    backend = transformers.AutoTokenizer.from_pretrained(str(tokenizer_dir))
    backend.add_tokens(["zeroband"])
    assert HuggingFaceTokenizer("longer", backend).fingerprint != tokenizer.fingerprint


def test_tokenizer_that_cannot_be_used_is_refused(tokenizer_dir: Path) -> None:
    backend = transformers.AutoTokenizer.from_pretrained(str(tokenizer_dir))
    backend.eos_token = None
    with pytest.raises(ConfigError, match=r"data\.tokenizer='mute' has no end-of-sequence"):
        HuggingFaceTokenizer("mute", backend)
    empty = tokenizer_dir.parent
    with pytest.raises(ConfigError, match=rf"data\.tokenizer='{empty}': neither `byte` nor"):
        open_tokenizer(str(empty))


def test_prepare_joins_a_data_set_and_its_tokenizer(
    source: HuggingFaceSource, tokenizer_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = DataConfig(source=source, tokenizer=str(tokenizer_dir), cache_dir=tmp_path / "cache")
    store = prepare(config, 0)
    expected = [*tokenizer.encode("ünï").tolist(), 300, *tokenizer.encode("last").tolist(), 300]
    assert store.read(0, len(store)).tolist() == expected


def test_prepare_names_the_file_that_the_tokenizer_cannot_take(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine until \xff")
    source = {"type": "text", "paths": [f"{tmp_path}/a.txt"]}
    config = DataConfig.model_validate({"source": source, "tokenizer": str(tokenizer_dir), "cache_dir": tmp_path})
    with pytest.raises(ConfigError, match=r"a\.txt is not text: byte 11 is 0xff.*data\.source\.binary"):
        prepare(config, 0)

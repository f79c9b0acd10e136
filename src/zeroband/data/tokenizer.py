"""Text to token ids and back: bytes as they are, a Hugging Face tokenizer by name (extra `hf`), or ids without text."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import numpy as np
import numpy.typing as npt

from zeroband.config.data import DataConfig, SyntheticTokensSource
from zeroband.data.tokenizer_files import match_training, write_byte_tokenizer
from zeroband.errors import ConfigError, way_to_extra

Ids = npt.NDArray[np.uint32]


class Tokenizer(Protocol):
    """What the data path and the sampler need of a tokenizer."""

    vocab_size: int
    """Every id is below it."""
    end_of_document: int
    """The id that follows each document; never the id of text."""
    fingerprint: str
    """Equal for two tokenizers only if they give the same ids for every text."""
    room: int = 0
    """Ids that the model has room for, where they are more than vocab_size."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """Ids of each text, without any special id. Bytes are taken as UTF-8. Raises: UnicodeError."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ids, padding of the vocabulary and broken characters do not raise."""
        ...

    def count_bytes(self, ids: Sequence[int]) -> int:
        """Length in UTF-8 of the text that ids stand for; special ids count nothing."""
        ...

    def save(self, folder: Path, *, seq_length: int) -> None:
        """Write files from which transformers' AutoTokenizer gives the same ids for a text. Raises: OSError."""
        ...

    def encode(self, text: str | bytes) -> Ids:
        """Ids of one text, as `encode_batch` gives them."""
        return self.encode_batch([text])[0]

    @property
    def padded_vocab_size(self) -> int:
        """Width of the model's head: its ids rounded up to a multiple of 64, which matrix units need to be fast."""
        return -(-max(self.vocab_size, self.room) // 64) * 64


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0..255, and 256 as the end of a document. Takes any bytes, valid UTF-8 or not."""

    vocab_size = 257
    end_of_document = 256
    fingerprint = "byte/1"

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        encoded = (text.encode() if isinstance(text, str) else text for text in texts)
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def count_bytes(self, ids: Sequence[int]) -> int:
        return sum(i < 256 for i in ids)

    def save(self, folder: Path, *, seq_length: int) -> None:
        write_byte_tokenizer(folder, seq_length=seq_length)


class NoTokenizer(Tokenizer):
    """Made-up ids 0..vocab_size-1, the last one the end of a document. None stands for text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.end_of_document = vocab_size - 1
        self.fingerprint = f"none/{vocab_size}"

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        self._refuse()

    def decode(self, ids: Sequence[int]) -> str:
        self._refuse()

    def count_bytes(self, ids: Sequence[int]) -> int:
        return 0

    def save(self, folder: Path, *, seq_length: int) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            "this model was trained on data.source.type='synthetic-tokens': it has no tokenizer, and its ids stand for "
            "no text; sample and export a model that was trained on text"
        )


class _Backend(Protocol):
    """The part of transformers' PreTrainedTokenizerBase that is used here."""

    eos_token_id: int | None

    def __call__(self, text: list[str], **options: Any) -> dict[str, list[list[int]]]: ...
    def decode(self, token_ids: list[int], **options: Any) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...
    def save_pretrained(self, save_directory: str) -> object: ...


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the transformers library; its end-of-sequence token ends documents.

    The literal text of a special token inside a document is encoded as plain text: data cannot end a document.
    """

    def __init__(self, name: str, backend: _Backend) -> None:
        if backend.eos_token_id is None:
            raise ConfigError(
                f"data.tokenizer={name!r} has no end-of-sequence token, which marks the end of a document here; "
                "choose a tokenizer that has one, or data.tokenizer=byte"
            )
        self._backend = backend
        vocabulary = backend.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # its length is smaller where ids have gaps
        self.end_of_document = backend.eos_token_id
        fast = getattr(backend, "backend_tokenizer", None)
        content = json.dumps(vocabulary, sort_keys=True) if fast is None else cast(str, fast.to_str())
        digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        self.fingerprint = f"hf/{self.end_of_document}/{digest}"

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        decoded = [text if isinstance(text, str) else text.decode() for text in texts]
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        encoded = self._backend(decoded, return_attention_mask=False, return_token_type_ids=False, **options)
        return [np.asarray(ids, dtype=np.uint32) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def count_bytes(self, ids: Sequence[int]) -> int:
        """A character that the ends of `ids` cut counts three bytes: it is decoded as U+FFFD."""
        return len(self.decode(ids).encode())

    def save(self, folder: Path, *, seq_length: int) -> None:
        self._backend.save_pretrained(str(folder))
        match_training(folder, seq_length=seq_length)


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of a [data] section, with the room that it asks for.

    Raises: ConfigError as `open_tokenizer` does, and where data.vocab_size is too small for it.
    """
    if isinstance(data.source, SyntheticTokensSource):
        assert data.vocab_size is not None, "checked with the section"
        return NoTokenizer(data.vocab_size)
    tokenizer = open_tokenizer(data.tokenizer)
    if data.vocab_size is not None:
        if data.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"data.vocab_size={data.vocab_size} has no room for the {tokenizer.vocab_size} ids of data.tokenizer="
                f"{data.tokenizer!r}; set it to {tokenizer.vocab_size} or more, or to none"
            )
        tokenizer.room = data.vocab_size
    return tokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a name: `byte`, or the name or folder of a Hugging Face tokenizer.

    Raises: ConfigError when the extra `hf` is missing, or nothing of that name can be loaded.
    """
    if name == "byte":
        return ByteTokenizer()
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as e:
        raise ConfigError(
            f"data.tokenizer={name!r} is not `byte`, so it names a Hugging Face tokenizer, which needs transformers: "
            f"{way_to_extra('hf')}"
        ) from e
    try:
        backend = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"data.tokenizer={name!r}: neither `byte` nor a tokenizer that can be loaded: {_first_line(e)}; where it "
            "is gated or private, accept its terms on the hub and set HF_TOKEN; without a network, name a folder of it"
        ) from e
    return HuggingFaceTokenizer(name, cast(_Backend, backend))


def _first_line(error: Exception) -> str:
    """What went wrong, without the advice about the library's own arguments that follows it."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error)).rstrip(".:")

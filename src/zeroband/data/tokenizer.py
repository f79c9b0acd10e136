"""Tokenizers: raw bytes, a Hugging Face tokenizer by name (extra `hf`), or none for synthetic ids."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from zeroband.config.data import ChatSource, DataConfig, Source
from zeroband.data.hub import hub_hint, hub_options
from zeroband.data.tokenizer_files import (
    BYTE_CHAT_TEMPLATE,
    END_OF_DOCUMENT_TEXT,
    match_training,
    write_byte_tokenizer,
)
from zeroband.errors import ConfigError, way_to_extra

_PROBE = (
    "The quick brown fox can't, won't & DIDN'T jump: 3.14159, 1,000,000 and 0x1F; e-mail me@example.org!  Two  spaces,"
    "\ttabs\tand\n\n\nlines\r\nof\u00a0all kinds.\n    def f(x):\n        return {'a': [x ** 2, -1e-9]}  # ok\n\n"
    "na\u00efve cafe\u0301 \u212b \u00bd \u2460 \ufb01n stra\u00dfe \u0130stanbul \u01c5 \u2026 \u201cquotes\u201d"
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u041f\u0440\u0438\u0432\u0435 "
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f600\U0001f468"
    "\u200d\U0001f469\u200d\U0001f467 \U0001d11e \u0000\u0007\u001b\ufeff\u00ad\ufffd\U000f0000 <|endoftext|><s>[SEP] "
    "aaaaaaaaaaaaaaaa 1234567890123456 ================ UPPER lower MiXeD \u2581under_score "
)
"""Exercises case, digits, whitespace, Unicode normalisation, scripts and special tokens."""

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

_CHARACTERS = re.compile(f"{re.escape(END_OF_DOCUMENT_TEXT)}|.", re.DOTALL)
"""A character of a chat, or the literal end of a document."""


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    vocab_size: int
    """Every id is below it."""
    end_of_document: int
    """Id that follows each document; encoding text never produces it."""
    fingerprint: str
    """Hash of the vocabulary and of the ids of a test text."""
    release: str = ""
    """Versions of the tokenizer's libraries, for messages; may be empty."""
    min_vocab_size: int = 0
    """Lower bound of the model's vocabulary (data.vocab_size)."""
    own_chat_template: str | None = None
    """The tokenizer's own Jinja chat template, if any."""
    chat_template: str | None = None
    """Jinja template of the conversations trained on; None if training on text."""
    special_names: Mapping[str, str] = {}
    """Text of special tokens in a chat, by their names in templates (`eos_token`, ...)."""
    special_texts: frozenset[str] = frozenset()
    """Texts of all special tokens in a chat."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """Encode texts without special tokens. Bytes are decoded as UTF-8. Raises: UnicodeError."""
        ...

    def encode_chat(self, text: str) -> tuple[Ids, Offsets]:
        """Encode text with literal special tokens, adding none; return ids and character offsets.

        Shapes: (n,) and (n, 2): start and end of each token. Raises: UnicodeError.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; tolerates special ids, vocabulary padding and incomplete characters."""
        ...

    def count_bytes(self, ids: Sequence[int]) -> int:
        """Return the UTF-8 length of decoded ids, without special ids."""
        ...

    def save(self, folder: Path, *, seq_length: int) -> None:
        """Write files with which transformers' AutoTokenizer produces the same ids. Raises: OSError."""
        ...

    def encode(self, text: str | bytes) -> Ids:
        """Encode one text as `encode_batch` does."""
        return self.encode_batch([text])[0]

    def matches(self, fingerprint: str) -> bool:
        """Return whether the tokenizer with this fingerprint produces the same ids."""
        return fingerprint == self.fingerprint

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary of the model, rounded up to a multiple of 64 for fast matrix multiplication."""
        return -(-max(self.vocab_size, self.min_vocab_size) // 64) * 64


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, and 256 as the end of a document. Accepts any bytes, valid UTF-8 or not."""

    vocab_size = 257
    end_of_document = 256
    fingerprint = "byte/1"
    own_chat_template = BYTE_CHAT_TEMPLATE
    special_names: Mapping[str, str] = {"eos_token": END_OF_DOCUMENT_TEXT}
    special_texts = frozenset({END_OF_DOCUMENT_TEXT})

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        encoded = (text.encode() if isinstance(text, str) else text for text in texts)
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in encoded]

    def encode_chat(self, text: str) -> tuple[Ids, Offsets]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for match in _CHARACTERS.finditer(text):
            found = [self.end_of_document] if match[0] == END_OF_DOCUMENT_TEXT else match[0].encode()
            ids.extend(found)
            offsets.extend([match.span()] * len(found))
        return np.array(ids, dtype=np.uint32), np.array(offsets, dtype=np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def count_bytes(self, ids: Sequence[int]) -> int:
        return sum(i < 256 for i in ids)

    def save(self, folder: Path, *, seq_length: int) -> None:
        write_byte_tokenizer(folder, seq_length=seq_length, chat_template=self.chat_template)


class NoTokenizer(Tokenizer):
    """Synthetic ids 0..vocab_size-1 without text; the last is the end of a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.end_of_document = vocab_size - 1
        self.fingerprint = f"none/{vocab_size}"

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            "this model was trained on data.source.type='synthetic-tokens', so it has no tokenizer and its ids have no "
            "text; sample and export a model trained on text"
        )

    encode_batch = encode_chat = decode = save = _refuse

    def count_bytes(self, ids: Sequence[int]) -> int:
        return 0


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of transformers; its end-of-sequence token ends documents.

    Literal special tokens inside a document are encoded as plain text, so data cannot end a document.
    backend: transformers' PreTrainedTokenizerBase.
    """

    def __init__(self, name: str, backend: Any) -> None:
        if backend.eos_token_id is None:
            raise ConfigError(
                f"data.tokenizer={name!r} has no end-of-sequence token, which ends documents; use a tokenizer that has "
                "one, or data.tokenizer=byte"
            )
        self._name = name
        self._backend = backend
        vocabulary = backend.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.end_of_document = backend.eos_token_id
        self._fast: Any = getattr(backend, "backend_tokenizer", None)
        serialised = None if self._fast is None else self._fast.to_str()
        content = json.dumps(vocabulary, sort_keys=True) if serialised is None else serialised
        self._old_fingerprint = f"hf/{self.end_of_document}/{_digest(content)}"
        model = {} if serialised is None else json.loads(serialised)["model"]
        self.fingerprint = f"hf2/{self.end_of_document}/{_digest(json.dumps(self._behaviour(vocabulary, model)))}"
        self.release = ", ".join(f"{library} {version(library)}" for library in ("transformers", "tokenizers"))
        self.special_names = backend.special_tokens_map
        self.special_texts = frozenset(str(token) for token in backend.added_tokens_decoder.values())
        with contextlib.suppress(ValueError):  # no template, or several without a default
            self.own_chat_template = backend.get_chat_template()

    def _behaviour(self, vocabulary: Mapping[str, int], model: Mapping[str, Any]) -> list[Any]:
        """Return everything that determines the ids, independent of the library's serialisation format."""
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        scored = model["vocab"] if isinstance(model.get("vocab"), list) else ()
        scores = [[token, f"{score:.6g}"] for token, score in scored]  # Unigram models
        added = sorted((id, str(token)) for id, token in self._backend.added_tokens_decoder.items())
        texts = [_PROBE, *(f"a{text}b {text} c" for _, text in added)]  # shows the flags of added tokens
        return [sorted(vocabulary.items()), merges, scores, added, [ids.tolist() for ids in self.encode_batch(texts)]]

    def matches(self, fingerprint: str) -> bool:
        return fingerprint in (self.fingerprint, self._old_fingerprint)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        decoded = [text if isinstance(text, str) else text.decode() for text in texts]
        if self._fast is not None:
            return _encode_fast(self._fast, decoded)
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        encoded = self._backend(decoded, return_attention_mask=False, return_token_type_ids=False, **options)
        return [np.asarray(ids, dtype=np.uint32) for ids in encoded["input_ids"]]

    def encode_chat(self, text: str) -> tuple[Ids, Offsets]:
        if not self._backend.is_fast:
            raise ConfigError(
                f"data.tokenizer={self._name!r} does not report character offsets, which chats need; use one with a "
                "tokenizer.json"
            )
        encoded = self._backend(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], dtype=np.uint32), offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def count_bytes(self, ids: Sequence[int]) -> int:
        """Return the UTF-8 length; a character cut off at either end counts as U+FFFD, three bytes."""
        return len(self.decode(ids).encode())

    def save(self, folder: Path, *, seq_length: int) -> None:
        if self.chat_template is None:
            self._backend.save_pretrained(str(folder))
            match_training(folder, seq_length=seq_length)
        else:  # as in training, the template writes the begin-of-sequence token
            self._backend.chat_template = self.chat_template
            self._backend.save_pretrained(str(folder))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def described(name: str, release: str | None) -> str:
    """Format a tokenizer for messages: its name and, if known, the releases of its libraries."""
    return f"{name!r} ({release})" if release else repr(name)


def _encode_fast(backend: Any, texts: list[str]) -> list[Ids]:
    """Encode as transformers' __call__ with split_special_tokens does, without its overhead.

    Sets the options on every call, because chats use the same backend with other options.
    """
    if not backend.encode_special_tokens:
        backend.encode_special_tokens = True
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    try:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    except TypeError:
        for text in texts:
            text.encode()  # raises UnicodeEncodeError for a lone surrogate
        raise
    return [np.frombuffer(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings]


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """Open the tokenizer of a [data] section.

    Raises: ConfigError as `open_tokenizer` does, and if data.vocab_size is too small, a chat source has no template, or
    sources use different templates.
    """
    if data.is_synthetic:
        assert data.vocab_size is not None, "validated with the section"
        return NoTokenizer(data.vocab_size)
    tokenizer = open_tokenizer(data.tokenizer)
    if data.vocab_size is not None:
        if data.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"data.vocab_size={data.vocab_size} is less than the {tokenizer.vocab_size} ids of data.tokenizer="
                f"{data.tokenizer!r}; set it to {tokenizer.vocab_size} or more, or to none"
            )
        tokenizer.min_vocab_size = data.vocab_size
    templates = {
        name: _chat_template(part.source, data.tokenizer, tokenizer)
        for name, part in data.parts.items()
        if isinstance(part.source, ChatSource)
    }
    if len(set(templates.values())) > 1:
        raise ConfigError(
            f"data.sources: the chats of {', '.join(templates)} use different templates; set the same source.template "
            "for each, as the trained model has one"
        )
    if templates:
        tokenizer.chat_template = next(iter(templates.values()))
    return tokenizer


def _chat_template(source: ChatSource, name: str, tokenizer: Tokenizer) -> str:
    """Return the configured template, or else the tokenizer's own."""
    if source.template is None:
        if tokenizer.own_chat_template is None:
            raise ConfigError(
                f"data.tokenizer={name!r} has no chat template for the conversations of {', '.join(source.paths)}; set "
                "data.source.template to a Jinja template or its file, or use the tokenizer of a chat model"
            )
        return tokenizer.own_chat_template
    if "{{" in source.template or "{%" in source.template:
        return source.template
    try:
        return Path(source.template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as e:  # also a NUL byte in the name, or the home of an unknown user
        raise ConfigError(
            f"data.source.template={source.template!r} is neither a Jinja template nor a readable file: {e}"
        ) from e


def with_template(data: DataConfig, tokenizer: Tokenizer) -> DataConfig:
    """Return the section with the chat template inlined, for machines that lack its file."""

    def inlined(source: Source) -> Source:
        is_set = isinstance(source, ChatSource) and source.template is not None
        return source.model_copy(update={"template": tokenizer.chat_template}) if is_set else source

    sources = tuple(part.model_copy(update={"source": inlined(part.source)}) for part in data.sources)
    return data.model_copy(update={"source": inlined(data.source), "sources": sources})


def open_tokenizer(name: str) -> Tokenizer:
    """Open a tokenizer: `byte`, or the name or folder of a Hugging Face tokenizer.

    Raises: ConfigError if the extra `hf` is missing or the tokenizer cannot be loaded.
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
        options = hub_options(name, "data.tokenizer")
        return HuggingFaceTokenizer(name, transformers.AutoTokenizer.from_pretrained(name, **options))
    except ConfigError:
        raise
    except Exception as e:  # the libraries raise bare exceptions for invalid files
        why = _first_line(e) + hub_hint()
        raise ConfigError(
            f"data.tokenizer={name!r}: neither `byte` nor a tokenizer that can be loaded: {why}; if it is gated or "
            "private, accept its terms on the hub and set HF_TOKEN; without a network, use a local folder"
        ) from e


def _first_line(error: Exception) -> str:
    """Return an error's message without the library's advice on its own arguments."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error)).rstrip(".:")

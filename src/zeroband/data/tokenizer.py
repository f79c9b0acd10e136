"""Text to token ids and back: bytes as they are, a Hugging Face tokenizer by name (extra `hf`), or ids without text."""

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
"""Text that asks for much of what tokenizers do: cases, digits, blanks, normal forms, scripts, special tokens."""

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

_CHARACTERS = re.compile(f"{re.escape(END_OF_DOCUMENT_TEXT)}|.", re.DOTALL)
"""A character of a chat, or the end of a document as it is written out."""


class Tokenizer(Protocol):
    """What the data path and the sampler need of a tokenizer."""

    vocab_size: int
    """Every id is below it."""
    end_of_document: int
    """The id that follows each document; never the id of text."""
    fingerprint: str
    """Follows from the ids that it gives: those of the vocabulary, and of a text that asks for much of what it does."""
    release: str = ""
    """Versions of the libraries that give the ids, for people; "" where there are none."""
    room: int = 0
    """Ids that the model has room for, where they are more than vocab_size."""
    own_chat_template: str | None = None
    """Jinja template that comes with the tokenizer, if one does."""
    chat_template: str | None = None
    """Jinja template of the conversations that are trained on; None where text is."""
    special_names: Mapping[str, str] = {}
    """How special ids are written in a chat, by the names that templates know: `eos_token` and others."""
    special_texts: frozenset[str] = frozenset()
    """How all special ids are written in a chat."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        """Ids of each text, without any special id. Bytes are taken as UTF-8. Raises: UnicodeError."""
        ...

    def encode_chat(self, text: str) -> tuple[Ids, Offsets]:
        """Ids of text in which special ids are written out, none is added, and the characters that each stands for.

        Shapes: (n,) and (n, 2), first character and the one behind the last. Raises: UnicodeError.
        """
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

    def gives_ids_of(self, fingerprint: str) -> bool:
        """Whether its ids are those of the tokenizer that had this fingerprint."""
        return fingerprint == self.fingerprint

    @property
    def padded_vocab_size(self) -> int:
        """Width of the model's head: its ids rounded up to a multiple of 64, which matrix units need to be fast."""
        return -(-max(self.vocab_size, self.room) // 64) * 64


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0..255, and 256 as the end of a document. Takes any bytes, valid UTF-8 or not."""

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
    """Made-up ids 0..vocab_size-1, the last one the end of a document. None stands for text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.end_of_document = vocab_size - 1
        self.fingerprint = f"none/{vocab_size}"

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[Ids]:
        self._refuse()

    def encode_chat(self, text: str) -> tuple[Ids, Offsets]:
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


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the transformers library; its end-of-sequence token ends documents.

    The literal text of a special token inside a document is encoded as plain text: data cannot end a document.
    backend: transformers' PreTrainedTokenizerBase, which has no types here.
    """

    def __init__(self, name: str, backend: Any) -> None:
        if backend.eos_token_id is None:
            raise ConfigError(
                f"data.tokenizer={name!r} has no end-of-sequence token, which marks the end of a document here; "
                "choose a tokenizer that has one, or data.tokenizer=byte"
            )
        self._name = name
        self._backend = backend
        vocabulary = backend.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # its length is smaller where ids have gaps
        self.end_of_document = backend.eos_token_id
        self._fast: Any = getattr(backend, "backend_tokenizer", None)
        serialised = None if self._fast is None else self._fast.to_str()
        before = json.dumps(vocabulary, sort_keys=True) if serialised is None else serialised
        self._fingerprint_of_before = f"hf/{self.end_of_document}/{_digest(before)}"
        model = {} if serialised is None else json.loads(serialised)["model"]
        self.fingerprint = f"hf2/{self.end_of_document}/{_digest(json.dumps(self._what_it_does(vocabulary, model)))}"
        self.release = ", ".join(f"{library} {version(library)}" for library in ("transformers", "tokenizers"))
        self.special_names = backend.special_tokens_map
        self.special_texts = frozenset(str(token) for token in backend.added_tokens_decoder.values())
        with contextlib.suppress(ValueError):  # it has none, or several without a default
            self.own_chat_template = backend.get_chat_template()

    def _what_it_does(self, vocabulary: Mapping[str, int], model: Mapping[str, Any]) -> list[Any]:
        """What its ids follow from, in a form that does not depend on how a release of the library writes it."""
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or ()]
        scored = model["vocab"] if isinstance(model.get("vocab"), list) else ()
        scores = [[token, f"{score:.6g}"] for token, score in scored]  # of Unigram
        added = sorted((id, str(token)) for id, token in self._backend.added_tokens_decoder.items())
        texts = [_PROBE, *(f"a{text}b {text} c" for _, text in added)]  # their flags show in what is around them
        return [sorted(vocabulary.items()), merges, scores, added, [ids.tolist() for ids in self.encode_batch(texts)]]

    def gives_ids_of(self, fingerprint: str) -> bool:
        """Whether its ids are those of the tokenizer that had this fingerprint, which may be one of before."""
        return fingerprint in (self.fingerprint, self._fingerprint_of_before)

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
                f"data.tokenizer={self._name!r} does not tell which characters a token stands for, which chats need; "
                "choose one with a tokenizer.json"
            )
        encoded = self._backend(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoded["input_ids"], dtype=np.uint32), offsets

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def count_bytes(self, ids: Sequence[int]) -> int:
        """A character that the ends of `ids` cut counts three bytes: it is decoded as U+FFFD."""
        return len(self.decode(ids).encode())

    def save(self, folder: Path, *, seq_length: int) -> None:
        if self.chat_template is None:
            self._backend.save_pretrained(str(folder))
            match_training(folder, seq_length=seq_length)
        else:  # what begins a conversation is written by the template, as in training
            self._backend.chat_template = self.chat_template
            self._backend.save_pretrained(str(folder))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def named(name: str, release: str | None) -> str:
    """A tokenizer for messages: its name, and the releases of the libraries that gave its ids, where they are known."""
    return f"{name!r} ({release})" if release else repr(name)


def _encode_fast(backend: Any, texts: list[str]) -> list[Ids]:
    """Ids as transformers' __call__ with split_special_tokens gives them, without what it does around the call.

    Sets what that sets, each time, for chats are encoded by the same backend with other settings.
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
            text.encode()  # half of a surrogate pair: raises UnicodeEncodeError, which says so
        raise
    return [np.frombuffer(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings]


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of a [data] section, with the room that it asks for.

    Raises: ConfigError as `open_tokenizer` does, and where data.vocab_size is too small for it, or it cannot write the
    chats of a source, or sources ask for several templates.
    """
    if data.is_synthetic:
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
    templates = {
        name: _chat_template(part.source, data.tokenizer, tokenizer)
        for name, part in data.parts.items()
        if isinstance(part.source, ChatSource)
    }
    if len(set(templates.values())) > 1:
        raise ConfigError(
            f"data.sources: the chats of {', '.join(templates)} are written by different templates, and the model that "
            "is trained has one; give each of them the same source.template"
        )
    if templates:
        tokenizer.chat_template = next(iter(templates.values()))
    return tokenizer


def _chat_template(source: ChatSource, name: str, tokenizer: Tokenizer) -> str:
    """The template that is asked for, or the tokenizer's own."""
    if source.template is None:
        if tokenizer.own_chat_template is None:
            raise ConfigError(
                f"data.tokenizer={name!r} has no chat template, which writes the conversations of "
                f"{', '.join(source.paths)} as text; set data.source.template to a Jinja template or the file of one, "
                "or choose the tokenizer of a model that chats"
            )
        return tokenizer.own_chat_template
    if "{{" in source.template or "{%" in source.template:
        return source.template
    try:
        return Path(source.template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as e:  # a name may hold a zero byte, or the home of an unknown user
        raise ConfigError(
            f"data.source.template={source.template!r} is neither a Jinja template nor a file of one: {e}"
        ) from e


def with_template(data: DataConfig, tokenizer: Tokenizer) -> DataConfig:
    """The section with the chat template itself instead of its file, for where that is not."""

    def told(source: Source) -> Source:
        is_set = isinstance(source, ChatSource) and source.template is not None
        return source.model_copy(update={"template": tokenizer.chat_template}) if is_set else source

    mixed = tuple(one.model_copy(update={"source": told(one.source)}) for one in data.sources)
    return data.model_copy(update={"source": told(data.source), "sources": mixed})


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
        options = hub_options(name, "data.tokenizer")
        return HuggingFaceTokenizer(name, transformers.AutoTokenizer.from_pretrained(name, **options))
    except ConfigError:
        raise
    except Exception as e:  # its libraries raise bare exceptions for files that they cannot make sense of
        why = _first_line(e) + hub_hint()
        raise ConfigError(
            f"data.tokenizer={name!r}: neither `byte` nor a tokenizer that can be loaded: {why}; where it "
            "is gated or private, accept its terms on the hub and set HF_TOKEN; without a network, name a folder of it"
        ) from e


def _first_line(error: Exception) -> str:
    """What went wrong, without the advice about the library's own arguments that follows it."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error)).rstrip(".:")

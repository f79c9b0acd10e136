"""Writes tokenizers as files for transformers' AutoTokenizer that reproduce the ids seen in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

END_OF_DOCUMENT_TEXT = "<|endoftext|>"
"""Literal form of the byte tokenizer's end of a document; training never encodes it from text."""

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Chat template of the byte tokenizer; the end of a document ends each message of the assistant."""

_N_BYTES = 256
_TOKENIZER, _SETTINGS, _SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"


def write_byte_tokenizer(folder: Path, *, seq_length: int, chat_template: str | None = None) -> None:
    """Write the byte tokenizer in the format of the tokenizers library.

    It is a byte-level BPE without merges: the pre-tokenizer maps each byte to a printable character, and the vocabulary
    maps that character back to the byte.
    """
    characters = _characters_of_bytes()
    end = {"id": _N_BYTES, "content": END_OF_DOCUMENT_TEXT, "special": True, "normalized": False}
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {character: byte for byte, character in enumerate(characters)},
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | plain],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT_TEXT,
        "eos_token": END_OF_DOCUMENT_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": seq_length,
    }
    _write(folder / _TOKENIZER, tokenizer)
    chats = {} if chat_template is None else {"chat_template": chat_template}
    _write(folder / _SETTINGS, settings | chats)


def match_training(folder: Path, *, seq_length: int) -> None:
    """Edit a saved tokenizer to encode text without added tokens, as in training.

    Many tokenizers add a begin-of-sequence token, which the model has never seen: in training every document followed
    an end-of-sequence token. That one becomes the begin-of-sequence token.
    """
    path = folder / _TOKENIZER
    if path.exists():
        _write(path, _read(path) | {"post_processor": None})
    settings = _read(folder / _SETTINGS)
    end = settings["eos_token"]
    trained = {"bos_token": end, "add_bos_token": False, "add_eos_token": False, "model_max_length": seq_length}
    _write(folder / _SETTINGS, settings | trained)
    special = folder / _SPECIAL  # written by transformers 4
    if special.exists():
        _write(special, _read(special) | {"bos_token": end})


def _characters_of_bytes() -> list[str]:
    """Return the byte-level alphabet: printable Latin-1 bytes map to themselves, others to characters from 256 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_N_BYTES) if byte not in printed]
    return [chr(byte if byte in printed else _N_BYTES + others.index(byte)) for byte in range(_N_BYTES)]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

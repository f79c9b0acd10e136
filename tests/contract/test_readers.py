"""Every reader of files that users bring, on bytes of its kind that were changed: it reads them, or says what is wrong.

What is wrong is a ZerobandError that names the file. Anything else would be a traceback of a library.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors.torch import save_file
from tests.unit.checkpoint.saves import stamp_of
from tests.unit.data.prepared import config_of, drawn_ids, write_set
from tests.unit.data.test_token_files import write as write_token_files

from zeroband.checkpoint.layout import parse_safetensors_header
from zeroband.checkpoint.manifest import Manifest, StoredFile, parse_manifest
from zeroband.checkpoint.state_dict_file import pack, unpack
from zeroband.config.data import ChatSource, DataConfig, JsonlSource, ParquetSource, TextSource
from zeroband.config.load import load_config
from zeroband.data.chat import ChatEncoder
from zeroband.data.files import find_files
from zeroband.data.readers import parquet_shape, read_ids, read_lines, read_row_groups
from zeroband.data.sources import conversations, documents
from zeroband.data.tokenizer import ByteTokenizer
from zeroband.data.tokens import prepare
from zeroband.errors import CheckpointDamaged, ZerobandError
from zeroband.export.hf import model_config_of
from zeroband.export.hub_files import WeightFiles, read_config

QUICK, THOROUGH = 12, 1500

ODD: list[Any] = [
    *(None, True, -1, 0, 3.5, 2**31, 2**70, 1e308, "", "x", "\ud800", "../../etc/passwd", "/etc/passwd", "a\0b"),
    *([], {}, [[]], [None], [1], {"a": None}, {"role": []}, float("nan")),
]
RAW = ["7" * 5000, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, '"\\ud800"', "1e999", "-", '"\xff"']
"""What no value of Python is written as."""
_MARK = "@@@"


def changed(content: bytes, seed: int) -> bytes:
    """Bytes of the same kind: some are replaced, left out, added or moved, or a value of JSON is another one."""
    draw = random.Random(seed)
    if draw.random() < 0.6 and (odd := _with_odd_value(content, draw)) is not None:
        return odd
    mutable = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(mutable) + 1)
        some = bytes(draw.choice((0, 0xFF, 0x80, draw.randrange(256))) for _ in range(draw.choice((1, 1, 2, 4, 8))))
        match draw.randrange(5):
            case 0:
                mutable[at : at + len(some)] = some
            case 1:
                mutable[at:at] = some
            case 2:
                del mutable[at : at + draw.choice((1, 4, 64))]
            case 3:
                del mutable[at:]
            case _:
                mutable[at:at] = mutable[: draw.choice((1, 16))]
    return bytes(mutable)


def _with_odd_value(content: bytes, draw: random.Random) -> bytes | None:
    lines = content.splitlines()
    at = draw.randrange(len(lines)) if lines else 0
    is_lines = len(lines) > 1 and not content.startswith(b"{\n")
    try:
        tree = json.loads(lines[at] if is_lines else content)
    except (ValueError, IndexError):
        return None
    odd, raw = draw.choice([*ODD, _MARK, _MARK]), draw.choice(RAW)
    text = json.dumps(_replaced(tree, odd, draw)).replace(f'"{_MARK}"', raw).encode(errors="surrogatepass")
    return b"\n".join([*lines[:at], text, *lines[at + 1 :]]) if is_lines else text


def _replaced(tree: Any, odd: Any, draw: random.Random) -> Any:
    """The tree with one value, or its key, replaced or left out."""
    if not isinstance(tree, dict | list) or not tree or draw.random() < 0.1:
        return odd
    items = cast("list[Any]", list(tree)) if isinstance(tree, dict) else list(range(len(tree)))
    key = draw.choice(items)
    copied: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    if draw.random() < 0.1:
        del copied[key]
    else:
        copied[key] = _replaced(tree[key], odd, draw)
    return copied


@dataclass(frozen=True)
class Reader:
    """Makes files, of which one is changed, and reads them again."""

    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: str
    """Those that are changed, by glob."""
    names: str | None = None
    """What an error names; None: the file."""


def _jsonl(folder: Path) -> None:
    rows = [{"text": "a b", "id": 1}, {"text": None}, {"text": "ünï", "more": {"x": [1, 2.5]}}]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _packed(pack_all: Callable[[bytes], bytes], ending: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        _jsonl(folder)
        (folder / f"a.jsonl.{ending}").write_bytes(pack_all((folder / "a.jsonl").read_bytes() * 40))
        (folder / "a.jsonl").unlink()

    return make


def _read_jsonl(folder: Path) -> object:
    paths = (f"{folder}/*.jsonl*",)
    (file,) = find_files(paths)
    return [*documents(JsonlSource(type="jsonl", paths=paths), 0), *read_lines(file, "text")]


def _parquet(folder: Path) -> None:
    table = pa.table({"text": ["a", None, "ünï"] * 9, "ids": [[1, 2], [3], []] * 9})
    parquet.write_table(table, folder / "a.parquet", row_group_size=9)


def _read_parquet(folder: Path) -> object:
    (file,) = find_files([f"{folder}/a.parquet"])
    read: list[object] = list(documents(ParquetSource(type="parquet", paths=(file.name,)), 0))
    for column, reader in (("text", read_row_groups), ("ids", read_ids)):
        shape = parquet_shape(file, column)
        read += reader(file, column, 0, len(shape.group_bytes))
    return read


def _chats(folder: Path) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    theirs = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    rows = [{"messages": said}, {"messages": theirs, "tools": [{"name": "f"}]}]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _read_chats(folder: Path) -> object:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = tokenizer.own_chat_template
    encoder = ChatEncoder(tokenizer)
    return [encoder.encode(chat) for chat in conversations(ChatSource(type="chat", paths=(f"{folder}/a.jsonl",)))]


def _text(folder: Path) -> None:
    (folder / "a.txt").write_text("naïve → 𝄞\n" * 3)


def _tokenizer(folder: Path) -> None:
    from tests.unit.data.test_tokenizer_release import written

    written(folder / "tokenizer", "gpt2")


def _read_tokenizer(folder: Path) -> object:
    (folder / "a.txt").write_text("the quick 12  brown")
    source = TextSource(paths=(f"{folder}/a.txt",))
    return prepare(DataConfig(source=source, tokenizer=f"{folder}/tokenizer", cache_dir=folder / "cache"), seed=0)


TOML = """
[run]
id = "a"
[model]
n_layers = 2
[data]
seq_length = 32
source = { type = "jsonl", paths = ["a", "b"] }
[train]
lr = 1e-3
"""


def _toml(folder: Path) -> None:
    (folder / "a.toml").write_text(TOML)


def _set(folder: Path) -> None:
    write_set(folder / "set", [drawn_ids(200), drawn_ids(100, 1)])


def _stored(kind: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        path = {"zeroband": "set", "litdata": "chunks"}.get(kind) or (folder / "path").read_text()
        config = config_of(folder / path, folder / "cache", format=kind)
        store = prepare(config.model_copy(update={"retry_s": 0.001}), 0)
        try:
            ids = store.read(0, len(store))
            return store.document_starts(0, ids)
        finally:
            store.close()

    return read


def _token_files(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "path").write_text(write_token_files(kind, folder))

    return make


def _weights(folder: Path) -> None:
    save_file({"a": torch.zeros(3, 4)}, folder / "x-1.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "x-2.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _read_weights(folder: Path) -> object:
    files = WeightFiles(folder)
    return [files.rows(name, slice(0, files.shape(name)[0] if files.shape(name) else 0)) for name in files.names]


def _hf_config(folder: Path) -> None:
    record = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    record |= {
        "intermediate_size": 128,
        "vocab_size": 300,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    (folder / "config.json").write_text(json.dumps(record, indent=1))


def _manifest(folder: Path) -> None:
    file = StoredFile(3, "0" * 32)
    manifest = Manifest(stamp_of(10), {"outer/model.safetensors": file, "nodes/a/inner.safetensors": file})
    (folder / "manifest.json").write_bytes(manifest.to_json())


def _state_dict(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(pack({"step": 3, "w": torch.ones(2), "more": [1, (2, b"x")]}, "state"))


def _header(folder: Path) -> None:
    entries = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    (folder / "header").write_text(json.dumps(entries))


def _read_header(folder: Path) -> object:
    try:
        return parse_safetensors_header((folder / "header").read_bytes(), 24)
    except ValueError as error:  # its caller names the file
        raise CheckpointDamaged(str(error)) from error


READERS = {
    "text": Reader(_text, lambda folder: list(documents(TextSource(paths=(f"{folder}/a.txt",)), 0)), "a.txt"),
    "jsonl": Reader(_jsonl, _read_jsonl, "a.jsonl"),
    "gz": Reader(_packed(gzip.compress, "gz"), _read_jsonl, "a.jsonl.gz"),
    "bz2": Reader(_packed(bz2.compress, "bz2"), _read_jsonl, "a.jsonl.bz2"),
    "xz": Reader(_packed(lzma.compress, "xz"), _read_jsonl, "a.jsonl.xz"),
    "zst": Reader(_packed(lambda b: pa.compress(b, "zstd", asbytes=True), "zst"), _read_jsonl, "a.jsonl.zst"),
    "parquet": Reader(_parquet, _read_parquet, "a.parquet"),
    "chat": Reader(_chats, _read_chats, "a.jsonl"),
    "tokenizer": Reader(_tokenizer, _read_tokenizer, "tokenizer/*", names="tokenizer"),
    "toml": Reader(_toml, lambda folder: load_config([f"@{folder}/a.toml"], {}), "a.toml"),
    "prepared set": Reader(_set, _stored("zeroband"), "set/*", names="set"),
    "nanogpt": Reader(_token_files("nanogpt"), _stored("nanogpt"), "*.bin", names="."),
    "llm.c": Reader(_token_files("llm.c"), _stored("llm.c"), "*.bin", names="."),
    "megatron": Reader(_token_files("megatron"), _stored("megatron"), "*.*", names="."),
    "litdata": Reader(_token_files("litdata"), _stored("litdata"), "chunks/*", names="chunks"),
    "weights": Reader(_weights, _read_weights, "*.*", names="."),
    "config.json": Reader(
        _hf_config, lambda folder: model_config_of(read_config(folder), f"{folder}/config.json"), "config.json"
    ),
    "state dict": Reader(_state_dict, lambda folder: unpack((folder / "a.safetensors").read_bytes()), "*", names=""),
    "header": Reader(_header, _read_header, "header", names=""),
    "manifest": Reader(
        _manifest, lambda folder: parse_manifest((folder / "manifest.json").read_bytes()), "*", names=""
    ),
}


def require_sentence(name: str, folder: Path, seed: int) -> None:
    """Change one of the reader's files and read it."""
    reader = READERS[name]
    reader.make(folder)
    files = sorted(folder.glob(reader.files))
    file = files[seed % len(files)]
    file.write_bytes(changed(file.read_bytes(), seed))
    said = None
    try:
        reader.read(folder)
    except ZerobandError as error:
        said = str(error)
    assert said is None or (file.name if reader.names is None else reader.names) in said


@pytest.mark.parametrize("name", READERS)
def test_reader_takes_changed_bytes_or_says_what_is_wrong(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @given(seed=st.integers(0, 1 << 40))
    @settings(max_examples=QUICK, derandomize=True, database=None)
    def check(seed: int) -> None:
        require_sentence(name, tmp_path_factory.mktemp("reader"), seed)

    check()


@pytest.mark.soak
@pytest.mark.parametrize("name", READERS)
def test_reader_holds_for_thousands_of_changes(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for seed in range(THOROUGH):
        require_sentence(name, tmp_path_factory.mktemp("reader"), seed)

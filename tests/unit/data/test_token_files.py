"""Files of other trainers, built here byte by byte as their own sources have it.

nanoGPT: data/openwebtext/prepare.py, ids as numpy lays them out, uint16. llm.c: dev/data/data_common.py (HEADERS_INFO,
write_datafile) and llmc/dataloader.h. Megatron-LM: megatron/core/datasets/indexed_dataset.py (DType, _IndexWriter).
litdata: src/litdata/streaming/writer.py (_create_chunk), item_loader.py (TokensLoader) and constants.py (numbers of
types). What the writers of Megatron-LM 0.16.1 and litdata 0.2.76 made themselves is in `MADE_ELSEWHERE`.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.data.prepared import END, Ids, config_of, drawn_ids, opened, served, spans_of, stored

from zeroband.data.token_files import open_tokens, require_set
from zeroband.errors import ConfigError, StorageLost


def write_llm_c(path: Path, ids: Ids, *, magic: int = 20240520, version: int = 1, told: int | None = None) -> None:
    """256 int32: magic, version, number of ids; then the ids."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if told is None else told
    path.write_bytes(header.tobytes() + ids.tobytes())


def write_megatron(
    path: Path, documents: Sequence[Ids], code: int = 8, *, borders: Sequence[int] | None = None
) -> None:
    """Ids in .bin; in .idx magic, version, code of the type, counts, lengths, places in bytes, documents' sequences."""
    lengths = np.array([len(ids) for ids in documents], dtype="<i4")
    size = documents[0].dtype.itemsize
    places = (np.cumsum(lengths, dtype="<i8") - lengths) * size
    firsts = np.array(range(len(lengths) + 1) if borders is None else borders, dtype="<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(firsts))
    path.with_suffix(".idx").write_bytes(header + lengths.tobytes() + places.astype("<i8").tobytes() + firsts.tobytes())
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).tobytes())


def write_litdata(
    folder: Path, chunks: Sequence[Sequence[Ids]], kind: str = "no_header_tensor:16", **config: Any
) -> None:
    """Chunks: number of items, where each begins and the last one ends (uint32), the items; index.json lists them."""
    folder.mkdir()
    told: list[dict[str, Any]] = []
    for number, items in enumerate(chunks):
        sizes = [0, *(item.nbytes for item in items)]
        offsets = np.cumsum(sizes) + 4 * (len(items) + 2)
        header = np.array([len(items), *offsets], dtype="<u4").tobytes()
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(header + b"".join(item.tobytes() for item in items))
        dim = sum(map(len, items))
        told.append({"filename": name, "chunk_size": len(items), "chunk_bytes": sum(sizes), "dim": dim})
    settings = {"compression": None, "data_format": [kind], "data_spec": "", "chunk_size": None, "chunk_bytes": 64}
    (folder / "index.json").write_text(json.dumps({"chunks": told, "config": settings | config}))


LITDATA_INDEX = (
    '{{"chunks": [{{"chunk_bytes": {bytes}, "chunk_size": 2, "dim": 6, "filename": "chunk-0-0.bin"}}], '
    '"config": {{"chunk_bytes": 1048576, "chunk_size": null, "compression": null, "compression_batch_size": null, '
    '"compression_level": null, "data_format": ["{format}"], '
    '"data_spec": "[1, {{\\"type\\": null, \\"context\\": null, \\"children_spec\\": []}}]", "encryption": null, '
    '"ipc_compression": null, "item_loader": "TokensLoader", "types": "tensor"}}, "updated_at": "1795573889.4733543"}}'
).format
LITDATA_SHORT = "0200000010000000180000001c000000 0100020003000001 05000001"
MADE_ELSEWHERE: dict[tuple[str, str], dict[str, bytes]] = {
    ("litdata", "uint16 tensors"): {
        "index.json": LITDATA_INDEX(bytes=28, format="no_header_tensor:20").encode(),
        "chunk-0-0.bin": bytes.fromhex(LITDATA_SHORT),
    },
    ("litdata", "uint16 arrays"): {
        "index.json": LITDATA_INDEX(bytes=28, format="no_header_numpy:5").encode(),
        "chunk-0-0.bin": bytes.fromhex(LITDATA_SHORT),
    },
    ("litdata", "int32 tensors"): {
        "index.json": LITDATA_INDEX(bytes=40, format="no_header_tensor:16").encode(),
        "chunk-0-0.bin": bytes.fromhex(
            "02000000100000002000000028000000 01000000020000000300000000010000 0500000000010000"
        ),
    },
    ("megatron", "uint16"): {
        "text.bin": bytes.fromhex("010002000300 0001 0500 0001"),
        "text.idx": bytes.fromhex(
            "4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000 030000000100000002000000"
            "000000000000000006000000000000000800000000000000"
            "0000000000000000010000000000000003000000000000000300000000000000"
        ),
    },
    ("megatron", "int32"): {
        "text.bin": bytes.fromhex("010000000200000003000000 00010000 05000000 00010000"),
        "text.idx": bytes.fromhex(
            "4d4d49444944580000 0100000000000000 04 0300000000000000 0400000000000000 030000000100000002000000"
            "00000000000000000c000000000000001000000000000000"
            "0000000000000000010000000000000003000000000000000300000000000000"
        ),
    },
}
"""Two documents, 1 2 3 256 and 5 256; Megatron's in three sequences, and an empty document behind them."""


def as_type(ids: Ids, dtype: str) -> Any:
    return ids.astype(dtype)


A, B = drawn_ids(700), drawn_ids(300, 1)
WHOLE = np.concatenate([A, B])


def write(kind: str, folder: Path) -> str:
    """Two files of a format, and how they are named."""
    match kind:
        case "nanogpt":
            (folder / "train_0.bin").write_bytes(A.tobytes())
            (folder / "train_1.bin").write_bytes(B.tobytes())
            return "train_*.bin"
        case "llm.c":
            write_llm_c(folder / "train_0.bin", A)
            write_llm_c(folder / "train_1.bin", B)
            return "train_*.bin"
        case "megatron":
            write_megatron(folder / "text_0", [A[:50], A[50:]])
            write_megatron(folder / "text_1", [B])
            return "text_?"
        case _:
            write_litdata(folder / "chunks", [[as_type(A[:10], "<i4"), as_type(A[10:], "<i4")], [as_type(B, "<i4")]])
            return "chunks"


FORMATS = ("nanogpt", "llm.c", "megatron", "litdata")


@pytest.mark.parametrize("kind", FORMATS)
def test_files_are_read_in_place_in_the_order_of_their_names(kind: str, tmp_path: Path) -> None:
    config = config_of(tmp_path / write(kind, tmp_path), tmp_path / "cache", format=kind)
    require_set(config.source)
    with stored(config) as store:
        assert list(store.shards) == [700, 300] and store.block_tokens == 1 << 16
        for start, stop in spans_of(1000):
            np.testing.assert_array_equal(store.read(start, stop), WHOLE[start:stop])


@pytest.mark.parametrize(("kind", "ids"), MADE_ELSEWHERE)
def test_files_that_the_projects_made_themselves_are_read(kind: str, ids: str, tmp_path: Path) -> None:
    for name, content in MADE_ELSEWHERE[kind, ids].items():
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "text" if kind == "megatron" else tmp_path
    with stored(config_of(path, tmp_path / "cache", format=kind)) as store:
        assert store.read(0, len(store)).tolist() == [1, 2, 3, 256, 5, 256]
        assert store.documents == (3 if kind == "megatron" else None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_files_elsewhere_are_the_same_corpus(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    name = write(kind, folder)
    name = {"train_*.bin": "train_0.bin", "text_?": "text_0"}.get(name, name)
    with served(folder) as server, stored(config_of(f"{server.url}/{name}", tmp_path / "cache", format=kind)) as there:
        there.prefetch(spans_of(700))
        with stored(config_of(folder / name, tmp_path / "cache", format=kind)) as here:
            assert here.fingerprint == there.fingerprint and len(here) == len(there)
            for span in spans_of(700):
                np.testing.assert_array_equal(there.read(*span), WHOLE[slice(*span)])


@pytest.mark.parametrize("kind", FORMATS)
def test_fingerprint_follows_the_ends_of_the_files(kind: str, tmp_path: Path) -> None:
    config = config_of(tmp_path / write(kind, tmp_path), tmp_path / "cache", format=kind)
    with stored(config) as store:
        before = store.fingerprint
    changed = sorted(path for path in tmp_path.rglob("*.bin"))[-1]
    content = bytearray(changed.read_bytes())
    content[-8 if kind == "litdata" else -4] ^= 1  # the last but one, as 256 ends a document
    changed.write_bytes(content)
    with stored(config) as store:
        assert store.fingerprint != before


def test_llama_3_files_of_llm_c_hold_four_bytes_an_id_and_tell_what_parts_documents(tmp_path: Path) -> None:
    ids = np.array([200, 1, 2, 200, 3], dtype="<u4")
    write_llm_c(tmp_path / "a.bin", ids, magic=20240801, version=7)
    with stored(config_of(tmp_path / "a.bin", tmp_path / "cache", format="llm.c")) as store:
        assert store.read(0, 5).tolist() == ids.tolist() and store.read(0, 5).dtype == np.uint32
        assert store.end_of_document == 200 and store.document_starts(0, ids).tolist() == [
            True,
            False,
            False,
            True,
            False,
        ]


@pytest.mark.parametrize(("code", "dtype"), [(4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_type_of_ids_of_megatron_is_that_of_its_code(tmp_path: Path, code: int, dtype: str) -> None:
    write_megatron(tmp_path / "text", [as_type(A, dtype)], code)
    with stored(config_of(tmp_path / "text.bin", tmp_path / "cache", format="megatron")) as store:
        assert store.read(0, 700).tolist() == A.tolist()
        assert store.read(0, 1).dtype == (np.uint16 if dtype == "<u2" else np.uint32)


def test_documents_of_megatron_begin_where_its_index_says(tmp_path: Path) -> None:
    with_end, without = np.array([1, 2, END], "<u2"), np.array([3, 4], "<u2")
    write_megatron(tmp_path / "t0", [with_end, without, without])
    write_megatron(tmp_path / "t1", [without, with_end])
    ids = [1, 2, END, 3, 4, 3, 4, 3, 4, 1, 2, END]
    begins = [1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0]  # an end stands for the document behind it
    with stored(config_of(tmp_path / "t?.idx", tmp_path / "cache", format="megatron")) as store:
        assert store.documents == 5
        for start in range(12):
            for stop in range(start + 1, 13):
                read = store.read(start, stop)
                assert read.tolist() == ids[start:stop]
                found = store.document_starts(start, read).tolist()
                expected = begins[start:stop]
                if ids[start - 1 : start] == [END] and start == 3:
                    expected = [1, *expected[1:]]  # its border, of which the end lies before the span
                assert found[1:] == [bool(one) for one in expected[1:]], (start, stop)


def test_documents_of_megatron_that_are_empty_begin_where_they_stand(tmp_path: Path) -> None:
    """As its writer has it: borders are numbers of sequences, which at the end are as many as there are."""
    write_megatron(tmp_path / "t0", [np.array(ids, "<u2") for ids in ([1, 2, END], [3, 4])], borders=[0, 1, 1, 2, 2, 2])
    write_megatron(tmp_path / "t1", [np.array([5, 6], "<u2")], borders=[0, 1, 1])
    with stored(config_of(tmp_path / "t?.idx", tmp_path / "cache", format="megatron")) as store:
        assert store.documents == 7
        assert store.document_starts(0, store.read(0, 7)).tolist() == [True, False, True, False, False, True, False]
        assert store.document_starts(5, store.read(5, 7)).tolist() == [True, False]


def test_index_that_is_cut_while_it_is_in_use_is_an_error_and_no_signal(tmp_path: Path) -> None:
    write_megatron(tmp_path / "text", [A])
    with stored(config_of(tmp_path / "text", tmp_path / "cache", format="megatron")) as store:
        os.truncate(tmp_path / "text.idx", 0)
        with pytest.raises(StorageLost, match=r"text.idx is damaged: got 0 bytes instead of 16"):
            store.document_starts(0, store.read(0, 10))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("no_header_tensor:18", "<i8"), ("no_header_tensor:20", "<u2"), ("no_header_numpy:5", "<u2")]
)
def test_type_of_ids_of_litdata_is_that_of_its_index(tmp_path: Path, kind: str, dtype: str) -> None:
    write_litdata(tmp_path / "chunks", [[as_type(A, dtype)]], kind)
    with stored(config_of(tmp_path / "chunks", tmp_path / "cache", format="litdata")) as store:
        assert store.read(0, 700).tolist() == A.tolist()


def refused(path: Path, cache: Path, said: str, **changed: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(config_of(path, cache, **changed))


def test_nanogpt_files_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "a.bin"
    refused(tmp_path, cache, "is a folder; name its files, such as", format="nanogpt")
    refused(tmp_path / "b*.bin", cache, "no file matches", format="nanogpt")
    refused(path, cache, "a.bin does not exist", format="nanogpt")
    path.write_bytes(b"abc")
    refused(path, cache, "3 bytes is not a multiple of 2-byte ids; set data.source.dtype", format="nanogpt")
    path.write_bytes(b"")
    refused(path, cache, "no ids in .*a.bin", format="nanogpt")
    path.write_bytes(A.tobytes())
    refused(path, cache, r"contains the id \d+, but the vocabulary has 257 ids", format="nanogpt", dtype="uint32")
    write_llm_c(path, A)
    refused(path, cache, 'has the header of llm.c; set data.source.format = "llm.c"', format="nanogpt")
    path.write_bytes(A.tobytes())
    refused(path, cache, "are not packed", format="nanogpt", packing="best-fit")


def tokenizer_of(vocab_size: int) -> Any:
    return SimpleNamespace(vocab_size=vocab_size, end_of_document=END, fingerprint="another")


@pytest.mark.parametrize("kind", ["nanogpt", "llm.c", "megatron"])
def test_ids_of_a_type_that_does_not_hold_the_vocabulary_are_refused(kind: str, tmp_path: Path) -> None:
    config = config_of(tmp_path / write(kind, tmp_path), tmp_path / "cache", format=kind, dtype="uint16")
    said = r"0.bin holds uint16, ids below 65536, but the vocabulary has 100000; correct data.source.dtype, or"
    with pytest.raises(ConfigError, match=said):
        open_tokens(config, tokenizer_of(100_000))
    roomy = config.model_copy(update={"vocab_size": 100_000})
    with pytest.raises(ConfigError, match=said):  # nothing else tells of the vocabulary
        opened(roomy)
    open_tokens(roomy, tokenizer_of(65_536)).close()  # a model may have room for more


def test_ids_of_nanogpt_have_four_bytes_where_the_vocabulary_needs_them(tmp_path: Path) -> None:
    np.array([1, 99_999], dtype="<u4").tofile(tmp_path / "a.bin")
    with stored(config_of(tmp_path / "a.bin", tmp_path / "cache", format="nanogpt", vocab_size=100_000)) as store:
        assert store.read(0, 2).tolist() == [1, 99_999]


def test_llm_c_files_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "a.bin"
    path.write_bytes(A.tobytes())
    refused(path, cache, "is not a token file of llm.c", format="llm.c")
    write_llm_c(path, A, told=9)
    refused(path, cache, r"has \d+ bytes, which does not match the 9 ids in its header", format="llm.c")
    write_llm_c(path, A)
    write_llm_c(tmp_path / "b.bin", as_type(A, "<u4"), magic=20240801, version=7)
    refused(tmp_path / "?.bin", cache, "files of different dtypes", format="llm.c")


def test_megatron_files_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "text"
    refused(path, cache, "text.idx does not exist", format="megatron")
    write_megatron(path, [A])
    index = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".bin").write_bytes(b"ab")
    refused(path, cache, "has 2 bytes, which does not match the 700 ids in its .idx", format="megatron")
    path.with_suffix(".idx").write_bytes(index[:60])
    refused(path, cache, "60 bytes for 1 sequences", format="megatron")
    path.with_suffix(".idx").write_bytes(index[:10])
    refused(path, cache, "truncated header", format="megatron")
    path.with_suffix(".idx").write_bytes(b"x" + index[1:])
    refused(path, cache, "not an index of Megatron, version 1", format="megatron")
    write_megatron(path, [A], code=7)
    refused(path, cache, "unsupported dtype 7; supported: 8", format="megatron")


@pytest.mark.slow
def test_index_that_was_kept_and_is_damaged_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_megatron(tmp_path / "files" / "text", [A])
    with served(tmp_path / "files") as server:
        config = config_of(f"{server.url}/text", tmp_path / "cache", format="megatron")
        with stored(config):
            (kept,) = (tmp_path / "cache" / "blocks").glob("*.idx/0/0")
        kept.write_bytes(b"")
        with stored(config) as store:
            np.testing.assert_array_equal(store.read(0, 700), A)


def test_litdata_folders_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    cache, item = tmp_path / "cache", [[as_type(A, "<i4")]]
    refused(tmp_path, cache, "is not a folder of litdata", format="litdata")
    write_litdata(tmp_path / "zstd", item, compression="zstd")
    refused(tmp_path / "zstd", cache, "compressed or encrypted", format="litdata")
    write_litdata(tmp_path / "other", item, "jpeg")
    refused(tmp_path / "other", cache, "each item must be one tensor of ids", format="litdata")
    write_litdata(tmp_path / "unknown", item, "no_header_tensor:21")
    refused(tmp_path / "unknown", cache, "unknown dtype .*; set data.source.dtype", format="litdata")
    write_litdata(tmp_path / "right", item)
    refused(tmp_path / "right", cache, "are <i4; drop data.source.dtype", format="litdata", dtype="uint16")
    (tmp_path / "right" / "index.json").write_text('{"chunks": []}')
    refused(tmp_path / "right", cache, "not an index of litdata: config: Field required", format="litdata")


def test_id_without_room_is_found_when_its_block_is_read(tmp_path: Path) -> None:
    ids = np.zeros(3 << 20, dtype="<u2")
    ids[len(ids) // 2] = 400
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    with stored(config_of(tmp_path / "a.bin", tmp_path / "cache", format="nanogpt")) as store:
        assert not store.read(0, 10).any()
        with pytest.raises(StorageLost, match="contains the id 400, but the vocabulary has 257 ids"):
            store.read(len(ids) // 2, len(ids) // 2 + 1)

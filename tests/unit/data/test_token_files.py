"""Files of other trainers, built here byte by byte as their formats are described."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.data.prepared import END, Ids, config_of, drawn_ids, opened, served, spans_of, stored

from zeroband.data.token_files import require_there
from zeroband.errors import ConfigError, StorageLost


def write_llm_c(path: Path, ids: Ids, *, magic: int = 20240520, version: int = 1, told: int | None = None) -> None:
    """256 int32: magic, version, number of ids; then the ids."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if told is None else told
    path.write_bytes(header.tobytes() + ids.tobytes())


def write_megatron(path: Path, documents: Sequence[Ids], code: int = 8) -> None:
    """Ids in .bin; in .idx magic, version, code of the type, counts, lengths, places in bytes, documents' sequences."""
    lengths = np.array([len(ids) for ids in documents], dtype="<i4")
    size = documents[0].dtype.itemsize
    places = (np.cumsum(lengths, dtype="<i8") - lengths) * size
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    borders = np.arange(len(lengths) + 1, dtype="<i8")
    path.with_suffix(".idx").write_bytes(
        header + lengths.tobytes() + places.astype("<i8").tobytes() + borders.tobytes()
    )
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
    require_there(config.source)
    with stored(config) as store:
        assert list(store.shards) == [700, 300] and store.block_tokens == 1 << 16
        for start, stop in spans_of(1000):
            np.testing.assert_array_equal(store.read(start, stop), WHOLE[start:stop])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_files_elsewhere_are_the_same_corpus(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    name = write(kind, folder)
    name = {"train_*.bin": "train_0.bin", "text_?": "text_0"}.get(name, name)
    with served(folder) as server, stored(config_of(f"{server.url}/{name}", tmp_path / "cache", format=kind)) as there:
        there.expect(spans_of(700))
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
        assert store.end_of_document == 200 and store.begins(0, ids).tolist() == [True, False, False, True, False]


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
                found = store.begins(start, read).tolist()
                expected = begins[start:stop]
                if ids[start - 1 : start] == [END] and start == 3:
                    expected = [1, *expected[1:]]  # its border, of which the end lies before the span
                assert found[1:] == [bool(one) for one in expected[1:]], (start, stop)


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
    refused(path, cache, "a.bin is not there", format="nanogpt")
    path.write_bytes(b"abc")
    refused(path, cache, "3 bytes are no ids of 2 bytes each; set data.source.dtype", format="nanogpt")
    path.write_bytes(b"")
    refused(path, cache, "no ids in .*a.bin", format="nanogpt")
    path.write_bytes(A.tobytes())
    refused(path, cache, r"holds the id \d+, and there is room for 257 ids", format="nanogpt", dtype="uint32")
    write_llm_c(path, A)
    refused(path, cache, 'begins as a file of llm.c does; set data.source.format = "llm.c"', format="nanogpt")
    path.write_bytes(A.tobytes())
    refused(path, cache, "were not packed", format="nanogpt", packing="best-fit")


def test_llm_c_files_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "a.bin"
    path.write_bytes(A.tobytes())
    refused(path, cache, "is no file of ids of llm.c", format="llm.c")
    write_llm_c(path, A, told=9)
    refused(path, cache, r"has \d+ bytes and not the 9 ids of its header", format="llm.c")
    write_llm_c(path, A)
    write_llm_c(tmp_path / "b.bin", as_type(A, "<u4"), magic=20240801, version=7)
    refused(tmp_path / "?.bin", cache, "ids of several types", format="llm.c")


def test_megatron_files_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "text"
    refused(path, cache, "text.idx is not there", format="megatron")
    write_megatron(path, [A])
    index = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".bin").write_bytes(b"ab")
    refused(path, cache, "has 2 bytes and not the 700 ids of its .idx", format="megatron")
    path.with_suffix(".idx").write_bytes(index[:60])
    refused(path, cache, "60 bytes for 1 sequences", format="megatron")
    path.with_suffix(".idx").write_bytes(index[:10])
    refused(path, cache, "ends in its header", format="megatron")
    path.with_suffix(".idx").write_bytes(b"x" + index[1:])
    refused(path, cache, "no index of Megatron, version 1", format="megatron")
    write_megatron(path, [A], code=7)
    refused(path, cache, "ids of type 7; 8", format="megatron")


@pytest.mark.slow
def test_index_that_was_kept_and_is_damaged_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_megatron(tmp_path / "files" / "text", [A])
    with served(tmp_path / "files") as server:
        config = config_of(f"{server.url}/text", tmp_path / "cache", format="megatron")
        with stored(config):
            (kept,) = (tmp_path / "cache" / "blocks" / "kept").iterdir()
        kept.write_bytes(b"")
        with stored(config) as store:
            np.testing.assert_array_equal(store.read(0, 700), A)


def test_litdata_folders_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    cache, item = tmp_path / "cache", [[as_type(A, "<i4")]]
    refused(tmp_path, cache, "is no folder of litdata", format="litdata")
    write_litdata(tmp_path / "zstd", item, compression="zstd")
    refused(tmp_path / "zstd", cache, "compressed or encrypted", format="litdata")
    write_litdata(tmp_path / "other", item, "jpeg")
    refused(tmp_path / "other", cache, "one tensor of ids each is needed", format="litdata")
    write_litdata(tmp_path / "unknown", item, "no_header_tensor:99")
    refused(tmp_path / "unknown", cache, "is not known here; set data.source.dtype", format="litdata")
    write_litdata(tmp_path / "right", item)
    refused(tmp_path / "right", cache, "are <i4; drop data.source.dtype", format="litdata", dtype="uint16")
    (tmp_path / "right" / "index.json").write_text('{"chunks": []}')
    refused(tmp_path / "right", cache, "no index of litdata: config: Field required", format="litdata")


def test_id_without_room_is_found_when_its_block_is_read(tmp_path: Path) -> None:
    ids = np.zeros(3 << 20, dtype="<u2")
    ids[len(ids) // 2] = 400
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    with stored(config_of(tmp_path / "a.bin", tmp_path / "cache", format="nanogpt")) as store:
        assert not store.read(0, 10).any()
        with pytest.raises(StorageLost, match="holds the id 400, and there is room for 257 ids"):
            store.read(len(ids) // 2, len(ids) // 2 + 1)

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from zeroband.data.shard_set import NPY_HEADER_BYTES, ShardDraft, ids_dtype, npy_pieces


@pytest.mark.parametrize("count", [1, 65_536, 5_000_000])
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_pieces_are_a_file_of_numpy_whose_values_begin_at_byte_128(tmp_path: Path, count: int, dtype: str) -> None:
    values = np.arange(count).astype(dtype)
    path = tmp_path / "a.npy"
    path.write_bytes(b"".join(npy_pieces(values)))
    loaded = np.load(path, mmap_mode="r")
    assert loaded.dtype == np.dtype(dtype) and loaded.offset == NPY_HEADER_BYTES and np.array_equal(loaded, values)
    saved = io.BytesIO()
    np.save(saved, values)
    assert path.read_bytes() == saved.getvalue()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (65_536, "<u2"), (65_537, "<u4")])
def test_ids_take_the_smallest_type_that_holds_them(vocab_size: int, dtype: str) -> None:
    assert ids_dtype(vocab_size).str == dtype


def test_draft_holds_all_that_was_appended_in_the_type_of_the_set() -> None:
    with closing(ShardDraft(np.dtype("<u2"))) as draft:
        assert draft.ids.tolist() == []
        draft.append([])
        draft.append([np.array([1, 65_535], dtype=np.uint32), np.array([3], dtype=np.uint32)])
        draft.append([np.array([4], dtype=np.uint32)])
        assert (draft.ids.tolist(), draft.ids.dtype.str) == ([1, 65_535, 3, 4], "<u2")

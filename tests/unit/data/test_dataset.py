"""Several sources as one list of samples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tests.unit.data.prepared import END, drawn_ids, write_packed_set, write_set

from zeroband.config.data import DataConfig
from zeroband.data.dataset import Dataset, open_dataset
from zeroband.data.loader import IGNORED, Loader

T = 16


def mixed(folder: Path, sources: dict[str, dict[str, Any]], **settings: Any) -> Dataset:
    tables = [{"name": name, "weight": 1, "source": {"type": "tokens"} | source} for name, source in sources.items()]
    data = {"sources": tables, "seq_length": T, "hold_out": 0, "cache_dir": folder / "cache"} | settings
    return open_dataset(DataConfig.model_validate(data), seed=0)


def test_fingerprint_is_the_same_in_whichever_order_a_mixture_is_written(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [drawn_ids(1000)])

    def fingerprint(names: str, **weights: float) -> str:
        phases = [{"from_tokens": 100, "weights": weights}]
        return mixed(tmp_path, {name: {"path": str(tmp_path / "set")} for name in names}, phases=phases).fingerprint

    assert fingerprint("ab", a=1, b=2) == fingerprint("ba", a=1, b=2) == fingerprint("ab", b=2, a=1)
    assert fingerprint("ab", a=1, b=2) != fingerprint("ab", a=2, b=1)


def test_packed_samples_are_whole_documents_whose_padding_is_not_learned(tmp_path: Path) -> None:
    """All but padding and the first id of each 16 samples, which are fetched as one, is learned once."""
    ids = write_packed_set(tmp_path / "set", 300, T, block_tokens=4 * T)
    source = {"type": "tokens", "path": str(tmp_path / "set")}
    data = {"source": source, "seq_length": T, "hold_out": 0, "cache_dir": tmp_path / "cache", "packing": "best-fit"}
    dataset = open_dataset(DataConfig.model_validate(data | {"shuffle_blocks": 2}), seed=0)
    samples = dataset.sources[0].index.n_train
    loader = Loader(dataset, batch_size=samples, micro_bs=1, local_rank=0, local_world_size=1, document_mask=True)
    loader.assign([(0, samples)])
    batches = loader.next_step()
    loader.close()
    bins = Counter(tuple(ids[start : start + T - 1].tolist()) for start in range(0, len(ids), T))
    assert Counter(tuple(batch.tokens[0, :-1].tolist()) for batch in batches) == bins
    for tokens, targets in ((batch.tokens[0].numpy(), batch.targets[0].numpy()) for batch in batches):
        is_next = (tokens[1:-1] != END) | (tokens[:-2] != END)
        assert targets[:-2].tolist() == np.where(is_next, tokens[1:-1], IGNORED).tolist()
    padding = np.concatenate([[False], (ids[1:] == END) & (ids[:-1] == END)])
    assert loader.targets_in_step == int((~padding).sum()) - int((~padding[:: 16 * T]).sum())


def test_documents_end_where_each_source_says(tmp_path: Path) -> None:
    """llm.c's files tell their delimiter themselves, as a mark of the beginning that is not the tokenizer's end."""
    delimiter, own = 7, np.full(400, 1, dtype="<u2")
    own[::10] = delimiter
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(own)
    (tmp_path / "own.bin").write_bytes(header.tobytes() + own.tobytes())
    ids = np.full(400, delimiter, dtype="<u2")
    ids[9::10] = END
    write_set(tmp_path / "set", [ids])
    sources = {"own": {"path": str(tmp_path / "own.bin"), "format": "llm.c"}, "prepared": {"path": f"{tmp_path}/set"}}
    dataset = mixed(tmp_path, sources)
    rank = {"local_rank": 0, "local_world_size": 1}
    loader = Loader(dataset, batch_size=20, micro_bs=1, document_mask=True, **rank)
    loader.assign([(0, 20)])
    ends = {"own": delimiter, "prepared": END}
    seen = set[str]()
    for batch in loader.next_step():
        assert batch.sources is not None and batch.cu_seqlens is not None
        name = loader.source_names[int(batch.sources)]
        row = batch.tokens[0].numpy()
        begins = sorted({0, *np.flatnonzero(row == ends[name]).tolist()})
        assert batch.cu_seqlens.tolist() == [*begins, T], name
        seen.add(name)
    loader.close()
    assert seen == set(ends)

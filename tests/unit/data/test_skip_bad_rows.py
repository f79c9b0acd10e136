"""data.skip_bad_rows: unusable rows are left out and counted; otherwise the first one is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.unit.tools.data.preparations import manifest_of
from tests.unit.tools.data.preparations import prepare as data_prepare

from zeroband.config.data import DataConfig
from zeroband.data.tokens import prepare
from zeroband.errors import ConfigError

ROWS = ['{"text": "one"}', "{", '{"body": "x"}', '{"text": 3}', "[" * 3000, '{"text": "\\ud800"}', '{"text": "two"}']
BAD = 5
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ASKED = TALK[:1]


def made(kind: str, folder: Path) -> dict[str, Any]:
    """A source with two good rows, and five bad ones between them."""
    match kind:
        case "jsonl":
            (folder / "a.jsonl").write_text("\n".join(ROWS))
        case "chat":
            unknown = [{"role": "user", "content": {}}, {"role": "assistant", "content": "b"}]
            rows = [TALK, ASKED, [], "text", [{"role": 1}], unknown, TALK]
            (folder / "a.chat").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
        case "parquet":
            texts = [b"one", b"\xff", b"\0", b"a\x80", b"\xc3", b"\xed\xa0\x80", b"two"]
            parquet.write_table(pa.table({"text": pa.array(texts, pa.binary())}), folder / "a.parquet")
        case _:
            for number, text in enumerate([b"one", *[b"\xff"] * BAD, b"two"]):
                (folder / f"{number}.text").write_bytes(text)
    return {"type": kind, "paths": [f"{folder}/*.{kind}"]}


@pytest.mark.parametrize("kind", ["jsonl", "chat", "parquet", "text"])
def test_bad_rows_are_left_out_and_counted(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = made(kind, tmp_path)
    settings = {"source": source, "cache_dir": tmp_path / "cache", "seq_length": 8}
    with pytest.raises(ConfigError, match=r"use data\.skip_bad_rows to skip"):
        prepare(DataConfig.model_validate(settings), 0)
    with caplog.at_level(logging.WARNING):
        store: Any = prepare(DataConfig.model_validate({**settings, "skip_bad_rows": True}), 0)
    assert (store.manifest.documents, store.manifest.bad_rows, store.manifest.empty_documents) == (2, BAD, 0)
    (told,) = [record.__dict__["fields"] for record in caplog.records if "unusable" in record.message]
    assert told["count"] == BAD and str(tmp_path) in told["first"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_data_prepare_leaves_them_out_too(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(kind, tmp_path)
    with pytest.raises(ConfigError, match=r"use --skip-bad-rows to skip"):
        data_prepare(tmp_path / f"a.{kind}", tmp_path / "refused")
    assert data_prepare(tmp_path / f"a.{kind}", tmp_path / "out", "--skip-bad-rows") == 0
    assert (manifest_of(tmp_path / "out").documents, manifest_of(tmp_path / "out").tokens) == (2, 8)
    assert f"for their length, {BAD} unusable, the first: {tmp_path}/a.{kind}" in capsys.readouterr().out


def test_a_source_of_bad_rows_alone_is_refused_with_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n[")
    source = {"type": "jsonl", "paths": [f"{tmp_path}/a.jsonl"]}
    data = DataConfig.model_validate({"source": source, "cache_dir": tmp_path / "cache", "skip_bad_rows": True})
    with pytest.raises(ConfigError, match=r"no text to train on .*2 unusable, .*a\.jsonl:1: "):
        prepare(data, 0)


def test_a_damaged_file_is_no_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip")
    source = {"type": "jsonl", "paths": [f"{tmp_path}/a.jsonl.gz"]}
    data = DataConfig.model_validate({"source": source, "cache_dir": tmp_path / "cache", "skip_bad_rows": True})
    with pytest.raises(ConfigError, match=r"cannot read .*a\.jsonl\.gz"):
        prepare(data, 0)

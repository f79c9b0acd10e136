from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from zeroband.config.data import HuggingFaceSource, JsonlSource, ParquetSource, SyntheticSource, TextSource
from zeroband.data.files import find_files
from zeroband.data.readers import require_beginning_of_text
from zeroband.data.sources import documents, source_identity
from zeroband.errors import ConfigError


def texts(source: Any, seed: int = 0) -> list[str | bytes]:
    return [document.text for document in documents(source, seed)]


def jsonl(path: Path, *lines: str) -> JsonlSource:
    path.write_text("\n".join(lines), encoding="utf-8")
    return JsonlSource(type="jsonl", paths=(str(path),))


def table(path: Path, column: str, values: list[Any], kind: pa.DataType | None = None) -> ParquetSource:
    parquet.write_table(pa.table({"id": pa.array(range(len(values))), column: pa.array(values, kind)}), path)
    return ParquetSource(type="parquet", paths=(str(path),))


def test_text_gives_each_file_as_one_document_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("line\r\nlinê".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    assert texts(TextSource(paths=(f"{tmp_path}/*.txt",))) == ["line\r\nlinê".encode(), b""]


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [
        (PNG, 0, "89"),
        (b"text, and then " + PNG, 15, "89"),
        ("latin-1: \xfc".encode("latin-1"), 9, "fc"),
        ("UTF-16".encode("utf-16-le"), 1, "00"),
        (b"cut in a character \xc3", 19, "c3"),
        (b"x" * 100_000 + b"\0", 100_000, "00"),
    ],
)
def test_file_that_is_no_text_is_refused_unless_asked_for(
    content: bytes, offset: int, byte: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(content)
    why = rf"{tmp_path}/a is not text: byte {offset} is 0x{byte}, .*set data\.source\.binary = true"
    with pytest.raises(ConfigError, match=why):
        texts(TextSource(paths=(f"{tmp_path}/a",)))
    assert texts(TextSource(paths=(f"{tmp_path}/a",), binary=True)) == [content]
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ConfigError, match=rf"a\.gz is not text: byte {offset} is 0x{byte}"):
        texts(TextSource(paths=(f"{tmp_path}/a.gz",)))


def test_beginning_of_a_text_may_end_within_a_character(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x" * 8191 + "é" * 10, encoding="utf-8")
    (file,) = find_files([f"{tmp_path}/a"])
    require_beginning_of_text(file)
    (tmp_path / "a").write_bytes(b"x" * 8000 + PNG)
    with pytest.raises(ConfigError, match="byte 8000 is 0x89"):
        require_beginning_of_text(file)


def test_column_of_bytes_that_are_no_text_is_refused_unless_asked_for(tmp_path: Path) -> None:
    source = table(tmp_path / "a.parquet", "text", [b"text", PNG], pa.binary())
    with pytest.raises(ConfigError, match=r"a\.parquet, row 1 is not text: byte 0 is 0x89"):
        texts(source)
    assert texts(source.model_copy(update={"binary": True})) == [b"text", PNG]


def test_text_without_paths_reads_the_standard_library() -> None:
    sources = {Path(document.where).name: document.text for document in documents(TextSource(), 0)}
    assert b"class ArgumentParser" in sources["argparse.py"]


def test_jsonl_gives_one_document_a_line_and_skips_blank_lines(tmp_path: Path) -> None:
    long = '{"text": "numbers of any length", "id": ' + "7" * 5000 + "}"
    source = jsonl(tmp_path / "a.jsonl", '{"text": "ünï"}', "", "  ", '{"text": "", "id": 2}', '{"text": null}', long)
    assert texts(source) == ["ünï", "", "", "numbers of any length"]


def test_jsonl_reads_gzip_from_a_url() -> None:
    with fsspec.open("memory://zeroband-sources/a.jsonl.gz", "wb") as out:
        out.write(gzip.compress(b'{"body": "packed"}\n{"body": "twice"}\n'))
    source = JsonlSource(type="jsonl", paths=("memory://zeroband-sources/*.gz",), field="body")
    assert texts(source) == ["packed", "twice"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a\.jsonl:2: not a line of JSON"),
        ('{"body": "x", "id": 1}', r"a\.jsonl:2: no field 'text' .*it has 'body', 'id'"),
        ("[1]", r"a\.jsonl:2: a list"),
        ('{"text": 7}', r"a\.jsonl:2: 'text' holds a int"),
    ],
)
def test_jsonl_names_the_file_line_and_field_that_is_wrong(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        texts(jsonl(tmp_path / "a.jsonl", '{"text": "fine"}', line))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_gives_one_document_a_row(tmp_path: Path, kind: pa.DataType) -> None:
    assert texts(table(tmp_path / "a.parquet", "text", ["ünï", "", None, "last"], kind)) == ["ünï", "", "", "last"]


def test_parquet_goes_through_all_row_groups(tmp_path: Path) -> None:
    values = [f"document {i}" for i in range(3000)]
    parquet.write_table(pa.table({"text": values}), tmp_path / "a.parquet", row_group_size=700)
    assert texts(ParquetSource(type="parquet", paths=(str(tmp_path / "a.parquet"),))) == values


def test_parquet_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.parquet: no column 'text' .*it has 'id', 'body'"):
        texts(table(tmp_path / "a.parquet", "body", ["x"]))
    with pytest.raises(ConfigError, match=r"a\.parquet, row 0: 'text' holds a float"):
        texts(source := table(tmp_path / "a.parquet", "text", [1.5]))
    (tmp_path / "a.parquet").write_bytes(b"this is no Parquet file at all")
    with pytest.raises(ConfigError, match=r"cannot read .*a\.parquet"):
        texts(source)


def test_synthetic_is_made_by_the_seed_alone_with_documents_of_the_mean_length() -> None:
    source = SyntheticSource(type="synthetic", documents=400, mean_length=100)
    assert texts(source, seed=1) == texts(source, seed=1) != texts(source, seed=2)
    lengths = [len(text) for text in texts(source)]
    assert len(lengths) == 400 and min(lengths) >= 1 and sum(lengths) / 400 == pytest.approx(100, rel=0.05)
    assert source_identity(source, 0) != source_identity(source, 1)


def test_synthetic_never_changes_between_releases() -> None:
    """Nodes with different Python versions must make the same corpus."""
    source = SyntheticSource(type="synthetic", documents=1, mean_length=32)
    assert texts(source, seed=0) == ["bo kogi fa tonineme"]


def test_huggingface_names_the_extra_when_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="extra `hf`"):
        documents(HuggingFaceSource(type="huggingface", name="x"), 0)


def test_source_identity_is_plain_json_and_follows_the_files(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", '{"text": "x"}')
    before = source_identity(source, 0)
    assert json.loads(json.dumps(before)) == before
    assert source_identity(source, 1) == before
    jsonl(tmp_path / "a.jsonl", '{"text": "longer"}')
    assert source_identity(source, 0) != before

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.text_server import refusing, text_server, without_sizes
from tests.unit.data.prepared import FileServer, FilesHandler

from zeroband.data import files
from zeroband.data.files import SourceFile, find_files, stdlib_files
from zeroband.errors import ConfigError, StorageLost


def read(file: SourceFile) -> bytes:
    with file.open() as stream:
        return stream.read()


def names(files: list[SourceFile]) -> list[str]:
    return [Path(file.name).name for file in files]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        pytest.param(["{}/*.md", "{}/*.txt"], ["c.md", "a.txt", "b.txt"], id="in the given order, a glob by name"),
        pytest.param(["{}/**/*.log"], ["deep.log"], id="folders for a double star"),
        pytest.param(["{}/a.txt", "{}/*.txt"], ["a.txt", "b.txt"], id="a file once when two patterns name it"),
        pytest.param(["{}/d[1].csv"], ["d[1].csv"], id="brackets literally when that exists"),
        pytest.param(["~/a.txt"], ["a.txt"], id="the home folder"),
        pytest.param(["memory://zeroband-files/*.txt"], ["m.txt"], id="fsspec URLs"),
    ],
)
def test_find_files_takes(
    patterns: list[str], found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("b.txt", "a.txt", "c.md", "d[1].csv", "x/y/deep.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    fsspec.filesystem("memory").pipe_file("/zeroband-files/m.txt", b"m.txt")
    files = find_files([pattern.format(tmp_path) for pattern in patterns])
    assert names(files) == found and [Path(read(file).decode()).name for file in files] == found


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        *[("missing.txt", "no file matches 'missing.txt'"), (r"*.none", r"no file matches '\*\.none'")],
        ("memory://zeroband-nowhere/*.txt", "memory:///zeroband-nowhere does not exist"),
        *[
            ("/", r"is a folder; name its files"),
            ("nosuch://bucket/a.txt", r"nosuch://bucket/a\.txt.*not a readable path or URL"),
        ],
    ],
)
def test_find_files_names_what_it_cannot_take(pattern: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_files([pattern])


def zst(text: bytes) -> bytes:
    return pa.Codec("zstd").compress(text, asbytes=True)


PACKED = pytest.mark.parametrize(
    ("pack", "ending"), [(gzip.compress, "GZ"), (bz2.compress, "bz2"), (lzma.compress, "xz"), (zst, "zst")]
)


@PACKED
def test_open_decompresses_by_the_ending_of_the_name(
    tmp_path: Path, pack: Callable[[bytes], bytes], ending: str
) -> None:
    (tmp_path / f"a.txt.{ending}").write_bytes(pack(b"first ") + pack(b"second"))
    assert [read(file) for file in find_files([f"{tmp_path}/*"])] == [b"first second"]


def test_open_reads_archives_of_the_longest_window(tmp_path: Path) -> None:
    text = b"as `zstd --long=31` writes it"
    window, block = (31 - 10) << 3, len(text) << 3 | 1  # RFC 8878: no size of the content; a raw block, the last one
    frame = b"\x28\xb5\x2f\xfd\0" + bytes([window]) + block.to_bytes(3, "little") + text
    (tmp_path / "a.txt.zst").write_bytes(frame)
    assert [read(file) for file in find_files([f"{tmp_path}/*"])] == [text]


@PACKED
@pytest.mark.parametrize("damage", ["cut", "changed", "not packed"])
def test_open_names_a_compressed_file_that_is_damaged(
    tmp_path: Path, pack: Callable[[bytes], bytes], ending: str, damage: str
) -> None:
    packed = pack(os.urandom(4096))
    changed = packed[:3] + bytes([packed[3] ^ 0xFF]) + packed[4:]
    content = {"cut": packed[:-100], "changed": changed, "not packed": b"plain text"}[damage]
    (tmp_path / f"bad.{ending}").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"cannot read .*bad\.{ending}: \S"):
        read(find_files([f"{tmp_path}/bad.{ending}"])[0])


def test_open_names_a_file_that_went_away(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (file,) = find_files([f"{tmp_path}/a.txt"])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"a\.txt does not exist .*restore it"):
        read(file)


def test_stamp_changes_with_size_and_time_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    os.utime(path, (1, 1))
    (file,) = find_files([str(path)])
    before = file.stamp()
    path.chmod(0o600)
    assert file.stamp() == before
    os.utime(path, (2, 2))
    touched = file.stamp()
    path.write_text("ab")
    os.utime(path, (2, 2))
    assert len({tuple(before), tuple(touched), tuple(file.stamp())}) == 3


def test_stdlib_files_are_sorted_sources_without_tests_and_packages() -> None:
    paths = [Path(file.name).relative_to(sysconfig.get_path("stdlib")) for file in stdlib_files()]
    assert paths == sorted(paths, key=str)
    assert {Path("argparse.py"), Path("json/decoder.py")} <= set(paths)
    assert not {part for path in paths for part in path.parts} & {"site-packages", "test", "tests", "__pycache__"}


def test_stdlib_files_says_so_when_there_are_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match="holds no Python sources"):
        stdlib_files()


TEXT = b"".join(b"line %d\n" % number for number in range(400_000))
"""More than is read at once."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Has `a.txt`; nobody pauses between two attempts."""
    monkeypatch.setattr(files, "pause", lambda _: False)
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.txt").write_bytes(TEXT)
    with text_server(tmp_path / "served") as serving:
        yield serving


@pytest.mark.parametrize("status", [429, 503, 0], ids=["429", "503", "hangs up"])
def test_server_that_fails_is_asked_again_and_that_is_said(
    server: FileServer, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zeroband")
    failures = [status] * 4
    server.fault = refusing(failures)
    (file,) = find_files([f"{server.url}/a.txt"], retry_s=60.0)
    assert not failures, "who lists waits it out"
    failures += [status] * 4
    assert file.size == len(TEXT)
    failures += [status] * 4
    assert read(file) == TEXT
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == ["data storage is failing; retrying", "data storage has recovered"]


RANGES = pytest.mark.parametrize("knows_ranges", [True, False])


@RANGES
def test_file_that_breaks_off_is_read_on_from_there(server: FileServer, knows_ranges: bool) -> None:
    server.knows_ranges = knows_ranges
    cuts = 3

    def cut(request: FilesHandler) -> bool:
        nonlocal cuts
        cuts -= request.command == "GET"
        return request.command == "GET" and cuts >= 0 and request.send(*request.content(), cut=True)

    server.fault = cut
    (file,) = find_files([f"{server.url}/a.txt"], retry_s=60.0)
    assert read(file) == TEXT
    assert [asked for asked in server.asked if "bytes" in asked], "the rest is asked for, not all of it"


def test_server_that_goes_on_failing_is_an_error_with_file_and_status(server: FileServer, tmp_path: Path) -> None:
    (file,) = find_files([f"{server.url}/a.txt"])
    server.fault = refusing([503] * 100)
    for ask in (lambda: find_files([f"{server.url}/a.txt"]), lambda: read(file), lambda: file.size):
        with pytest.raises(StorageLost, match=rf"^{server.url}/.*\.txt: the storage failed for 0 s .* 503: "):
            ask()


def test_server_that_is_down_is_no_file_that_is_missing() -> None:
    with pytest.raises(StorageLost, match=r"the storage failed .*Cannot connect to host"):
        find_files(["http://127.0.0.1:1/a.txt"])


def test_file_that_ends_early_again_and_again_is_damaged(server: FileServer) -> None:
    def shorter(request: FilesHandler) -> bool:
        return request.command == "GET" and request.send(TEXT[:1000], 200)

    (file,) = find_files([f"{server.url}/a.txt"], retry_s=60.0)
    server.fault = shorter
    with pytest.raises(ConfigError, match=r"/a\.txt is damaged: it ends before byte 1000, also when read again"):
        read(file)


@RANGES
def test_file_of_a_server_is_read_from_any_byte(server: FileServer, knows_ranges: bool) -> None:
    server.knows_ranges = knows_ranges
    (file,) = find_files([f"{server.url}/a.txt"])
    assert file.has_ranges == knows_ranges
    with file.open() as stream:
        for at in (len(TEXT) - 10, 7, 3_000_000, 3_000_100, 0, len(TEXT), len(TEXT) + 1):
            assert stream.seek(at) == at
            assert stream.read(20) == TEXT[at : at + 20]


@RANGES
def test_table_of_a_server_is_read(server: FileServer, tmp_path: Path, knows_ranges: bool) -> None:
    values = [f"{number} {os.urandom(50).hex()}" for number in range(20_000)]
    parquet.write_table(pa.table({"text": values}), tmp_path / "served" / "a.parquet", row_group_size=3000)
    server.knows_ranges = knows_ranges
    (file,) = find_files([f"{server.url}/a.parquet"])
    with file.open() as stream:
        assert parquet.ParquetFile(stream).read().column("text").to_pylist() == values


def test_file_whose_size_nobody_says_is_read_to_its_end(server: FileServer) -> None:
    server.fault = without_sizes
    (file,) = find_files([f"{server.url}/a.txt"])
    assert file.size is None and not file.has_ranges
    assert read(file) == TEXT
    with (
        file.open() as stream,
        pytest.raises(ConfigError, match=r"does not report the size of .*/a\.txt, which must be read"),
    ):
        stream.seek(0, 2)

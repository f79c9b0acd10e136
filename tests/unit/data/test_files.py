from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def test_find_files_keeps_the_given_order_and_sorts_within_a_glob(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert names(find_files([f"{tmp_path}/*.md", f"{tmp_path}/*.txt"])) == ["c.md", "a.txt", "b.txt"]


def test_find_files_goes_into_folders_for_a_double_star(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "y" / "deep.txt").write_text("deep")
    assert names(find_files([f"{tmp_path}/**/*.txt"])) == ["deep.txt"]


def test_find_files_reads_a_file_once_when_two_patterns_name_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert names(find_files([f"{tmp_path}/a.txt", f"{tmp_path}/*.txt"])) == ["a.txt"]


def test_find_files_takes_a_name_with_brackets_literally_when_it_exists(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("one")
    (file,) = find_files([f"{tmp_path}/a[1].txt"])
    assert read(file) == b"one"


def test_find_files_reads_fsspec_urls() -> None:
    with fsspec.open("memory://zeroband-files/a.txt", "wb") as out:
        out.write(b"in memory")
    (file,) = find_files(["memory://zeroband-files/*.txt"])
    assert file.name == "memory:///zeroband-files/a.txt"
    assert read(file) == b"in memory"


def test_find_files_expands_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("at home")
    assert [read(file) for file in find_files(["~/a.txt"])] == [b"at home"]


@pytest.mark.parametrize("pattern", ["missing.txt", "*.none", "memory://zeroband-nowhere/*.txt"])
def test_find_files_names_the_pattern_that_matches_nothing(pattern: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_files([pattern])
    says = f"no file matches {pattern!r}", "memory:///zeroband-nowhere is not there"
    assert any(words in str(raised.value) for words in says)


def test_find_files_says_what_to_write_instead_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; name its files"):
        find_files([str(tmp_path)])


def test_find_files_names_an_unknown_protocol() -> None:
    with pytest.raises(ConfigError, match=r"nosuch://bucket/a\.txt.*no path or URL"):
        find_files(["nosuch://bucket/a.txt"])


def zst(text: bytes) -> bytes:
    return pa.Codec("zstd").compress(text, asbytes=True)


@pytest.mark.parametrize(
    ("pack", "ending"), [(gzip.compress, "GZ"), (bz2.compress, "bz2"), (lzma.compress, "xz"), (zst, "zst")]
)
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


@pytest.mark.parametrize(
    ("pack", "ending"), [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lzma.compress, "xz"), (zst, "zst")]
)
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
    with pytest.raises(ConfigError, match=r"a\.txt is not there .*bring it back"):
        read(file)


def test_stamp_changes_with_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    os.utime(path, (1, 1))
    (file,) = find_files([str(path)])
    before = file.stamp()
    assert file.stamp() == before
    os.utime(path, (2, 2))
    touched = file.stamp()
    path.write_text("ab")
    os.utime(path, (2, 2))
    assert len({tuple(before), tuple(touched), tuple(file.stamp())}) == 3


def test_stamp_stays_when_only_the_permissions_change(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a")
    (file,) = find_files([str(path)])
    before = file.stamp()
    path.chmod(0o600)
    assert file.stamp() == before


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
    assert said[:2] == ["the storage of the data fails; trying again", "the storage of the data answers again"]


@pytest.mark.parametrize("knows_ranges", [True, False])
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
        with pytest.raises(StorageLost, match=rf"^{server.url}/.*\.txt: the storage did not give it for 0 s .* 503: "):
            ask()


def test_server_that_is_down_is_no_file_that_is_missing() -> None:
    with pytest.raises(StorageLost, match=r"did not give it .*Cannot connect to host"):
        find_files(["http://127.0.0.1:1/a.txt"])


def test_file_that_ends_early_again_and_again_is_damaged(server: FileServer) -> None:
    def shorter(request: FilesHandler) -> bool:
        return request.command == "GET" and request.send(TEXT[:1000], 200)

    (file,) = find_files([f"{server.url}/a.txt"], retry_s=60.0)
    server.fault = shorter
    with pytest.raises(ConfigError, match=r"/a\.txt is damaged: it ends before byte 1000, and again .*"):
        read(file)


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_file_of_a_server_is_read_from_any_byte(server: FileServer, knows_ranges: bool) -> None:
    server.knows_ranges = knows_ranges
    (file,) = find_files([f"{server.url}/a.txt"])
    assert file.has_ranges == knows_ranges
    with file.open() as stream:
        for at in (len(TEXT) - 10, 7, 3_000_000, 3_000_100, 0, len(TEXT), len(TEXT) + 1):
            assert stream.seek(at) == at
            assert stream.read(20) == TEXT[at : at + 20]


@pytest.mark.parametrize("knows_ranges", [True, False])
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
    with file.open() as stream, pytest.raises(ConfigError, match=r"does not say how large .*/a\.txt is, which is read"):
        stream.seek(0, 2)


def _errors() -> Iterator[Exception]:
    aiohttp = pytest.importorskip("aiohttp")
    yield aiohttp.ServerDisconnectedError()
    yield aiohttp.ClientPayloadError("cut")
    retry = pytest.importorskip("gcsfs.retry", reason="needs the extra gcs")
    yield retry.HttpError({"code": 503, "message": "busy"})


@pytest.mark.parametrize("error", list(_errors()), ids=lambda error: type(error).__name__)
def test_errors_of_clients_that_are_no_errors_of_the_system_are_waited_out_too(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not isinstance(error, OSError)
    monkeypatch.setattr(files, "pause", lambda _: False)
    system = fsspec.filesystem("memory")
    system.pipe_file("/zeroband-failing/a.txt", b"had")
    failures = [error]

    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def fails_first(*arguments: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return call(*arguments, **options)

        return fails_first

    for name in ("info", "open"):
        monkeypatch.setattr(system, name, failing(getattr(system, name)))
    (file,) = find_files(["memory://zeroband-failing/a.txt"], retry_s=60.0)
    assert not failures
    failures += [error, error]
    assert read(file) == b"had"

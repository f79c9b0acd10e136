from __future__ import annotations

import gzip
import os
import sysconfig
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from zeroband.data.files import SourceFile, find_files, stdlib_files
from zeroband.errors import ConfigError


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
    assert f"no file matches {pattern!r}" in str(raised.value)


def test_find_files_says_what_to_write_instead_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; name its files"):
        find_files([str(tmp_path)])


def test_find_files_names_an_unknown_protocol() -> None:
    with pytest.raises(ConfigError, match=r"nosuch://bucket/a\.txt.*no path or URL"):
        find_files(["nosuch://bucket/a.txt"])


def test_open_decompresses_by_the_ending_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first ") + gzip.compress(b"second"))
    zstd = pa.Codec("zstd")
    (tmp_path / "b.txt.zst").write_bytes(b"".join(zstd.compress(part, asbytes=True) for part in (b"first ", b"second")))
    assert [read(file) for file in find_files([f"{tmp_path}/*"])] == [b"first second"] * 2


@pytest.mark.parametrize("damage", ["cut", "not gzip"])
def test_open_names_a_compressed_file_that_is_damaged(tmp_path: Path, damage: str) -> None:
    packed = gzip.compress(os.urandom(4096))
    (tmp_path / "bad.gz").write_bytes(packed[:-100] if damage == "cut" else b"plain text")
    with pytest.raises(ConfigError, match=r"cannot read .*bad\.gz"):
        read(find_files([f"{tmp_path}/bad.gz"])[0])


def test_open_names_a_file_that_went_away(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (file,) = find_files([f"{tmp_path}/a.txt"])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*a\.txt"):
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

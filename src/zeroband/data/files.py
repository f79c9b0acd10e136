"""The files behind paths, globs and URLs, through fsspec and pyarrow. Lists and opens them; knows no format."""

from __future__ import annotations

import importlib
import io
import os
import sysconfig
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from zeroband.errors import ConfigError

_COMPRESSION = {".gz": "gzip", ".zst": "zstd"}
_HTTP_CLIENTS = {"httpx", "httpx2"}
"""What huggingface_hub speaks with; their errors are no OSError."""
_TIME_KEYS = ("mtime", "LastModified", "last_modified", "updated", "created")
_STDLIB_SUFFIXES = {".py", ".txt", ".rst", ".md"}
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "sitecustomize.py"}


class FileSystem(Protocol):
    """The part of fsspec's AbstractFileSystem that is used here."""

    def exists(self, path: str) -> bool: ...
    def isdir(self, path: str) -> bool: ...
    def isfile(self, path: str) -> bool: ...
    def glob(self, path: str) -> list[str]: ...
    def find(self, path: str) -> list[str]: ...
    def info(self, path: str) -> dict[str, Any]: ...
    def open(self, path: str, mode: str) -> BinaryIO: ...
    def unstrip_protocol(self, name: str) -> str: ...


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    name: str
    """Name as a user would write it: a path, or a URL when it is not local."""
    path: str
    system: FileSystem

    @property
    def size(self) -> int:
        """Bytes, before it is decompressed; 0 where its store does not say."""
        return int(self.system.info(self.path).get("size") or 0)

    def stamp(self) -> list[str]:
        """Name, size and time of the last change, or the store's tag: what changes when the file does."""
        info = self.system.info(self.path)
        changed = next((info[key] for key in _TIME_KEYS if info.get(key) is not None), None)
        return [self.name, str(info.get("size")), str(changed), str(info.get("ETag") or info.get("blob_id"))]

    @contextmanager
    def open(self) -> Generator[BinaryIO]:
        """The bytes of the file, decompressed when its name ends with `.gz` or `.zst`.

        Raises: ConfigError naming the file, for any failure to open or to read it inside the block.
        """
        try:
            with self.system.open(self.path, "rb") as raw:
                codec = next((c for ending, c in _COMPRESSION.items() if self.path.endswith(ending)), None)
                yield raw if codec is None else _decompressed(raw, codec)
        except Exception as e:
            if not _is_of_storage(e):
                raise
            raise ConfigError(f"data.source: cannot read {self.name}: {e}") from e


def find_files(paths: Sequence[str], in_folders: tuple[str, ...] = ()) -> list[SourceFile]:
    """The files that paths, globs and fsspec URLs name: in the given order, within a glob by name, each once.

    A folder stands for the files below it that end with one of `in_folders`, hidden ones left out.
    Raises: ConfigError naming the path that matches nothing or is a folder without such files, or whose protocol is not
    known.
    """
    found = [file for path in paths for file in _expand(path, in_folders)]
    return list({file.name: file for file in found}.values())


def stdlib_files() -> list[SourceFile]:
    """Sources and docs of this machine's Python standard library, by name; tests and build-specific files left out.

    Equal Python versions give equal texts on most machines; a distribution's patches may differ.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(_stdlib_texts(root))
    if not paths:
        raise ConfigError(f"data.source.paths is empty and {root} holds no Python sources; name files to train on")
    return find_files(paths)


def _stdlib_texts(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]
        for name in names:
            skipped = name in _STDLIB_SKIPPED or name.startswith("_sysconfigdata")
            if Path(name).suffix in _STDLIB_SUFFIXES and not skipped:
                yield str(Path(folder, name))


def _expand(pattern: str, in_folders: tuple[str, ...]) -> list[SourceFile]:
    system, path = _resolve(pattern)
    try:
        if system.isfile(path):
            matches = [path]
        elif in_folders and system.isdir(path):
            visible = (found for found in system.find(path) if "/." not in found.removeprefix(path))
            matches = sorted(found for found in visible if found.endswith(in_folders))
        elif system.isdir(path):
            raise ConfigError(f"data.source.paths: {pattern!r} is a folder; name its files, like {pattern}/*.txt")
        else:
            matches = sorted(match for match in system.glob(path) if system.isfile(match))
    except Exception as e:
        if not _is_of_storage(e):
            raise
        raise ConfigError(f"data.source.paths: cannot list {pattern!r}: {e}") from e
    if not matches:
        raise ConfigError(f"data.source.paths: no file matches {pattern!r}")
    return [SourceFile(_name(system, match), match, system) for match in matches]


def _is_of_storage(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _HTTP_CLIENTS


def _resolve(pattern: str) -> tuple[FileSystem, str]:
    core: Any = importlib.import_module("fsspec.core")  # has no types
    try:
        system, path = core.url_to_fs(str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern)
    except (ValueError, ImportError) as e:
        raise ConfigError(f"data.source.paths: {pattern!r} is no path or URL that can be read here: {e}") from e
    return cast(FileSystem, system), cast(str, path)


def _name(system: FileSystem, path: str) -> str:
    return system.unstrip_protocol(path).removeprefix("file://")


def _decompressed(raw: BinaryIO, codec: str) -> BinaryIO:
    pa: Any = importlib.import_module("pyarrow")  # has no types
    return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, codec), buffer_size=1 << 20))

"""Files of this machine that a glob names, or that lie below a folder. Lists them; opens none.

What is named and is no file to read is either refused or told by the reason why it is left out. Links are followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from zeroband.errors import ConfigError

_MAGIC = frozenset("*?[")
_ANY_FOLDERS = "**"

Kind = Literal["folder", "file", "device", "nothing"]


@dataclass
class Listing:
    """The files of a pattern, and what else it named, by the reason why that is left out."""

    files: list[str] = field(default_factory=list[str])
    left_out: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def leave_out(self, path: Path, reason: str) -> None:
        self.left_out[reason].append(str(path))


def has_magic(pattern: str) -> bool:
    """Whether a pattern may name more than one file."""
    return not _MAGIC.isdisjoint(pattern)


def files_matching(pattern: str) -> Listing:
    """The files that an absolute glob names, by name.

    `**` goes through any number of folders, those behind links as well. A part of the pattern that is the name of
    something that is there stands for it alone, whatever letters it has.
    Raises: ConfigError naming a folder or file on the way that this user may not read, or a link to nothing; OSError.
    """
    listing = Listing()
    parts = [part for part in pattern.split("/") if part]
    for path in _matches(Path("/"), parts, (), listing):
        if _kind(path) == "folder":
            if _ANY_FOLDERS not in parts:
                listing.leave_out(path, "folders, whose files a pattern names as FOLDER/*")
        else:
            _take(path, listing)
    return _each_once(listing)


def files_below(folder: str, endings: tuple[str, ...]) -> Listing:
    """The files below a folder that have one of these endings in any case, by name. Raises as `files_matching` does."""
    listing = Listing()
    for path in _below(Path(folder), (), listing):
        if path.name.casefold().endswith(endings):
            _take(path, listing)
        else:
            listing.leave_out(path, "files of other endings")
    return _each_once(listing)


def require_readable(path: Path) -> None:
    """Raise ConfigError where this user may not read a file."""
    if not os.access(path, os.R_OK, effective_ids=True):
        raise ConfigError(
            f"data.source: {path} may not be read by this user; change its permissions, or name files without it"
        )


def _take(path: Path, listing: Listing) -> None:
    """Add a file, or the reason why it is none."""
    kind = _kind(path)
    if kind == "nothing":
        raise ConfigError(f"data.source: {path} is a link to {path.readlink()}, which is not there; mend or remove it")
    if kind == "file":
        require_readable(path)
        listing.files.append(str(path))
    else:
        listing.leave_out(path, "pipes, sockets and devices")


def _each_once(listing: Listing) -> Listing:
    """Leave out files that links lead to a second time: of two names the one without a link stays."""
    listing.files.sort()
    folders = {folder: folder.resolve() for folder in {Path(path).parent for path in listing.files}}
    real = {path: _resolved(Path(path), folders) for path in listing.files}
    if len(set(real.values())) < len(real):
        kept: dict[str, str] = {}
        for path in sorted(listing.files, key=lambda path: real[path] != path):
            kept.setdefault(real[path], path)
        once = set(kept.values())
        listing.left_out["links to files that are listed already"] += [p for p in listing.files if p not in once]
        listing.files = sorted(once)
    return listing


def _resolved(path: Path, folders: Mapping[Path, Path]) -> str:
    return os.path.realpath(path) if path.is_symlink() else str(folders[path.parent] / path.name)


def _matches(folder: Path, parts: Sequence[str], trail: tuple[Path, ...], listing: Listing) -> Iterator[Path]:
    """What lies in a folder and matches the rest of a pattern. `trail`: folders on the way that `**` went through."""
    part, rest = parts[0], parts[1:]
    if part == _ANY_FOLDERS:
        yield from _matches(folder, rest or ["*"], trail, listing)
        for inner in _folders(folder, trail, listing):
            yield from _matches(inner, parts, (*trail, folder), listing)
        return
    for path in _named(folder, part, listing if not rest else None):
        if not rest:
            yield path
        elif _kind(path) == "folder":
            yield from _matches(path, rest, trail, listing)


def _named(folder: Path, part: str, listing: Listing | None) -> list[Path]:
    """What of a folder a part of a pattern names. `listing`: told what it would name if case did not count."""
    literal = folder / part
    if _kind(literal) != "nothing" or literal.is_symlink():
        return [literal]
    if not has_magic(part):
        return []
    there = _entries(folder)
    if listing is not None:
        for path in there:
            if not fnmatchcase(path.name, part) and fnmatchcase(path.name.casefold(), part.casefold()):
                listing.leave_out(path, "names that match in another case")
    return [path for path in there if fnmatchcase(path.name, part)]


def _below(folder: Path, trail: tuple[Path, ...], listing: Listing) -> Iterator[Path]:
    """What lies below a folder and is no folder, without hidden names."""
    for path in _entries(folder):
        if path.name.startswith("."):
            listing.leave_out(path, "hidden names")
        elif _kind(path) != "folder":
            yield path
    for inner in _folders(folder, trail, listing):
        if not inner.name.startswith("."):
            yield from _below(inner, (*trail, folder), listing)


def _folders(folder: Path, trail: Sequence[Path], listing: Listing) -> Iterator[Path]:
    """The folders in a folder. `trail`: folders that it lies in, which a link must not lead back to."""
    for path in _entries(folder):
        if _kind(path) != "folder":
            continue
        if path.is_symlink() and any(path.samefile(outer) for outer in (*trail, folder)):
            listing.leave_out(path, "links back to a folder that they lie in")
        else:
            yield path


def _kind(path: Path) -> Kind:
    """What a name stands for, behind links. Raises: ConfigError where this user may not know it, OSError."""
    try:
        mode = path.stat().st_mode
    except PermissionError as error:
        raise _closed(path.parent) from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return "nothing"
        raise
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device"


def _entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name. Raises: ConfigError where this user may not see it, OSError."""
    try:
        return sorted(folder.iterdir())
    except PermissionError as error:
        raise _closed(folder) from error


def _closed(folder: Path) -> ConfigError:
    return ConfigError(
        f"data.source: the folder {folder} may not be read by this user; change its permissions, or name the files "
        "that are meant without it"
    )

"""Files that a glob names, or that lie below a folder, on this machine or in any storage. Lists them; opens none.

What is named and is no file to read is either refused or told by the reason why it is left out. A folder that cannot
be listed is an error that names it. Links are followed on this machine; elsewhere those to files are.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

_MAGIC = frozenset("*?[")
_ANY_FOLDERS = "**"

Kind = Literal["folder", "file", "device", "nothing"]

_log = get_logger(__name__)


@dataclass
class Listing:
    """The files of a pattern, and what else it named, by the reason why that is left out."""

    files: list[str] = field(default_factory=list[str])
    left_out: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def leave_out(self, path: str, reason: str) -> None:
        self.left_out[reason].append(path)

    def tell(self, pattern: str) -> None:
        """Log what a pattern names and is not read."""
        for reason, names in self.left_out.items():
            tell_left_out(reason, len(names), min(names, default=""), pattern=pattern)


def tell_left_out(reason: str, count: int, first: str, **fields: str) -> None:
    """Log what was named and is not read, or holds nothing: how many there are, and the first one."""
    if count:
        told = {**fields, "count": count, "first": first}
        _log.warning(f"left out of the data: {reason}", extra={"fields": told})


def tell_empty(files: Iterable[Sequence[str]]) -> None:
    """Log files of 0 bytes, by the stamps of all."""
    names = [name for name, size, *_ in files if size == "0"]
    tell_left_out("files of 0 bytes", len(names), min(names, default=""))


class LocalTree:
    """The files of this machine and its mounts. All methods raise an error that names what cannot be seen."""

    def start(self, pattern: str) -> tuple[str, list[str]]:
        """A folder, and the parts of a pattern that are to be matched below it."""
        return "/", [part for part in pattern.split("/") if part]

    def child(self, folder: str, name: str) -> str | None:
        """The path of what has this very name in a folder; None where there is nothing, not even a link."""
        path = Path(folder, name)
        return str(path) if self.kind(str(path)) != "nothing" or path.is_symlink() else None

    def entries(self, folder: str) -> list[str]:
        """The paths of what lies in a folder, by name."""
        try:
            return sorted(map(str, Path(folder).iterdir()))
        except PermissionError as error:
            raise _closed(folder) from error

    def kind(self, path: str) -> Kind:
        """What a path stands for, behind links; `nothing`: a link leads nowhere."""
        try:
            mode = Path(path).stat().st_mode
        except PermissionError as error:
            raise _closed(str(Path(path).parent)) from error
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                return "nothing"
            raise
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device"

    def why_not_into(self, folder: str, outer: Sequence[str]) -> str:
        """Why a folder that a pattern found is not gone into; empty: it is. `outer`: folders that it lies in."""
        path = Path(folder)
        is_loop = path.is_symlink() and any(path.samefile(one) for one in outer)
        return "links back to a folder that they lie in" if is_loop else ""

    def require_file(self, path: str) -> None:
        """Raise ConfigError where a file cannot be read."""
        if self.kind(path) == "nothing":
            raise ConfigError(
                f"data.source: {path} is a link to {Path(path).readlink()}, which is not there; mend or remove it"
            )
        if not os.access(path, os.R_OK, effective_ids=True):
            raise ConfigError(
                f"data.source: {path} may not be read by this user; change its permissions, or name files without it"
            )

    def each_once(self, listing: Listing) -> None:
        """Leave out files that are listed a second time: of those that links lead to, the name without a link stays."""
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


class RemoteTree:
    """What a file system of fsspec lists, each folder once, for one listing.

    `run`, `name`: of its client; what a call raises names what was asked for. A storage says nothing of where a link to
    a folder ends, so those are not gone into: they might lead in circles.
    """

    def __init__(self, run: Callable[[Callable[[Any], Any], str], Any], name: Callable[[str], str]) -> None:
        self._run, self._name = run, name
        self._listed: dict[str, dict[str, str]] = {}
        """Paths in each folder, by name."""
        self._types: dict[str, str] = {}
        self._links = set[str]()

    def start(self, pattern: str) -> tuple[str, list[str]]:
        first = min(pattern.index(sign) for sign in _MAGIC if sign in pattern)
        folder, slash, _ = pattern[:first].rpartition("/")
        return folder or slash, [part for part in pattern[len(folder) :].split("/") if part]

    def child(self, folder: str, name: str) -> str | None:
        return self._within(folder).get(name)

    def entries(self, folder: str) -> list[str]:
        return sorted(self._within(folder).values())

    def kind(self, path: str) -> Kind:
        if self._types[path] == "link":
            self._links.add(path)
            found = str(self._run(lambda system: system.info(path), self._name(path))["type"])
            self._types[path] = "file" if found == "link" else found  # opening it says what is wrong with it
        kinds: Mapping[str, Kind] = {"directory": "folder", "file": "file"}
        return kinds.get(self._types[path], "device")

    def why_not_into(self, folder: str, outer: Sequence[str]) -> str:
        return "links to folders, which are followed on this machine alone" if folder in self._links else ""

    def require_file(self, path: str) -> None: ...

    def each_once(self, listing: Listing) -> None:
        listing.files = sorted(set(listing.files))

    def _within(self, folder: str) -> dict[str, str]:
        if (found := self._listed.get(folder)) is None:
            listed = self._run(lambda system: system.ls(folder, detail=True), self._name(folder))
            types: dict[str, str] = {entry["name"].rstrip("/"): str(entry["type"]) for entry in listed}
            types.pop(folder.rstrip("/"), None)  # some stores keep an object for the folder itself
            if folder.startswith(
                ("http://", "https://")
            ):  # whose pages lead to anywhere, and to other orders of itself
                within = f"{folder.rstrip('/')}/"
                names = {path: path.removeprefix(within) for path in types if path.startswith(within)}
                types = {path: types[path] for path, name in names.items() if not {"/", "?"} & {*name}}
            self._types |= types
            found = self._listed[folder] = {path.rpartition("/")[2]: path for path in types}
        return found


Tree = LocalTree | RemoteTree

LOCAL = LocalTree()


def has_magic(pattern: str) -> bool:
    """Whether a pattern may name more than one file."""
    return not _MAGIC.isdisjoint(pattern)


def files_matching(pattern: str, tree: Tree = LOCAL) -> Listing:
    """The files that an absolute glob names, by name.

    `**` goes through any number of folders. A part of the pattern that is the name of something that is there stands
    for it alone, whatever letters it has.
    Raises: ConfigError naming a folder or file on the way that this user may not read, or a link to nothing; OSError,
    and what a tree's calls raise.
    """
    listing = Listing()
    folder, parts = tree.start(pattern)
    for path in _matches(tree, folder, parts, (), listing):
        if tree.kind(path) == "folder":
            if _ANY_FOLDERS not in parts:
                listing.leave_out(path, "folders, whose files a pattern names as FOLDER/*")
        else:
            _take(tree, path, listing)
    tree.each_once(listing)
    return listing


def files_below(folder: str, endings: tuple[str, ...], tree: Tree = LOCAL) -> Listing:
    """The files below a folder that have one of these endings in any case, by name. Raises as `files_matching` does."""
    listing = Listing()
    for path in _below(tree, folder, (), listing):
        if path.casefold().endswith(endings):
            _take(tree, path, listing)
        else:
            listing.leave_out(path, "files of other endings")
    tree.each_once(listing)
    return listing


def require_readable(path: str) -> None:
    """Raise ConfigError where this user may not read a file of this machine."""
    LOCAL.require_file(path)


def _take(tree: Tree, path: str, listing: Listing) -> None:
    """Add a file, or the reason why it is none."""
    if tree.kind(path) == "device":
        listing.leave_out(path, "pipes, sockets and devices")
    else:
        tree.require_file(path)
        listing.files.append(path)


def _resolved(path: Path, folders: Mapping[Path, Path]) -> str:
    return os.path.realpath(path) if path.is_symlink() else str(folders[path.parent] / path.name)


def _matches(tree: Tree, folder: str, parts: Sequence[str], trail: tuple[str, ...], listing: Listing) -> Iterator[str]:
    """What lies in a folder and matches the rest of a pattern. `trail`: folders on the way that `**` went through."""
    part, rest = parts[0], parts[1:]
    if part == _ANY_FOLDERS:
        yield from _matches(tree, folder, rest or ["*"], trail, listing)
        for inner in _folders(tree, folder, trail, listing):
            yield from _matches(tree, inner, parts, (*trail, folder), listing)
    elif (path := tree.child(folder, part)) is not None:
        if not rest:
            yield path
        elif tree.kind(path) == "folder":
            yield from _matches(tree, path, rest, trail, listing)
    elif has_magic(part):
        for path in _named(tree, folder, part, listing if not rest else None):
            if not rest:
                yield path
            elif tree.kind(path) == "folder" and _goes_into(tree, path, (), listing):
                yield from _matches(tree, path, rest, trail, listing)


def _named(tree: Tree, folder: str, part: str, listing: Listing | None) -> list[str]:
    """What of a folder a part of a pattern matches. `listing`: told what it would match if case did not count."""
    there = {path: path.rpartition("/")[2] for path in tree.entries(folder)}
    if listing is not None:
        for path, name in there.items():
            if not fnmatchcase(name, part) and fnmatchcase(name.casefold(), part.casefold()):
                listing.leave_out(path, "names that match in another case")
    return [path for path, name in there.items() if fnmatchcase(name, part)]


def _below(tree: Tree, folder: str, trail: tuple[str, ...], listing: Listing) -> Iterator[str]:
    """What lies below a folder and is no folder, without hidden names."""
    for path in tree.entries(folder):
        if _is_hidden(path):
            listing.leave_out(path, "hidden names")
        elif tree.kind(path) != "folder":
            yield path
    for inner in _folders(tree, folder, trail, listing):
        if not _is_hidden(inner):
            yield from _below(tree, inner, (*trail, folder), listing)


def _is_hidden(path: str) -> bool:
    return path.rpartition("/")[2].startswith(".")


def _folders(tree: Tree, folder: str, trail: Sequence[str], listing: Listing) -> Iterator[str]:
    """The folders in a folder that are gone into. `trail`: folders that it lies in."""
    for path in tree.entries(folder):
        if tree.kind(path) == "folder" and _goes_into(tree, path, (*trail, folder), listing):
            yield path


def _goes_into(tree: Tree, folder: str, outer: Sequence[str], listing: Listing) -> bool:
    """Whether a folder is gone into; the reason why not is told."""
    if reason := tree.why_not_into(folder, outer):
        listing.leave_out(folder, reason)
    return not reason


def _closed(folder: str) -> ConfigError:
    return ConfigError(
        f"data.source: the folder {folder} may not be read by this user; change its permissions, or name the files "
        "that are meant without it"
    )

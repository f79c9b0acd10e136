"""Lists the files of a glob or a folder, on this machine or in remote storage; opens none.

Anything named that is not a readable file is either an error or reported as skipped, with the reason. A folder that
cannot be listed is an error. Links are followed on this machine; in remote storage only those to files.
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
_RECURSIVE = "**"

Kind = Literal["folder", "file", "device", "missing"]

_log = get_logger(__name__)


@dataclass
class Listing:
    """The files of a pattern, and the other paths that it named, by the reason for skipping them."""

    files: list[str] = field(default_factory=list[str])
    skipped: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def skip(self, path: str, reason: str) -> None:
        self.skipped[reason].append(path)

    def log(self, pattern: str) -> None:
        """Log the skipped paths, one line for each reason."""
        for reason, names in self.skipped.items():
            log_skipped(reason, len(names), min(names, default=""), pattern=pattern)


def log_skipped(reason: str, count: int, first: str, **fields: str) -> None:
    """Log how many inputs were skipped, and the first one; nothing if there are none."""
    if count:
        _log.warning(f"skipped in the data: {reason}", extra={"fields": {**fields, "count": count, "first": first}})


def log_empty(stamps: Iterable[Sequence[str]]) -> None:
    """Log the files of 0 bytes, given the stamps of all files."""
    names = [name for name, size, *_ in stamps if size == "0"]
    log_skipped("files of 0 bytes", len(names), min(names, default=""))


class LocalTree:
    """The file tree of this machine and its mounts. Methods raise ConfigError naming a path that cannot be read."""

    def start(self, pattern: str) -> tuple[str, list[str]]:
        """Return the folder to start from, and the parts of the pattern below it."""
        return "/", [part for part in pattern.split("/") if part]

    def child(self, folder: str, name: str) -> str | None:
        """Return the path of the entry with this exact name, which may be a broken link; None if there is none."""
        path = Path(folder, name)
        return str(path) if self.kind(str(path)) != "missing" or path.is_symlink() else None

    def entries(self, folder: str) -> list[str]:
        """Return the paths in a folder, sorted."""
        try:
            return sorted(map(str, Path(folder).iterdir()))
        except PermissionError as error:
            raise _unreadable_folder(folder) from error

    def kind(self, path: str) -> Kind:
        """Return what a path refers to, following links; `missing` for a broken link."""
        try:
            mode = Path(path).stat().st_mode
        except PermissionError as error:
            raise _unreadable_folder(str(Path(path).parent)) from error
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                return "missing"
            raise
        return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device"

    def reason_to_skip(self, folder: str, parents: Sequence[str]) -> str:
        """Return why a folder is not entered; empty if it is. `parents`: the folders that contain it."""
        path = Path(folder)
        is_loop = path.is_symlink() and any(path.samefile(parent) for parent in parents)
        return "links to a parent folder" if is_loop else ""

    def require_file(self, path: str) -> None:
        """Raise ConfigError if a file cannot be read."""
        if self.kind(path) == "missing":
            raise ConfigError(f"data.source: {path} is a broken link to {Path(path).readlink()}; repair or remove it")
        if not os.access(path, os.R_OK, effective_ids=True):
            raise ConfigError(
                f"data.source: no permission to read {path}; change its permissions, or name files without it"
            )

    def drop_duplicates(self, listing: Listing) -> None:
        """Keep each file once, preferring its path without links."""
        listing.files.sort()
        folders = {folder: folder.resolve() for folder in {Path(path).parent for path in listing.files}}
        real = {path: _resolved(Path(path), folders) for path in listing.files}
        if len(set(real.values())) < len(real):
            kept: dict[str, str] = {}
            for path in sorted(listing.files, key=lambda path: real[path] != path):
                kept.setdefault(real[path], path)
            once = set(kept.values())
            listing.skipped["links to files listed already"] += [p for p in listing.files if p not in once]
            listing.files = sorted(once)


class RemoteTree:
    """The file tree of an fsspec file system; each folder is listed once.

    `run`, `name`: methods of its client. Remote links to folders are not entered: storage does not report their
    targets, so loops would go unnoticed.
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
        return self._list(folder).get(name)

    def entries(self, folder: str) -> list[str]:
        return sorted(self._list(folder).values())

    def kind(self, path: str) -> Kind:
        if self._types[path] == "link":
            self._links.add(path)
            found = str(self._run(lambda system: system.info(path), self._name(path))["type"])
            self._types[path] = "file" if found == "link" else found  # a broken link fails when it is opened
        kinds: Mapping[str, Kind] = {"directory": "folder", "file": "file"}
        return kinds.get(self._types[path], "device")

    def reason_to_skip(self, folder: str, parents: Sequence[str]) -> str:
        return "links to folders (followed on this machine only)" if folder in self._links else ""

    def require_file(self, path: str) -> None: ...

    def drop_duplicates(self, listing: Listing) -> None:
        listing.files = sorted(set(listing.files))

    def _list(self, folder: str) -> dict[str, str]:
        if (found := self._listed.get(folder)) is None:
            entries = self._run(lambda system: system.ls(folder, detail=True), self._name(folder))
            types: dict[str, str] = {entry["name"].rstrip("/"): str(entry["type"]) for entry in entries}
            types.pop(folder.rstrip("/"), None)  # some stores keep an object for the folder itself
            if folder.startswith(("http://", "https://")):  # drop links that leave the page or only sort it
                prefix = f"{folder.rstrip('/')}/"
                names = {path: path.removeprefix(prefix) for path in types if path.startswith(prefix)}
                types = {path: types[path] for path, name in names.items() if not {"/", "?"} & {*name}}
            self._types |= types
            found = self._listed[folder] = {path.rpartition("/")[2]: path for path in types}
        return found


Tree = LocalTree | RemoteTree

LOCAL = LocalTree()


def has_magic(pattern: str) -> bool:
    """Return whether a pattern contains wildcards."""
    return not _MAGIC.isdisjoint(pattern)


def files_matching(pattern: str, tree: Tree = LOCAL) -> Listing:
    """List the files that an absolute glob matches, sorted.

    `**` matches any number of folders. A part that is the exact name of an existing entry matches only that entry,
    even if it contains wildcards.
    Raises: ConfigError for an unreadable folder or file, or a broken link; OSError; errors of the tree's calls.
    """
    listing = Listing()
    folder, parts = tree.start(pattern)
    for path in _matches(tree, folder, parts, (), listing):
        if tree.kind(path) == "folder":
            if _RECURSIVE not in parts:
                listing.skip(path, "folders (FOLDER/* names their files)")
        else:
            _add(tree, path, listing)
    tree.drop_duplicates(listing)
    return listing


def files_below(folder: str, endings: tuple[str, ...], tree: Tree = LOCAL) -> Listing:
    """List the files below a folder with one of these endings in any case, sorted. Raises as `files_matching` does."""
    listing = Listing()
    for path in _below(tree, folder, (), listing):
        if path.casefold().endswith(endings):
            _add(tree, path, listing)
        else:
            listing.skip(path, "files with other endings")
    tree.drop_duplicates(listing)
    return listing


def _add(tree: Tree, path: str, listing: Listing) -> None:
    if tree.kind(path) == "device":
        listing.skip(path, "pipes, sockets and devices")
    else:
        tree.require_file(path)
        listing.files.append(path)


def _resolved(path: Path, folders: Mapping[Path, Path]) -> str:
    return os.path.realpath(path) if path.is_symlink() else str(folders[path.parent] / path.name)


def _matches(
    tree: Tree, folder: str, parts: Sequence[str], parents: tuple[str, ...], listing: Listing
) -> Iterator[str]:
    """Yield the entries of a folder that match the remaining parts. `parents`: folders that `**` has entered."""
    part, rest = parts[0], parts[1:]
    if part == _RECURSIVE:
        yield from _matches(tree, folder, rest or ["*"], parents, listing)
        for inner in _subfolders(tree, folder, parents, listing):
            yield from _matches(tree, inner, parts, (*parents, folder), listing)
    elif (path := tree.child(folder, part)) is not None:
        if not rest:
            yield path
        elif tree.kind(path) == "folder":
            yield from _matches(tree, path, rest, parents, listing)
    elif has_magic(part):
        for path in _glob(tree, folder, part, listing if not rest else None):
            if not rest:
                yield path
            elif tree.kind(path) == "folder" and _enters(tree, path, (), listing):
                yield from _matches(tree, path, rest, parents, listing)


def _glob(tree: Tree, folder: str, part: str, listing: Listing | None) -> list[str]:
    """Return the entries of a folder that match one part. `listing`: records matches that differ in case only."""
    names = {path: path.rpartition("/")[2] for path in tree.entries(folder)}
    if listing is not None:
        for path, name in names.items():
            if not fnmatchcase(name, part) and fnmatchcase(name.casefold(), part.casefold()):
                listing.skip(path, "names that match only in another case")
    return [path for path, name in names.items() if fnmatchcase(name, part)]


def _below(tree: Tree, folder: str, parents: tuple[str, ...], listing: Listing) -> Iterator[str]:
    """Yield everything below a folder except folders and hidden names."""
    for path in tree.entries(folder):
        if _is_hidden(path):
            listing.skip(path, "hidden names")
        elif tree.kind(path) != "folder":
            yield path
    for inner in _subfolders(tree, folder, parents, listing):
        if not _is_hidden(inner):
            yield from _below(tree, inner, (*parents, folder), listing)


def _is_hidden(path: str) -> bool:
    return path.rpartition("/")[2].startswith(".")


def _subfolders(tree: Tree, folder: str, parents: Sequence[str], listing: Listing) -> Iterator[str]:
    for path in tree.entries(folder):
        if tree.kind(path) == "folder" and _enters(tree, path, (*parents, folder), listing):
            yield path


def _enters(tree: Tree, folder: str, parents: Sequence[str], listing: Listing) -> bool:
    """Return whether a folder is entered; record the reason if not."""
    if reason := tree.reason_to_skip(folder, parents):
        listing.skip(folder, reason)
    return not reason


def _unreadable_folder(folder: str) -> ConfigError:
    return ConfigError(
        f"data.source: no permission to read the folder {folder}; change its permissions, or name files without it"
    )

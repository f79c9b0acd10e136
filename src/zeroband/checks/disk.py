"""Checks that a run's file systems are writable and large enough."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zeroband.checkpoint.layout import step_of
from zeroband.checks.finding import Finding, Stops
from zeroband.checks.needs import Needs
from zeroband.config.data import DataConfig, SyntheticTokensSource, TextSource, TokensSource
from zeroband.data.block_cache import cache_dir_of, cached_bytes
from zeroband.data.sources import source_files
from zeroband.data.tokens import is_prepared
from zeroband.errors import ConfigError, StorageLost
from zeroband.node.names import node_dir_of
from zeroband.observe.words import human_bytes

_FILES_BYTES = 16_000_000
"""Space for logs, events and metrics, or a small corpus: a disk with less counts as full."""

_FETCHED, _JOURNAL = "data.cache_gb", "elastic.journal_gb"
"""Fetched ids, and rounds for joiners; they work with less space."""

_TOKEN_BYTES = 2
"""Bytes per byte of text with the byte tokenizer."""


@dataclass(frozen=True)
class _WrittenFolder:
    """A folder that the run writes to."""

    key: str
    folder: Path
    needed: int
    stops: Stops
    """What the run cannot do without the space."""


def disks(needs: Needs) -> Iterator[Finding]:
    """Return a finding for each file system that the run writes to."""
    by_device: dict[int, list[_WrittenFolder]] = defaultdict(list)
    for place in _places(needs):
        folder = _existing(place.folder)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            seen = f"{place.key}={str(place.folder)!r}: nothing can be written to {folder}: {error.strerror}"
            yield Finding("disk", seen, f"set {place.key} to a folder that this user may write to", stops="start")
            continue
        by_device[folder.stat().st_dev].append(place)
    yield from (_room(places) for places in by_device.values())


def _room(places: list[_WrittenFolder]) -> Finding:
    """Check that one file system has the space for all these folders."""
    folder = _existing(places[0].folder)
    free, needed = shutil.disk_usage(folder).free, sum(place.needed for place in places)
    what = ", ".join(f"{place.key} {human_bytes(place.needed)}" for place in places)
    seen = f"{human_bytes(free)} free where {folder} lies, needed: {what}"
    at_start = sum(place.needed for place in places if place.stops == "start")
    stops = "start" if free < at_start else "finish" if free < needed else None
    keys = ", ".join(place.key for place in places if place.key not in (_FETCHED, _JOURNAL))
    smaller = "".join(f"lower {place.key}, " for place in places if place.key in (_FETCHED, _JOURNAL))
    return Finding(
        "disk", seen, f"make room there, {smaller}or set {keys} to another disk" if stops else "", stops=stops
    )


def _places(needs: Needs) -> Iterator[_WrittenFolder]:
    config = needs.config
    yield _WrittenFolder("run.dir", node_dir_of(config), _FILES_BYTES, "start")
    if needs.journal_bytes:
        yield _WrittenFolder(_JOURNAL, node_dir_of(config), needs.journal_bytes, "finish")
    parts = config.data.parts.values()
    if corpus_bytes := sum(_corpus_bytes(data, config.run.seed) for data in parts):
        yield _WrittenFolder("data.cache_dir", cache_dir_of(config.data), corpus_bytes, "start")
    if any(
        isinstance(data.source, TokensSource) and "://" in data.source.path.removeprefix("file://") for data in parts
    ):
        folder = cache_dir_of(config.data)
        yield _WrittenFolder(_FETCHED, folder, max(0, int(config.data.cache_gb * 1e9) - cached_bytes(folder)), "finish")
    if config.ckpt.path is not None and "://" not in config.ckpt.path.removeprefix("file://"):
        folder = Path(config.ckpt.path.removeprefix("file://")) / config.run.id
        missing = max(1, needs.kept_checkpoints - _checkpoints_in(folder))
        yield _WrittenFolder("ckpt.path", folder, missing * needs.checkpoint_bytes, "finish")
    if config.export is not None:
        yield _WrittenFolder("export.path", config.export.path or node_dir_of(config), needs.export_bytes, "finish")


def _corpus_bytes(data: DataConfig, seed: int) -> int:
    """Estimate the size of the tokenised corpus; 0 if it is cached already, or may be.

    A cache that was filled before may be read-only. Data and folder have their own checks.
    """
    source = data.source
    if isinstance(source, SyntheticTokensSource | TokensSource):
        return 0
    unknown_bytes = 0 if any(cache_dir_of(data).glob("*.tokens")) else _FILES_BYTES
    if data.tokenizer != "byte" or not isinstance(source, TextSource):
        return unknown_bytes
    if any("://" in path for path in source.paths):
        return unknown_bytes
    try:
        is_there = is_prepared(data, seed)
    except (ConfigError, StorageLost, OSError):
        return _FILES_BYTES
    return 0 if is_there else max(_FILES_BYTES, _TOKEN_BYTES * sum(file.size or 0 for file in source_files(source)))


def _checkpoints_in(folder: Path) -> int:
    try:
        return sum(step_of(path.name) is not None for path in folder.iterdir())
    except OSError:
        return 0


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.exists()), folder)

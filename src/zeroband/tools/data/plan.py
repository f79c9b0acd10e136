"""The plan of a preparation: sources with their stamps, options, and units of work.

A unit becomes one shard. Units depend only on sources and options, so the set is the same for any number of workers and
interruptions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from zeroband.config.data import HuggingFaceSource
from zeroband.data.files import COMPRESSED, Files, SourceFile
from zeroband.data.listing import log_empty
from zeroband.data.readers import parquet_shape, require_column
from zeroband.data.shard_set import first_problem
from zeroband.data.sources import announced, dataset_stamp, load_dataset
from zeroband.data.tokenizer import Tokenizer, described
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger

FORMAT = 2
_HUGGING_FACE = "hf:"
_LINES = (".jsonl", ".ndjson", ".json")
_TABLE = ".parquet"
_IN_FOLDERS = (
    _TABLE,
    *(f"{ending}{packed}" for ending in (".jsonl", ".ndjson", ".txt") for packed in ("", *COMPRESSED)),
)
"""Extensions that are read in a folder; a `README.md` or `dataset_info.json` is not."""
_EXPANSION = 4
"""Approximate ratio of text to its compressed file; only decides which files share a unit."""
_LISTING_THREADS = 16

_log = get_logger(__name__)

_T = TypeVar("_T")

Kind = Literal["text", "jsonl", "parquet", "huggingface"]


@dataclass(frozen=True)
class PrepareOptions:
    """Options that determine the ids, in addition to sources and tokenizer."""

    field: str = "text"
    column: str = "text"
    binary: bool = False
    unit_mb: float = 64.0
    dedup: bool = False
    min_tokens: int | None = None
    max_tokens: int | None = None
    pack: Literal["best-fit"] | None = None
    seq_length: int | None = None
    """Ids per bin, if documents are packed."""
    allow_empty: bool = False
    skip_bad_rows: bool = False

    @property
    def unit_bytes(self) -> int:
        return round(self.unit_mb * 1e6)

    @property
    def packed_length(self) -> int | None:
        return self.seq_length if self.pack is not None else None


@dataclass(frozen=True)
class Origin:
    """One file or one Hugging Face data set."""

    kind: Kind
    name: str
    source: int
    """Number of its source."""
    stamp: tuple[str, ...]
    """Changes with its content."""
    holds_ids: bool = False
    subset: str | None = None
    split: str = "train"

    @property
    def label(self) -> str:
        """Unique name for display."""
        if self.kind != "huggingface":
            return self.name
        return f"{_HUGGING_FACE}{self.name}:{self.subset or ''}:{self.split}"

    def dataset(self, options: PrepareOptions) -> HuggingFaceSource:
        """Return the data.source section for this data set."""
        source = HuggingFaceSource(type="huggingface", name=self.name, subset=self.subset, split=self.split)
        return source.model_copy(update={"column": options.column, "binary": options.binary})


class OriginPart(NamedTuple):
    """A part of an origin."""

    origin: int
    start: int
    """First byte of JSON Lines, row group of Parquet, or row of a data set."""
    stop: int | None
    """None: the end."""
    size_bytes: int
    """Approximate size of its text."""


@dataclass(frozen=True)
class Plan:
    """The whole work of a preparation."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    format: int
    tokenizer: str
    tokenizer_fingerprint: str
    tokenizer_release: str
    options: PrepareOptions
    sources: tuple[str, ...]
    """As the user wrote them."""
    origins: tuple[Origin, ...]
    units: tuple[tuple[OriginPart, ...], ...]

    @cached_property
    def digest(self) -> str:
        """Hash of all that determines the ids; the user's names of tokenizer and sources do not count."""
        ignored = ("tokenizer", "tokenizer_release", "sources")
        decisive = {key: value for key, value in asdict(self).items() if key not in ignored}
        return hashlib.blake2b(json.dumps(decisive).encode(), digest_size=16).hexdigest()

    def shard_name(self, unit: int) -> str:
        """Return the file name of a unit's shard."""
        return f"{unit:0{max(5, len(str(len(self.units) - 1)))}}.npy"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def of_json(content: bytes) -> Plan:
        """Parse a plan. Raises ValueError."""
        try:
            plan = TypeAdapter(Plan).validate_json(content)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        if plan.format != FORMAT:
            raise ValueError(f"format {plan.format}, this version writes {FORMAT}")
        return plan


def size_of(unit: Sequence[OriginPart]) -> int:
    """Return the approximate size of a unit's text in bytes."""
    return sum(piece.size_bytes for piece in unit)


def differences(then: Plan, now: Plan) -> list[str]:
    """Describe the differences between two plans; empty for equal ones."""
    found: list[str] = []
    for key in (option.name for option in fields(PrepareOptions)):
        before, after = getattr(then.options, key), getattr(now.options, key)
        if before != after:
            found.append(f"--{key.replace('_', '-')} was {before} and is {after}")
    if then.tokenizer_fingerprint != now.tokenizer_fingerprint:
        before, after = (described(plan.tokenizer, plan.tokenizer_release) for plan in (then, now))
        found.append(f"--tokenizer was {before} and is {after}, which produces other ids")
    stamps = [{origin.label: origin.stamp for origin in plan.origins} for plan in (then, now)]
    for words, names in (
        ("added", stamps[1].keys() - stamps[0].keys()),
        ("removed", stamps[0].keys() - stamps[1].keys()),
        ("changed", {name for name in stamps[0].keys() & stamps[1].keys() if stamps[0][name] != stamps[1][name]}),
    ):
        if names:
            found.append(f"{words}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}")
    if not found and then.origins != now.origins:
        found.append(f"sources or their order were {' '.join(then.sources)} and are {' '.join(now.sources)}")
    if not found and then.digest != now.digest:
        found.append("a server's support for range requests has changed")
    return found


def make_plan(
    sources: Sequence[str],
    name: str,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    files: Files,
    *,
    processes: int = 1,
    is_dry: bool = False,
) -> Plan:
    """List all sources and divide the work into units. Reads footers of Parquet files, but no text.

    processes: number for fetching and converting a Hugging Face data set. is_dry: do not fetch such a data set if its
    metadata suffices. Raises ConfigError naming a source that is unreadable or empty; StorageLost.
    """
    origins: list[Origin] = []
    pieces: list[OriginPart] = []
    for number, source in enumerate(sources):
        if source.startswith(_HUGGING_FACE) and not source.startswith(f"{_HUGGING_FACE}//"):
            found = [_look_at_dataset(source, number, options, files.retry_s, processes=processes, is_dry=is_dry)]
        else:
            found = _look_at_files(source, number, {origin.name for origin in origins}, options, files)
        if not found:
            raise ConfigError(f"{source}: earlier sources already contain all of its files; leave it out")
        if not options.allow_empty and not any(size for _, sizes in found for *_, size in sizes):
            raise ConfigError(f"{source} is empty: {len(found)} empty files; leave it out, or give --allow-empty")
        for origin, cuts in found:
            pieces += [OriginPart(len(origins), *cut) for cut in cuts]
            origins.append(origin)
    units = tuple(map(tuple, _grouped(pieces, lambda piece: piece.size_bytes, options.unit_bytes)))
    return Plan(FORMAT, name, tokenizer.fingerprint, tokenizer.release, options, tuple(sources), tuple(origins), units)


Cut = tuple[int, int | None, int]
"""Start, stop and size of a piece."""


def _look_at_files(
    source: str, number: int, known: set[str], options: PrepareOptions, files: Files
) -> list[tuple[Origin, list[Cut]]]:
    """Return the new files of a source, each with its pieces."""
    found = [file for file in files.find([source], in_folders=_IN_FOLDERS, logs_skipped=True) if file.name not in known]
    with ThreadPoolExecutor(_LISTING_THREADS, thread_name_prefix="listing") as threads:
        looked = list(threads.map(_look_at_file, found, itertools.repeat(number), itertools.repeat(options)))
    log_empty(origin.stamp for origin, _ in looked)
    return looked


def _look_at_file(file: SourceFile, number: int, options: PrepareOptions) -> tuple[Origin, list[Cut]]:
    kind = kind_of(file.name)
    stamp = tuple(file.stamp())
    limit, size = options.unit_bytes, file.size
    if kind == "parquet":
        shape = parquet_shape(file, options.column)
        sizes = shape.group_bytes
        groups = _grouped(range(len(sizes)), sizes.__getitem__, limit)
        held = ((group, sum(sizes[row_group] for row_group in group)) for group in groups)
        cuts: list[Cut] = [(group[0], group[-1] + 1, size) for group, size in held if size]
        return Origin(kind, file.name, number, stamp, holds_ids=shape.holds_ids), cuts
    whole = Origin(kind, file.name, number, stamp)
    if size is None:  # unknown size: a unit of its own, possibly empty
        return whole, [(0, None, limit)]
    is_packed = file.name.casefold().endswith(COMPRESSED)
    if kind == "jsonl" and not is_packed and size > limit:
        if file.has_ranges:
            stops = [*range(limit, size, limit), size]
            return whole, [(start, stop, stop - start) for start, stop in itertools.pairwise([0, *stops])]
        fields = {"file": file.name}
        _log.warning("the server does not support ranges; one worker reads the whole file", extra={"fields": fields})
    return whole, [(0, None, size * (_EXPANSION if is_packed else 1))] if size else []


def _look_at_dataset(
    source: str, number: int, options: PrepareOptions, retry_s: float, *, processes: int, is_dry: bool
) -> tuple[Origin, list[Cut]]:
    name, subset, split = (*source.removeprefix(_HUGGING_FACE).split(":", 2), "", "")[:3]
    origin = Origin("huggingface", name, number, (), subset=subset or None, split=split or "train")
    rows, size, stamp = _shape_of(origin.dataset(options), retry_s, processes=processes, is_dry=is_dry)
    each = max(1, round(options.unit_bytes * rows / max(size, 1)))
    cuts: list[Cut] = [
        (row, min(row + each, rows), size * (min(row + each, rows) - row) // rows) for row in range(0, rows, each)
    ]
    return replace(origin, stamp=stamp), cuts


def _shape_of(
    source: HuggingFaceSource, retry_s: float, *, processes: int, is_dry: bool
) -> tuple[int, int, tuple[str, ...]]:
    """Return a data set's rows, the bytes of its text, and its stamp, empty if it was not fetched."""
    if is_dry and (said := announced(source, retry_s)) is not None:
        rows, size_bytes, column_names = said
        require_column(source.column, column_names, source.name)
        return rows, size_bytes, ()
    dataset = load_dataset(source, retry_s, processes=processes)
    require_column(source.column, dataset.column_names, source.name)
    return len(dataset), int(dataset.select_columns([source.column]).data.nbytes), dataset_stamp(dataset)


def kind_of(name: str) -> Kind:
    """Return the kind of a file by its extension, text by default."""
    name = name.casefold()
    bare = next((name.removesuffix(ending) for ending in COMPRESSED if name.endswith(ending)), name)
    return "parquet" if bare.endswith(_TABLE) else "jsonl" if bare.endswith(_LINES) else "text"


def _grouped(items: Iterable[_T], size_of: Callable[[_T], int], limit: int) -> Iterator[list[_T]]:
    """Group consecutive items up to a size limit."""
    group: list[_T] = []
    held = 0
    for item in items:
        size = size_of(item)
        if held and held + size > limit:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    if group:
        yield group

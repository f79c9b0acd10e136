"""The plan of a preparation: sources with their stamps, options, and the units that the work is cut into.

A unit is what one worker makes one shard of. Units follow from the sources and the options alone, never from who does
the work, so the set is the same for any number of workers and interruptions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from typing import Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from zeroband.config.data import HuggingFaceSource
from zeroband.data.files import COMPRESSED, Files, SourceFile
from zeroband.data.listing import log_empty
from zeroband.data.readers import parquet_shape, require_column
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
"""Endings of what is taken of a folder: a `README.md` or `dataset_info.json` next to the data is not."""
_EXPANSION = 4
"""How much longer text is than its compressed file, roughly: it decides which files share a unit, and no more."""
_LISTING_THREADS = 16

_log = get_logger(__name__)

_T = TypeVar("_T")

Kind = Literal["text", "jsonl", "parquet", "huggingface"]


@dataclass(frozen=True)
class PrepareOptions:
    """What decides which ids come out, besides the sources and the tokenizer; equal options give equal sets."""

    field: str = "text"
    column: str = "text"
    binary: bool = False
    unit_mb: float = 64.0
    dedup: bool = False
    min_tokens: int | None = None
    max_tokens: int | None = None
    pack: Literal["best-fit"] | None = None
    seq_length: int | None = None
    """Ids of a bin, where documents are packed."""
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
    """One file, or one data set of Hugging Face."""

    kind: Kind
    name: str
    source: int
    """Which of the sources it belongs to."""
    stamp: tuple[str, ...]
    """What changes when it does."""
    holds_ids: bool = False
    subset: str | None = None
    split: str = "train"

    @property
    def label(self) -> str:
        """Its name for people, which no other origin of a plan has."""
        if self.kind != "huggingface":
            return self.name
        return f"{_HUGGING_FACE}{self.name}:{self.subset or ''}:{self.split}"

    def dataset(self, options: PrepareOptions) -> HuggingFaceSource:
        """The section of a configuration that names this data set."""
        source = HuggingFaceSource(type="huggingface", name=self.name, subset=self.subset, split=self.split)
        return source.model_copy(update={"column": options.column, "binary": options.binary})


class OriginPart(NamedTuple):
    """A part of an origin."""

    origin: int
    start: int
    """First byte of lines of JSON, row group of Parquet, or row of a data set."""
    stop: int | None
    """None: to its end."""
    size_bytes: int
    """Size of its text, roughly."""


@dataclass(frozen=True)
class Plan:
    """All that a preparation does."""

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
        """Equal for two plans only if the same ids come out; what the user calls tokenizer and sources is no matter."""
        told = ("tokenizer", "tokenizer_release", "sources")
        decisive = {key: value for key, value in asdict(self).items() if key not in told}
        return hashlib.blake2b(json.dumps(decisive).encode(), digest_size=16).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(size_of(unit) for unit in self.units)

    def shard_name(self, unit: int) -> str:
        """Name of the file of a unit's ids."""
        return f"{unit:0{max(5, len(str(len(self.units) - 1)))}}.npy"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def of_json(content: bytes) -> Plan:
        """The inverse. Raises ValueError."""
        try:
            plan = TypeAdapter(Plan).validate_json(content)
        except ValidationError as error:
            raise ValueError(error.errors()[0]["msg"]) from error
        if plan.format != FORMAT:
            raise ValueError(f"format {plan.format}, this version writes {FORMAT}")
        return plan


def size_of(unit: Sequence[OriginPart]) -> int:
    """Bytes of the text of a unit, roughly."""
    return sum(piece.size_bytes for piece in unit)


def differences(then: Plan, now: Plan) -> list[str]:
    """What differs between two plans, in words for the user; empty for equal ones."""
    found: list[str] = []
    for key in (option.name for option in fields(PrepareOptions)):
        before, after = getattr(then.options, key), getattr(now.options, key)
        if before != after:
            found.append(f"--{key.replace('_', '-')} was {before} and is {after}")
    if then.tokenizer_fingerprint != now.tokenizer_fingerprint:
        before, after = (described(plan.tokenizer, plan.tokenizer_release) for plan in (then, now))
        found.append(f"--tokenizer was {before} and is {after}, which gives other ids")
    stamps = [{origin.label: origin.stamp for origin in plan.origins} for plan in (then, now)]
    for words, names in (
        ("not there before", stamps[1].keys() - stamps[0].keys()),
        ("not there any more", stamps[0].keys() - stamps[1].keys()),
        ("changed", {name for name in stamps[0].keys() & stamps[1].keys() if stamps[0][name] != stamps[1][name]}),
    ):
        if names:
            found.append(f"{words}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}")
    if not found and then.origins != now.origins:
        found.append(f"sources, or their order, were {' '.join(then.sources)} and are {' '.join(now.sources)}")
    if not found and then.digest != now.digest:
        found.append("a server sends whole files that gave parts of them, or the other way round")
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
    """Look at all sources, and cut the work into units. Reads the footers of Parquet files, and no text.

    processes: what a data set of Hugging Face is fetched and converted by. is_dry: nothing is made of the plan, so such
    a data set is not fetched where it says by itself what it holds.
    Raises: ConfigError naming the source that cannot be listed or read, or holds nothing; StorageLost.
    """
    shape_of = partial(_shape_of, retry_s=files.retry_s, processes=processes, is_dry=is_dry)
    origins: list[Origin] = []
    pieces: list[OriginPart] = []
    for number, source in enumerate(sources):
        if source.startswith(_HUGGING_FACE) and not source.startswith(f"{_HUGGING_FACE}//"):
            found = [_look_at_dataset(source, number, options, shape_of)]
        else:
            found = _look_at_files(source, number, {origin.name for origin in origins}, options, files)
        if not found:
            raise ConfigError(f"{source} names no file that an earlier source does not name; leave it out")
        if not options.allow_empty and not any(size for _, sizes in found for *_, size in sizes):
            raise ConfigError(
                f"{source} is empty: {len(found)} files without a byte or row; leave it out, or give --allow-empty"
            )
        for origin, cuts in found:
            pieces += [OriginPart(len(origins), *cut) for cut in cuts]
            origins.append(origin)
    units = tuple(map(tuple, _grouped(pieces, lambda piece: piece.size_bytes, options.unit_bytes)))
    return Plan(FORMAT, name, tokenizer.fingerprint, tokenizer.release, options, tuple(sources), tuple(origins), units)


Cut = tuple[int, int | None, int]
"""Start, stop and size of a piece."""

Shape = tuple[int, int, tuple[str, ...]]
"""Rows of a data set, bytes of its text, and its stamp, or none where it was not fetched."""


def _look_at_files(
    source: str, number: int, known: set[str], options: PrepareOptions, files: Files
) -> list[tuple[Origin, list[Cut]]]:
    """The files of a source that are not known yet, each with its pieces."""
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
        sizes = [max(group.size_bytes, 1) if group.rows else 0 for group in shape.groups]
        groups = _grouped(range(len(sizes)), sizes.__getitem__, limit)
        held = ((group, sum(sizes[row_group] for row_group in group)) for group in groups)
        cuts: list[Cut] = [(group[0], group[-1] + 1, size) for group, size in held if size]
        return Origin(kind, file.name, number, stamp, holds_ids=shape.holds_ids), cuts
    whole = Origin(kind, file.name, number, stamp)
    if size is None:  # it fills a unit alone, and may be empty
        return whole, [(0, None, limit)]
    is_packed = file.name.casefold().endswith(COMPRESSED)
    if kind == "jsonl" and not is_packed and size > limit:
        if file.has_ranges:
            stops = [*range(limit, size, limit), size]
            return whole, [(start, stop, stop - start) for start, stop in itertools.pairwise([0, *stops])]
        fields = {"file": file.name}
        _log.warning("its server sends whole files only, so one worker reads it alone", extra={"fields": fields})
    return whole, [(0, None, size * (_EXPANSION if is_packed else 1))] if size else []


def _look_at_dataset(
    source: str, number: int, options: PrepareOptions, shape_of: Callable[[HuggingFaceSource, str], Shape]
) -> tuple[Origin, list[Cut]]:
    name, subset, split = (*source.removeprefix(_HUGGING_FACE).split(":", 2), "", "")[:3]
    named = HuggingFaceSource(type="huggingface", name=name, subset=subset or None, split=split or "train")
    rows, size, stamp = shape_of(named, options.column)
    each = max(1, round(options.unit_bytes * rows / max(size, 1)))
    cuts: list[Cut] = [
        (row, min(row + each, rows), size * (min(row + each, rows) - row) // rows) for row in range(0, rows, each)
    ]
    return Origin("huggingface", name, number, stamp, subset=named.subset, split=named.split), cuts


def _shape_of(source: HuggingFaceSource, column: str, *, retry_s: float, processes: int, is_dry: bool) -> Shape:
    if is_dry and (said := announced(source, retry_s)) is not None:
        rows, size_bytes, column_names = said
        require_column(column, column_names, source.name)
        return rows, size_bytes, ()
    dataset = load_dataset(source, retry_s, processes=processes)
    require_column(column, dataset.column_names, source.name)
    return len(dataset), int(dataset.select_columns([column]).data.nbytes), dataset_stamp(dataset)


def kind_of(name: str) -> Kind:
    """What a file is by the ending of its name: text where nothing else is known."""
    name = name.casefold()
    bare = next((name.removesuffix(ending) for ending in COMPRESSED if name.endswith(ending)), name)
    return "parquet" if bare.endswith(_TABLE) else "jsonl" if bare.endswith(_LINES) else "text"


def _grouped(items: Iterable[_T], size_of: Callable[[_T], int], limit: int) -> Iterator[list[_T]]:
    """Items that follow each other, as many as fit into a unit."""
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

"""`zeroband data prepare SOURCE... OUT --tokenizer T`: tokenize text once for all runs.

SOURCE is a path, glob or URL of text, JSON Lines (.jsonl, also .gz, .bz2, .xz and .zst) or Parquet files, recognised by
extension; a folder of such files; or hf:NAME[:SUBSET[:SPLIT]], a Hugging Face data set or a folder of one. A Parquet
column of integer lists is taken as token ids. OUT is a folder: a path or a URL such as s3://.
The same command resumes an interrupted preparation.
Exit codes: 0 OUT is finished; 2 wrong arguments or data, or failing SOURCE or OUT; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from zeroband.checkpoint.storage import LocalStorage
from zeroband.config.data import DataConfig
from zeroband.data.files import Files
from zeroband.data.shard_set import ShardSet
from zeroband.data.tokenizer import Tokenizer, open_tokenizer
from zeroband.errors import ConfigError, StorageLost
from zeroband.node.processors import usable_processors
from zeroband.observe.status import human_bytes, human_count
from zeroband.observe.words import typed
from zeroband.tools.arguments import bounded, parser_of
from zeroband.tools.data.folder import (
    WORK,
    Folder,
    UnitRecord,
    alone_in,
    find_duplicates,
    flags_file,
    open_out,
    writing_to,
)
from zeroband.tools.data.plan import Plan, PrepareOptions, differences, make_plan, size_of
from zeroband.tools.data.units import Task
from zeroband.tools.data.workers import Pool, say_warning, warnings_to

_EXIT_INTERRUPTED = 130
_LINE_EVERY_S = 10.0
_RATE_OVER_S = 600.0
"""Window of the rate for the remaining time."""
_WORDS = {
    "set data.source.binary = true to train on its bytes": "give --binary to take its bytes, with --tokenizer byte",
    "data.source.paths: ": "",
    "data.source: ": "",
    "data.source cannot be read: ": "",
    "data.source.field": "--field",
    "data.source.column": "--column",
    "data.source.type='huggingface'": "hf:",
    "data.tokenizer": "--tokenizer",
    "data.skip_bad_rows": "--skip-bad-rows",
    "or raise data.retry_s": "or raise --retry-s",
    " (data.retry_s)": "",
    "restart the node": "run the same command again",
    "this node's credentials": "your credentials",
    "correct data.source.path": "correct SOURCE",
}
"""Replacements of configuration keys by this command's options, in messages shared with training."""

OpenPool = Callable[[Plan, str, int, float], AbstractContextManager[Pool]]
"""Opens the workers for a plan, OUT, the number of workers and retry_s."""


def main(argv: Sequence[str], open_workers: OpenPool = Pool) -> int:
    """Prepare and print the result. Returns the exit code."""
    parser = _parser()
    given = parser.parse_intermixed_args(argv)
    *sources, out = given.places
    if not sources:
        parser.error("give at least one SOURCE, then OUT")
    try:
        with warnings_to(say_warning):
            return _Preparation(given, sources, out, open_workers).run()
    except (ConfigError, StorageLost) as error:
        text = str(error)
        for theirs, ours in _WORDS.items():
            text = text.replace(theirs, ours)
        raise ConfigError(text) from error


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("data prepare", __doc__, usage="%(prog)s SOURCE... OUT --tokenizer T [options]")
    add = parser.add_argument
    add("places", nargs="+", metavar="SOURCE... OUT", help="what to read; last, the folder to write")
    add("--tokenizer", required=True, metavar="T", help="`byte`, or the name or folder of a Hugging Face tokenizer")
    add(
        "--workers",
        type=bounded(int, ge=1),
        default=usable_processors(),
        help="number of processes (default: usable CPUs)",
    )
    add("--field", default="text", help="key of the document in JSON Lines (default: text)")
    add("--column", default="text", help="column of the document in Parquet and data sets (default: text)")
    add("--binary", action="store_true", help="accept bytes that are not UTF-8, for --tokenizer byte")
    add("--dedup", action="store_true", help="drop documents that equal an earlier one")
    add("--min-tokens", type=int, metavar="N", help="drop documents with fewer tokens")
    add("--max-tokens", type=bounded(int, ge=1), metavar="N", help="drop documents with more tokens")
    add("--pack", choices=["best-fit"], help="fill samples with whole documents, for data.packing = best-fit")
    add("--seq-length", type=bounded(int, ge=2), metavar="T", help="tokens per sample (data.seq_length), for --pack")
    add(
        "--unit-mb",
        type=bounded(float, ge=1e-6),
        default=64.0,
        help="megabytes of text per shard (default: 64)",
    )
    add(
        "--retry-s",
        type=bounded(float, ge=0),
        default=DataConfig().retry_s,
        metavar="S",
        help="seconds for which a failing SOURCE is retried (default: %(default)g)",
    )
    add("--skip-bad-rows", action="store_true", help="skip and count unusable rows")
    add("--allow-empty", action="store_true", help="allow empty sources")
    add("--start-over", action="store_true", help="remove what an earlier preparation left in OUT")
    add("--dry-run", action="store_true", help="print what would be read, and stop")
    return parser


def _options(given: argparse.Namespace) -> PrepareOptions:
    """Return the options. Raises ConfigError for contradicting values."""
    if (given.pack is None) != (given.seq_length is None):
        raise ConfigError("--pack best-fit and --seq-length T belong together; give both or none")
    if given.min_tokens is not None and given.max_tokens is not None and given.min_tokens > given.max_tokens:
        raise ConfigError(f"--min-tokens {given.min_tokens} is above --max-tokens {given.max_tokens}; nothing is left")
    if given.binary and given.tokenizer != "byte":
        raise ConfigError(f"--binary needs --tokenizer byte, not {given.tokenizer}: other tokenizers need text")
    return PrepareOptions(**{option.name: getattr(given, option.name) for option in fields(PrepareOptions)})


class _Preparation:
    """One run of the command."""

    def __init__(self, given: argparse.Namespace, sources: Sequence[str], out: str, open_workers: OpenPool) -> None:
        self._given = given
        self._open_workers = open_workers
        self._out = out
        self._folder = Folder(open_out(out))
        options, files = _options(given), Files(given.retry_s)
        self._tokenizer: Tokenizer = open_tokenizer(given.tokenizer)
        how = {"processes": given.workers, "is_dry": given.dry_run}
        self._plan = make_plan(sources, given.tokenizer, self._tokenizer, options, files, **how)

    def run(self) -> int:
        """Prepare, describe or confirm the set. Returns the exit code."""
        with writing_to(self._out):
            if self._given.start_over and not self._given.dry_run:
                self._folder.start_over()
            if self._given.dry_run:
                return self._describe()
            if (finished := self._folder.manifest()) is not None:
                return self._already(finished)
            is_begun = self._require_beginning_of_this()
            with alone_in(self._folder.storage):
                if not is_begun:
                    self._folder.begin(self._plan)
                return self._make()

    def _describe(self) -> int:
        """Print what would be read."""
        plan = self._plan
        for number, source in enumerate(plan.sources):
            origins = {i: origin for i, origin in enumerate(plan.origins) if origin.source == number}
            size = sum(piece.size_bytes for unit in plan.units for piece in unit if piece.origin in origins)
            kinds = sorted({"ids" if origin.holds_ids else origin.kind for origin in origins.values()})
            print(f"source    {source}: {len(origins)} x {', '.join(kinds)}, about {human_bytes(size)} of text")
        shards = "shard, made" if len(plan.units) == 1 else "shards at most, made"
        print(f"units     {len(plan.units)} {shards} by {min(self._given.workers, len(plan.units))} processes")
        end = self._tokenizer.end_of_document
        print(f"tokenizer {plan.tokenizer}: {self._tokenizer.vocab_size} ids, {end} ends a document")
        if self._folder.manifest() is None and self._folder.plan() is not None:
            print(f"out       {self._out}: {len(self._folder.records(plan))} units are finished")
        return 0

    def _already(self, finished: ShardSet) -> int:
        """Confirm a finished OUT. Raises ConfigError if another preparation made it."""
        if finished.plan != self._plan.digest:
            raise ConfigError(
                f"{self._out} holds a finished set of other sources, options or another tokenizer: {finished.tokens} "
                f"tokens of {' '.join(finished.sources)} by {finished.tokenizer}; name another OUT, or replace it with "
                "--start-over"
            )
        if WORK in self._folder.storage.names():
            self._folder.clean()
        print(f"{self._out} is finished already: {finished.tokens} tokens in {len(finished.shards)} shards")
        return 0

    def _require_beginning_of_this(self) -> bool:
        """Return whether OUT holds an unfinished run of this preparation. Raises ConfigError for any other content."""
        begun = self._folder.plan()
        if begun is None and (others := self._folder.other_files()):
            raise ConfigError(
                f"{self._out} holds {others[0]!r} and no preparation to resume; name a new or empty folder, or give "
                "--start-over if an earlier preparation left it"
            )
        if begun is not None and begun.digest != self._plan.digest:
            raise ConfigError(
                f"{self._out} holds another unfinished preparation: {'; '.join(differences(begun, self._plan))}; give "
                "the same arguments, another OUT, or --start-over"
            )
        return begun is not None

    def _make(self) -> int:
        plan = self._plan
        records = self._folder.records(plan)
        if records:
            print(f"resuming: {len(records)} of {len(plan.units)} units are finished")
        began_s, before = time.monotonic(), sum(record.tokens for record in records.values())
        try:
            with contextlib.ExitStack() as stack:
                workers = self._open_workers(plan, self._out, self._given.workers, self._given.retry_s)
                pool = stack.enter_context(workers)
                self._make_units(pool, stack.enter_context(_scratch(self._folder)), records)
        except KeyboardInterrupt:
            done = len(self._folder.records(plan))
            print(
                f"interrupted: {done} of {len(plan.units)} units are finished; the same command resumes",
                file=sys.stderr,
            )
            return _EXIT_INTERRUPTED
        took_s = time.monotonic() - began_s
        ordered = [records[unit] for unit in range(len(plan.units))]
        _require_text(ordered)
        made = self._folder.finish(plan, self._tokenizer, ordered)
        self._report(made, ordered, (made.tokens - before) / took_s)
        return 0

    def _make_units(self, pool: Pool, scratch: Path, records: dict[int, UnitRecord]) -> None:
        """Make all unfinished units and add their records; find duplicates first."""
        units, spans = range(len(self._plan.units)), None
        if self._plan.options.dedup and len(records) < len(units):
            hashed = self._folder.hashed()
            self._run(pool, "comparing", [Task(unit, is_for_hashes=True) for unit in units if unit not in hashed], {})
            spans = find_duplicates(self._folder, self._folder.hashed(), scratch)
        flags = {unit: None if spans is None else (str(flags_file(scratch)), *spans[unit]) for unit in units}
        self._run(pool, "tokens", [Task(unit, flags=flags[unit]) for unit in units if unit not in records], records)

    def _run(self, pool: Pool, what: str, tasks: Sequence[Task], records: dict[int, UnitRecord]) -> None:
        """Run tasks, show their progress, and add the records of finished units."""
        sizes = list(map(size_of, self._plan.units))
        shown = Shown(what, sum(sizes), sum(sizes) - sum(sizes[task.unit] for task in tasks), sys.stdout)

        def keep(task: Task, record: UnitRecord | None) -> None:
            if record is not None:
                records[task.unit] = record
            shown.finish(sizes[task.unit])

        with shown.block:
            pool.run(tasks, shown.advance, keep)

    def _report(self, made: ShardSet, records: Sequence[UnitRecord], tokens_per_s: float) -> None:
        """Print a summary and the next commands."""
        for number, source in enumerate(made.sources):
            if not any(record.of_sources.get(number) for record in records):
                print(f"zeroband data prepare: {source} contributed no document", file=sys.stderr)
        rate = f", {human_count(tokens_per_s)} tokens/s" if tokens_per_s else ""
        print(f"tokens    {made.tokens}, documents {made.documents}, shards {len(made.shards)}{rate}")
        print(
            f"dropped   {made.empty_documents} empty, {made.duplicate_documents} duplicates, "
            f"{made.filtered_documents} for their length{_bad_rows(records)}"
        )
        if made.packed_length is not None:
            print(f"padding   {made.padding / made.tokens:.2%} of the tokens")
        print(f"inspect it: {typed('data', 'inspect', self._out)}\ntrain on it:\n\n{_section(self._out, made)}")


class Shown:
    """Shows progress in bytes of text and tokens: a bar on a terminal, else lines.

    total, done: planned bytes of all and of already finished units.
    """

    def __init__(self, what: str, total: int, done: int, stream: TextIO, now: Callable[[], float] = time.monotonic):
        self._what, self._stream, self._now = what, stream, now
        self._total = max(total, 1)
        self._finished, self._read, self._tokens = done, 0, 0
        self._line_s = now()
        console = Console(file=stream)
        self._is_live = stream.isatty() and not console.is_dumb_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counts]}"),
        )
        self.block = Progress(
            *(*columns, TimeRemainingColumn()),
            console=console,
            get_time=now,
            disable=not self._is_live,
            speed_estimate_period=_RATE_OVER_S,
        )
        """Context in which the bar is shown."""
        self.block.add_task(what, total=self._total, completed=done, counts="")

    def advance(self, size_bytes: int, tokens: int) -> None:
        """Add text that was read."""
        self._read += size_bytes
        self._tokens += tokens
        self._show()

    def finish(self, planned_bytes: int) -> None:
        """Add a finished unit by its planned bytes, which the bytes read may differ from."""
        self._finished += planned_bytes
        self._read = max(0, self._read - planned_bytes)
        self._show()

    def _show(self) -> None:
        (task,) = self.block.tasks
        rate = self._tokens / max(task.elapsed or 0.0, 1e-9)
        counts = f"{human_count(self._tokens)} tokens, {human_count(rate)}/s"
        self.block.update(task.id, completed=min(self._total, self._finished + self._read), counts=counts)
        if not self._is_live and self._now() - self._line_s >= _LINE_EVERY_S:
            self._line_s = self._now()
            left = "" if task.time_remaining is None else f", {task.time_remaining:.0f} s left"
            print(f"{self._what}: {task.percentage:.0f}%, {counts}{left}", file=self._stream, flush=True)


def _bad_rows(records: Sequence[UnitRecord]) -> str:
    count, first = sum(record.bad for record in records), next((r.first_bad for r in records if r.bad), "")
    return f", {count} unusable, the first: {first}" if count else ""


def _section(out: str, made: ShardSet) -> str:
    """Return the configuration that reads a set."""
    path = out if "://" in out else str(Path(out).expanduser().resolve())
    packed = f'seq_length = {made.packed_length}\npacking = "best-fit"\n' if made.packed_length is not None else ""
    head = f'[data]\ntokenizer = "{made.tokenizer}"\n{packed}'
    return f'{head}\n[data.source]\ntype = "tokens"\npath = "{path}"'


@contextlib.contextmanager
def _scratch(folder: Folder) -> Generator[Path]:
    """Give a local folder for finding duplicates, which may need much space."""
    here = Path(folder.storage.url) / WORK if isinstance(folder.storage, LocalStorage) else None
    with tempfile.TemporaryDirectory(dir=here, prefix="scratch-") as path:
        yield Path(path)


def _require_text(records: Sequence[UnitRecord]) -> None:
    """Raise ConfigError if there is nothing to write."""
    if not any(record.tokens for record in records):
        left_out = [sum(getattr(record, name) for record in records) for name in ("empty", "duplicates", "filtered")]
        raise ConfigError(
            "no document is left: {} empty, {} duplicates, {} dropped for their length; name other sources, or relax "
            "--min-tokens and --max-tokens".format(*left_out)
            + _bad_rows(records)
        )

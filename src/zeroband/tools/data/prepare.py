"""`zeroband data prepare SOURCE... OUT --tokenizer T`: token ids of text, made once for all runs.

SOURCE is a path, a glob or a URL of text, JSON Lines (.jsonl, also .gz, .bz2, .xz and .zst) or Parquet, told by the
ending; a folder, for all such files in it; or hf:NAME[:SUBSET[:SPLIT]], a data set of Hugging Face or a folder of one.
A Parquet column of lists of integers is taken as ids that were made before. OUT is a folder: a path or a URL such as
s3://.
A preparation that was interrupted goes on when the same command is given again.
Exit codes: 0 OUT is finished; 2 wrong arguments or data, or a SOURCE or OUT that fails; 130 interrupted.
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
"""Time behind the rate by which the time to go is told."""
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
"""What this command calls what a configuration names otherwise, in messages that both have."""

OpenPool = Callable[[Plan, str, int, float], AbstractContextManager[Pool]]
"""Opens the workers of a plan: where OUT is, how many, and how long a storage of sources that fails is asked again."""


def main(argv: Sequence[str], open_workers: OpenPool = Pool) -> int:
    """Prepare, and print what came of it. Returns the exit code."""
    parser = _parser()
    given = parser.parse_intermixed_args(argv)
    *sources, out = given.places
    if not sources:
        parser.error("give at least one SOURCE and, behind it, OUT")
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
    add("places", nargs="+", metavar="SOURCE... OUT", help="what to read; last of all, the folder to write")
    add("--tokenizer", required=True, metavar="T", help="`byte`, or the name or folder of a Hugging Face tokenizer")
    add(
        "--workers",
        type=bounded(int, ge=1),
        default=usable_processors(),
        help="processes (default: as many as there are processors for this one)",
    )
    add("--field", default="text", help="key that holds the document in JSON Lines (default: text)")
    add("--column", default="text", help="column that holds it in Parquet and data sets (default: text)")
    add("--binary", action="store_true", help="take bytes that are no UTF-8, for --tokenizer byte")
    add("--dedup", action="store_true", help="leave out documents that equal an earlier one")
    add("--min-tokens", type=int, metavar="N", help="leave out documents of fewer tokens")
    add("--max-tokens", type=bounded(int, ge=1), metavar="N", help="leave out documents of more tokens")
    add("--pack", choices=["best-fit"], help="fill samples with whole documents, for data.packing = best-fit")
    add("--seq-length", type=bounded(int, ge=2), metavar="T", help="tokens of a sample, data.seq_length; for --pack")
    add(
        "--unit-mb",
        type=bounded(float, ge=1e-6),
        default=64.0,
        help="megabytes of text that make a shard (default: 64)",
    )
    add(
        "--retry-s",
        type=bounded(float, ge=0),
        default=DataConfig().retry_s,
        metavar="S",
        help="seconds that a server of a SOURCE that fails is asked again (default: %(default)g)",
    )
    add("--skip-bad-rows", action="store_true", help="skip and count unusable rows")
    add("--allow-empty", action="store_true", help="go on where a source holds nothing")
    add("--start-over", action="store_true", help="remove what an earlier preparation left in OUT")
    add("--dry-run", action="store_true", help="say what would be read, and stop")
    return parser


def _options(given: argparse.Namespace) -> PrepareOptions:
    """What the arguments ask for. Raises ConfigError for values that make no sense together."""
    if (given.pack is None) != (given.seq_length is None):
        raise ConfigError("--pack best-fit and --seq-length T belong together; give both or none")
    if given.min_tokens is not None and given.max_tokens is not None and given.min_tokens > given.max_tokens:
        raise ConfigError(f"--min-tokens {given.min_tokens} is above --max-tokens {given.max_tokens}; nothing is left")
    if given.binary and given.tokenizer != "byte":
        raise ConfigError(f"--binary needs --tokenizer byte, not {given.tokenizer}: other tokenizers take text alone")
    return PrepareOptions(**{option.name: getattr(given, option.name) for option in fields(PrepareOptions)})


class _Preparation:
    """One call of the command, from its arguments to the finished set."""

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
        """Do what the arguments ask for. Returns the exit code."""
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
        """Answer for an OUT that is finished: all is well where this command made it."""
        if finished.plan != self._plan.digest:
            raise ConfigError(
                f"{self._out} holds a finished set of other sources, options or another tokenizer: {finished.tokens} "
                f"tokens of {' '.join(finished.sources)} by {finished.tokenizer}; name another OUT, or make it again "
                "with --start-over"
            )
        if WORK in self._folder.storage.names():
            self._folder.clean()
        print(f"{self._out} is finished already: {finished.tokens} tokens in {len(finished.shards)} shards")
        return 0

    def _require_beginning_of_this(self) -> bool:
        """Whether OUT holds the beginning of this very preparation. Raises ConfigError where it holds anything else."""
        begun = self._folder.plan()
        if begun is None and (others := self._folder.strangers()):
            raise ConfigError(
                f"{self._out} holds {others[0]!r} and no preparation that could go on; name a folder that is new or "
                "empty, or give --start-over where an earlier one left it"
            )
        if begun is not None and begun.digest != self._plan.digest:
            raise ConfigError(
                f"{self._out} holds the beginning of another preparation: {'; '.join(differences(begun, self._plan))}; "
                "give what was given then, another OUT, or --start-over"
            )
        return begun is not None

    def _make(self) -> int:
        plan = self._plan
        records = self._folder.records(plan)
        if records:
            print(f"going on: {len(records)} of {len(plan.units)} units are finished")
        began_s, before = time.monotonic(), sum(record.tokens for record in records.values())
        try:
            with contextlib.ExitStack() as stack:
                workers = self._open_workers(plan, self._out, self._given.workers, self._given.retry_s)
                pool = stack.enter_context(workers)
                self._make_units(pool, stack.enter_context(_scratch(self._folder)), records)
        except KeyboardInterrupt:
            done = len(self._folder.records(plan))
            print(
                f"interrupted: {done} of {len(plan.units)} units are finished; the same command goes on from there",
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
        """Have all units made that are not finished, and add their records; copies are found first."""
        units, spans = range(len(self._plan.units)), None
        if self._plan.options.dedup and len(records) < len(units):
            there = self._folder.hashed()
            self._run(pool, "comparing", [Task(unit, is_for_hashes=True) for unit in units if unit not in there], {})
            spans = find_duplicates(self._folder, self._folder.hashed(), scratch)
        flags = {unit: None if spans is None else (str(flags_file(scratch)), *spans[unit]) for unit in units}
        self._run(pool, "tokens", [Task(unit, flags=flags[unit]) for unit in units if unit not in records], records)

    def _run(self, pool: Pool, what: str, tasks: Sequence[Task], records: dict[int, UnitRecord]) -> None:
        """Have tasks done, show how far they are, and keep the records of units that they made."""
        sizes = list(map(size_of, self._plan.units))
        shown = Shown(what, sum(sizes), sum(sizes) - sum(sizes[task.unit] for task in tasks), sys.stdout)

        def keep(task: Task, record: UnitRecord | None) -> None:
            if record is not None:
                records[task.unit] = record
            shown.finish(sizes[task.unit])

        with shown.block:
            pool.run(tasks, shown.advance, keep)

    def _report(self, made: ShardSet, records: Sequence[UnitRecord], tokens_per_s: float) -> None:
        """Print what came of it, and what to type next."""
        for number, source in enumerate(made.sources):
            if not any(record.of_sources.get(number) for record in records):
                print(f"zeroband data prepare: {source} gave no document", file=sys.stderr)
        rate = f", {human_count(tokens_per_s)} tokens/s" if tokens_per_s else ""
        print(f"tokens    {made.tokens}, documents {made.documents}, shards {len(made.shards)}{rate}")
        print(
            f"left out  {made.empty_documents} empty, {made.duplicate_documents} duplicates, "
            f"{made.filtered_documents} for their length{_bad_rows(records)}"
        )
        if made.packed_length is not None:
            print(f"padding   {made.padding / made.tokens:.2%} of the tokens")
        print(f"look at it: {typed('data', 'inspect', self._out)}\ntrain on it:\n\n{_section(self._out, made)}")


class Shown:
    """What of some bytes of text is done, and how many tokens they gave.

    total: bytes of all of it, as the plan has them; done: of what was finished before.
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
        """The time in which it is shown."""
        self.block.add_task(what, total=self._total, completed=done, counts="")

    def advance(self, size_bytes: int, tokens: int) -> None:
        """Take note of text that was read."""
        self._read += size_bytes
        self._tokens += tokens
        self._show()

    def finish(self, planned_bytes: int) -> None:
        """Take note of a unit that is finished, by what the plan has of it: what was read may be more or less."""
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
    """The lines of a configuration that read a set."""
    path = out if "://" in out else str(Path(out).expanduser().resolve())
    packed = f'seq_length = {made.packed_length}\npacking = "best-fit"\n' if made.packed_length is not None else ""
    head = f'[data]\ntokenizer = "{made.tokenizer}"\n{packed}'
    return f'{head}\n[data.source]\ntype = "tokens"\npath = "{path}"'


@contextlib.contextmanager
def _scratch(folder: Folder) -> Generator[Path]:
    """A folder of this machine for the search of duplicates, which may be large."""
    here = Path(folder.storage.url) / WORK if isinstance(folder.storage, LocalStorage) else None
    with tempfile.TemporaryDirectory(dir=here, prefix="scratch-") as path:
        yield Path(path)


def _require_text(records: Sequence[UnitRecord]) -> None:
    """Raise ConfigError where there is nothing to write."""
    if not any(record.tokens for record in records):
        left_out = [sum(getattr(record, name) for record in records) for name in ("empty", "duplicates", "filtered")]
        raise ConfigError(
            "no document is left of all sources: {} empty, {} duplicates, {} left out for their length; name other "
            "sources, or let --min-tokens and --max-tokens take more".format(*left_out)
            + _bad_rows(records)
        )

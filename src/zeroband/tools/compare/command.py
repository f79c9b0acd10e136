"""`zeroband compare @config --methods ddp,diloco,demo --seeds 2`: compare methods in a table and figures.

Every method gets the same start, data, number of steps and number of learning rates. A failed run does not stop the
others; an interrupted comparison resumes.
Exit codes: 0 done and every claim is met; 1 a run failed, none ended with a loss, or a claim was not measured; 2 wrong
arguments; 3 a claim is not met; 4 no claim is refuted, but the seeds do not suffice for one; 130 after Ctrl-C.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from zeroband.config.load import load_config
from zeroband.config.stability import cautions_of, overlap_steps
from zeroband.errors import ConfigError, way_to_extra
from zeroband.tools.cluster.interrupts import counted_interrupts
from zeroband.tools.compare.claims import check
from zeroband.tools.compare.figures import charts, write_pngs
from zeroband.tools.compare.methods import PRESETS, Arm, require_known
from zeroband.tools.compare.options import CompareOptions, read_options
from zeroband.tools.compare.page import ComparisonResult, document, model_in_words, table
from zeroband.tools.compare.results import ResultFiles, RunResult, provenance
from zeroband.tools.compare.runner import RunFailed, Runner, Stopped
from zeroband.tools.compare.table import Losses, Row, best_lr, chosen_by, next_alternative, next_lr, row_of
from zeroband.tools.compare.texts import cut
from zeroband.tools.compare.trials import Trial, shared_folder, trial, warm_up

_EXIT_FAILED, _EXIT_CONFIG, _EXIT_NOT_MET, _EXIT_CANNOT_TELL = 1, 2, 3, 4
_TABLE = "table.md"
_RATE_OVER_S = 3600.0
"""Window of the rate for the remaining time: runs start slowly and differ."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    try:
        options = read_options(argv)
        require_known(options.methods)
        with counted_interrupts() as interrupts:
            command = shlex.join(["zeroband", "compare", *argv])
            comparison = Comparison(options, command, is_stopped=lambda: interrupts.count > 0)
            try:
                comparison.run(Console(force_terminal=sys.stdout.isatty()))
            except Stopped:
                print(f"interrupted; the same command resumes. So far: {options.out / _TABLE}", file=sys.stderr)
                return interrupts.exit_code
    except (ConfigError, RunFailed) as error:
        print(f"zeroband compare: {error}", file=sys.stderr)
        return _EXIT_CONFIG if isinstance(error, ConfigError) else _EXIT_FAILED
    if lacking := comparison.lacking():
        for line in lacking:
            print(f"zeroband compare: {line}", file=sys.stderr)
        return _EXIT_FAILED
    open_claims = [verdict for verdict in comparison.report().verdicts if verdict.answer != "met"]
    for verdict in open_claims:
        print(f"zeroband compare: {verdict}", file=sys.stderr)
    if any(verdict.answer == "NOT MET" for verdict in open_claims):
        return _EXIT_NOT_MET
    return _EXIT_CANNOT_TELL if open_claims else 0


class Bar(Progress):
    """Shows finished work, in samples, and the remaining time. The total may grow. One thread."""

    def __init__(self, total: float, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, speed_estimate_period=_RATE_OVER_S)
        self._all, self._done = total, 0.0
        self._shown = self.add_task("", total=total)

    def add(self, work: float) -> None:
        """Add work to the total."""
        self._all += work
        self.update(self._shown, total=self._all)

    def drop(self, work: float, line: str) -> None:
        """Remove work from the total: it was done before or is skipped."""
        self.add(-work)
        self._say(line)

    def running(self, name: str, work: float) -> Callable[[float], None]:
        """Start a run. Returns a function that takes its finished fraction."""
        self.update(self._shown, description=name)
        return lambda share: self.update(self._shown, completed=self._done + share * work)

    def over(self, work: float, line: str) -> None:
        """Add finished work."""
        self._done += work
        self.update(self._shown, completed=self._done)
        self._say(line)

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def line_of(outcome: RunResult, *, is_kept: bool) -> str:
    """Describe a finished run."""
    name = f"{outcome.arm}, lr {outcome.lr:g}, seed {outcome.seed}"
    if outcome.failure:
        return f"{name}: failed: {outcome.failure.splitlines()[0]}"
    loss = "diverged" if outcome.loss is None else f"loss {outcome.loss:.4f}"
    return f"{name}: {loss}, {'cached' if is_kept else f'{outcome.took_s:.0f} s'}"


class Comparison:
    """Runs a comparison, one run at a time. Raises ConfigError for invalid settings of a method."""

    def __init__(
        self, options: CompareOptions, command: str, *, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._command, self._config = command, load_config(options.arguments, {})
        self._read = [one.model_dump() for one in self._config.data.sources] or self._config.data.source.model_dump()
        self._texts = cut(self._config.data, self._config.run.seed, shared_folder("texts"))
        if self._texts is not None:
            options = options.model_copy(update={"arguments": self._texts.arguments(options.arguments)})
        self._options, self._text_digest = options, "" if self._texts is None else self._texts.digest
        self._lrs = options.lrs or (self._config.optim.adamw.lr,)
        self._made_by = provenance(command)
        self._files = ResultFiles(options.results or shared_folder("results"))
        self._warm_up = warm_up(options, texts=self._text_digest) if options.warm_steps else None
        limit_s = 60 * options.limit_minutes
        self._runner = Runner(
            options.out, texts=self._texts, limit_s=limit_s, samples=options.samples, is_stopped=is_stopped
        )
        self.outcomes: list[RunResult] = []
        self._trials: dict[tuple[str, float, int], Trial] = {}
        self._families = [list(arms) for _, arms in groupby(options.methods, lambda arm: arm.family or arm.name)]
        planned = [self._trial(arms[0], lr, options.seeds[0]) for arms in self._families for lr in self._lrs]
        more_seeds = [self._trial(arms[0], self._lrs[0], seed) for arms in self._families for seed in options.seeds[1:]]
        self._work = sum(one.work for one in (*planned, *more_seeds))

    def _trial(self, arm: Arm, lr: float, seed: int) -> Trial:
        key = (arm.name, lr, seed)
        if key not in self._trials:
            start = "" if self._warm_up is None else self._warm_up[1]
            self._trials[key] = trial(self._options, arm, lr, seed, start=start, texts=self._text_digest)
        return self._trials[key]

    def run(self, console: Console) -> None:
        """Make all runs and write the table after each. Raises Stopped, RunFailed for the common start."""
        with Bar(self._work, console) as bar:
            start = self._warm_start(bar)
            for arms in self._families:
                self._run_family(arms, start, bar)
        pngs = self.write()
        console.print(table(self.report()), highlight=False, markup=False, soft_wrap=True)
        console.print(f"\nfull report: {self._options.out / _TABLE}", highlight=False)
        if not pngs:
            missing = f"no PNG files: matplotlib is not installed; {way_to_extra('compare')}"
            console.print(missing, highlight=False, markup=False, soft_wrap=True)

    def _warm_start(self, bar: Bar) -> Path | None:
        """Return the directory that all runs start from; comparisons with the same start share it."""
        if self._warm_up is None:
            return None
        arguments, digest = self._warm_up
        out = shared_folder("starts") / digest / "model"
        if not out.exists():
            samples = self._options.warm_steps * self._options.nodes * self._config.train.batch_size
            bar.add(samples)
            self._runner.warm_up(arguments, f"start-{digest[:10]}", out, bar.running("common start", samples))
            bar.over(samples, f"common start: {self._options.warm_steps} steps, in {out}")
        return out

    def _run_family(self, arms: Sequence[Arm], start: Path | None, bar: Bar) -> None:
        """Search the learning rate of the alternatives with the first seed, then run the best one with the others.

        An alternative that is not better at the best learning rate so far gets no others: so the neighbours of the best
        one are tried, one setting at a time.
        """
        lrs, found = self._lrs, dict[int, tuple[float, float]]()
        while (place := next_alternative({at: loss for at, (loss, _) in found.items()}, len(arms))) is not None:
            if found:
                lrs = (min(found.values())[1],)  # the best alternative's rate is near this one's
                bar.add(self._trial(arms[place], lrs[0], self._options.seeds[0]).work)
            losses = self._search(arms[place], lrs, start, bar, below=min(found.values(), default=(math.inf, 0.0))[0])
            found[place] = (chosen_by(losses), best_lr(losses) or lrs[0])
        best = min(found, key=lambda place: found[place])
        loss, lr = found[best]
        for seed in self._options.seeds[1:] if math.isfinite(loss) else ():
            self._outcome(self._trial(arms[best], lr, seed), start, bar)

    def _search(self, arm: Arm, lrs: Sequence[float], start: Path | None, bar: Bar, *, below: float) -> Losses:
        """Run these learning rates with the first seed, and if a loss is below this those that bracket the best one."""
        first, losses, untried = self._options.seeds[0], dict[float, float | None](), [*lrs]
        while untried:
            lr = untried.pop(0)
            outcome = self._outcome(self._trial(arm, lr, first), start, bar)
            if outcome.failure:  # the others would most likely fail as well
                work = sum(self._trial(arm, rest, first).work for rest in untried)
                bar.drop(work, f"{arm.name}: no more learning rates")
                break
            losses[lr] = outcome.tuning_loss
            is_worse = math.isfinite(below) and chosen_by(losses) >= below
            if untried or is_worse or len(self._lrs) == 1:
                continue
            if (another := next_lr(losses, most=self._options.tries)) is not None:
                bar.add(self._trial(arm, another, first).work)
                untried.append(another)
        return losses

    def _outcome(self, one: Trial, start: Path | None, bar: Bar) -> RunResult:
        """Return the result of a run, made now or cached."""
        on_progress = bar.running(f"{one.arm.name}, lr {one.lr:g}, seed {one.seed}", one.work)
        name = one.name if self._options.results is not None else ""
        kept = self._files.load(one.digest, name)
        outcome = kept or self._runner.run(one, start, on_progress)
        outcome = replace(outcome, arm=one.arm.name)  # names may differ for the same settings
        if kept is None:
            outcome = replace(outcome, made_by=self._made_by)
            if not (name and outcome.failure):  # a committed failure would hold lines of this machine's consoles
                self._files.save(outcome, name)
        self.outcomes.append(outcome)
        if kept is None:
            bar.over(one.work, line_of(outcome, is_kept=False))
        else:
            bar.drop(one.work, line_of(outcome, is_kept=True))
        self.write()
        return outcome

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of the methods with results."""
        options = self._options
        return tuple(
            row_of(
                arm,
                self.outcomes,
                options.wan,
                overlap_steps=overlap_steps(self._trial(arm, self._lrs[0], options.seeds[0]).config.outer),
                step_s=options.step_s,
            )
            for arm in options.methods
            if any(outcome.arm == arm.name for outcome in self.outcomes)
        )

    def lacking(self) -> list[str]:
        """Return what this comparison failed to show."""
        failed = [f"{o.arm}, lr {o.lr:g}, seed {o.seed} failed" for o in self.outcomes if o.failure]
        if not any(outcome.loss is not None for outcome in self.outcomes):
            failed.append("no run ended with a loss, so nothing was compared")
        return failed + [str(verdict) for verdict in self.report().verdicts if verdict.answer == "not measured"]

    def report(self) -> ComparisonResult:
        """Return the results so far."""
        rows, options = self.rows(), self._options
        return ComparisonResult(
            title=options.title,
            command=self._command,
            setting=self._setting(),
            rows=rows,
            outcomes=self.outcomes,
            verdicts=check(options.claims, rows),
            cautions=self._cautions(),
            charts=charts(rows, options.link),
        )

    def write(self) -> tuple[Path, ...]:
        """Write the table and the figures. Returns the figures."""
        report, out = self.report(), self._options.out
        out.mkdir(parents=True, exist_ok=True)
        figures = write_pngs(report.charts, out)
        (out / _TABLE).write_text(document(report, [figure.name for figure in figures]), encoding="utf-8")
        return figures

    def _setting(self) -> list[tuple[str, str]]:
        options, config = self._options, self._config
        params = next((outcome.params for outcome in self.outcomes if outcome.params), 0)
        start = f"{options.warm_steps} steps of data parallel training, then fresh optimizer moments for every method"
        return [
            (
                "machine",
                f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}",
            ),
            ("model", model_in_words(config.model, params)),
            ("data", f"{self._read}, tokenizer {config.data.tokenizer}, {config.data.seq_length} tokens per sample"),
            (
                "run",
                f"{config.train.total_steps} steps, {config.train.batch_size} samples per node, {options.nodes} nodes",
            ),
            ("start", start if options.warm_steps else "random weights"),
            ("learning rates", f"{', '.join(f'{lr:g}' for lr in self._lrs)}; at most {options.tries} per method"),
            ("seeds", f"{', '.join(map(str, options.seeds))}; the learning rate is chosen with the first"),
            (
                "evaluated",
                f"outer parameters, on {options.samples} samples of held-out documents, at {options.points} points of "
                "a run; learning rates are chosen on as many samples of other documents"
                if self._texts is not None
                else f"outer parameters, on up to {options.samples} held-out samples, at {options.points} points of a "
                "run; learning rates are chosen on as many others. Other parts of their documents are trained on, as "
                "this data cannot be split by document",
            ),
            ("link", options.link),
            *((arm.name, PRESETS[arm.preset].what) for arm in options.methods),
        ]

    def _cautions(self) -> list[str]:
        """Return the known problems of the methods' settings."""
        params = next((outcome.params for outcome in self.outcomes if outcome.params), None)
        return [
            f"{arm.name}: {caution}"
            for arm in self._options.methods
            for caution in cautions_of(self._trial(arm, self._lrs[0], self._options.seeds[0]).config, params=params)
        ]

"""Charts of held-out loss, and PNG files of them by matplotlib (extra `compare`)."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroband.observe.status import human_count
from zeroband.tools.compare.results import AtLink, RunMeasurements
from zeroband.tools.compare.table import Row

COLOURS = ("#1d4fbf", "#b4590a", "#14693d", "#7c3aa8", "#a31656", "#0b6a76", "#565f67")


@dataclass(frozen=True)
class ChartSeries:
    """A line of a chart."""

    name: str
    number: int
    """Determines its colour, the same in every chart."""
    xs: tuple[float, ...]
    ys: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """Loss over one axis."""

    name: str
    """Name of its file."""
    x_label: str
    is_log: bool
    series: tuple[ChartSeries, ...]
    y_label: str = "held-out loss, nats per token"


def charts(rows: Sequence[Row], link: str) -> tuple[Chart, ...]:
    """Return charts of loss over tokens, over bytes sent, and over wall-clock time at a link."""
    axes: tuple[tuple[str, str, bool, Callable[[RunMeasurements, AtLink], float]], ...] = (
        ("loss-tokens", "tokens of all nodes", False, lambda found, _: found.tokens),
        ("loss-bytes", "bytes that a node sent", True, lambda found, _: found.sent_bytes),
        ("loss-time", f"seconds, simulated for {link}", True, lambda found, there: found.steps * there.step_s),
    )
    return tuple(Chart(name, label, is_log, _series(rows, whole)) for name, label, is_log, whole in axes)


def _series(rows: Sequence[Row], whole: Callable[[RunMeasurements, AtLink], float]) -> tuple[ChartSeries, ...]:
    """Return the mean over seeds at each evaluated step, without step 0."""
    found: list[ChartSeries] = []
    for place, row in enumerate(rows):
        if row.measured is None or row.at_link is None:
            continue
        points, end = row.runs[0].points, whole(row.measured, row.at_link)
        places = [(end * point.step / points[-1].step, _mean_loss(row, point.step)) for point in points]
        shown = [(x, loss) for x, loss in places if loss is not None and x > 0]
        if shown:
            found.append(ChartSeries(row.arm, place, tuple(x for x, _ in shown), tuple(y for _, y in shown)))
    return tuple(found)


def _mean_loss(row: Row, step: int) -> float | None:
    """Return the mean over seeds; None if one is missing, as a checkpoint may be skipped during the previous write."""
    losses = [point.loss for run in row.runs for point in run.points if point.step == step and point.loss is not None]
    return statistics.mean(losses) if len(losses) == len(row.runs) else None


def write_pngs(charts: Sequence[Chart], folder: Path) -> tuple[Path, ...]:
    """Write a file per non-empty chart; none if matplotlib is not installed."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return ()
    return tuple(_write(chart, folder / f"{chart.name}.png", figures) for chart in charts if chart.series)


def _label(place: float, _number: int) -> str:
    return human_count(place)


def _write(chart: Chart, path: Path, figures: Any) -> Path:
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for series in chart.series:
        colour = COLOURS[series.number % len(COLOURS)]
        axes.plot(series.xs, series.ys, marker="o", markersize=4, color=colour, label=series.name)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.is_log:
        axes.set_xscale("log")
        ticker: Any = importlib.import_module("matplotlib.ticker")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(_label)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    return path

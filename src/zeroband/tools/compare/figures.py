"""Charts of held-out loss, and PNG files of them by matplotlib (extra `compare`)."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroband.observe.status import human_count
from zeroband.tools.compare.results import AtLink, RunMeasurements
from zeroband.tools.compare.table import Row

COLOURS = ("#1d4fbf", "#b4590a", "#14693d", "#7c3aa8", "#a31656", "#0b6a76", "#565f67")


Y_LABEL = "held-out loss, nats per token"


@dataclass(frozen=True)
class Chart:
    """Loss over one axis."""

    name: str
    """Name of its file."""
    x_label: str
    is_log: bool
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Places on the axis with their losses, by method."""


def charts(rows: Sequence[Row], link: str) -> tuple[Chart, ...]:
    """Return charts of loss over tokens, over bytes sent, and over wall-clock time at a link."""
    axes: tuple[tuple[str, str, bool, Callable[[RunMeasurements, AtLink], float]], ...] = (
        ("loss-tokens", "tokens of all nodes", False, lambda found, _: found.tokens),
        ("loss-bytes", "bytes that a node sent", True, lambda found, _: found.sent_bytes),
        ("loss-time", f"seconds, simulated for {link}", True, lambda found, there: found.steps * there.step_s),
    )
    return tuple(Chart(name, label, is_log, _lines(rows, whole)) for name, label, is_log, whole in axes)


def _lines(
    rows: Sequence[Row], whole: Callable[[RunMeasurements, AtLink], float]
) -> dict[str, list[tuple[float, float]]]:
    """Return the mean over seeds at each evaluated step, without step 0."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.measured is None or row.at_link is None:
            continue
        points, end = row.runs[0].points, whole(row.measured, row.at_link)
        places = [(end * point.step / points[-1].step, _mean_loss(row, point.step)) for point in points]
        if shown := [(x, loss) for x, loss in places if loss is not None and x > 0]:
            found[row.arm] = shown
    return found


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
    names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}  # equal in all charts
    return tuple(_write(chart, folder / f"{chart.name}.png", colours, figures) for chart in charts if chart.lines)


def _label(place: float, _number: int) -> str:
    return human_count(place)


def _write(chart: Chart, path: Path, colours: Mapping[str, str], figures: Any) -> Path:
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in chart.lines.items():
        xs, losses = zip(*points, strict=True)
        axes.plot(xs, losses, marker="o", markersize=4, color=colours[name], label=name)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(Y_LABEL)
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

"""The charts as PNG files, by matplotlib where it is installed (extra `compare`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeroband.observe.status import human_count
from zeroband.tools.document.line_chart import Chart, ticks

COLOURS = ("#1d4fbf", "#b4590a", "#14693d", "#7c3aa8", "#a31656", "#0b6a76", "#565f67")


def write_pngs(charts: Sequence[Chart], folder: Path) -> tuple[Path, ...]:
    """One file for each chart that has a line; none where matplotlib is not installed."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return ()
    return tuple(_write(chart, folder / f"{chart.name}.png", figures) for chart in charts if chart.series)


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
        xs = [x for series in chart.series for x in series.xs]
        axes.xaxis.set_minor_locator(importlib.import_module("matplotlib.ticker").NullLocator())
        places = ticks(min(xs), max(xs), is_log=True)
        axes.set_xticks(places, [human_count(place) for place in places])
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    return path

"""Draw the charts of docs/results.md and docs/benchmarks.md from the tables there (extra `compare`).

.venv/bin/python scripts/draw_results.py

The tables are the only record of those runs, so a chart cannot differ from the figures next to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from zeroband.tools.compare.figures import COLOURS

DOCS = Path(__file__).resolve().parents[1] / "docs"
STYLE = {"svg.hashsalt": "zeroband", "svg.fonttype": "none", "font.size": 9}


def main() -> None:
    settings: Any = mpl.rcParams
    settings.update(STYLE)
    results, benchmarks = ((DOCS / name).read_text(encoding="utf-8") for name in ("results.md", "benchmarks.md"))
    _write("results-methods.svg", lambda axes: draw_methods(axes, table_under(results, "## All methods in figures")))
    _write("results-links.svg", lambda axes: draw_utilisation(axes, table_under(results, "## E5 in figures")))
    heading = "## The native all-reduce: the link is the limit"
    _write("results-all-reduce.svg", lambda axes: draw_all_reduce(axes, table_under(benchmarks, heading)))


def table_under(text: str, heading: str) -> list[dict[str, str]]:
    """The first table behind a heading: a record of each row."""
    lines = text.partition(f"{heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    names, width = rows[0], len(rows[0])
    ends = next((n for n, row in enumerate(rows) if len(row) != width), len(rows))
    return [dict(zip(names, row, strict=True)) for row in rows[2:ends]]


def number(cell: str) -> float:
    """The figure of a cell, such as `49.3 %` or `1.3372 +- 0.0013`."""
    return float(re.findall(r"[-+]?[\d.]+", cell)[0])


def draw_methods(axes: Any, rows: Sequence[dict[str, str]]) -> None:
    shown = [row for row in rows if number(row["bytes up, a token"])]
    for place, row in enumerate(shown):
        x, y = number(row["bytes up, a token"]), number(row["of DDP's perplexity"])
        axes.plot(x, y, "o", color=COLOURS[place % len(COLOURS)])
        name = re.split(r", `|, \d", row["method"])[0]
        axes.annotate(name, (x, y), xytext=(6, 4), textcoords="offset points")
    (alone,) = [number(row["of DDP's perplexity"]) for row in rows if row not in shown]
    axes.axhline(alone, color="#565f67", linestyle=":")
    axes.annotate("one node alone", (1, alone), xytext=(4, -10), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xlim(1, 2e4)
    axes.set_xlabel("bytes that a node sends, for each token")
    axes.set_ylabel("perplexity, relative to DDP")


def draw_utilisation(axes: Any, rows: Sequence[dict[str, str]]) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for place, method in enumerate(methods):
        points = [row for row in rows if row["method"] == method]
        xs, colour = [number(row["Mbit/s"]) for row in points], COLOURS[place % len(COLOURS)]
        measured = [number(row["computes, measured"]) for row in points]
        # a record keeps the last of the two columns called "predicted", which holds seconds
        predicted = [value - number(row["points"]) for value, row in zip(measured, points, strict=True)]
        axes.plot(xs, predicted, "--", color=colour, linewidth=1)
        axes.plot(xs, measured, "o-", color=colour, label=method.partition(", overlap")[0])
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([3, 5, 10, 30, 100], ["3", "5", "10", "30", "100"])
    axes.set_xlabel("Mbit/s of each access link")
    axes.set_ylabel("% of the time computing; dashed: predicted")
    axes.set_ylim(0, 105)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw_all_reduce(axes: Any, rows: Sequence[dict[str, str]]) -> None:
    links = list(dict.fromkeys((row["Mbit/s"], row["RTT ms"], row["nodes"]) for row in rows))
    kinds = {"gloo, float32": "gloo", "zeroband, int8, sealed": "int8"}
    for place, (label, start) in enumerate(kinds.items()):
        best = [
            min(
                number(row["median s"])
                for row in rows
                if (row["Mbit/s"], row["RTT ms"], row["nodes"]) == link and row["way"].startswith(start)
            )
            for link in links
        ]
        places = [n + 0.4 * place - 0.2 for n in range(len(links))]
        axes.bar(places, best, width=0.38, color=COLOURS[1 - place], label=label)
    axes.set_xticks(range(len(links)), [f"{rate}\n{rtt} ms\n{nodes} nodes" for rate, rtt, nodes in links])
    axes.set_xlabel("Mbit/s of each access link, round trip, nodes")
    axes.set_ylabel("seconds of an all-reduce, best way of each")
    axes.set_ylim(0, 40)
    axes.legend(frameon=False, ncols=2)


def _write(name: str, draw: Callable[[Any], None]) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    draw(axes)
    axes.grid(alpha=0.3)
    figure.savefig(DOCS / name, metadata={"Date": None})


if __name__ == "__main__":
    main()

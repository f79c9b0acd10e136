"""Draw the charts of docs/results.md and docs/benchmarks.md (extra `compare`).

.venv/bin/python scripts/draw_results.py

From docs/measured/*.json, and from the one table of the documents that shows every figure of its chart itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from zeroband.tools.compare.figures import COLOURS

DOCS = Path(__file__).resolve().parents[1] / "docs"
STYLE = {"svg.hashsalt": "zeroband", "svg.fonttype": "none", "font.size": 9}

Row = Mapping[str, Any]


def main() -> None:
    settings: Any = mpl.rcParams
    settings.update(STYLE)
    methods = table_under((DOCS / "results.md").read_text(encoding="utf-8"), "## All methods in figures")
    _write("results-methods.svg", lambda axes: draw_methods(axes, methods))
    _write("results-rates.svg", lambda axes: draw_rates(axes, measured("learning_rates", "methods")))
    _write("results-links.svg", lambda axes: draw_utilisation(axes, measured("utilisation")))
    _write("results-all-reduce.svg", lambda axes: draw_all_reduce(axes, measured("all_reduce_links")))


def measured(name: str, key: str = "rows") -> Sequence[Row]:
    """The rows of a file of measurements."""
    return json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8"))[key]


def table_under(text: str, heading: str) -> Sequence[Row]:
    """The first table behind a heading: a record of each row."""
    lines = text.partition(f"{heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    ends = next((n for n, row in enumerate(rows) if len(row) != len(rows[0])), len(rows))
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:ends]]


def number(cell: Any) -> float:
    """The figure of a cell, such as `49.3 %` or `1.3372 +- 0.0013`."""
    return float(re.findall(r"[-+]?[\d.]+", str(cell))[0])


def draw_methods(axes: Any, rows: Sequence[Row]) -> None:
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


def draw_rates(axes: Any, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        rates = [key for key in row if key != "run"]
        losses = [row[rate] for rate in rates]
        axes.plot([float(rate) for rate in rates], losses, "o-", color=COLOURS[place], label=row["run"])
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([0.0005, 0.001, 0.002, 0.004, 0.008], ["0.0005", "0.001", "0.002", "0.004", "0.008"])
    axes.set_xlabel("inner learning rate")
    axes.set_ylabel("held-out loss, nats per byte, first seed")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw_utilisation(axes: Any, rows: Sequence[Row]) -> None:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for place, method in enumerate(methods):
        points = [row for row in rows if row["method"] == method]
        xs, colour = [row["Mbit/s"] for row in points], COLOURS[place % len(COLOURS)]
        axes.plot(xs, [number(row["computes, predicted"]) for row in points], "--", color=colour, linewidth=1)
        shown = [number(row["computes, measured"]) for row in points]
        axes.plot(xs, shown, "o-", color=colour, label=method.partition(", overlap")[0])
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([3, 5, 10, 30, 100], ["3", "5", "10", "30", "100"])
    axes.set_xlabel("Mbit/s of each access link")
    axes.set_ylabel("% of the time computing; dashed: predicted")
    axes.set_ylim(0, 105)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw_all_reduce(axes: Any, rows: Sequence[Row]) -> None:
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

"""Draw the charts of docs/results.md and docs/benchmarks.md, and write the tables of the curve (extra `compare`).

.venv/bin/python scripts/draw_results.py

From results/*/*.json, docs/measured/*.json, and the one table of the documents that shows every figure of its chart
itself. The tables of the curve stand between two comments of docs/results.md.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from zeroband.observe.words import human_count, markdown_table
from zeroband.tools.compare.claims import Claim, ClaimVerdict, best_of, check, interval_of
from zeroband.tools.compare.figures import COLOURS
from zeroband.tools.compare.options import CompareOptions, read_options
from zeroband.tools.compare.results import ResultFiles, RunResult
from zeroband.tools.compare.table import REFERENCE, Row, figure_of, find, row_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
STYLE: Any = {"svg.hashsalt": "zeroband", "svg.fonttype": "none", "font.size": 9}

Record = Mapping[str, Any]

CURVES = (("curve",), ("curve", "curve-360k"), ("curve", "curve-steps"))
"""Files of experiments/ behind each other, for each size of the curve, and for the smallest in more steps."""
NODES = (1, 2, 4, 8)
LAW = {0: (18.129, -0.0953), 1: (18.363, -0.0961), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""Loss A N^a for each number of nodes, 0: data parallel training. arXiv:2503.09799, table 7."""
SMALLEST = {1: -0.1, 2: 0.7, 4: 2.0, 8: 3.9}
"""Per cent over data parallel training of 35 M parameters, the smallest model of its table 4."""
BEGIN, END = "<!-- curve: scripts/draw_results.py writes what follows -->\n", "<!-- end of the curve -->\n"


def main() -> None:
    curves = list(map(read_curve, CURVES))
    page = DOCS / "results.md"
    page.write_text(with_curves(page.read_text(encoding="utf-8"), curves), encoding="utf-8")
    (DOCS / "results-curve.svg").write_text(drawn(lambda axes: draw_curves(axes, curves)), encoding="utf-8")
    methods = table_under((DOCS / "results.md").read_text(encoding="utf-8"), "## All methods in figures")
    charts: Mapping[str, Callable[[Any], None]] = {
        "methods": lambda axes: draw_methods(axes, methods),
        "rates": lambda axes: draw_rates(axes, measured("learning_rates", "methods")),
        "links": lambda axes: draw_utilisation(axes, measured("utilisation")),
        "all-reduce": lambda axes: draw_all_reduce(axes, measured("all_reduce_links")),
    }
    for name, draw in charts.items():
        (DOCS / f"results-{name}.svg").write_text(drawn(draw), encoding="utf-8")


# -- the curve ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """One size of the curve, as far as it was measured."""

    options: CompareOptions
    outcomes: Sequence[RunResult]
    rows: Sequence[Row]

    @property
    def params(self) -> int:
        return self.outcomes[0].params if self.outcomes else 0

    @property
    def size(self) -> str:
        """Parameters and steps, in words."""
        if not self.outcomes:
            return self.options.title.partition(" parameters")[0]
        steps = max((one.measured.steps for one in self.outcomes if one.measured is not None), default=0)
        return f"{human_count(self.params)}, {steps:,} steps"

    def best(self, nodes: int) -> Row | None:
        """The best outer rate of this many nodes."""
        return best_of(self.rows, f"diloco-fp32:nodes={nodes}:*")

    def costs(self, row: Row | None, figure: str) -> Mapping[int, float]:
        """A figure of a method over data parallel training, for each seed that both have."""
        reference = find(self.rows, REFERENCE)
        if row is None or reference is None:
            return {}
        found = {seed: figure_of(figure, loss, reference.by_seed.get(seed)) for seed, loss in row.by_seed.items()}
        return {seed: cost for seed, cost in found.items() if cost is not None}


def read_curve(files: Sequence[str]) -> Curve:
    """The runs of one size that results/ holds."""
    options = read_options([f"@{ROOT / 'experiments' / name}.toml" for name in files])
    assert options.results is not None
    return curve_of(options, ResultFiles(ROOT / options.results).load_all())


def curve_of(options: CompareOptions, outcomes: Sequence[RunResult]) -> Curve:
    """One size of the curve, of these runs."""
    outcomes = sorted(outcomes, key=lambda one: options.seeds.index(one.seed))  # rates are chosen with the first
    arms = [arm for arm in options.methods if any(one.arm == arm.name for one in outcomes)]
    rows = [row_of(arm, outcomes, options.wan, overlap_steps=0, step_s=None) for arm in arms]
    return Curve(options, outcomes, rows)


def predicted(params: float, nodes: int) -> float:
    """Per cent over the loss of data parallel training that the published law extrapolates to."""
    (a, power), (base, base_power) = LAW[nodes], LAW[0]
    return 100 * (a / base * params ** (power - base_power) - 1)


def with_curves(page: str, curves: Sequence[Curve]) -> str:
    """The page with the tables of these runs between its comments."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{curves_in_words(curves)}\n{END}{rest.partition(END)[2]}"


def curves_in_words(curves: Sequence[Curve]) -> str:
    """Every table of the curve, and whether its predictions were met."""
    over = ("over data parallel, nats a byte", "%", "law, %")
    head = ("parameters", "method", "rates: inner, outer", "seeds", "loss", *over, "bytes up, a token")
    costs = markdown_table(head, [cells for curve in curves for cells in _cost_cells(curve)])
    predictions = [*_answers(curves)]
    answered = [cells for cells in predictions if cells[2] != "not measured"]
    answers = markdown_table(("parameters", "prediction", "answer"), answered)
    left = f"Not measured: {len(predictions) - len(answered)} of {len(predictions)} predictions."
    tried = markdown_table(
        (
            "parameters",
            "method",
            "losses by which rates were chosen: outer rate: inner rate and loss",
        ),
        [cells for curve in curves for cells in _tried_cells(curve)],
    )
    runs = [outcome for curve in curves for outcome in curve.outcomes]
    commits = sorted({run.made_by.commit for run in runs})
    versions = sorted({", ".join(f"{k} {v}" for k, v in run.made_by.versions.items()) for run in runs})
    made = f"{len(runs)} runs in `results/`, by {'; '.join(versions) or '-'}, at {', '.join(commits) or '-'}."
    return "\n".join([costs, "", answers, "", left, "", made, "", tried])


def _answers(curves: Sequence[Curve]) -> Iterator[tuple[str, ...]]:
    for curve in curves:
        for verdict in check(curve.options.claims, curve.rows):
            yield (
                curve.size,
                re.sub(r"diloco-fp32:nodes=(\d+):\*( \(\S*\))?", r"M = \1", str(verdict.claim)),
                _answer(verdict),
            )
    for small, large in pairwise(curves):
        for nodes in NODES[1:] if small.params <= large.params else ():
            one, other = (curve.costs(curve.best(nodes), "loss_ratio") for curve in (small, large))
            falls = [100 * (cost - other[seed]) for seed, cost in one.items() if seed in other]
            claim = Claim("fall of the cost, in points,", f"M = {nodes}", at_least=0.0)
            verdict = ClaimVerdict(claim, interval_of(falls) if falls else None, "runs are missing")
            yield f"{small.size} to {large.size}", str(claim), _answer(verdict)


def _answer(verdict: ClaimVerdict) -> str:
    return verdict.answer if verdict.found is None else f"{verdict.answer}: {verdict.found}"


def _cost_cells(curve: Curve) -> Iterator[tuple[str, ...]]:
    rows = {f"DiLoCo, M = {nodes}": (curve.best(nodes), nodes) for nodes in NODES}
    rows |= {f"plain mean, M = {nodes}": (find(curve.rows, f"average:nodes={nodes}"), nodes) for nodes in NODES}
    for name, (row, nodes) in {"data parallel": (find(curve.rows, REFERENCE), 0), **rows}.items():
        if row is None or row.loss is None or row.measured is None:
            continue
        outer = _outer_rate(row)
        tried = [_outer_rate(other) or 0.0 for other in curve.rows if f":nodes={nodes}:" in other.arm]
        is_bracketed = row.is_bracketed and (outer is None or min(tried) < outer < max(tried))
        nats, ratio = (curve.costs(row, figure) for figure in ("ln_ppl_ratio", "loss_ratio"))
        yield (
            curve.size,
            name,
            f"{row.lr:g}" + (f", {outer:g}" if outer else "") + ("" if is_bracketed else " (edge)"),
            str(len(row.losses)),
            f"{row.loss:.4f}",
            _interval(nats, "{:+.4f}") if nodes else "",
            _interval({seed: 100 * (value - 1) for seed, value in ratio.items()}, "{:+.2f}") if nodes else "",
            f"{predicted(curve.params, nodes):+.1f}" if outer else "",
            f"{row.measured.sent_per_token:.0f}" if nodes > 1 else "",
        )


def _outer_rate(row: Row) -> float | None:
    return float(row.arm.rpartition("=")[2]) if "optimizer.lr=" in row.arm else None


def _interval(figures: Mapping[int, float], form: str) -> str:
    if not figures:
        return ""
    found = interval_of(list(figures.values()))
    mean = form.format(found.mean)
    return mean if found.seeds == 1 else f"{mean} ({form.format(found.low)} to {form.format(found.high)})"


def _tried_cells(curve: Curve) -> Iterator[tuple[str, ...]]:
    for family, arms in groupby(curve.options.methods, lambda arm: arm.family or arm.name):
        rows = [row for arm in arms if (row := find(curve.rows, arm.name))]
        best = min((row.chosen_by for row in rows), default=0.0)
        tried: list[str] = []
        for row in rows:
            losses = ", ".join(f"{lr:g} {_loss(loss, best)}" for lr, loss in sorted(row.search.items()))
            outer = _outer_rate(row)
            tried.append(f"{outer:g}: {losses}" if outer else losses)
        if tried:
            yield curve.size, family.replace(":optimizer.lr=*", ""), "; ".join(tried)


def _loss(loss: float | None, best: float) -> str:
    if loss is None:
        return "diverged"
    return f"**{loss:.4f}**" if loss == best else f"{loss:.4f}"


def draw_curves(axes: Any, curves: Sequence[Curve]) -> None:
    axes.plot(NODES, [SMALLEST[nodes] for nodes in NODES], "s-", color="#565f67", label="35 M, published")
    for place, curve in enumerate(curves):
        costs = {
            nodes: [100 * (c - 1) for c in curve.costs(curve.best(nodes), "loss_ratio").values()] for nodes in NODES
        }
        found = {nodes: interval_of(values) for nodes, values in costs.items() if values}
        if not found:
            continue
        spread = [(i.mean - i.low if i.seeds > 1 else 0.0) for i in found.values()]
        name, colour = curve.size, COLOURS[place]
        axes.errorbar(
            list(found), [i.mean for i in found.values()], spread, fmt="o-", capsize=3, color=colour, label=name
        )
        law = [predicted(curve.params, nodes) for nodes in NODES]
        axes.plot(NODES, law, ":", color=colour, label=f"{name}, extrapolated law")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(NODES, list(map(str, NODES)))
    axes.set_xlabel("nodes, with the same batch over all of them")
    axes.set_ylabel("% of the loss of data parallel training")
    axes.legend(frameon=False)


# -- charts of measurements -----------------------------------------------------------------------------------------


def measured(name: str, key: str = "rows") -> Sequence[Record]:
    """The rows of a file of measurements."""
    return json.loads((DOCS / "measured" / f"{name}.json").read_text(encoding="utf-8"))[key]


def table_under(text: str, heading: str) -> Sequence[Record]:
    """The first table behind a heading: a record of each row."""
    lines = text.partition(f"{heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    ends = next((n for n, row in enumerate(rows) if len(row) != len(rows[0])), len(rows))
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:ends]]


def number(cell: Any) -> float:
    """The figure of a cell, such as `49.3 %` or `1.3372 +- 0.0013`."""
    return float(re.findall(r"[-+]?[\d.]+", str(cell))[0])


def draw_methods(axes: Any, rows: Sequence[Record]) -> None:
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


def draw_rates(axes: Any, rows: Sequence[Record]) -> None:
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


def draw_utilisation(axes: Any, rows: Sequence[Record]) -> None:
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


def draw_all_reduce(axes: Any, rows: Sequence[Record]) -> None:
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


def drawn(draw: Callable[[Any], None]) -> str:
    """A chart as the text of an SVG file, the same for the same figures."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes: Any = figure.add_subplot()
        draw(axes)
        axes.grid(alpha=0.3)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


if __name__ == "__main__":
    main()

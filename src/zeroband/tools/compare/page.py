"""The page and the table of a comparison: HTML that needs no other file, and Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroband.observe.status import human_bytes
from zeroband.tools.compare.claims import ClaimVerdict
from zeroband.tools.compare.results import Outcome
from zeroband.tools.compare.table import ALONE, REFERENCE, Row, find, gap, ppl_ratio, statement
from zeroband.tools.document import html as parts
from zeroband.tools.document.line_chart import Chart, draw

COLUMNS: Mapping[str, str] = {
    "method": "settings behind the name",
    "lr": "peak learning rate of the inner optimizer, the best of those tried; (edge): no worse one on one side",
    "loss": "held-out, nats per token, mean over the seeds; +-: half of the distance between best and worst seed",
    "ppl": "perplexity, exp(loss)",
    "of ddp": "perplexity over that of ddp at its best learning rate",
    "gap closed": "part of the loss between one node alone and ddp that the method gains",
    "2N/up": "2 bytes a parameter and step over what a node has to say (its payload, however often it is sent)",
    "up": "bytes sent by a node for each of its tokens",
    "down": "bytes received",
    "peak": "most bytes that a node sent in one synchronisation",
    "computes": "part of the time in which a node computed, here, where nodes share the processor",
    "at link": "the same for the chosen link, from counted bytes and measured times by the formulas of `zeroband plan`",
    "rounds": "outer updates",
    "wall": "of the run here, with starting and ending its processes; at the link: simulated",
}
"""Columns of the table, and what they mean."""
UNITS: Mapping[str, str] = {
    "loss": "nats/token",
    "of ddp": "ratio",
    "gap closed": "%",
    "2N/up": "ratio",
    "up": "bytes/token",
    "down": "bytes/token",
    "peak": "bytes",
    "computes": "% of time",
    "at link": "% of time",
    "wall": "here, at the link",
}
"""Units of columns, for the page."""


@dataclass(frozen=True)
class ResultPage:
    """Everything that the page shows."""

    title: str
    command: str
    setting: Sequence[tuple[str, str]]
    """Machine, model, data, link: name and value."""
    rows: Sequence[Row]
    outcomes: Sequence[Outcome]
    """The runs, those of the other learning rates among them."""
    verdicts: Sequence[ClaimVerdict]
    cautions: Sequence[str]
    charts: Sequence[Chart]


def cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """A line of the table; a dash for what is not known."""
    if row.loss is None or row.measured is None or row.lr is None or row.at_link is None or row.perplexity is None:
        return (row.arm, "failed" if row.failures else "diverged", *("-" for _ in range(len(COLUMNS) - 2)))
    reference, found = find(rows, REFERENCE), row.measured
    closed = gap(row, find(rows, ALONE), reference)
    spread = f" +-{row.spread / 2:.4f}" if len(row.losses) > 1 else ""
    wall = f"{row.runs[0].took_s:.0f} s, {found.steps * row.at_link.step_s:.0f} s"
    return (
        row.arm,
        f"{row.lr:g}" + ("" if row.is_bracketed else " (edge)"),
        f"{row.loss:.4f}{spread}",
        f"{row.perplexity:.3f}",
        _number(ppl_ratio(row, reference), "{:.4f}"),
        _number(None if closed is None or row.arm == ALONE else 100 * closed, "{:.0f} %"),
        _number(row.payload_ratio, "{:.4g}"),
        f"{found.sent_per_token:.4g}",
        f"{found.received_per_token:.4g}",
        human_bytes(found.peak_bytes),
        f"{100 * found.compute_utilisation:.1f} %",
        f"{100 * row.at_link.compute_utilisation:.1f} %",
        str(found.rounds),
        wall,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def markdown(report: ResultPage) -> str:
    """The table, what has to be said of it, and the claims, for a terminal and for docs."""
    header = [" | ".join(COLUMNS), "|".join("---" for _ in COLUMNS)]
    body = [" | ".join(cells(row, report.rows)) for row in report.rows]
    lines = [f"| {line} |" if "---|" not in line else f"|{line}|" for line in (*header, *body)]
    said = [f"- {line}" for line in (*statement(report.rows), *map(str, report.verdicts))]
    return "\n".join([*lines, *([""] if said else []), *said])


def html(report: ResultPage) -> str:
    """The whole page."""
    body = [
        f"<h1>{parts.text(report.title)}</h1>",
        '<p class="lead">Methods of distributed training, from one start, on the same data, each at its best learning '
        "rate.</p>",
        parts.section(
            "Results",
            parts.table(
                tuple(COLUMNS), [cells(row, report.rows) for row in report.rows], units=UNITS, meanings=COLUMNS
            ),
            parts.folded("What the columns mean", parts.definitions(list(COLUMNS.items()))),
        ),
        parts.section("Before believing it", parts.bullets(statement(report.rows))),
        parts.section("What it should show", parts.bullets([str(verdict) for verdict in report.verdicts])),
        parts.section(
            "Held-out loss",
            parts.side_by_side(*(parts.card(f"Against {chart.x_label}", draw(chart)) for chart in report.charts)),
        ),
        parts.section(
            "Setting", parts.definitions(report.setting), f"<pre>{parts.text(report.command)}</pre>", anchor="setting"
        ),
        parts.section("Known of these settings", parts.bullets(report.cautions)),
        parts.section(
            "All runs",
            parts.table(
                ("method", "lr", "seed", "state", "loss", "took", "why"),
                [_run(outcome) for outcome in report.outcomes],
                units={"loss": "nats/token", "took": "s"},
            ),
        ),
    ]
    return parts.document(report.title, body)


def _run(outcome: Outcome) -> tuple[str, ...]:
    loss = _number(outcome.loss, "{:.4f}")
    why = outcome.failure.splitlines()[0] if outcome.failure else ""
    place = (outcome.arm, f"{outcome.lr:g}", str(outcome.seed))
    return (*place, outcome.state, loss, f"{outcome.took_s:.0f}", why)

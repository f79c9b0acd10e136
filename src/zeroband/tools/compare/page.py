"""The page and the table of a comparison: HTML that needs no other file, and Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from zeroband.observe.status import human_bytes
from zeroband.tools.compare.claims import ClaimVerdict
from zeroband.tools.compare.curves import Chart
from zeroband.tools.compare.results import Outcome
from zeroband.tools.compare.svg import draw
from zeroband.tools.compare.table import ALONE, REFERENCE, Row, find, gap, ppl_ratio, statement

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
    sections = [
        f"<h1>{escape(report.title)}</h1>",
        _definitions(report.setting),
        f"<pre>{escape(report.command)}</pre>",
        _table(tuple(COLUMNS), [cells(row, report.rows) for row in report.rows], COLUMNS),
        _list("Before believing it", statement(report.rows)),
        _list("What it should show", [str(verdict) for verdict in report.verdicts]),
        *(f"<figure>{draw(chart)}</figure>" for chart in report.charts),
        _list("Known of these settings", report.cautions),
        "<h2>All runs</h2>",
        _table(("method", "lr", "seed", "state", "loss", "seconds", "why"), [_run(o) for o in report.outcomes], {}),
        "<h2>Columns</h2>",
        _definitions(list(COLUMNS.items())),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(report.title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(filter(None, sections)) + "\n</body></html>\n"
    )


def _run(outcome: Outcome) -> tuple[str, ...]:
    loss = _number(outcome.loss, "{:.4f}")
    why = outcome.failure.splitlines()[0] if outcome.failure else ""
    place = (outcome.arm, f"{outcome.lr:g}", str(outcome.seed))
    return (*place, outcome.state, loss, f"{outcome.took_s:.0f}", why)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], meanings: Mapping[str, str]) -> str:
    head = "".join(f'<th title="{escape(meanings.get(name, name))}">{escape(name)}</th>' for name in header)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{escape(title)}</h2><ul>{items}</ul>" if lines else ""


def _definitions(pairs: Sequence[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
table { display: block; overflow-x: auto }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap }
pre { background: #f5f5f5; padding: .6rem; overflow-x: auto }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem } dt { font-weight: 600 } dd { margin: 0 }
figure { margin: 1rem 0 } svg { width: 100%; max-width: 760px; font: 12px system-ui, sans-serif }
svg .frame { fill: none; stroke: #999 } svg .grid { stroke: #eee }
"""

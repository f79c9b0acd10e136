"""The table and the report of a comparison, in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zeroband.config.model import LlamaConfig, Model
from zeroband.observe.words import human_bytes, human_count, markdown_table
from zeroband.tools.compare.claims import ClaimVerdict
from zeroband.tools.compare.figures import Y_LABEL, Chart
from zeroband.tools.compare.results import RunResult
from zeroband.tools.compare.table import ALONE, REFERENCE, Row, figure_of, find, statement

COLUMNS: Mapping[str, str] = {
    "method": "method with its settings",
    "lr": "best peak learning rate of the inner optimizer; (edge): not bracketed by worse ones on both sides",
    "loss": "held-out, nats per token, mean over the seeds; +-: half of the difference between worst and best seed",
    "ppl": "perplexity, exp(loss)",
    "of ddp": "perplexity over that of ddp at its best learning rate",
    "gap closed": "fraction of the loss difference between a single node and ddp that the method gains",
    "2N/up": "2 bytes per parameter and step over a node's contribution, independent of how often it is sent",
    "up": "bytes sent by a node per token",
    "down": "bytes received by a node per token",
    "peak": "maximum bytes that a node sent in one synchronisation",
    "computes": "fraction of the time in which a node computed on this machine, whose CPUs the nodes share",
    "at link": "the same for the chosen link, from counted bytes and measured times by the formulas of `zeroband plan`",
    "rounds": "outer updates",
    "wall": "wall time of the run here, process start-up included; for the link, simulated",
}
"""Columns of the table and their meanings."""
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
"""Units of columns."""


@dataclass(frozen=True)
class ComparisonResult:
    """Contents of the report."""

    title: str
    command: str
    setting: Sequence[tuple[str, str]]
    """Machine, model, data, link: name and value."""
    rows: Sequence[Row]
    outcomes: Sequence[RunResult]
    """All runs, including other learning rates."""
    verdicts: Sequence[ClaimVerdict]
    cautions: Sequence[str]
    charts: Sequence[Chart]


def cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a row of the table; `-` for unknown values."""
    if row.loss is None or row.measured is None or row.lr is None or row.at_link is None or row.perplexity is None:
        return (row.arm, "failed" if row.failures else "diverged", *("-" for _ in range(len(COLUMNS) - 2)))
    found = row.measured
    alone, reference = (other and other.loss for other in (find(rows, ALONE), find(rows, REFERENCE)))
    closed = figure_of("gap", row.loss, alone, reference)
    spread = f" +-{row.spread / 2:.4f}" if len(row.losses) > 1 else ""
    wall = f"{row.runs[0].took_s:.0f} s, {found.steps * row.at_link.step_s:.0f} s"
    return (
        row.arm,
        f"{row.lr:g}" + ("" if row.is_bracketed else " (edge)"),
        f"{row.loss:.4f}{spread}",
        f"{row.perplexity:.3f}",
        _number(figure_of("ppl_ratio", row.loss, reference), "{:.4f}"),
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


def table(report: ComparisonResult) -> str:
    """Return the results, caveats and verdicts, for a terminal and for documents."""
    said = _bullets([*statement(report.rows), *map(str, report.verdicts)])
    results = markdown_table(list(COLUMNS), [cells(row, report.rows) for row in report.rows])
    return "\n".join([results, *(["", said] if said else [])])


def document(report: ComparisonResult, figures: Sequence[str]) -> str:
    """Return the report: the table, then details. `figures`: names of the files next to it."""
    meanings = [f"{name}{f' ({UNITS[name]})' if name in UNITS else ''}: {meaning}" for name, meaning in COLUMNS.items()]
    runs = markdown_table(
        ("method", "lr", "seed", "state", "loss, nats/token", "took, s", "why"), map(_run, report.outcomes)
    )
    images = [
        f"![{Y_LABEL} against {chart.x_label}]({chart.name}.png)"
        for chart in report.charts
        if f"{chart.name}.png" in figures
    ]
    parts = {
        "Held-out loss": "\n\n".join(images),
        "What the columns mean": _bullets(meanings),
        report.title: "\n".join(
            ["```bash", report.command, "```", "", markdown_table(("name", "value"), report.setting)]
        ),
        "Known of these settings": _bullets(report.cautions),
        "All runs": runs,
    }
    shown = [f"## {title}\n\n{text}" for title, text in parts.items() if text]
    return "\n\n".join([table(report), *shown]) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _run(outcome: RunResult) -> tuple[str, ...]:
    loss = _number(outcome.loss, "{:.4f}")
    why = outcome.failure.splitlines()[0] if outcome.failure else ""
    place = (outcome.arm, f"{outcome.lr:g}", str(outcome.seed))
    return (*place, outcome.state, loss, f"{outcome.took_s:.0f}", why)


def model_in_words(config: Model, parameters: int | None) -> str:
    """Describe a model's size and shape. `parameters`: None or 0 if unknown."""
    size = f"{human_count(parameters)} trained parameters: " if parameters else ""
    if not isinstance(config, LlamaConfig):
        values = config.model_dump(exclude_none=True, exclude={"type"})
        keys = ", ".join(f"{name} {value}" for name, value in values.items())
        return f"{size}{config.type} ({keys})" if keys else f"{size}{config.type}"
    heads = f"{config.n_heads} heads"
    if config.kv_heads != config.n_heads:
        heads += f" over {config.kv_heads} of keys and values"
    tied = "tied to the output head" if config.tie_embeddings else "not tied to the output head"
    return (
        f"{size}a Llama decoder of {config.n_layers} layers, width {config.d_model}, {heads}, "
        f"SwiGLU of {config.ff_width}; embedding {tied}"
    )

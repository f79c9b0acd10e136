"""Held-out loss along the runs, as series for a chart. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from zeroband.tools.compare.table import Row
from zeroband.tools.document.line_chart import Chart, Series


def charts(rows: Sequence[Row], link: str) -> tuple[Chart, ...]:
    """Loss against tokens, against bytes sent, and against wall-clock at a link."""
    return (
        Chart("loss-tokens", "tokens of all nodes", False, _series(rows, _tokens)),
        Chart("loss-bytes", "bytes that a node sent", True, _series(rows, _bytes)),
        Chart("loss-time", f"seconds, simulated for {link}", True, _series(rows, _seconds)),
    )


def _tokens(row: Row, share: float) -> float:
    return share * row.measured.tokens if row.measured else 0.0


def _bytes(row: Row, share: float) -> float:
    return share * row.measured.sent_bytes if row.measured else 0.0


def _seconds(row: Row, share: float) -> float:
    return share * row.measured.steps * row.at_link.step_s if row.measured and row.at_link else 0.0


def _series(rows: Sequence[Row], x_of: Callable[[Row, float], float]) -> tuple[Series, ...]:
    """The mean over the seeds at each place; without places at 0, and methods that have none."""
    found: list[Series] = []
    for place, row in enumerate(rows):
        if row.measured is None:
            continue
        last = row.runs[0].points[-1].step
        places = [(point.step / last, _mean_loss(row, point.step)) for point in row.runs[0].points]
        shown = [(x_of(row, share), loss) for share, loss in places if loss is not None and x_of(row, share) > 0]
        if shown:
            found.append(Series(row.arm, place, tuple(x for x, _ in shown), tuple(y for _, y in shown)))
    return tuple(found)


def _mean_loss(row: Row, step: int) -> float | None:
    """Mean over the seeds; None where one has none: a checkpoint is skipped while the one before is being written."""
    losses = [point.loss for run in row.runs for point in run.points if point.step == step and point.loss is not None]
    return statistics.mean(losses) if len(losses) == len(row.runs) else None

"""Curves over one axis: a line chart as SVG text in the design of the documents. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroband.observe.status import human_count
from zeroband.tools.document.html import NOT_MEASURED, text

COLOURS = 6
"""Colours of the design; further lines have them again, dashed."""

_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 40
_DOTS = 40
"""Most points of a line that are shown one by one."""
_READ = 12
"""Rows of the table of values."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    number: int
    """Gives its colour: the same in every chart of a document."""
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    is_dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one axis."""

    name: str
    """Short name, that of its file where it has one."""
    x_label: str
    is_log: bool
    series: tuple[Series, ...]
    y_label: str = "held-out loss, nats per token"


class _Axis:
    """Maps values to pixels; a little room at both ends."""

    def __init__(self, values: Sequence[float], first: float, last: float, *, is_log: bool) -> None:
        self._is_log, self._first, self._last = is_log, first, last
        low, high = min(values), max(values)
        room = 0.04 * (self._scaled(high) - self._scaled(low)) or 0.5
        self._low, self._high = self._scaled(low) - room, self._scaled(high) + room
        self.ticks = ticks(self._value(self._low), self._value(self._high), is_log=is_log)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def _value(self, scaled: float) -> float:
        return 10**scaled if self._is_log else scaled

    def at(self, value: float) -> float:
        """Pixels from the left, or from the top."""
        share = (self._scaled(value) - self._low) / (self._high - self._low)
        return round(self._first + share * (self._last - self._first), 1)


def colour(number: int) -> str:
    """Class of a line's colour."""
    return f"s{number % COLOURS + 1}"


def draw(chart: Chart) -> str:
    """The chart with its legend; a sentence where nothing can be drawn. Points of y=None are gaps."""
    shown = [series for series in chart.series if any(y is not None for y in series.ys)]
    if not shown:
        return f'<p class="none">{text(chart.y_label)} against {text(chart.x_label)}: {NOT_MEASURED}</p>'
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    x = _Axis([v for s in shown for v in s.xs], _LEFT, right, is_log=chart.is_log)
    y = _Axis([v for s in shown for v in s.ys if v is not None], bottom, _TOP, is_log=False)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(chart.y_label)} against '
        f'{text(chart.x_label)}" xmlns="http://www.w3.org/2000/svg">',
        *(_vertical(x.at(tick), bottom, human_count(tick)) for tick in x.ticks),
        *(_horizontal(y.at(tick), right, human_count(tick) if abs(tick) >= 1e4 else f"{tick:g}") for tick in y.ticks),
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{text(chart.x_label)}</text>',
    ]
    for series in shown:
        is_dashed = " is-dashed" if series.number >= COLOURS or series.is_dashed else ""
        for xs, ys in _stretches(series):
            points = [(x.at(a), y.at(b)) for a, b in zip(xs, ys, strict=True)]
            path = " ".join(f"{a},{b}" for a, b in points)
            parts.append(f'<polyline class="line {colour(series.number)}{is_dashed}" points="{path}"/>')
            if len(points) == 1 or len(series.xs) <= _DOTS:
                parts += [
                    f'<circle class="dot {colour(series.number)}" cx="{a}" cy="{b}" r="2.5">'
                    f"<title>{text(series.name)}: {value:.4g}</title></circle>"
                    for (a, b), value in zip(points, ys, strict=True)
                ]
    legend = [(colour(series.number), series.name) for series in shown]
    return f"<figure>{legend_of(legend)}{''.join(parts)}</svg></figure>"


def legend_of(items: Sequence[tuple[str, str]]) -> str:
    """What colours mean: class and words."""
    keys = "".join(
        '<li><svg viewBox="0 0 10 10" aria-hidden="true">'
        f'<rect class="key {name}" width="10" height="10" rx="3"/></svg>{text(words)}</li>'
        for name, words in items
    )
    return f'<ul class="legend">{keys}</ul>'


def readings(chart: Chart) -> list[tuple[str, ...]]:
    """Some points of every line in figures: name, x, y; the first and the last among them."""
    found: list[tuple[str, ...]] = []
    for series in chart.series:
        known = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if y is not None]
        stride = max(1, -(-len(known) // _READ))
        chosen = sorted({*range(0, len(known), stride), len(known) - 1} - {-1})
        found += [(series.name, human_count(known[i][0]), f"{known[i][1]:.4g}") for i in chosen]
    return found


def _stretches(series: Series) -> list[tuple[list[float], list[float]]]:
    """The line without its gaps, in pieces."""
    pieces: list[tuple[list[float], list[float]]] = [([], [])]
    for a, b in zip(series.xs, series.ys, strict=True):
        if b is not None:
            pieces[-1][0].append(a)
            pieces[-1][1].append(b)
        elif pieces[-1][0]:
            pieces.append(([], []))
    return [piece for piece in pieces if piece[0]]


def _vertical(at: float, bottom: float, label: str) -> str:
    return (
        f'<line x1="{at}" y1="{_TOP}" x2="{at}" y2="{bottom}" class="grid"/>'
        f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{label}</text>'
    )


def _horizontal(at: float, right: float, label: str) -> str:
    return (
        f'<line x1="{_LEFT}" y1="{at}" x2="{right}" y2="{at}" class="grid"/>'
        f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{label}</text>'
    )


def ticks(low: float, high: float, *, is_log: bool) -> tuple[float, ...]:
    """Round numbers that lie in a range, about five of them."""
    if not low < high:
        return (low,)
    if is_log:
        decades = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        if len(decades) >= 2:
            return tuple(10.0**d for d in decades)
        steps = (
            m * 10.0**d for d in range(math.floor(math.log10(low)), math.ceil(math.log10(high))) for m in (1, 2, 5)
        )
        return tuple(t for t in steps if low <= t <= high)
    raw = (high - low) / 5
    unit = 10 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    first = math.ceil(low / step - 1e-9)
    return tuple(round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1))

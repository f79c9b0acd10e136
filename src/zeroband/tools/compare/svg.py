"""A line chart as SVG text, for a page that needs nothing else. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from zeroband.observe.status import human_count
from zeroband.tools.compare.curves import Chart, ticks

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 16, 46


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


def draw(chart: Chart) -> str:
    """The chart; a sentence where nothing can be drawn."""
    if not chart.series:
        return f"<p>{escape(chart.x_label)}: no run to draw.</p>"
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    x = _Axis([v for s in chart.series for v in s.xs], _LEFT, right, is_log=chart.is_log)
    y = _Axis([v for s in chart.series for v in s.ys], bottom, _TOP, is_log=False)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(chart.y_label)} against '
        f'{escape(chart.x_label)}" xmlns="http://www.w3.org/2000/svg">',
        f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" class="frame"/>',
        *(_vertical(x.at(tick), bottom, human_count(tick)) for tick in x.ticks),
        *(_horizontal(y.at(tick), right, f"{tick:g}") for tick in y.ticks),
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>',
        f'<text transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>",
    ]
    for number, series in enumerate(chart.series):
        colour = COLOURS[series.number % len(COLOURS)]
        points = [(x.at(a), y.at(b)) for a, b in zip(series.xs, series.ys, strict=True)]
        path = " ".join(f"{a},{b}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a}" cy="{b}" r="3" fill="{colour}"/>' for a, b in points]
        at = _TOP + 14 + 18 * number
        parts.append(f'<rect x="{right + 12}" y="{at - 9}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{right + 30}" y="{at - 3}">{escape(series.name)}</text>')
    return "\n".join([*parts, "</svg>"])


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

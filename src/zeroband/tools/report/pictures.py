"""Rounds and memberships of a run as SVG text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroband.observe.history import RoundView, Span
from zeroband.tools.document.html import NOT_MEASURED, text
from zeroband.tools.document.line_chart import legend_of, ticks
from zeroband.tools.report.facts_in_words import PHASES, duration, phases, when

_WIDTH, _LEFT, _TOP, _BOTTOM = 960, 56, 8, 36
_ROUNDS_HEIGHT, _LANE, _NAME = 240, 22, 110
_MOST_LANES = 200
_CLOSE = "</svg></div>"


def draw_rounds(rounds: Sequence[RoundView]) -> str:
    """A bar for each round, or stretch of them: seconds of each phase, the mean over the nodes."""
    shown = [(one, _means(one)) for one in rounds if one.nodes and any(_means(one))]
    highest = max((sum(parts) for _, parts in shown), default=0.0)
    if not highest:
        return f'<p class="none">Seconds of each round: {NOT_MEASURED}</p>'
    bottom, step = _ROUNDS_HEIGHT - _BOTTOM, (_WIDTH - _LEFT - 8) / len(shown)
    scale = (bottom - _TOP) / highest
    parts = [_open(_ROUNDS_HEIGHT, "seconds of each round, by phase")]
    for tick in ticks(0.0, highest, is_log=False):
        y = round(bottom - tick * scale, 1)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{_WIDTH - 8}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for number, (one, seconds) in enumerate(shown):
        x, y = _LEFT + number * step, float(bottom)
        width = max(0.5, step * 0.86 if step > 3 else step)
        said = ", ".join(f"{name} {value:.3g} s" for name, value in zip(PHASES, seconds, strict=True))
        label = f"round {one.round}" if one.rounds == 1 else f"{one.rounds} rounds up to {one.round}"
        parts.append(f"<g><title>{text(f'{label}, {one.members} members: {said}')}</title>")
        for name, value in zip(PHASES, seconds, strict=True):
            height = value * scale
            y -= height
            if height > 0:
                at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.2f}"'
                parts.append(f'<rect class="block {name}" {at}/>')
        parts.append("</g>")
    for number in sorted({0, len(shown) // 2, len(shown) - 1}):
        x = _LEFT + (number + 0.5) * step
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{shown[number][0].round}</text>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_ROUNDS_HEIGHT - 4}" text-anchor="middle">round</text></svg></div>'
    )
    return f"<figure>{legend_of([(name, f'{name}, s') for name in PHASES])}{''.join(parts)}</figure>"


def _means(one: RoundView) -> tuple[float, ...]:
    values = [phases(took) for took in one.nodes.values()]
    return tuple(sum(part) / len(values) for part in zip(*values, strict=True))


def draw_membership(membership: Mapping[str, Sequence[Span]], from_s: float | None, to_s: float | None) -> str:
    """A lane for each node: where it stood when."""
    lanes = [(node_id, spans) for node_id, spans in membership.items() if spans][:_MOST_LANES]
    if from_s is None or to_s is None or not lanes:
        return f'<p class="none">Membership over time: {NOT_MEASURED}</p>'
    whole_s = max(to_s - from_s, 1e-9)
    height = len(lanes) * _LANE + 24
    room = _WIDTH - _NAME - 8
    parts = [_open(height, "where each node stood when")]
    for number, (node_id, spans) in enumerate(lanes):
        y = number * _LANE
        short = node_id if len(node_id) <= 16 else f"{node_id[:15]}…"
        parts.append(f'<text x="0" y="{y + 14}">{text(short)}<title>{text(node_id)}</title></text>')
        parts.append(f'<rect class="lane" x="{_NAME}" y="{y + 3}" width="{room}" height="{_LANE - 8}" rx="3"/>')
        for span in spans:
            end_s = to_s if span.to_s is None else span.to_s
            x = _NAME + room * max(0.0, span.from_s - from_s) / whole_s
            width = max(2.0, room * (min(end_s, to_s) - max(span.from_s, from_s)) / whole_s)
            width = min(width, max(2.0, _NAME + room - x))
            said = f"{node_id}: {span.standing} for {duration(max(0.0, end_s - span.from_s))} from {when(span.from_s)}"
            said += f" ({span.why})" if span.why else ""
            at = f'x="{min(x, _NAME + room - 2):.1f}" y="{y + 3}" width="{width:.1f}" height="{_LANE - 8}"'
            parts.append(f'<rect class="block {span.standing}" {at}><title>{text(said)}</title></rect>')
    bottom = len(lanes) * _LANE + 14
    parts.append(f'<text x="{_NAME}" y="{bottom}">start</text>')
    parts.append(
        f'<text x="{_WIDTH - 8}" y="{bottom}" text-anchor="end">{text(duration(to_s - from_s))}</text></svg></div>'
    )
    standings = dict.fromkeys(span.standing for _, spans in lanes for span in spans)
    return f"<figure>{legend_of([(name, name) for name in standings])}{''.join(parts)}</figure>"


def _open(height: float, label: str) -> str:
    return (
        f'<div class="scroll"><svg class="chart is-wide" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{label}" xmlns="http://www.w3.org/2000/svg">'
    )

"""The report as HTML: what a record says, section by section. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zeroband.data.ledger import SHARED, Range, count
from zeroband.observe.commands import command
from zeroband.observe.events import EVENTS
from zeroband.observe.history import Axis, Series
from zeroband.observe.status import human_bytes, lacking_in_words, sent_in_words
from zeroband.observe.words import event_in_words
from zeroband.tools.document import html
from zeroband.tools.document.html import NOT_MEASURED, text
from zeroband.tools.document.line_chart import Chart, draw, readings
from zeroband.tools.document.line_chart import Series as Line
from zeroband.tools.report import facts_in_words as words
from zeroband.tools.report.facts_in_words import Cost, duration, known, size, when
from zeroband.tools.report.pictures import draw_membership, draw_rounds
from zeroband.tools.report.record import FlatConfig, RunRecord

SHOWN_EVENTS = 300
_SHOWN_CHECKPOINTS = 20
_SHOWN_LINKS = 200
_SHOWN_NODES = 200
_SHOWN_RANGES = 5
_SOURCES = 6
_MOST_COLUMNS = 6
_KEPT = {"good": "kept", "bad": "BROKEN", "unknown": "not shown by this run"}
_LIGHTS = {"good": "✓", "bad": "!", "unknown": "?"}
_LEVELS = {10: "info", 20: "info", 30: "warning", 40: "error"}
_AXES: Mapping[Axis, str] = {"tokens": "tokens of all nodes", "time": "time", "bytes": "bytes that all nodes sent"}
_SCALES = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "hours"), (180, 60, "minutes"))


def page(record: RunRecord, cost: Cost | None = None) -> str:
    """The whole document. `cost`: None: no price was given."""
    body = [
        _head(record),
        _figures(record, cost),
        html.section("What to do next", html.bullets(words.next_steps(record)), anchor="next"),
        _promises(record),
        _curves(record),
        _rounds(record),
        _membership(record),
        _links(record),
        _audit(record),
        _checkpoints(record),
        _cost(record, cost),
        _events(record),
        _sample(record),
        _configuration(record.configs),
        _remarks(record),
        f"<footer>{text(f'{record.place}, read {when(record.made_at_s)} by zeroband {record.version}')}</footer>",
    ]
    return html.document(f"{record.run_id}: report", body)


def _head(record: RunRecord) -> str:
    state, level = words.state_of(record)
    history = record.history
    took = None if history.from_s is None or history.to_s is None else history.to_s - history.from_s
    stretch = f"{when(history.from_s)} to {when(history.to_s)}, {duration(took)}" if took is not None else NOT_MEASURED
    return (
        f'<h1>{text(record.run_id)} <span class="pill" data-state="{level}">{text(state)}</span></h1>'
        f'<p class="lead">{text(stretch)}</p>'
    )


def _figures(record: RunRecord, cost: Cost | None) -> str:
    view, history = record.history.view(), record.history
    first, last = view.first_loss, view.loss
    step = max((node.step for node in view.nodes), default=None)
    total = max((node.total_steps for node in view.nodes if node.total_steps), default=None)
    tokens = max((node.tokens for node in view.nodes), default=0) or None
    rate = history.mean_rate(view)
    parameters = next((node.parameters for node in view.nodes if node.parameters), None)
    saved = f"{view.ddp_bytes / view.sent_bytes:.3g} times less than data parallel" if view.sent_bytes else ""
    items = [
        ("Training loss", known(last, "{:.4f}"), f"nats/token, from {known(first, '{:.4f}')}"),
        ("Held-out loss", known(words.last_held_out(record), "{:.4f}"), "nats/token"),
        ("Inner steps", NOT_MEASURED if step is None else f"{step}", f"of {total}" if total else "no end set"),
        ("Tokens", words.count(tokens), "of all nodes"),
        ("Throughput", words.count(rate), "tokens/s, every wait counted"),
        ("Parameters", words.count(parameters), "trained"),
        ("Nodes", f"{len(view.nodes)}", f"round {view.round}" if view.round is not None else "no rounds"),
        ("Sent", human_bytes(view.sent_bytes) if view.sent_bytes else "nothing", saved),
    ]
    if cost is not None:
        items.append(("Cost", f"{cost.total:.2f} {cost.currency}", f"{cost.node_hours:.2f} node-hours"))
    return html.figures(items)


def _promises(record: RunRecord) -> str:
    shown = "".join(
        f'<div class="promise" data-state="{one.state}"><span class="light" aria-hidden="true">'
        f"{_LIGHTS[one.state]}</span><strong>{text(one.title)} "
        f'<span class="unit">{_KEPT[one.state]}</span>'
        f"</strong><p>{text(one.words)}</p>{html.bullets(one.evidence)}</div>"
        for one in words.promises(record)
    )
    return html.section("Promises", f'<div class="promises">{shown}</div>', anchor="promises")


# -- curves ---------------------------------------------------------------------------------------------------------


def _curves(record: RunRecord) -> str:
    names = "".join(
        f'<input type="radio" name="by" id="by-{axis}"{" checked" if number == 0 else ""}>'
        f'<label for="by-{axis}">{text(axis)}</label>'
        for number, axis in enumerate(_AXES)
    )
    choices = "".join(
        f'<div class="choice choice-{number}">{_curves_by(record, axis)}</div>' for number, axis in enumerate(_AXES, 1)
    )
    return html.section("Curves", f'<div class="switch">{names}{choices}</div>', anchor="curves")


def _curves_by(record: RunRecord, axis: Axis) -> str:
    by_key = {series.key: series for series in record.history.series(axis)}
    scale, label = _scale(record, axis)

    def line(series: Series, name: str, number: int, *, is_dashed: bool = False, factor: float = 1.0) -> Line:
        begin = (record.history.from_s or 0.0) if axis == "time" else 0.0
        xs = tuple((x - begin) / scale for x in series.x)
        ys = tuple(None if y is None else y * factor for y in series.y)
        return Line(name, number, xs, ys, is_dashed)

    def chart(name: str, y_label: str, *lines: Line) -> Chart:
        return Chart(name, label, False, lines, y_label)

    nothing = Series("", "", "", (), ())
    sources = [one for key, one in by_key.items() if key.startswith("loss/")][:_SOURCES]
    loss = chart(
        "loss",
        "nats/token",
        line(by_key.get("loss", nothing), "training loss", 0),
        line(by_key.get("held_out", nothing), "held-out loss", 1, is_dashed=True),
    )
    rate = chart("rate", "tokens/s", line(by_key.get("tokens_per_s", nothing), "tokens/s of all nodes", 2))
    charts = [("Loss, nats/token", loss), ("Throughput, tokens/s", rate)]
    if len(sources) > 1:
        lines = [line(one, one.key.removeprefix("loss/"), number) for number, one in enumerate(sources)]
        charts.append(("Loss by source, nats/token", chart("sources", "nats/token", *lines)))
    charts.append(("Nodes", chart("nodes", "nodes", line(by_key.get("nodes", nothing), "members", 3))))
    if by_key.get("mfu", nothing).y:
        mfu = line(by_key["mfu"], "model FLOP utilisation", 4, factor=100)
        charts.append(("Model FLOP utilisation, %", chart("mfu", "%", mfu)))
    return html.side_by_side(*(html.card(title, draw(one), _values(one)) for title, one in charts))


def _scale(record: RunRecord, axis: Axis) -> tuple[float, str]:
    """What x is divided by, and its label."""
    if axis != "time":
        return 1.0, _AXES[axis]
    history = record.history
    took = 0.0 if history.from_s is None or history.to_s is None else history.to_s - history.from_s
    for least, scale, unit in _SCALES:
        if took >= least:
            return float(scale), f"{unit} since the start"
    return 1.0, "seconds since the start"


def _values(chart: Chart) -> str:
    shown = html.table(("line", chart.x_label, "value"), readings(chart), units={"value": chart.y_label})
    return html.folded("Values", shown)


# -- rounds, nodes, links -------------------------------------------------------------------------------------------


def _rounds(record: RunRecord) -> str:
    rounds = record.history.rounds(most=240)
    if not rounds:
        return html.section("Rounds", f'<p class="none">Rounds: {NOT_MEASURED}</p>', anchor="rounds")
    rows: list[tuple[str, ...]] = []
    for node_id, seconds in sorted(words.shares(rounds).items())[:_SHOWN_NODES]:
        whole = sum(seconds)
        parts = [f"{part:.4g} ({100 * part / whole:.0f} %)" if whole else NOT_MEASURED for part in seconds]
        rows.append((node_id, *parts))
    retries = sum(one.retries for one in rounds)
    single = sum(one.rounds - (one.rounds > one.round) for one in rounds)  # the founding, 0, trains nothing
    about = (
        f"{single} committed rounds, mean over the nodes; older ones of a long run are drawn as means of neighbours. "
        f"Opened again because somebody was lost or late: {retries}."
    )
    table = html.table(("node", *words.PHASES), rows, units=dict.fromkeys(words.PHASES, "s, share"))
    cards = html.card("Seconds of a round", draw_rounds(rounds)) + html.card("Where each node's time went", table)
    return html.section("Rounds", cards, about=about, anchor="rounds")


def _membership(record: RunRecord) -> str:
    history = record.history
    view, membership = history.view(), history.membership()
    picture = draw_membership(membership, history.from_s, history.to_s)
    rows: list[tuple[str, ...]] = []
    for node in view.nodes[:_SHOWN_NODES]:
        spans = membership.get(node.node_id, ())
        rows.append(
            (
                node.node_id,
                spans[-1].standing if spans else node.state,
                f"{node.step}",
                known(node.loss, "{:.4f}"),
                known(node.tokens_per_s),
                known(None if node.mfu is None else 100 * node.mfu, "{:.1f}"),
                size(node.memory_bytes),
                human_bytes(node.sent_bytes),
                human_bytes(node.received_bytes),
                f"{node.starts}",
                (node.digest or NOT_MEASURED)[:12],
            )
        )
    table = html.table(
        ("node", "state", "step", "loss", "rate", "MFU", "memory", "sent", "received", "starts", "outer state"),
        rows,
        units={"loss": "nats/token", "rate": "tokens/s", "MFU": "%"},
    )
    more = len(view.nodes) - _SHOWN_NODES
    about = f"{sent_in_words(view)}." if view.sent_bytes else ""
    about += f" {more} more nodes are not listed." if more > 0 else ""
    cards = html.card("Membership", picture) + html.card("Nodes at the end", table)
    return html.section("Nodes", cards, about=about, anchor="nodes")


def _links(record: RunRecord) -> str:
    links = record.history.links()
    rows = [
        (
            one.from_id,
            one.to_id,
            known(one.mbit_s),
            known(one.rtt_ms),
            "cut off" if one.is_cut_off else "",
        )
        for one in links[:_SHOWN_LINKS]
    ]
    marked = [number for number, one in enumerate(links[:_SHOWN_LINKS]) if one.is_cut_off]
    units = {"rate": "Mbit/s", "round trip": "ms"}
    table = html.table(("from", "to", "rate", "round trip", "state"), rows, units=units, marked=marked)
    return html.section("Links", table or f'<p class="none">Links: {NOT_MEASURED}</p>', anchor="links")


# -- data, checkpoints, cost ----------------------------------------------------------------------------------------


def _audit(record: RunRecord) -> str:
    audit = record.audit
    if audit is None:
        said = f'<p class="none">Data audit: {NOT_MEASURED}; {text(record.audit_missing)}</p>'
        return html.section("Data audit", said, anchor="audit")
    rows = [
        (
            "all nodes" if corpus == SHARED else corpus,
            f"{account.trained}",
            f"{account.owed}",
            _ranges(account.repeated),
            _ranges(account.skipped),
        )
        for corpus, account in audit.accounts.items()
    ]
    marked = [number for number, account in enumerate(audit.accounts.values()) if not account.is_exact]
    verdict = "Every sample was trained once." if audit.is_exact else "The account does not add up."
    missing = audit.missing_rounds
    if missing:
        listed = ", ".join(map(str, missing[:_SHOWN_RANGES])) + (", ..." if len(missing) > _SHOWN_RANGES else "")
        verdict += f" Rounds that no node here recorded: {listed}."
    columns = ("corpus", "trained", "owed", "repeated", "skipped")
    table = html.table(columns, rows, units=dict.fromkeys(columns[1:], "samples"), marked=marked)
    return html.section("Data audit", table, about=f"{audit.rounds} rounds replayed. {verdict}", anchor="audit")


def _ranges(ranges: Sequence[Range]) -> str:
    shown = ", ".join(f"{start}..{stop - 1}" for start, stop in ranges[:_SHOWN_RANGES])
    more = ", ..." if len(ranges) > _SHOWN_RANGES else ""
    return f"{count(ranges)} ({shown}{more})" if ranges else "0"


def _checkpoints(record: RunRecord) -> str:
    found = record.history.checkpoints()
    rows = [
        (f"{one.step}", f"{one.round}", when(one.at_s), size(one.bytes), duration(one.took_s), one.node_id)
        for one in reversed(found[-_SHOWN_CHECKPOINTS:])
    ]
    table = html.table(("step", "round", "committed", "size", "took", "by"), rows)
    place = record.value("ckpt.path")
    where = f"In {place.rstrip('/')}/{record.run_id}; older ones may have been removed." if place and rows else ""
    none = "No checkpoint was committed." if record.configs else f"Checkpoints: {NOT_MEASURED}"
    return html.section("Checkpoints", table or f'<p class="none">{none}</p>', about=where, anchor="checkpoints")


def _cost(record: RunRecord, cost: Cost | None) -> str:
    hours = words.node_hours(record.history.membership(), record.history.to_s)
    pairs = [("node-hours", f"{hours:.3f}")]
    if cost is None:
        pairs.append(("cost", f"{NOT_MEASURED}: {command('report', record.place, '--price-per-hour', 'PRICE')}"))
        return html.section("Cost", html.definitions(pairs), anchor="cost")
    tokens = max((node.tokens for node in record.history.view().nodes), default=0)
    pairs += [
        ("price", f"{cost.per_hour:g} {cost.currency} an hour for each node"),
        ("cost", f"{cost.total:.2f} {cost.currency}"),
        ("per billion tokens", f"{cost.total / tokens * 1e9:.4g} {cost.currency}" if tokens else NOT_MEASURED),
    ]
    about = "A node counts from its start until it left, was lost or ended."
    return html.section("Cost", html.definitions(pairs), about=about, anchor="cost")


# -- events, sample, configuration ----------------------------------------------------------------------------------


def _events(record: RunRecord) -> str:
    events = record.history.events()
    rows: list[str] = []
    for event in reversed(events[-SHOWN_EVENTS:]):
        kind = EVENTS.get(event.kind)
        level = _LEVELS.get(kind.level if kind else 20, "info")
        said = event_in_words(event)
        rows.append(
            f"<tr><td>{text(when(event.at_s))}</td><td>{text(event.node_id)}</td>"
            f'<td class="words" data-level="{level}">{text(said[:600])}</td></tr>'
        )
    if not rows:
        return html.section("Events", f'<p class="none">Events: {NOT_MEASURED}</p>', anchor="events")
    more = len(events) - len(rows)
    about = "Newest first; what all members recorded is told once." + (f" {more} older ones left out." if more else "")
    table = (
        '<div class="scroll"><table><thead><tr><th scope="col">when</th><th scope="col">node</th>'
        f'<th scope="col">what</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
    return html.section("Events", table, about=about, anchor="events")


def _sample(record: RunRecord) -> str:
    if record.sample is None:
        return ""
    node_id, written = record.sample
    return html.section("Sample", f'<p class="sample">{text(written)}</p>', about=f"Written by {node_id} at the end.")


def _configuration(configs: Mapping[str, FlatConfig]) -> str:
    if not configs:
        return html.section("Configuration", f'<p class="none">Configuration: {NOT_MEASURED}</p>', anchor="config")
    one_node = next(iter(configs.values()))
    keys = sorted({key for config in configs.values() for key in config}, key=lambda key: ("." in key, key))
    by_section: dict[str, list[tuple[str, str]]] = {}
    differing: list[tuple[str, ...]] = []
    is_wide = len(configs) <= _MOST_COLUMNS
    for key in keys:
        values = {node_id: config.get(key, "not set") for node_id, config in configs.items()}
        is_common = len(set(values.values())) == 1
        rows = by_section.setdefault(key.rpartition(".")[0] or "top level", [])
        rows.append((key, one_node[key] if is_common else "differs, see above"))
        if not is_common:
            differing += [(key, *values.values())] if is_wide else [(key, *item) for item in values.items()]
    apart = ""
    if differing:
        columns = ("key", *configs) if is_wide else ("key", "node", "value")
        table = html.table(columns, differing, marked=range(len(differing)))
        apart = html.card("Keys that differ between nodes", table)
    parts = [html.folded(name, html.table(("key", "value"), rows)) for name, rows in sorted(by_section.items())]
    about = f"As each of {len(configs)} nodes resolved it; secrets are in none of its files."
    return html.section("Configuration", apart, html.card("All keys", *parts), about=about, anchor="config")


def _remarks(record: RunRecord) -> str:
    lines = list(record.problems)
    if record.skipped_lines:
        lines.append(f"Lines of the nodes' files that could not be read, and are missing: {record.skipped_lines}.")
    if lacking := lacking_in_words(replace(record.history.view(), has_all_machines=False)):
        lines.append(f"At its newest round {lacking}; the others' are on their machines.")
    offsets = {node_id: by for node_id, by in record.history.offsets().items() if by}
    lines += [
        f"The clock of {node_id} was {by:+.1f} s apart; its times are corrected."
        for node_id, by in sorted(offsets.items())
    ]
    return html.section("Remarks", html.bullets(lines), anchor="remarks")

"""Sections that a report adds to the board's documents: next steps, audit, cost, configuration. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from zeroband.data.ledger import SHARED, Range, count
from zeroband.observe.history import Axis
from zeroband.observe.lines import RoundView
from zeroband.observe.status import lacking_in_words
from zeroband.observe.words import command, first_of
from zeroband.tools.board.document import Encoder, series_document
from zeroband.tools.report.record import RunRecord, without_secrets

NOT_MEASURED = "not measured"
PHASES = ("compute", "wait", "transfer", "apply")

_MUCH = 0.2
"""Fraction of time that is worth a remark."""
_POINTS = 400
_SHOWN_NODES = 200
_MOST_COLUMNS = 6


def saved_data(record: RunRecord) -> dict[str, Any]:
    """Return the data of the saved page: the board's documents and the report's sections."""
    to_s = record.history.to_s
    age_s = None if to_s is None else max(0.0, round(record.made_at_s - to_s, 1))
    encoded = Encoder().state(
        record.history, record.run_id, record.setting, now_s=round(record.made_at_s, 1), age_s=age_s, at_s=None,
        problem=None,
    )  # fmt: skip
    state: dict[str, Any] = json.loads(encoded.body)
    state["guarantees"] = [_audited(one, record) for one in state["guarantees"]]
    series = {axis: json.loads(series_document(record.history, axis, _POINTS)) for axis in get_args(Axis)}
    last = [_phases(record), _audit(record), _cost(record), _configuration(record), _remarks(record)]
    first = [_part("What to do next", lines=next_steps(record, state))]
    return without_secrets({"state": state, "series": series, "first": first, "last": last})


def _part(title: str, about: str = "", *, lines: Sequence[str] = (), tables: Sequence[Any] = ()) -> dict[str, Any]:
    return {"title": title, "about": about, "lines": lines, "tables": tables}


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", is_folded: bool = False,
    is_marked: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return a table of texts. `is_folded`: collapsed; `is_marked`: highlighted."""
    return {"title": title, "columns": columns, "rows": rows, "is_folded": is_folded, "is_marked": is_marked}


def _audited(guarantee: dict[str, Any], record: RunRecord) -> dict[str, Any]:
    """Return a guarantee as on the board, with the ledger's replaced by the audit if there is one."""
    audit = record.audit
    if guarantee["key"] != "ledger" or audit is None or not audit.trained or guarantee["state"] == "bad":
        return guarantee
    if audit.is_exact:
        words = f"{audit.trained} samples of {audit.rounds} rounds were replayed: each was trained once."
        evidence = [*guarantee["evidence"][:1], "replayed for this report"]
        return {**guarantee, "state": "good", "words": words, "evidence": evidence}
    if audit.missing_rounds and all(account.is_exact for account in audit.accounts.values()):
        words = f"{len(audit.missing_rounds)} rounds were not recorded by any node here."
        return {**guarantee, "state": "unknown", "words": words}
    return {**guarantee, "state": "bad", "words": "Samples were repeated or skipped; see the audit below."}


# -- next steps -----------------------------------------------------------------------------------------------------


def next_steps(record: RunRecord, state: dict[str, Any]) -> list[str]:
    """Return recommended actions, the most urgent first. `state`: the state document."""
    is_finished = state["run"]["state"] == "finished"
    steps = _urgent(record, state)
    if state["nodes"] and not is_finished:
        steps.append(_unfinished(record, "failed" if state["run"]["state"] == "failed" else "not finished"))
    steps += [*_with_the_model(record), *_slow(record)]
    if steps or not is_finished:
        return steps or ["Nothing was recorded here; give the folder of a run, <run.dir>/<run.id>."]
    return ["Neither a checkpoint nor an export was kept; set ckpt.path or [export] to keep the model."]


def _urgent(record: RunRecord, state: dict[str, Any]) -> list[str]:
    place = record.setting.place
    broken = [one for one in state["guarantees"] if one["state"] == "bad"]
    stop = f"Keep {place} unchanged, and do not use this model before the cause is known."
    said = [
        f"{one['title']}: {one['words']} {stop if one['key'] in ('divergence', 'ledger') else 'See docs/faults.md.'}"
        for one in broken
    ]
    for node in state["nodes"]:
        if node["state"] == "failed":
            why = f" ({node['why']})" if node["why"] else ""
            said.append(f"{node['id']} failed{why}: read {place}/{node['id']}/rank0.log")
    view = record.history.view()
    if view.first_loss is not None and view.loss is not None and view.loss > view.first_loss:
        said.append(
            "The final loss is higher than the first: try a lower learning rate or more warm-up before a longer run."
        )
    return said


def _unfinished(record: RunRecord, state: str) -> str:
    if record.history.checkpoints():
        step = record.history.checkpoints()[-1].step
        return f"The run is {state}; the same command with --resume continues from the checkpoint of step {step}."
    return f"The run is {state} and no checkpoint was committed; set ckpt.path to be able to resume."


def _with_the_model(record: RunRecord) -> list[str]:
    said = [
        f"The trained model is in {event.fields.get('path')}, for transformers and vLLM."
        for event in record.history.events()
        if event.kind == "model_exported"
    ][-1:]
    place = record.value("ckpt.path")
    if record.history.checkpoints() and place is not None:
        where = f"{place.rstrip('/')}/{record.run_id}"
        if not said:
            said.append(f"Export the model for transformers and vLLM: {command('export', where, 'OUT')}")
        said.append(f"Evaluate it on your own text: {command('eval', where)}")
        said.append(f"Sample from it: {command('sample', where, '--prompt', 'TEXT')}")
    return said


def _slow(record: RunRecord) -> list[str]:
    spent = list(_seconds(record.history.rounds(most=1000)).values())
    whole = sum(map(sum, spent))
    if not whole:
        return []
    _, wait, transfer, _ = (sum(part) / whole for part in zip(*spent, strict=True))
    said: list[str] = []
    if wait > _MUCH:
        said.append(
            f"Nodes waited for each other {100 * wait:.0f} % of the time; the node that waits least in the table of "
            "phases is the slowest."
        )
    if transfer > _MUCH:
        said.append(
            f"Transfers took {100 * transfer:.0f} % of the time; `zeroband plan` shows what more inner steps or "
            "another codec would save, `zeroband doctor` measures the links."
        )
    return said


# -- phases, data, cost ---------------------------------------------------------------------------------------------


def _seconds(rounds: Sequence[RoundView]) -> dict[str, tuple[float, ...]]:
    """Return the total seconds of each node in each of PHASES."""
    spent: dict[str, tuple[float, ...]] = {}
    for one in rounds:
        for node_id, took in one.nodes.items():
            parts = (took.compute_s, took.wait_s, took.transfer_s, took.apply_s)
            before = spent.get(node_id, (0.0, 0.0, 0.0, 0.0))
            spent[node_id] = tuple(old + took.rounds * new for old, new in zip(before, parts, strict=True))
    return spent


def _phases(record: RunRecord) -> dict[str, Any]:
    rounds = record.history.rounds(most=240)
    if not rounds:
        return _part("Phases", f"Rounds: {NOT_MEASURED}")
    rows: list[tuple[str, ...]] = []
    for node_id, seconds in sorted(_seconds(rounds).items())[:_SHOWN_NODES]:
        whole = sum(seconds)
        parts = (f"{part:.4g} ({100 * part / whole:.0f} %)" if whole else NOT_MEASURED for part in seconds)
        rows.append((node_id, *parts))
    retries = sum(one.retries for one in rounds)
    single = sum(one.rounds - (one.rounds > one.round) for one in rounds)  # the founding, 0, trains nothing
    about = f"{single} committed rounds; reopened because a member was lost or late: {retries}."
    return _part("Phases", about, tables=[_table(("node", *(f"{phase}, s" for phase in PHASES)), rows)])


def _audit(record: RunRecord) -> dict[str, Any]:
    audit = record.audit
    if audit is None:
        return _part("Data audit", f"Data audit: {NOT_MEASURED}; {record.audit_missing}")
    rows = {is_exact: list[tuple[str, ...]]() for is_exact in (False, True)}
    for corpus, account in audit.accounts.items():
        name = "all nodes" if corpus == SHARED else corpus
        counts = (f"{account.trained}", f"{account.owed}", _ranges(account.repeated), _ranges(account.skipped))
        rows[account.is_exact].append((name, *counts))
    verdict = "Every sample was trained once." if audit.is_exact else "The ledger does not add up."
    if missing := audit.missing_rounds:
        verdict += f" Rounds not recorded by any node here: {first_of(missing)}."
    columns = ("corpus", "trained, samples", "owed", "repeated", "skipped")
    tables = [_table(columns, found, is_marked=not is_exact) for is_exact, found in rows.items() if found]
    return _part("Data audit", f"{audit.rounds} rounds replayed. {verdict}", tables=tables)


def _ranges(ranges: Sequence[Range]) -> str:
    shown = first_of([f"{start}..{stop - 1}" for start, stop in ranges[:6]])  # one more than are shown
    return f"{count(ranges)} ({shown})" if ranges else "0"


def _cost(record: RunRecord) -> dict[str, Any]:
    view, setting = record.history.view(), record.setting
    hours = record.history.node_hours([node.node_id for node in view.own])
    lines = [f"node-hours: {hours:.3f}"]
    if setting.price_per_hour is None:
        lines.append(f"cost: {NOT_MEASURED}: {command('report', setting.place, '--price-per-hour', 'PRICE')}")
        return _part("Cost", lines=lines)
    total, tokens = hours * setting.price_per_hour, view.tokens
    lines += [
        f"price: {setting.price_per_hour:g} {setting.currency} per hour and node",
        f"cost: {total:.2f} {setting.currency}",
        f"per billion tokens: {f'{total / tokens * 1e9:.4g} {setting.currency}' if tokens else NOT_MEASURED}",
    ]
    return _part("Cost", "Nodes count from their start until they left, were lost or ended.", lines=lines)


# -- configuration, remarks -----------------------------------------------------------------------------------------


def _configuration(record: RunRecord) -> dict[str, Any]:
    configs = record.configs
    if not configs:
        return _part("Configuration", f"Configuration: {NOT_MEASURED}")
    keys = sorted({key for config in configs.values() for key in config}, key=lambda key: ("." in key, key))
    by_section: dict[str, list[tuple[str, str]]] = {}
    differing: list[tuple[str, ...]] = []
    is_wide = len(configs) <= _MOST_COLUMNS
    for key in keys:
        values = {node_id: config.get(key, "not set") for node_id, config in configs.items()}
        is_common = len(set(values.values())) == 1
        rows = by_section.setdefault(key.rpartition(".")[0] or "top level", [])
        rows.append((key, next(iter(values.values())) if is_common else "differs, see above"))
        if not is_common:
            differing += [(key, *values.values())] if is_wide else [(key, *item) for item in values.items()]
    columns = ("key", *configs) if is_wide else ("key", "node", "value")
    apart = [_table(columns, differing, title="Keys that differ between nodes", is_marked=True)] if differing else []
    common = [_table(("key", "value"), rows, title=name, is_folded=True) for name, rows in sorted(by_section.items())]
    about = f"As resolved by each of {len(configs)} nodes, without secrets."
    return _part("Configuration", about, tables=[*apart, *common])


def _remarks(record: RunRecord) -> dict[str, Any]:
    history, lines = record.history, list(record.problems)
    if record.skipped_lines:
        lines.append(f"Unreadable lines of the nodes' files: {record.skipped_lines}.")
    if lacking := lacking_in_words(replace(history.view(), has_all_machines=False)):
        lines.append(f"At its newest round {lacking}; the others' are on their machines.")
    lines += [
        f"The clock of {node_id} was {by:+.1f} s off; its times are corrected."
        for node_id, by in sorted(history.offsets().items())
        if by and math.isfinite(by)
    ]
    return _part("Remarks", "" if lines else "Every line of the nodes' files was read.", lines=lines)

"""What a report says of a run in sentences and figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from zeroband.observe.commands import command
from zeroband.observe.history import NodeRound, Promise, RoundView, Span
from zeroband.observe.status import human_bytes, human_count
from zeroband.tools.document.html import NOT_MEASURED
from zeroband.tools.report.record import RunRecord

Level = Literal["good", "warning", "bad", "unknown"]

PHASES = ("compute", "wait", "transfer", "apply")

_MUCH = 0.2
"""Share of the time that is worth a remark."""
_AWAY = ("left", "lost", "failed", "finished")


@dataclass(frozen=True)
class Cost:
    """What the nodes of a run cost."""

    node_hours: float
    per_hour: float
    currency: str

    @property
    def total(self) -> float:
        return self.node_hours * self.per_hour


def when(at_s: float | None) -> str:
    """A wall-clock time, in UTC."""
    if at_s is None or not math.isfinite(at_s):
        return NOT_MEASURED
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def duration(seconds: float | None) -> str:
    """A stretch of time with two units at the most: `3 h 20 min`."""
    if seconds is None or not math.isfinite(seconds):
        return NOT_MEASURED
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def known(value: float | None, form: str = "{:.4g}") -> str:
    """A number, or that there is none."""
    return NOT_MEASURED if value is None or not math.isfinite(value) else form.format(value)


def count(value: float | None) -> str:
    """A count with a prefix, or that there is none."""
    return NOT_MEASURED if value is None else human_count(value)


def size(value: float | None) -> str:
    """Bytes with a prefix, or that there are none known."""
    return NOT_MEASURED if value is None else human_bytes(value)


def state_of(record: RunRecord) -> tuple[str, Level]:
    """How the run ended, as far as its files tell."""
    newest = {node_id: spans[-1] for node_id, spans in record.history.membership().items() if spans}
    standings = [span.standing for span in newest.values()]
    if not standings:
        return ("nothing recorded", "unknown")
    if "finished" in standings:
        return ("finished", "good")
    if all(standing == "failed" for standing in standings):
        return ("failed", "bad")
    if all(standing in _AWAY for standing in standings):
        return ("ended before its last step", "warning")
    return ("not finished when this was read", "warning")


def node_hours(membership: Mapping[str, Sequence[Span]], to_s: float | None) -> float:
    """Hours in which the nodes were up, summed up; a node that never said that it ended counts up to `to_s`."""
    total_s = 0.0
    for spans in membership.values():
        for span in spans:
            end_s = span.to_s if span.to_s is not None else to_s
            if span.standing not in _AWAY and end_s is not None:
                total_s += max(0.0, end_s - span.from_s)
    return total_s / 3600


def shares(rounds: Sequence[RoundView]) -> dict[str, tuple[float, float, float, float]]:
    """Seconds of each node's rounds that went into compute, wait, transfer and apply, summed up."""
    sums: dict[str, tuple[float, float, float, float]] = {}
    for one in rounds:
        for node_id, took in one.nodes.items():
            old = sums.get(node_id, (0.0, 0.0, 0.0, 0.0))
            new = phases(took)
            sums[node_id] = (
                old[0] + new[0] * one.rounds,
                old[1] + new[1] * one.rounds,
                old[2] + new[2] * one.rounds,
                old[3] + new[3] * one.rounds,
            )
    return sums


def phases(took: NodeRound) -> tuple[float, float, float, float]:
    """Seconds of compute, wait, transfer and apply of a node's round."""
    return (took.compute_s, took.wait_s, took.transfer_s, took.apply_s)


def last_held_out(record: RunRecord) -> float | None:
    """Newest held-out loss."""
    for series in record.history.series("tokens"):
        if series.key == "held_out":
            return next((y for y in reversed(series.y) if y is not None), None)
    return None


def promises(record: RunRecord) -> tuple[Promise, ...]:
    """The four promises; that of the data by the audit where it could be made."""
    found = record.history.promises()
    return tuple(_audited(one, record) if one.key == "ledger" else one for one in found)


def _audited(promise: Promise, record: RunRecord) -> Promise:
    audit = record.audit
    if audit is None or not audit.trained or promise.state == "bad":
        return promise
    words = f"{audit.trained} samples of {audit.rounds} rounds were replayed: each was trained once."
    if audit.is_exact:
        return Promise(promise.key, promise.title, "good", words, (*promise.evidence[:1], "replayed for this report"))
    if audit.missing_rounds and all(account.is_exact for account in audit.accounts.values()):
        missing = f"{len(audit.missing_rounds)} rounds were recorded by no node here, so that nothing is known of them."
        return Promise(promise.key, promise.title, "unknown", missing, promise.evidence)
    lost = "Samples were repeated or skipped, as the audit below lists."
    return Promise(promise.key, promise.title, "bad", lost, promise.evidence)


def next_steps(record: RunRecord) -> list[str]:
    """What a reader should do now, the most urgent first."""
    steps = [*_urgent(record), *_unfinished(record), *_with_the_model(record), *_slow(record)]
    if steps or state_of(record)[1] != "good":
        return steps
    return ["Neither a checkpoint nor an export was kept: set ckpt.path or [export] for a model that outlives its run."]


def _urgent(record: RunRecord) -> list[str]:
    said = [
        f"{one.title}: {one.words} Keep {record.place} as it is, and do not go on with this model before the cause is "
        "known."
        for one in promises(record)
        if one.state == "bad" and one.key in ("divergence", "ledger")
    ]
    said += [
        f"{one.title}: {one.words} See docs/faults.md."
        for one in promises(record)
        if one.state == "bad" and one.key not in ("divergence", "ledger")
    ]
    for node_id, spans in record.history.membership().items():
        if spans and spans[-1].standing == "failed":
            why = f" ({spans[-1].why})" if spans[-1].why else ""
            said.append(f"{node_id} failed{why}: read {record.place}/{node_id}/rank0.log")
    view = record.history.view()
    first, last = view.first_loss, view.loss
    if first is not None and last is not None and last > first:
        said.append(
            "The loss ends higher than it began: try a lower learning rate, or more warm-up, before a longer run."
        )
    return said


def _unfinished(record: RunRecord) -> list[str]:
    state, level = state_of(record)
    if level == "good":
        return []
    if record.history.checkpoints():
        step = record.history.checkpoints()[-1].step
        return [f"The run is {state}: the same command with --resume goes on from the checkpoint of step {step}."]
    return [
        f"The run is {state} and no checkpoint was committed: set ckpt.path, so that a next one can be gone on with."
    ]


def _with_the_model(record: RunRecord) -> list[str]:
    said = [
        f"The trained model lies in {event.fields.get('path')}: transformers and vLLM load it."
        for event in record.history.events()
        if event.kind == "model_exported"
    ][-1:]
    place = record.value("ckpt.path")
    if record.history.checkpoints() and place is not None:
        where = f"{place.rstrip('/')}/{record.run_id}"
        if not said:
            said.append(f"Make a model that transformers and vLLM load: {command('export', where, 'OUT')}")
        said.append(f"Measure it on text of your own: {command('eval', where)}")
        said.append(f"Read what it writes: {command('sample', where, '--prompt', 'TEXT')}")
    return said


def _slow(record: RunRecord) -> list[str]:
    totals = [0.0, 0.0, 0.0, 0.0]
    for seconds in shares(record.history.rounds(most=1000)).values():
        totals = [a + b for a, b in zip(totals, seconds, strict=True)]
    whole = sum(totals)
    if not whole:
        return []
    _, wait, transfer, _ = (part / whole for part in totals)
    said: list[str] = []
    if wait > _MUCH:
        said.append(
            f"Nodes waited for one another {100 * wait:.0f} % of the time: the table below the rounds shows who waits "
            "least, and so comes last."
        )
    if transfer > _MUCH:
        said.append(
            f"Transfers took {100 * transfer:.0f} % of the time: `zeroband plan` shows what more inner steps "
            "or another codec would save, `zeroband doctor` what the links carry."
        )
    return said

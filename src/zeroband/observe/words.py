"""Events, counts and lists in plain English, the same wherever they are shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeroband.observe.events import EVENTS
from zeroband.observe.view import EventView, node_id_of_member

EVENT_WORDS: Mapping[str, str] = {
    "node_started": "{node} has started.",
    "joined": "{node} is in: outer step {round} counts it as a member.",
    "epoch_changed": "Epoch {epoch}: {members} train together.",
    "round_committed": "Round {round} is committed.",
    "round_retried": "{node} tries round {round} again: {reason}.",
    "peer_lost": "Round {round} goes on without {member_ids}.",
    "transfer_stalled": "{node} got no byte of round {round} from {waiting_for} for {since_s} s: {reason}.",
    "blamed": "Round {round} failed because of {member_ids} ({consequence}): {reason}.",
    "update_refused": "The update of {node} was left out of round {round}: {reason}.",
    "payload_refused": "What {member_id} sent in round {round} was left out: {reason}.",
    "payload_scored": "What {member_id} sent in round {round} is worth {gain} of what the others sent.",
    "record_refused": "What {member_id} announced for round {round} was refused: {reason}.",
    "opening_refused": "{node} refused an opening of round {round}: {reason}.",
    "impostor": "Another node posed as {member_id} ({where}), without effect.",
    "same_batches": "{node} and {member_id} learned from the same batches in round {round}.",
    "paused": "The run is paused before round {round}, as an operator ordered.",
    "resumed": "The run goes on with round {round} after a pause of {paused_s} s.",
    "drained": "{node} leaves after round {round}, as an operator ordered.",
    "rolled_back": "The run went back to the checkpoint of step {step}.",
    "rollback_ordered": "The loss of round {round} calls for going back to step {step}: {reason}.",
    "rollback_given_up": "The loss of round {round} calls for going back, which was given up: {reason}.",
    "rollback_refused": "{node} cannot go back to step {step}: {reason}.",
    "resumed_from": "The run begins again on the checkpoint of step {step}.",
    "newer_checkpoint": "{node} has a checkpoint of step {step}; the run began again without it, and is at step {at}.",
    "checkpoints_apart": "{nodes} write whole checkpoints into {folder}; for {apart} ckpt.path is another folder.",
    "run_abandoned": "{node} finds no living member of the run and waits {wait_s} s for {members}.",
    "store_in_use": "{node} uses the store {store} of the run, in generation {generation}.",
    "lines_met": "{node} sees two lines of the run: {goes_on} goes on, {ends} ends.",
    "fenced": "The run went on without {node}, which comes back: {reason}.",
    "join_state": "{node} is {state}: {why}.",
    "links": "{node} measured its links to the other members.",
    "join_progress": "{node} has fetched {bytes} of the {of_bytes} of the run's state.",
    "recovering": "{node} is fetching the run's state from other members.",
    "recovered": "{node} holds the state of round {round}, verified, after {took_s} s.",
    "checkpoint_staged": "{node} copied the state of step {step} for a checkpoint.",
    "checkpoint_skipped": "{node} skipped the checkpoint of step {step}: the one before was still being written.",
    "checkpoint_share_written": "{node} wrote its share of the checkpoint of step {step} in {took_s} s.",
    "checkpoint_without": "The checkpoint of round {round} lacks the own state of {nodes}: {why}.",
    "checkpoint_left_out": "The checkpoint of step {step} lacks the own state of {node}: {reason}.",
    "checkpoint_committed": "The checkpoint of step {step} is complete, after {took_s} s.",
    "checkpoint_retrying": "{node} writes the checkpoint of step {step} again: {reason}.",
    "checkpoint_failed": "{node} could not write the checkpoint of step {step}: {reason}.",
    "checkpoints_lost": "The folder of checkpoints {folder} was removed; {node} makes it anew.",
    "checkpoints_removed": "{node} removed the older checkpoints of steps {steps}.",
    "evaluated": "{node} evaluated the model of step {step}: loss {loss}.",
    "sample_written": "{node} wrote a sample of the model's text.",
    "model_exported": "{node} exported the model: {parity}.",
    "left": "{node} left: {reason}.",
    "run_finished": "{node} has done all {step} steps.",
    "run_failed": "{node} failed: {error}.",
}
"""A sentence for each kind of event, with its fields and `node`, who recorded it."""

JOIN_WORDS: Mapping[str, str] = {
    "wait_old_lease": "makes sure that its name is free",
    "restore_local": "takes over what is left in memory",
    "discover": "looks into the store for the way in",
    "pick_checkpoint": "agrees with others on a checkpoint",
    "founding": "agrees with the other founders",
    "fetching": "fetches the state from members",
    "announcing": "waits for the next round",
    "catching_up": "replays the rounds that it missed",
    "rejoin": "takes another membership",
    "roll_back": "goes back to a checkpoint",
}
"""What a node does in each state of its way in."""

_MEMBERS = ("members", "member_ids", "waiting_for", "member_id")
_SHOWN_MEMBERS = 6
_UNITS = ("", "k", "M", "G", "T", "P")


def event_in_words(event: EventView) -> str:
    """An event as a sentence. Of a kind that is not known here, its meaning or its name; what it lacks is `?`."""
    words = EVENT_WORDS.get(event.kind)
    if words is None:
        known = EVENTS.get(event.kind)
        return f"{event.node_id}: {event.kind if known is None else known.meaning}"
    text = words.format_map(_Fields(fields_in_words(event)))
    return f"{text.rstrip('.')}."


def fields_in_words(event: EventView) -> dict[str, str]:
    """What an event says, for sentences, and `node`, who recorded it."""
    return {name: _in_words(name, value) for name, value in event.fields.items()} | {"node": event.node_id}


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names for a sentence; what is beyond the first few is counted."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def human_count(count: float) -> str:
    """A count with three digits and a decimal prefix: 1234567 is `1.23M`."""
    for unit in _UNITS[:-1]:
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}{_UNITS[-1]}"


def human_bytes(size_bytes: float) -> str:
    """Bytes with three digits and a decimal prefix: 1234567 is `1.23 MB`."""
    count = human_count(size_bytes)
    return f"{count[:-1]} {count[-1]}B" if count[-1] in _UNITS[1:] else f"{count} B"


def age(seconds: float) -> str:
    """A time span with its largest unit: 5400 is `1 h`."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table for a terminal: a line for each row, with its cells below those of the row before."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class _Fields(dict[str, str]):
    def __missing__(self, _key: str) -> str:
        return "?"


def _in_words(name: str, value: Any) -> str:
    if name in _MEMBERS:
        ids: Sequence[object] = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        return listed(sorted({node_id_of_member(str(one)) for one in ids}), _SHOWN_MEMBERS)
    if name in ("bytes", "of_bytes") and isinstance(value, int):
        return human_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(str, value[:_SHOWN_MEMBERS]))
    return "?" if value is None else str(value)

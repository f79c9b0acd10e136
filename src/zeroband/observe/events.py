"""Events: what happened to a node in a run, in one table, and the log that writes them. Local rank 0, any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zeroband.observe.log import get_logger
from zeroband.observe.sinks import RecordLog, Sink

EVENTS_FILE = "events.jsonl"
"""Name of the file inside a node's folder of the run directory."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class EventKind:
    """What a kind of event means, and the fields that it always carries (others may come along)."""

    words: str
    """A sentence of these fields and `node`, who recorded it."""
    meaning: str
    fields: tuple[str, ...] = ()
    level: int = logging.INFO
    """Level of its line in the log."""


EVENTS: Mapping[str, EventKind] = {
    "node_started": EventKind(
        "{node} has started.",
        "The trainer of this node is up and knows its model and data; detect_s: its fault.detect_s, where it trains "
        "with others.",
        ("total_steps", "local_world_size", "parameters"),
    ),
    "joined": EventKind(
        "{node} is in: it trains, and counts from outer step {round} on.",
        "This node trains with the others; round: the first that can count what it learns.",
        ("member_id", "round"),
    ),
    "first_step": EventKind(
        "{node} made its first inner step {after_s} s after its state was verified.",
        "The first inner step of a node that joined, came back or went back to a checkpoint is done; after_s: seconds "
        "since it held a verified state.",
        ("step", "after_s"),
    ),
    "epoch_changed": EventKind(
        "Epoch {epoch}: {members} train together.", "The list of members is another one.", ("epoch", "members")
    ),
    "round_committed": EventKind(
        "Round {round} is committed.",
        "An outer step counts; digest: of the outer state after it; samples: of each member, as the run deals them "
        "out, so that with zeroband.DiLoCoOptimizer an inner step is one. A trainer that goes on from memory "
        "says so of the round that it found there, too.",
        ("round", "epoch", "members", "digest"),
    ),
    "round_retried": EventKind(
        "{node} tries round {round} again: {reason}.",
        "An outer step could not be finished and is tried again.",
        ("round", "reason"),
        logging.WARNING,
    ),
    "peer_lost": EventKind(
        "Round {round} goes on without {member_ids}.",
        "Other members were lost; not those that left as they were asked to.",
        ("round", "member_ids"),
        logging.WARNING,
    ),
    "transfer_stalled": EventKind(
        "{node} got no byte of round {round} from {waiting_for} for {since_s} s: {reason}.",
        "No byte of a transfer came from these members for so long, at this byte; links that are silent are dropped, "
        "and the round is opened again.",
        ("round", "waiting_for", "since_s", "at_byte", "of_bytes", "reason"),
        logging.WARNING,
    ),
    "blamed": EventKind(
        "Round {round} failed because of {member_ids} ({consequence}): {reason}.",
        "What kept a round from its end, as its members testify: one member is at fault, or one of two. is_lie: bytes "
        "or words contradict each other; else something did not come. consequence: `named`, nothing yet; `apart`, the "
        "two do not take part in one round; `out`, the member is put out.",
        ("round", "member_ids", "reason", "is_lie", "consequence"),
        logging.ERROR,
    ),
    "update_refused": EventKind(
        "The update of {node} was left out of round {round}: {reason}.",
        "This node's update was not finite; the round goes on without it.",
        ("round", "reason"),
        logging.ERROR,
    ),
    "payload_refused": EventKind(
        "What {member_id} sent in round {round} was left out: {reason}.",
        "What a member sent is no payload, or cannot be added up; all leave it out.",
        ("round", "member_id", "reason"),
        logging.ERROR,
    ),
    "payload_scored": EventKind(
        "What {member_id} sent in round {round} is worth {gain} of what the others sent.",
        "What the members found the payload of one of them in this round to be worth, with outer.score; gain: by how "
        "much it lowers the loss of their held-out rows, as a part of what their own payloads do, -1 to 1; the median.",
        ("round", "member_id", "gain"),
    ),
    "record_refused": EventKind(
        "What {member_id} announced for round {round} was refused: {reason}.",
        "What a member announced for this round is out of range, or more than the run dealt to it: the round goes on "
        "without it.",
        ("round", "member_id", "reason"),
        logging.ERROR,
    ),
    "plan_refused": EventKind(
        "{node} refused a plan of round {round}: {reason}.",
        "The plan of this round says other numbers than its members announced, or something else of who was at "
        "fault than follows from what they signed; or one member opened it without most others, which live: the round "
        "is opened again.",
        ("round", "reason"),
        logging.ERROR,
    ),
    "impostor": EventKind(
        "Another node posed as {member_id} ({where}), without effect.",
        "Another node with the run's token wrote a record of the store, or called, in the name of this member without "
        "its key: that had no effect. where: the record's place, or the address of the caller.",
        ("member_id", "where"),
        logging.WARNING,
    ),
    "same_batches": EventKind(
        "{node} and {member_id} learned from the same batches in round {round}.",
        "The gradients of another member's first inner step of this round are equal to this node's bit for bit: both "
        "learn from the same batches. Said by zeroband.DiLoCoOptimizer only.",
        ("round", "member_id"),
    ),
    "paused": EventKind(
        "The run is paused before round {round}, as an operator ordered.",
        "The run stands still before this round, as an operator ordered.",
        ("round",),
    ),
    "resumed": EventKind(
        "The run goes on with round {round} after a pause of {paused_s} s.", "It goes on.", ("round", "paused_s")
    ),
    "drained": EventKind(
        "{node} leaves after round {round}, as an operator ordered.",
        "An operator ordered this node to leave after its round.",
        ("round",),
    ),
    "rolled_back": EventKind(
        "The run went back to the checkpoint of step {step}.",
        "The run went back to the checkpoint of this inner step, as was ordered; has_inner: with this node's own "
        "optimizer state from it; skipped: samples that are not learned from again, by corpus.",
        ("round", "step", "digest", "has_inner", "skipped"),
        logging.WARNING,
    ),
    "rollback_ordered": EventKind(
        "The loss of round {round} calls for going back to step {step}: {reason}.",
        "The loss of this round calls for going back, as [rollback] says; times: so often in a row to this step.",
        ("round", "step", "reason", "times"),
        logging.WARNING,
    ),
    "rollback_given_up": EventKind(
        "The loss of round {round} calls for going back, which was given up: {reason}.",
        "It does, but there is no checkpoint from before (step is null), or the run came back to it rollback.most "
        "times: it is paused instead.",
        ("round", "step", "reason", "most"),
        logging.ERROR,
    ),
    "rollback_refused": EventKind(
        "{node} cannot go back to step {step}: {reason}.",
        "It does not go back: this node cannot have that checkpoint.",
        ("round", "step", "reason"),
        logging.ERROR,
    ),
    "resumed_from": EventKind(
        "The run begins again on the checkpoint of step {step}.",
        "The run begins again on the checkpoint of this inner step; has_inner: with this node's own optimizer state; "
        "source: `checkpoint`, or `members` where this node has none of it and fetched the state.",
        ("round", "step", "digest", "took_s", "has_inner"),
    ),
    "newer_checkpoint": EventKind(
        "{node} has a checkpoint of step {step}; the run began again without it, and is at step {at}.",
        "This node has a checkpoint of this inner step, and the run that it joined is at an earlier one (`at`): the "
        "run began again, or went back, without it. `--resume.step` on all nodes goes on from it after the run's end, "
        "as long as the run has not come that far itself.",
        ("step", "at"),
        logging.WARNING,
    ),
    "checkpoints_apart": EventKind(
        "{nodes} write whole checkpoints into {folder}; for {apart} ckpt.path is another folder.",
        "ckpt.path is not one folder for all: `nodes` write whole checkpoints into this one, the members `apart` into "
        "theirs.",
        ("folder", "nodes", "apart"),
    ),
    "run_abandoned": EventKind(
        "{node} finds no living member of the run and waits {wait_s} s for {members}.",
        "No member of the run holds a lease; this node waits for one until then, and what it does after that.",
        ("round", "members", "wait_s", "until", "then", "type"),
        logging.WARNING,
    ),
    "store_in_use": EventKind(
        "{node} uses the store {store} of the run, in generation {generation}.",
        "The store that this node uses from now on, of a run that has several; generation: grows by one where a store "
        "was lost.",
        ("store", "generation"),
    ),
    "split_brain": EventKind(
        "{node} sees two lines of the run: {goes_on} goes on, {ends} ends.",
        "The run was founded twice, by machines that were cut off from one another, and both lines have met; each with "
        "session, round, tokens and members. One goes on, the other ends with exit code 2.",
        ("goes_on", "ends"),
        logging.ERROR,
    ),
    "fenced": EventKind(
        "The run went on without {node}, which comes back: {reason}.",
        "The run went on without this node, which now comes back by the join path.",
        ("reason",),
        logging.WARNING,
    ),
    "join_state": EventKind(
        "{node} is {state}: {why}.",
        "This node stands there on its way into the run, for this reason (docs/architecture.md, Joining); since: when "
        "it set out.",
        ("state", "why", "since"),
        logging.DEBUG,
    ),
    "links": EventKind(
        "{node} measured its links to the other members.",
        "How the links of this node to the other members are, where that changed notably: to: the member; mbit_s: "
        "measured when the two met (null: not yet); rtt_ms: the shortest round trip (null: no answer at all); "
        "is_cut_off: no answer for fault.detect_s. At most every 3 s.",
        ("links",),
        logging.DEBUG,
    ),
    "join_progress": EventKind(
        "{node} has fetched {bytes} of the {of_bytes} of the run's state.",
        "How far this node has fetched the state: bytes that are here and verified, of of_bytes; bytes_per_s: since "
        "it began (null: it begins). At the beginning, each second, and at the end.",
        ("bytes", "of_bytes", "bytes_per_s"),
        logging.DEBUG,
    ),
    "recovering": EventKind(
        "{node} is fetching the run's state from other members.",
        "This node is fetching the outer state from other members.",
        ("round",),
    ),
    "recovered": EventKind(
        "{node} holds the state of round {round}, verified, after {took_s} s.",
        "It holds the state of this round, verified.",
        ("round", "digest", "took_s"),
    ),
    "checkpoint_staged": EventKind(
        "{node} copied the state of step {step} for a checkpoint.",
        "The state after this round was copied; a writer makes it durable.",
        ("round", "step", "bytes"),
    ),
    "checkpoint_skipped": EventKind(
        "{node} skipped the checkpoint of step {step}: the one before was still being written.",
        "A checkpoint fell due while the one before was still being written.",
        ("round", "step"),
        logging.WARNING,
    ),
    "checkpoint_share_written": EventKind(
        "{node} wrote its share of the checkpoint of step {step} in {took_s} s.",
        "This node's share of a checkpoint is written; those before it commit it first.",
        ("round", "step", "bytes", "took_s"),
    ),
    "checkpoint_incomplete": EventKind(
        "The checkpoint of round {round} lacks the own state of {nodes}: {why}.",
        "These nodes did not write their shares, for the reasons in why; this node wrote what of it is common, and "
        "commits. Their own state is missing, which the manifest says.",
        ("round", "nodes", "why"),
        logging.WARNING,
    ),
    "checkpoint_left_out": EventKind(
        "The checkpoint of step {step} lacks the own state of {node}: {reason}.",
        "The others committed a checkpoint without this node's own state.",
        ("round", "step", "reason"),
        logging.ERROR,
    ),
    "checkpoint_committed": EventKind(
        "The checkpoint of step {step} is complete, after {took_s} s.",
        "A checkpoint is complete and durable.",
        ("round", "step", "bytes", "took_s"),
    ),
    "checkpoint_retrying": EventKind(
        "{node} writes the checkpoint of step {step} again: {reason}.",
        "The storage failed; it is tried again.",
        ("round", "step", "reason"),
        logging.WARNING,
    ),
    "checkpoint_failed": EventKind(
        "{node} could not write the checkpoint of step {step}: {reason}.",
        "A checkpoint could not be written; the one before stays, the run goes on.",
        ("round", "step", "reason"),
        logging.ERROR,
    ),
    "checkpoints_lost": EventKind(
        "The folder of checkpoints {folder} was removed; {node} makes it anew.",
        "Somebody removed the run's folder of checkpoints; it is made anew, and the next checkpoint goes into it.",
        ("folder",),
        logging.WARNING,
    ),
    "checkpoints_removed": EventKind(
        "{node} removed the older checkpoints of steps {steps}.",
        "Older checkpoints were removed, as ckpt.keep_last says.",
        ("steps",),
    ),
    "evaluated": EventKind(
        "{node} evaluated the model of step {step}: loss {loss}.",
        "The outer parameters after this inner step of the run were evaluated: mean cross entropy in nats per token, "
        "and bits per byte, of held-out samples (null where there are none); the loss by eval.sources.",
        ("step", "loss", "bits_per_byte", "by_source", "took_s"),
    ),
    "sample_written": EventKind(
        "{node} wrote a sample of the model's text.", "Text was generated; text: how it begins.", ("path",)
    ),
    "model_exported": EventKind(
        "{node} exported the model: {parity}.",
        "The trained model lies there as transformers and vLLM load it; parity: with transformers.",
        ("path", "parity"),
    ),
    "left": EventKind("{node} left: {reason}.", "This node gave its membership back.", ("reason",)),
    "run_finished": EventKind(
        "{node} has done all {step} steps.",
        "All inner steps are done; with [eval] the last held-out loss and bits per byte come along.",
        ("step",),
    ),
    "run_failed": EventKind(
        "{node} failed: {error}.", "The trainer of this node ends with an error.", ("error",), logging.ERROR
    ),
}
"""Every kind of event there is. Lists of members hold member ids: `node id#incarnation.public key`."""


class Events(Protocol):
    """Where events go."""

    def emit(self, kind: str, **fields: object) -> None:
        """Record an event. Fields are JSON values, with their units in their names."""
        ...


def noop(*_: object, **__: object) -> None:
    """Do nothing: for a listener that is optional."""


class NoEvents:
    """Drops events: for ranks other than local rank 0."""

    def emit(self, kind: str, **fields: object) -> None: ...


class EventLog(RecordLog):
    """Writes one line for each event to `events.jsonl` in the node's folder, its usual fields to the log.

    Other sinks get the record, too.
    """

    def __init__(self, node_dir: Path, sinks: Sequence[Sink] = (), *, now: Callable[[], float] = time.time) -> None:
        super().__init__(node_dir / EVENTS_FILE, sinks, now=now)
        self._lock = threading.Lock()

    def emit(self, kind: str, **fields: object) -> None:
        """Record an event. Any thread. Fields are JSON values, with their units in their names."""
        assert kind in EVENTS, f"not in EVENTS: {kind}"
        missing = [name for name in EVENTS[kind].fields if name not in fields]
        assert not missing, f"{kind} without {', '.join(missing)}"
        assert "at_s" not in fields, "at_s is set by the log"
        with self._lock:
            self._write({"at_s": round(self._now(), 3), "kind": kind, **fields})
        shown = {name: fields[name] for name in EVENTS[kind].fields}
        _log.log(EVENTS[kind].level, kind, extra={"fields": shown})

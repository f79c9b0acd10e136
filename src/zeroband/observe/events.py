"""Events of a node: the table of all kinds, and the log that writes them. Local rank 0, any thread."""

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
"""Name of the file in a node's folder of the run directory."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class EventKind:
    """A kind of event: its meaning and the fields that it always has (others are possible)."""

    words: str
    """Sentence for display, a template of the fields and `node`, the recording node."""
    meaning: str
    fields: tuple[str, ...] = ()
    level: int = logging.INFO
    """Log level."""


EVENTS: Mapping[str, EventKind] = {
    "node_started": EventKind(
        "{node} has started.",
        "This node's trainer has loaded its model and data; detect_s: its fault.detect_s, if it trains with others.",
        ("total_steps", "local_world_size", "parameters"),
    ),
    "joined": EventKind(
        "{node} has joined; its updates count from outer step {round}.",
        "This node trains with the others; round: the first that can include its update.",
        ("member_id", "round"),
    ),
    "first_step": EventKind(
        "{node} finished its first inner step {after_s} s after its state was verified.",
        "First inner step after joining, rejoining or rolling back; after_s: seconds since its state was verified.",
        ("step", "after_s"),
    ),
    "epoch_changed": EventKind(
        "Epoch {epoch}: {members} train together.", "The list of members has changed.", ("epoch", "members")
    ),
    "round_committed": EventKind(
        "Round {round} is committed.",
        "An outer step is committed; digest: of the outer state after it; samples: of each member, in the units that "
        "the run assigns (with zeroband.DiLoCoOptimizer: inner steps). A trainer that restores its state from memory "
        "repeats the event for the round that it found there.",
        ("round", "epoch", "members", "digest"),
    ),
    "round_retried": EventKind(
        "{node} retries round {round}: {reason}.",
        "An outer step failed and is retried.",
        ("round", "reason"),
        logging.WARNING,
    ),
    "peer_lost": EventKind(
        "Round {round} continues without {member_ids}.",
        "Members were lost; members that left on purpose are not included.",
        ("round", "member_ids"),
        logging.WARNING,
    ),
    "transfer_stalled": EventKind(
        "{node} received nothing of round {round} from {waiting_for} for {since_s} s: {reason}.",
        "These members sent nothing for since_s; silent links are dropped and the round is retried.",
        ("round", "waiting_for", "since_s", "at_byte", "of_bytes", "reason"),
        logging.WARNING,
    ),
    "blamed": EventKind(
        "Round {round} failed because of {member_ids} ({consequence}): {reason}.",
        "Why a round failed, by the members' evidence: one member is at fault, or one of two. is_lie: data or "
        "statements contradict each other; otherwise something did not arrive. consequence: `named`: none yet; "
        "`apart`: the two do not take part in the same round; `out`: the member is excluded.",
        ("round", "member_ids", "reason", "is_lie", "consequence"),
        logging.ERROR,
    ),
    "update_refused": EventKind(
        "The update of {node} was excluded from round {round}: {reason}.",
        "This node's update was not finite; the round continues without it.",
        ("round", "reason"),
        logging.ERROR,
    ),
    "payload_refused": EventKind(
        "The payload of {member_id} in round {round} was dropped: {reason}.",
        "A member's payload is malformed or cannot be added; all members drop it.",
        ("round", "member_id", "reason"),
        logging.ERROR,
    ),
    "payload_scored": EventKind(
        "The payload of {member_id} in round {round} scored {gain} relative to the others'.",
        "Score of a member's payload in this round, with outer.score; gain: the reduction of the loss on held-out rows "
        "relative to that by the measuring member's own payload, -1 to 1; median over the members.",
        ("round", "member_id", "gain"),
    ),
    "record_refused": EventKind(
        "The record of {member_id} for round {round} was refused: {reason}.",
        "A member's announcement is out of range, or exceeds what the run assigned to it: the round continues without "
        "it.",
        ("round", "member_id", "reason"),
        logging.ERROR,
    ),
    "plan_refused": EventKind(
        "{node} refused a plan of round {round}: {reason}.",
        "The plan of this round contradicts the members' announcements or their signed evidence, or one member opened "
        "it without most of the living ones: the round is reopened.",
        ("round", "reason"),
        logging.ERROR,
    ),
    "impostor": EventKind(
        "Another node impersonated {member_id} ({where}), without effect.",
        "Another node with the run's token wrote a store record or connected in this member's name without its key: "
        "that had no effect. where: the record's key, or the caller's address.",
        ("member_id", "where"),
        logging.WARNING,
    ),
    "same_batches": EventKind(
        "{node} and {member_id} trained on the same batches in round {round}.",
        "The gradients of another member's first inner step in this round equal this node's bit for bit: both train on "
        "the same batches. Only with zeroband.DiLoCoOptimizer.",
        ("round", "member_id"),
    ),
    "paused": EventKind(
        "An operator paused the run before round {round}.",
        "An operator paused the run before this round.",
        ("round",),
    ),
    "resumed": EventKind(
        "The run continues with round {round} after a pause of {paused_s} s.",
        "The run was resumed.",
        ("round", "paused_s"),
    ),
    "drained": EventKind(
        "{node} leaves after round {round}, as ordered by an operator.",
        "An operator ordered this node to leave after this round.",
        ("round",),
    ),
    "rolled_back": EventKind(
        "The run rolled back to the checkpoint of step {step}.",
        "The run rolled back to the checkpoint of this inner step, as ordered; has_inner: this node's own optimizer "
        "state was restored; skipped: samples that are not used again, by corpus.",
        ("round", "step", "digest", "has_inner", "skipped"),
        logging.WARNING,
    ),
    "rollback_ordered": EventKind(
        "The loss of round {round} triggers a rollback to step {step}: {reason}.",
        "The loss of this round triggers a rollback as [rollback] says; times: rollbacks in a row to this step.",
        ("round", "step", "reason", "times"),
        logging.WARNING,
    ),
    "rollback_given_up": EventKind(
        "The loss of round {round} triggers a rollback, but none is possible: {reason}.",
        "Rollback is due, but no older checkpoint exists (step is null) or the limit rollback.most is reached: the run "
        "pauses.",
        ("round", "step", "reason", "most"),
        logging.ERROR,
    ),
    "rollback_refused": EventKind(
        "{node} cannot roll back to step {step}: {reason}.",
        "The rollback is cancelled: this node cannot load that checkpoint.",
        ("round", "step", "reason"),
        logging.ERROR,
    ),
    "resumed_from": EventKind(
        "The run resumes from the checkpoint of step {step}.",
        "The run resumes from the checkpoint of this inner step; has_inner: with this node's own optimizer state; "
        "source: `checkpoint`, or `members` if this node has none and fetched the state.",
        ("round", "step", "digest", "took_s", "has_inner"),
    ),
    "newer_checkpoint": EventKind(
        "{node} has a checkpoint of step {step}, but the run resumed without it and is at step {at}.",
        "This node has a newer checkpoint than the run that it joined, which is at step `at`: the run resumed or "
        "rolled back without it. After the run's end, `--resume.step` on all nodes resumes from it, unless the run has "
        "passed that step.",
        ("step", "at"),
        logging.WARNING,
    ),
    "checkpoints_apart": EventKind(
        "{nodes} write whole checkpoints into {folder}; {apart} use other folders.",
        "ckpt.path is not shared by all nodes: `nodes` write whole checkpoints into this folder, the members `apart` "
        "into theirs.",
        ("folder", "nodes", "apart"),
    ),
    "run_abandoned": EventKind(
        "{node} found no living member of the run and waits {wait_s} s for {members}.",
        "No member of the run holds a lease; this node waits for one until `until`, then does what `then` says.",
        ("round", "members", "wait_s", "until", "then", "type"),
        logging.WARNING,
    ),
    "store_in_use": EventKind(
        "{node} uses the store {store}, generation {generation}.",
        "The store that this node uses from now on, in a run with several; generation: grows by one when a store is "
        "lost.",
        ("store", "generation"),
    ),
    "split_brain": EventKind(
        "{node} found two lines of the run: {goes_on} continues, {ends} ends.",
        "The run was founded twice by partitioned machines, and the lines have met; each with session, round, tokens "
        "and members. One continues, the other ends with exit code 2.",
        ("goes_on", "ends"),
        logging.ERROR,
    ),
    "fenced": EventKind(
        "The run continued without {node}, which rejoins: {reason}.",
        "The run continued without this node, which now rejoins.",
        ("reason",),
        logging.WARNING,
    ),
    "join_state": EventKind(
        "{node} is {state}: {why}.",
        "State of this joining node and the reason for it (docs/architecture.md, Joining); since: start of the join.",
        ("state", "why", "since"),
        logging.DEBUG,
    ),
    "links": EventKind(
        "{node} measured its links to the other members.",
        "This node's links to the other members, after a notable change: to: the member; mbit_s: measured when the two "
        "met (null: not yet); rtt_ms: the shortest round trip (null: no answer); is_cut_off: no answer for "
        "fault.detect_s. At most every 3 s.",
        ("links",),
        logging.DEBUG,
    ),
    "join_progress": EventKind(
        "{node} has fetched {bytes} of {of_bytes} of the run's state.",
        "Progress of fetching the state: verified bytes, of of_bytes; bytes_per_s: mean so far (null at the start). At "
        "the start, every second, and at the end.",
        ("bytes", "of_bytes", "bytes_per_s"),
        logging.DEBUG,
    ),
    "recovering": EventKind(
        "{node} is fetching the run's state from its peers.",
        "This node fetches the outer state from its peers.",
        ("round",),
    ),
    "recovered": EventKind(
        "{node} holds the verified state of round {round} after {took_s} s.",
        "This node holds the verified state of this round.",
        ("round", "digest", "took_s"),
    ),
    "checkpoint_staged": EventKind(
        "{node} copied the state of step {step} for a checkpoint.",
        "The state after this round was copied for the checkpoint writer.",
        ("round", "step", "bytes"),
    ),
    "checkpoint_skipped": EventKind(
        "{node} skipped the checkpoint of step {step}: the previous one was still being written.",
        "A checkpoint was due while the previous one was still being written.",
        ("round", "step"),
        logging.WARNING,
    ),
    "checkpoint_share_written": EventKind(
        "{node} wrote its share of the checkpoint of step {step} in {took_s} s.",
        "This node's share of a checkpoint is written; the nodes before it in order commit first.",
        ("round", "step", "bytes", "took_s"),
    ),
    "checkpoint_incomplete": EventKind(
        "The checkpoint of round {round} lacks the node state of {nodes}: {why}.",
        "These nodes did not write their shares, for the reasons in why; this node wrote the common part of them and "
        "commits. The manifest lists their own state as missing.",
        ("round", "nodes", "why"),
        logging.WARNING,
    ),
    "checkpoint_left_out": EventKind(
        "The checkpoint of step {step} lacks the node state of {node}: {reason}.",
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
        "{node} retries the checkpoint of step {step}: {reason}.",
        "The storage failed; the write is retried.",
        ("round", "step", "reason"),
        logging.WARNING,
    ),
    "checkpoint_failed": EventKind(
        "{node} could not write the checkpoint of step {step}: {reason}.",
        "A checkpoint could not be written; the previous one stays and the run continues.",
        ("round", "step", "reason"),
        logging.ERROR,
    ),
    "checkpoints_lost": EventKind(
        "The checkpoint folder {folder} was removed; {node} recreates it.",
        "The run's checkpoint folder was removed; it is recreated for the next checkpoint.",
        ("folder",),
        logging.WARNING,
    ),
    "checkpoints_removed": EventKind(
        "{node} removed the older checkpoints of steps {steps}.",
        "Older checkpoints were removed (ckpt.keep_last).",
        ("steps",),
    ),
    "evaluated": EventKind(
        "{node} evaluated the model of step {step}: loss {loss}.",
        "Evaluation of the outer parameters after this inner step of the run: mean cross entropy in nats per token and "
        "bits per byte of held-out samples (null without any); the loss by eval.sources.",
        ("step", "loss", "bits_per_byte", "by_source", "took_s"),
    ),
    "sample_written": EventKind(
        "{node} wrote a sample of generated text.", "Text was generated; text: its beginning.", ("path",)
    ),
    "model_exported": EventKind(
        "{node} exported the model: {parity}.",
        "The trained model was exported for transformers and vLLM; parity: compared with transformers.",
        ("path", "parity"),
    ),
    "left": EventKind("{node} left: {reason}.", "This node left the run.", ("reason",)),
    "run_finished": EventKind(
        "{node} finished all {step} steps.",
        "All inner steps are done; with [eval], includes the last held-out loss and bits per byte.",
        ("step",),
    ),
    "run_failed": EventKind("{node} failed: {error}.", "This node's trainer failed.", ("error",), logging.ERROR),
}
"""All kinds of events. Lists of members hold member ids: `node id#incarnation.public key`."""


class Events(Protocol):
    """Receives events."""

    def emit(self, kind: str, **fields: object) -> None:
        """Record an event. Fields are JSON values with units in their names."""
        ...


def noop(*_: object, **__: object) -> None:
    """Do nothing, as the default of an optional callback."""


class NoEvents:
    """Drops events, on ranks other than local rank 0."""

    def emit(self, kind: str, **fields: object) -> None: ...


class EventLog(RecordLog):
    """Writes events to `events.jsonl` in the node's folder and to other sinks, and logs their fixed fields."""

    def __init__(self, node_dir: Path, sinks: Sequence[Sink] = (), *, now: Callable[[], float] = time.time) -> None:
        super().__init__(node_dir / EVENTS_FILE, sinks, now=now)
        self._lock = threading.Lock()

    def emit(self, kind: str, **fields: object) -> None:
        """Record an event. Any thread. Fields are JSON values with units in their names."""
        assert kind in EVENTS, f"not in EVENTS: {kind}"
        missing = [name for name in EVENTS[kind].fields if name not in fields]
        assert not missing, f"{kind} without {', '.join(missing)}"
        assert "at_s" not in fields, "at_s is set by the log"
        with self._lock:
            self._write({"at_s": round(self._now(), 3), "kind": kind, **fields})
        shown = {name: fields[name] for name in EVENTS[kind].fields}
        _log.log(EVENTS[kind].level, kind, extra={"fields": shown})

"""The training of one rank, from its parts to the end of the run. The only place where the parts meet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from zeroband.checks.finding import require_start
from zeroband.checks.memory import gpu_memory
from zeroband.checks.needs import Needs
from zeroband.config import RunConfig
from zeroband.config.schema import ExportConfig
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.rounds.member import say_nothing
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import Fenced, Leaving, RunOver
from zeroband.export.directory import FolderInUse, TrainedModel, whole_parameters, write_directory
from zeroband.export.parity import check_parity, describe
from zeroband.model.loss import gradient_scale, next_token_loss
from zeroband.model.sample import generate
from zeroband.node.mesh import LocalMesh, barrier, broadcast_json, clip_grad_norm_, init_local_mesh, set_gradient_sync
from zeroband.observe.log import get_logger
from zeroband.observe.stall import register_stack_dump
from zeroband.outer.every_step import EveryStep
from zeroband.runtime.build import TrainerParts, build_trainer
from zeroband.runtime.checkpointing import NoSnapshots, Snapshots
from zeroband.runtime.join import Joiner, LoneJoiner, join_until_member
from zeroband.runtime.replica import Replica
from zeroband.runtime.report import Report, RunProgress, StepResult

SAMPLE_FILE = "sample.txt"
EXPORT_DIR = "export"

_log = get_logger(__name__)


def run(config: RunConfig, departure: Departure) -> None:
    """Train with this node's other ranks, and give everything back at the end."""
    with ExitStack() as stack:
        local = init_local_mesh()
        stack.callback(local.close)
        require_start(gpu_memory(Needs(config), local.world_size))
        train(config, local, departure, stack)


def train(config: RunConfig, local: LocalMesh, departure: Departure, stack: ExitStack) -> None:
    """The whole run of this rank; `stack` gives everything back at its end."""
    node = build_trainer(config, local, departure)
    report = Report(node) if local.rank == 0 else None
    if report is not None:
        stack.callback(report.close)
        report.started()
        stack.push(report.leave)
        stack.callback(setattr, departure, "on_cut_off", departure.on_cut_off)  # signal handlers hold it to the exit
        departure.on_cut_off = report.cut_off
    barrier(local)  # the node's folder is ours now: another trainer that was started by mistake has been refused
    stack.callback(register_stack_dump(node.node_dir, local.rank))
    entry = build_joiner(node, report, stack)
    joined = enter(entry, report)
    snapshots = build_snapshots(node, entry, report, stack)
    if joined is not None:
        snapshots.take_if_due(joined)
    departure.holds_work = True
    while not entry.hooks.progress.is_complete:
        leave_if_asked(node, entry, snapshots, report)
        try:
            train_round(node, entry, snapshots, report)
        except Fenced as fence:
            leave_if_asked(
                node, entry, NoSnapshots(), report
            )  # others go on, and it holds no committed state of theirs
            node.inner.zero_grad()
            snapshots.take_if_due(enter(entry, report, fence))
        except Leaving:  # its time is over, and the others, if there are any, did not come
            if not node.departure.is_cut_short or local.world_size == 1:  # else local ranks are at different places
                save_if_last(entry, snapshots)
            raise
        except RolledBack as order:
            node.inner.zero_grad()
            enter(entry, report, order)
    if config.observe.sample_prompt is not None:
        write_sample(node, config.observe.sample_prompt, config.observe.sample_tokens)
        if report is not None:
            report.sampled(node.node_dir / SAMPLE_FILE)
    if report is not None:
        report.finished()
    if config.export is not None:
        write_export(node, config.export, report)


def leave_if_asked(
    node: TrainerParts, entry: Joiner | LoneJoiner, snapshots: Snapshots | NoSnapshots, report: Report | None
) -> None:
    """Raise Leaving on all local ranks where this node was asked to leave; it owes the others nothing here.

    If nobody goes on with the run, it saves what it holds first.
    """
    if broadcast_json(node.departure.is_asked, node.local):
        for synced in entry.hooks.flush():
            if report is not None:
                report.committed(synced)
        round = entry.hooks.round
        save_if_last(entry, snapshots)
        if report is not None and not node.departure.is_hurried:
            report.events.emit("drained", round=round)
        node.faults.at("leaving", 0)
        raise Leaving(f"left as asked, after round {round}")


def save_if_last(entry: Joiner | LoneJoiner, snapshots: Snapshots | NoSnapshots) -> None:
    """Take a checkpoint if nobody goes on with the run when this node leaves."""
    if (last := entry.announce_leaving()) is not None:
        snapshots.take_before_leaving(is_alone=last == "alone")


def build_joiner(node: TrainerParts, report: Report | None, stack: ExitStack) -> Joiner | LoneJoiner:
    """The way into the run that the configuration asks for."""
    events = report.events if report is not None else None
    if node.config.outer is None:
        return LoneJoiner(node, events)
    run = Replica(node, on_event=events.emit if events is not None else say_nothing)
    stack.push(run.leave)
    batch_size, patience_s = node.config.train.batch_size, node.config.elastic.start_timeout_s
    return Joiner(run, node.local, events, batch_size=batch_size, patience_s=patience_s)


def build_snapshots(
    node: TrainerParts, entry: Joiner | LoneJoiner, report: Report | None, stack: ExitStack
) -> Snapshots | NoSnapshots:
    """The checkpoints that the configuration asks for; `stack` waits for the last one where this rank ends well."""
    if node.config.ckpt.path is None:
        return NoSnapshots()
    events, is_sequel = report.events if report is not None else None, entry.hooks.progress.follows is not None
    snapshots = Snapshots(node, entry.run, entry.hooks, events, takes_over=is_sequel)

    def close(kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        snapshots.close(waits=kind is None or issubclass(kind, RunOver | Leaving))

    stack.push(close)
    return snapshots


def enter(
    entry: Joiner | LoneJoiner, report: Report | None, why: Fenced | RolledBack | None = None
) -> RoundReport | None:
    """Become a member. Returns the report of the round that it became a member with."""
    joined = join_until_member(entry, why)
    if report is not None:
        report.belongs_to(entry.hooks.record["session"])
    if report is not None and joined is not None:
        report.entered(joined)
    return joined


def train_round(
    node: TrainerParts, entry: Joiner | LoneJoiner, snapshots: Snapshots | NoSnapshots, report: Report | None
) -> None:
    """The inner steps from one boundary to the next, and what they contribute to the outer step."""
    hooks, inner, first = entry.hooks, node.inner, entry.hooks.inner_step
    node.loader.assign(hooks.upcoming())
    step, ends_round = first, False
    while not (ends_round or hooks.progress.is_complete):  # a round that travelled may complete the run before
        lr, began_at_s, before = inner.lr, time.monotonic(), hooks.progress
        with node.departure.in_step():
            passed = forward_backward(node, lambda: hooks.is_time_over(step + 1 - first))  # noqa: B023
        snapshots.settle()  # what a checkpoint copies has not changed so far
        node.step_loss.nats = passed.loss
        with node.departure.in_step():
            node.faults.at("inner", hooks.round + 1)
            time.sleep(node.faults.extra_s(time.monotonic() - began_at_s))
        blocked = Stopwatch()
        with blocked:
            norm = hooks.sync_gradients(step, passed.tokens)
        learned_tokens = passed.tokens
        if norm is None:
            with node.departure.in_step():
                norm = clip_grad_norm_(node.model, node.config.optim.clip_norm)
            if not (math.isfinite(norm) or isinstance(hooks, EveryStep)):  # all nodes make the same step of theirs
                leave_out_gradient(node, step, norm)
                learned_tokens = 0
        inner.step()
        inner.zero_grad()
        ends_round = passed.ends_round or node.loader.remaining < node.config.train.batch_size
        with blocked:
            synced = hooks.sync_parameters(step, learned_tokens, ends_round=ends_round)
        step += 1
        committed = RunProgress(hooks.progress, is_now=hooks.progress is not before)
        if committed.is_now:
            snapshots.take_if_due(synced[-1] if synced else None)
        if report is not None:
            learned = StepResult(passed.loss, passed.tokens, lr, norm, passed.data_s, blocked.total_s)
            report.stepped(step, learned, synced, committed, snapshots.measured())


def leave_out_gradient(node: TrainerParts, step: int, norm: float) -> None:
    """Drop a gradient that is not finite: the next step of the optimizer moves its schedule alone."""
    fields = {"step": step, "norm": norm, "loss": node.step_loss.nats}
    _log.warning("the gradient of an inner step is not finite, so it is left out", extra={"fields": fields})
    node.inner.zero_grad()


class Stopwatch:
    """Adds up the time spent inside it."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def __enter__(self) -> None:
        self._from_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.monotonic() - self._from_s


@dataclass(frozen=True)
class PassResult:
    """What the forward and backward passes of one inner step showed, over all ranks of the node."""

    loss: float
    """Mean over the node's targets, in nats."""
    tokens: int
    data_s: float
    ends_round: bool
    """A rank found that the round should end here."""


def forward_backward(node: TrainerParts, is_time_over: Callable[[], bool]) -> PassResult:
    """Gradients of one inner step on this rank."""
    from_s = time.perf_counter()
    batches = [batch.to(node.local.device) for batch in node.loader.next_step()]
    data_s = time.perf_counter() - from_s
    targets = node.loader.targets_in_step
    scale = gradient_scale(targets, node.local.world_size)
    cross_entropy = torch.zeros((), device=node.local.device)
    for number, batch in enumerate(batches, start=1):
        set_gradient_sync(node.model, number == len(batches))
        logits = node.model(batch.tokens, batch.document_ids)  # (b, t, v)
        loss = next_token_loss(logits, batch.targets, z_loss=node.config.optim.z_loss)
        (loss.objective * scale).backward()
        cross_entropy += loss.cross_entropy
    total = cross_entropy.cpu()
    ends_round = node.departure.is_hurried or is_time_over()
    agreed = torch.stack([total, torch.tensor(float(ends_round))])  # one exchange for both
    dist.all_reduce(agreed, group=node.local.control)
    return PassResult(agreed[0].item() / targets, targets, data_s, agreed[1].item() > 0)


def write_sample(node: TrainerParts, prompt: str, tokens: int) -> None:
    """Continue a prompt with the trained model; into the node's folder of the run directory."""
    ids = torch.tensor(node.tokenizer.encode(prompt).astype("int64"), device=node.local.device)
    context = node.config.data.seq_length
    generated = generate(node.model, ids, max_new_tokens=tokens, temperature=0.8, seed=0, context=context)
    if node.local.rank == 0:
        (node.node_dir / SAMPLE_FILE).write_text(node.tokenizer.decode(generated.tolist()), encoding="utf-8")


def write_export(node: TrainerParts, settings: ExportConfig, report: Report | None) -> None:
    """Write the trained model as a directory; 4 bytes of memory for each parameter, and 8 more to compare it."""
    out = settings.path or node.node_dir / EXPORT_DIR
    held = whole_parameters(node.model, keeps=report is not None)
    if report is None:
        return
    vocab_size, seq_length = node.tokenizer.padded_vocab_size, node.config.data.seq_length
    trained = TrainedModel(node.config.model, vocab_size, node.tokenizer, seq_length, held.__getitem__)
    try:
        write_directory(trained, out, settings.dtype)
    except FolderInUse as error:
        _log.warning("not exported", extra={"fields": {"why": str(error)}})
        return
    report.exported(out, describe(check_parity(trained, out, settings.dtype)))

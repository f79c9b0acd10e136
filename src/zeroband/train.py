"""torchrun's target: builds the parts and runs the loop. The only place where they meet.

    torchrun --nproc_per_node 2 src/zeroband/train.py @configs/debug/normal.toml --train.micro_bs 4

Start it once on every machine; with [outer] and store.url the machines train one model together.
SIGTERM or SIGUSR1 asks a node to leave: within `fault.grace_s` it hands over what it learned, or hands its samples
back, and ends with 0. A second one ends it at once.
Exit codes: 0 done, or left as asked; 2 the configuration is wrong or was refused at join; 130 after Ctrl-C; 143 after a
second SIGTERM or SIGUSR1; 1 anything else. torchrun makes 1 of every failure of its ranks.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from zeroband.config import RunConfig, load_config
from zeroband.config.export import ExportConfig
from zeroband.elastic.departure import Departure
from zeroband.elastic.member import say_nothing
from zeroband.entry import Entry, LoneEntry, get_in
from zeroband.errors import ConfigError, Fenced, Leaving, RunOver, ZerobandError
from zeroband.model.loss import gradient_scale, next_token_loss
from zeroband.model.sample import generate
from zeroband.node import node_dir_of, node_id_of
from zeroband.observe.log import get_logger, setup_logging
from zeroband.observe.stall import register_stack_dump
from zeroband.offline.directory import FolderInUse, TrainedModel, whole_parameters, write_directory
from zeroband.offline.parity import check_parity, describe
from zeroband.outer.base import RoundReport
from zeroband.outer.every_step import EveryStep
from zeroband.outer.rollback import RolledBack
from zeroband.parallel import LocalMesh, barrier, broadcast_json, clip_grad_norm_, init_local_mesh, set_gradient_sync
from zeroband.parts import RunParts
from zeroband.report import Committed, Learned, Report
from zeroband.snapshots import NoSnapshots, Snapshots
from zeroband.trainer import TrainerParts, build_trainer

SAMPLE_FILE = "sample.txt"
EXPORT_DIR = "export"
_EXIT_FAILED = 1
_EXIT_CODES: dict[type[ZerobandError], int] = {RunOver: 0, Leaving: 0, ConfigError: 2}
_FIRST_RANK_SPEAKS_S = 10.0

_log = get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say. Returns the exit code."""
    code = _main(argv)
    gc.collect()  # the frames of an error hold process groups, whose threads can abort a process that ends with them
    return code


def _main(argv: Sequence[str] | None) -> int:
    die_with_launcher()
    signal.signal(signal.SIGINT, _exit_on_signal)
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        departure = Departure(config.fault.grace_s)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, partial(_leave_on_signal, departure))
        with ExitStack() as stack:
            start_logging(config)
            local = init_local_mesh()
            stack.callback(local.close)
            train(config, local, departure, stack)
    except ZerobandError as error:
        return explain(error)
    return 0


def start_logging(config: RunConfig) -> None:
    """Log to this rank's file in the node's folder, and to the console. Raises ConfigError where it cannot be made."""
    node_dir, local_rank = node_dir_of(config), _local_rank()
    try:
        setup_logging(config.log_level, node_id_of(config), local_rank, node_dir / f"rank{local_rank}.log")
    except OSError as error:
        raise ConfigError(
            f"cannot write to {node_dir}: {error.strerror}; set run.dir to a folder that this user may write to"
        ) from error


def explain(error: ZerobandError) -> int:
    """Say why this rank ends, once for the node: its ranks mostly end by the same. Returns the exit code.

    The first rank speaks. The others leave it the time: torchrun ends them as soon as one rank has failed.
    """
    _log.debug("ended by an error", exc_info=error)
    code = next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), _EXIT_FAILED)
    is_first = _local_rank() == 0
    if code and not is_first:
        time.sleep(_FIRST_RANK_SPEAKS_S)
    if code or is_first:
        print(f"zeroband: {error}", file=sys.stderr, flush=True)
    return code


def train(config: RunConfig, local: LocalMesh, departure: Departure, stack: ExitStack) -> None:
    """The whole run of this rank; `stack` gives everything back at its end."""
    node = build_trainer(config, local, departure)
    report = Report(node) if local.rank == 0 else None
    if report is not None:
        stack.callback(report.close)
        report.started()
        stack.push(report.leave)
    barrier(local)  # the node's folder is ours now: another trainer that was started by mistake has been refused
    stack.callback(register_stack_dump(node.node_dir, local.rank))
    entry = build_entry(node, report, stack)
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
    node: TrainerParts, entry: Entry | LoneEntry, snapshots: Snapshots | NoSnapshots, report: Report | None
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


def save_if_last(entry: Entry | LoneEntry, snapshots: Snapshots | NoSnapshots) -> None:
    """Take a checkpoint if nobody goes on with the run when this node leaves."""
    if (last := entry.leaves_nobody()) is not None:
        snapshots.take_before_leaving(is_alone=last == "alone")


def build_entry(node: TrainerParts, report: Report | None, stack: ExitStack) -> Entry | LoneEntry:
    """The way into the run that the configuration asks for."""
    events = report.events if report is not None else None
    if node.config.outer is None:
        return LoneEntry(node, events)
    run = RunParts(node, on_event=events.emit if events is not None else say_nothing)
    stack.push(run.leave)
    batch_size, patience_s = node.config.train.batch_size, node.config.elastic.start_timeout_s
    return Entry(run, node.local, events, batch_size=batch_size, patience_s=patience_s)


def build_snapshots(
    node: TrainerParts, entry: Entry | LoneEntry, report: Report | None, stack: ExitStack
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
    entry: Entry | LoneEntry, report: Report | None, why: Fenced | RolledBack | None = None
) -> RoundReport | None:
    """Become a member. Returns the report of the round that it became a member with."""
    joined = get_in(entry, why)
    if report is not None and joined is not None:
        report.entered(joined)
    return joined


def train_round(
    node: TrainerParts, entry: Entry | LoneEntry, snapshots: Snapshots | NoSnapshots, report: Report | None
) -> None:
    """The inner steps from one boundary to the next, and what they contribute to the outer step."""
    hooks, inner, first = entry.hooks, node.inner, entry.hooks.inner_step
    node.loader.assign(hooks.upcoming())
    step, ends_round = first, False
    while not (ends_round or hooks.progress.is_complete):  # a round that travelled may complete the run before
        lr, began_at_s, before = inner.lr, time.monotonic(), hooks.progress
        passed = forward_backward(node, lambda: hooks.is_time_over(step + 1 - first))  # noqa: B023
        snapshots.settle()  # what a checkpoint copies has not changed so far
        node.step_loss.nats = passed.loss
        node.faults.at("inner", hooks.round + 1)
        time.sleep(node.faults.extra_s(time.monotonic() - began_at_s))
        blocked = Stopwatch()
        with blocked:
            norm = hooks.sync_gradients(step, passed.tokens)
        learned_tokens = passed.tokens
        if norm is None:
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
        committed = Committed(hooks.progress, is_now=hooks.progress is not before)
        if committed.is_now:
            snapshots.take_if_due(synced[-1] if synced else None)
        if report is not None:
            learned = Learned(passed.loss, passed.tokens, lr, norm, passed.data_s, blocked.total_s)
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
class Passed:
    """What the forward and backward passes of one inner step showed, over all ranks of the node."""

    loss: float
    """Mean over the node's targets, in nats."""
    tokens: int
    data_s: float
    ends_round: bool
    """A rank found that the round should end here."""


def forward_backward(node: TrainerParts, is_time_over: Callable[[], bool]) -> Passed:
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
    return Passed(agreed[0].item() / targets, targets, data_s, agreed[1].item() > 0)


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


def die_with_launcher() -> None:
    """Have the kernel kill this process when its launcher dies, so that no orphan trains on. Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == 1 and "TORCHELASTIC_RUN_ID" in os.environ:  # it died before the call
            raise SystemExit(_EXIT_FAILED)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """End through the `finally` blocks, which give the lease and the shared memory back."""
    raise SystemExit(128 + number)


def _leave_on_signal(departure: Departure, number: int, _frame: FrameType | None) -> None:
    """The first signal asks to leave; without work to hand over, and at the second one, the node ends at once."""
    if departure.is_hurried:
        raise SystemExit(128 + signal.SIGTERM)
    departure.ask(time.monotonic())
    if not departure.holds_work:
        raise SystemExit(0)


if __name__ == "__main__":
    sys.path.pop(0)  # torchrun puts this folder first, where our `data` or `model` would hide other packages
    sys.exit(main())

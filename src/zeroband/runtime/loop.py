"""The training of one rank, from building its parts to the end of the run."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from zeroband.config import RunConfig
from zeroband.config.schema import ExportConfig
from zeroband.data.chat import prompt_of
from zeroband.data.loader import MicroBatch
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import Fenced, LearnsNothing, Leaving
from zeroband.export.directory import (
    FolderInUse,
    TrainedModel,
    check_parity,
    describe,
    whole_parameters,
    write_directory,
)
from zeroband.model.generate import evaluating, generate
from zeroband.model.loss import TokenLoss, gradient_scale, sums_by_source
from zeroband.model.parallel import begin_micro_batch, clip_grad_norm_, compiles, widest_float
from zeroband.node.async_copy import PendingNumbers
from zeroband.node.mesh import LocalMesh, all_ok, barrier, broadcast_json, init_local_mesh, sum_over_ranks
from zeroband.observe.events import Events, noop
from zeroband.observe.log import get_logger
from zeroband.observe.stall import register_stack_dump
from zeroband.runtime.build import TrainerParts, agree, build_trainer
from zeroband.runtime.checkpointing import Checkpointing, drain, open_checkpoints, save_if_last
from zeroband.runtime.evaluation import (
    Evaluations,
    EvaluationSet,
    HeldOutEvaluations,
    open_evaluation_sets,
    open_scorer,
)
from zeroband.runtime.join import open_runtime
from zeroband.runtime.node_parts import Entry, OpenPort, TrainingRun
from zeroband.runtime.own_store import open_own_store
from zeroband.runtime.report import (
    EXPORT_DIR,
    SAMPLE_FILE,
    InnerStep,
    PassResult,
    Report,
    SourceResult,
    mean_of,
    open_report,
)
from zeroband.runtime.run_rules import scoring_of
from zeroband.runtime.single_node import SingleNode

PROGRESS_S = 1.0
"""Interval at which a rank that waits for samples shows that it is alive."""

_MIN_ROUNDS = 3
"""One or two rejected rounds may be an accident, whatever their length."""

_SAMPLE_CHARS = 1000
"""Most characters of a generated text in its event, which is also published in the store."""

_log = get_logger(__name__)


def run(config: RunConfig, departure: Departure) -> None:
    """Train together with the other local ranks, and release everything at the end."""
    with ExitStack() as stack:
        local = init_local_mesh(kind=config.train.device)
        stack.push(partial(end_ranks, local, departure))
        config = agree(config, local)
        config, port = open_own_store(config, local, departure, stack)
        train(config, local, departure, stack, port)


def end_ranks(local: LocalMesh, departure: Departure, kind: type[BaseException] | None, *_: object) -> None:
    """Close this node's process groups; after a clean end only when all local ranks have come here.

    NCCL groups fail on all ranks as soon as one rank closes its own, and rank 0 may still export or write the last
    checkpoint for minutes.
    """
    if kind is None or (issubclass(kind, Leaving) and not departure.is_cut_short):
        with contextlib.suppress(RuntimeError):  # another rank failed and reports the cause
            barrier(local)
    local.close()


class NonFiniteSteps:
    """Counts consecutive inner steps that teach nothing: gradients, or updates of rounds, are not finite.

    limit: number of such steps at which training ends, for updates also at least three rounds; None: no limit.
    `has_learned`: before this start. All local ranks count the same.
    """

    def __init__(self, limit: int | None = None, *, has_learned: bool = False) -> None:
        self._limit = math.inf if limit is None else limit
        self._has_learned = has_learned
        self._gradients = 0
        self._steps, self._rounds = 0, 0
        """Steps since the last round that counted this node's update, and rounds that did not."""
        self._loss = 0.0

    def note(self, step: int, norm: float, loss: float, rounds: Sequence[RoundReport]) -> None:
        """Count a step. Raises LearnsNothing at the limit."""
        self._gradients = 0 if math.isfinite(norm) else self._gradients + 1
        self._steps, self._loss = self._steps + 1, loss
        for round in rounds:
            self._rounds = self._rounds + 1 if round.is_left_out else 0
            if not round.is_left_out:
                self._steps, self._has_learned = 0, True
        lost = self._steps if self._rounds >= _MIN_ROUNDS else 0
        if max(lost, self._gradients) >= self._limit:
            raise LearnsNothing(
                f"nothing was learned in {max(lost, self._gradients)} inner steps in a row (train.non_finite_steps), "
                f"up to step {step}: their updates are not finite (gradient norm {norm}, loss {loss}); check the data "
                "and the learning rate, and resume from a checkpoint with --resume; if only one node reports this, "
                "check its hardware"
            )

    def require_progress(self) -> None:
        """Raise LearnsNothing at the end of a run whose model has no finite loss, or learned nothing at all."""
        is_broken = self._gradients > 0 and not math.isfinite(self._loss)
        if self._limit < math.inf and (is_broken or (self._rounds and not self._has_learned)):
            raise LearnsNothing(
                f"nothing was learned in the last {max(self._steps, self._gradients)} inner steps, whose updates are "
                f"not finite (loss {self._loss}), so nothing is exported; check the data and the learning rate"
            )


@dataclass(frozen=True)
class Training:
    """Everything that the training loop of this rank uses."""

    node: TrainerParts
    run: TrainingRun
    entry: Entry
    checkpoints: Checkpointing
    report: Report
    evaluations: Evaluations = field(default_factory=Evaluations)
    non_finite: NonFiniteSteps = field(default_factory=NonFiniteSteps)


def train(
    config: RunConfig, local: LocalMesh, departure: Departure, stack: ExitStack, port: OpenPort | None = None
) -> None:
    """Run the training of this rank; `stack` releases everything. `port`: already open, if the node holds a store."""
    node = build_trainer(config, local, departure, port)
    stack.callback(node.loader.close)
    sets = open_evaluation_sets(node)
    report = open_report(node, stack)
    barrier(local)  # only now does rank 0 hold the folder's lock: a second trainer of this node was refused
    stack.callback(register_stack_dump(node.node_dir, local.rank))
    compile_model(node)
    run, entry = open_run(node, report, stack, sets)
    joined = entry.enter()
    report.run_entered(run.outer.record["session"], joined, entry.verified_at_s)
    checkpoints = open_checkpoints(node, run, report.events, stack)
    non_finite = NonFiniteSteps(config.train.non_finite_steps, has_learned=run.outer.inner_step > 0)
    evaluations = open_evaluations(node, run, sets, report)
    training = Training(node, run, entry, checkpoints, report, evaluations, non_finite)
    if joined:
        training.checkpoints.take_if_due(joined)
    departure.holds_work = True
    while not run.outer.progress.is_complete:
        leave_if_asked(training)
        try:
            train_round(training)
        except (Fenced, RolledBack) as why:
            rejoin(training, why)
        except Leaving:  # fault.grace_s is over before the round was committed
            # a step that was cut short leaves several ranks at different places: they cannot save together
            if not departure.is_cut_short or local.world_size == 1:
                save_if_last(run, checkpoints)
            raise
    non_finite.require_progress()
    finish(node, report)


def leave_if_asked(training: Training) -> None:
    """Raise Leaving on all local ranks if this node was asked to leave. Call between two rounds.

    The last node of the run saves its state first.
    """
    node, run = training.node, training.run
    if broadcast_json(node.departure.is_asked, node.local):
        drain(node, run, training.checkpoints, training.report)
        node.faults.at("leaving", 0)
        raise Leaving(f"left as asked, after round {run.outer.round}")


def open_run(
    node: TrainerParts, report: Report, stack: ExitStack, sets: Sequence[EvaluationSet] = ()
) -> tuple[TrainingRun, Entry]:
    """Open the configured run, and the node's way into it. `sets`: as for `open_scorer`."""
    if node.config.outer is None:
        return (single := SingleNode(node, report.events)), single
    return open_runtime(node, report.events, stack, open_scorer(node, sets))


def open_evaluations(
    node: TrainerParts, run: TrainingRun, sets: Sequence[EvaluationSet], report: Report
) -> Evaluations:
    """Open the evaluations that [eval] asks for."""
    if node.config.eval is None:
        return Evaluations()
    return HeldOutEvaluations(node, run, sets, node.config.eval.every_steps, report.events)


def rejoin(training: Training, why: Fenced | RolledBack) -> None:
    """Become a member again after the run continued without this node or rolled back."""
    if isinstance(why, Fenced):  # the others hold a newer state, so a node that leaves now must not save its own
        leave_if_asked(replace(training, checkpoints=Checkpointing()))
    training.node.inner.zero_grad()
    joined = training.entry.rejoin(why)
    training.report.run_entered(training.run.outer.record["session"], joined, training.entry.verified_at_s)
    if joined and isinstance(why, Fenced):
        training.checkpoints.take_if_due(joined)


def finish(node: TrainerParts, report: Report) -> None:
    """Write the sample and the export that the configuration asks for."""
    config = node.config
    if config.observe.sample_prompt is not None:
        write_sample(node, config.observe.sample_prompt, config.observe.sample_tokens, report.events)
    report.run_finished()
    if config.export is not None:
        write_export(node, config.export, report.events)


def train_round(training: Training) -> None:
    """Make the inner steps of one phase, and contribute them to the outer step."""
    node, outer, checkpoints = training.node, training.run.outer, training.checkpoints
    first, ends_round = outer.inner_step, False
    node.loader.assign(outer.upcoming())
    with DeferredReports(training) as reports:
        for step in itertools.count(first):
            if ends_round or outer.progress.is_complete:  # an overlapped round may complete the run within the phase
                break
            node.profiler.begin(step + 1)
            before, blocked = outer.progress, Stopwatch()
            passed = compute_gradients(training)
            made = take_inner_step(training, step, passed, blocked)
            ends_round = is_round_over(training, step + 1 - first)
            is_boundary = outer.is_boundary(ends_round=ends_round)
            if is_boundary:
                reports.pass_to_outer(made)
            with blocked:
                made.synced = outer.sync_parameters(step, ends_round=ends_round)
            made.progress, made.is_commit = outer.progress, outer.progress is not before
            if made.is_commit:
                checkpoints.take_if_due(made.synced)
            made.blocked_s, made.measured = blocked.total_s, checkpoints.metrics()
            if is_evaluated := training.evaluations.is_due(before, outer.progress):
                if not is_boundary:
                    reports.pass_to_outer(made)
                made.measured = {**made.measured, **training.evaluations.run(outer.progress.inner_step)}
            reports.add(made, is_deferred=not (is_boundary or is_evaluated))
            node.profiler.end(step + 1)


class DeferredReports:
    """Passes each inner step's results on, in order, to the outer algorithm and the report.

    Reading a result waits for the device. So a step is read only after the next one was queued on the device, which
    then never idles; at a boundary at once. As a context manager, passes the last step on at the end.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._outer = training.run.outer
        self._deferred: InnerStep | None = None

    def __enter__(self) -> DeferredReports:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Leaving):
            self._flush()

    def pass_to_outer(self, made: InnerStep) -> None:
        """Pass all steps up to this one to the outer algorithm, before it ends a phase. Waits for the device."""
        self._flush()
        self._pass_to_outer(made)

    def add(self, made: InnerStep, *, is_deferred: bool) -> None:
        """Take a step that is complete. `is_deferred`: read and report it with the next one."""
        if is_deferred:
            self._flush()
            self._deferred = made
        else:
            self._report(made, ended_at_s=time.monotonic())

    def _flush(self) -> None:
        made, self._deferred = self._deferred, None
        if made is not None:
            self._pass_to_outer(made)
            self._report(made, ended_at_s=made.pending.ready_at_s)

    def _pass_to_outer(self, made: InnerStep) -> None:
        if not self._outer.has_own_steps:  # `take_inner_step` has passed it on with the gradient
            return
        with self._training.node.departure.in_step():
            made.read()
        is_finite = math.isfinite(made.grad_norm)
        if not is_finite:
            fields = {"step": made.number, "norm": made.grad_norm, "loss": made.loss}
            _log.warning("non-finite gradient: inner step skipped", extra={"fields": fields})
        self._outer.learned(made.passed.tokens if is_finite else 0, made.loss)

    def _report(self, made: InnerStep, *, ended_at_s: float) -> None:
        made.read()
        made.ended_at_s = ended_at_s
        self._training.report.step_done(made)
        self._training.non_finite.note(made.number + 1, made.grad_norm, made.loss, made.synced)


def compute_gradients(training: Training) -> PassResult:
    """Run the passes of one inner step, and wait until a checkpoint's copy of the state is complete.

    The copy overlaps the passes, which do not change the state; the optimizer's step after them does.
    """
    node, began_at_s = training.node, time.monotonic()
    with node.departure.in_step():
        passed = forward_backward(node, training.run.show_progress)
    training.checkpoints.wait_for_copy()
    with node.departure.in_step():
        node.faults.at("inner", training.run.outer.round + 1)
        time.sleep(node.faults.extra_s(time.monotonic() - began_at_s))
    return passed


def is_round_over(training: Training, steps: int) -> bool:
    """Whether the round ends after `steps` steps. Gives the same answer on all local ranks."""
    node = training.node
    if node.loader.remaining < node.config.train.batch_size:
        return True
    return not all_ok(not (node.departure.is_urgent or training.run.outer.is_time_over(steps)), node.local)


def take_inner_step(training: Training, step: int, passed: PassResult, blocked: Stopwatch) -> InnerStep:
    """Step the optimizer by this node's gradients, without waiting for the device, or by those of all nodes.

    If this node's own gradient is not finite or has no targets, only the learning rate schedule advances.
    """
    node, outer, found_inf = training.node, training.run.outer, None
    widest = widest_float(passed.nats.device)
    lr, lr_muon, has_own_steps = node.inner.lr, node.inner.lr_muon, outer.has_own_steps
    if not has_own_steps:  # each node announces its loss together with its gradient
        with node.departure.in_step():
            sum_over_ranks(passed.nats, node.local)
            outer.learned(passed.tokens, mean_of(passed.nats[0].item(), passed.tokens))
    with blocked:
        common_norm = outer.sync_gradients(step, passed.tokens)
    if common_norm is None:
        with node.departure.in_step():
            also = passed.nats if has_own_steps else None  # one all-reduce for the norm and the losses
            norm = clip_grad_norm_(node.parameters, node.config.optim.clip_norm, also=also)
        found_inf = (~norm.isfinite() | (passed.tokens == 0)).float() if has_own_steps else None
    else:
        assert not has_own_steps, "nodes with own steps have no common gradient"
        norm = torch.full((), common_norm, dtype=widest, device=passed.nats.device)
    node.inner.step(found_inf)
    node.inner.zero_grad()
    pending = PendingNumbers(torch.cat([norm.to(widest).view(1), passed.nats.to(widest)]))
    return InnerStep(number=step, lr=lr, lr_muon=lr_muon, passed=passed, pending=pending)


class Stopwatch:
    """Sums up the time spent inside it."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def __enter__(self) -> None:
        self._from_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.monotonic() - self._from_s


def forward_backward(node: TrainerParts, show_progress: Callable[[], None] = noop) -> PassResult:
    """Compute the gradients of one inner step on this rank.

    `show_progress`: called after each micro-batch, and every second while samples are late, such as during an outage
    of the storage.
    """
    from_s = time.perf_counter()
    while not node.loader.is_ready(PROGRESS_S):
        show_progress()
    batches = [batch.to(node.local.device) for batch in node.loader.next_step()]
    data_s = time.perf_counter() - from_s
    targets, names = node.loader.targets_in_step, node.loader.source_names
    by_target = _tracks_sources(node)
    scale = gradient_scale(targets, node.local.world_size)
    nats = torch.zeros(1 + len(names) * by_target, device=node.local.device)
    for number, batch in enumerate(batches, start=1):
        begin_micro_batch(node.model, node.placement, is_last=number == len(batches))
        loss = _pass_through(node, batch, scale)
        nats[0] += loss.cross_entropy
        if by_target:
            assert batch.sources is not None and loss.per_target is not None, "rows of a mixture know their sources"
            nats[1:] += sums_by_source(loss.per_target, batch.sources, len(names))
        show_progress()
    read = zip(names, node.loader.targets_by_source, node.loader.passes, strict=False)  # a single source has no name
    sources = {name: SourceResult(tokens, data_pass) for name, tokens, data_pass in read}
    return PassResult(nats, targets, data_s, node.loader.data_pass, sources)


def _tracks_sources(node: TrainerParts) -> bool:
    return bool(node.loader.source_names) and not node.model.has_own_loss


def _pass_through(node: TrainerParts, batch: MicroBatch, scale: float) -> TokenLoss:
    """Run one forward and one backward pass; returns its loss, detached."""
    loss = node.model(batch.tokens, batch.cu_seqlens, batch.targets, node.config.optim.z_loss, _tracks_sources(node))
    (loss.objective * scale).backward()
    return loss


def compile_model(node: TrainerParts) -> None:
    """Compile the model before this node is a member, so that no other node waits for its slow first step.

    Runs one step's passes and, with [eval] or outer.score, one pass without gradients, on dummy rows of the training
    shapes. The model, its gradients and the random states stay unchanged. No-op without compilation. All local ranks.
    """
    config, device = node.config, node.local.device
    if not compiles(config.train, node.local):
        return
    from_s = time.monotonic()
    rows = min(config.train.micro_bs, config.train.batch_size // node.local.world_size)
    tokens = torch.zeros(rows, config.data.seq_length, dtype=torch.int64)
    borders = torch.arange(0, tokens.numel() + 1, config.data.seq_length, dtype=torch.int32)
    batch = MicroBatch(tokens, tokens, borders if config.data.document_mask else None).to(device)
    buffers = [(buffer, buffer.clone()) for buffer in node.model.buffers()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        begin_micro_batch(node.model, node.placement, is_last=True)
        _pass_through(node, batch, 1.0)
        node.inner.zero_grad()
        if config.eval is not None or scoring_of(config) is not None:
            with evaluating(node.model):
                node.model(batch.tokens, batch.cu_seqlens, batch.targets)
    for buffer, before in buffers:
        buffer.copy_(before)
    if node.local.rank == 0:
        _log.info("compiled the model", extra={"fields": {"took_s": round(time.monotonic() - from_s, 1)}})


def write_sample(node: TrainerParts, prompt: str, tokens: int, events: Events) -> None:
    """Continue a prompt with the trained model, and write the text to the node's folder."""
    ids = torch.tensor(prompt_of(node.tokenizer, prompt).ids.astype("int64"), device=node.local.device)
    context = node.config.data.seq_length
    generated = generate(node.model, ids, max_new_tokens=tokens, temperature=0.8, seed=0, context=context)
    if node.local.rank == 0:
        path, text = node.node_dir / SAMPLE_FILE, node.tokenizer.decode(generated.tolist())
        path.write_text(text, encoding="utf-8")
        events.emit("sample_written", path=str(path), text=text[:_SAMPLE_CHARS])


def write_export(node: TrainerParts, settings: ExportConfig, events: Events) -> None:
    """Export the trained model as a folder. Takes 4 bytes of memory per parameter, and 8 more for the comparison."""
    out = settings.path or node.node_dir / EXPORT_DIR
    held = whole_parameters(node.parameters, keeps=node.local.rank == 0)
    if node.local.rank != 0:
        return
    trained = TrainedModel(node.blueprint, node.tokenizer, node.config.data.seq_length, held.__getitem__)
    try:
        write_directory(trained, out, settings.dtype)
    except FolderInUse as error:
        _log.warning("the model is not exported", extra={"fields": {"why": str(error)}})
        return
    events.emit("model_exported", path=str(out), parity=describe(check_parity(trained, out, settings.dtype)))

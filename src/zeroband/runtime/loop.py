"""The training of one rank, from its parts to the end of the run. The only place where the parts meet."""

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
from zeroband.node.async_copy import PendingNumbers
from zeroband.node.mesh import (
    LocalMesh,
    all_ok,
    barrier,
    broadcast_json,
    clip_grad_norm_,
    compiles,
    init_local_mesh,
    set_gradient_sync,
    sum_over_ranks,
    widest_float,
)
from zeroband.observe.events import noop
from zeroband.observe.log import get_logger
from zeroband.observe.stall import register_stack_dump
from zeroband.runtime.build import TrainerParts, build_trainer
from zeroband.runtime.checkpointing import Checkpointing, open_checkpoints
from zeroband.runtime.evaluation import (
    Evaluations,
    EvaluationSet,
    HeldOutEvaluations,
    open_evaluation_sets,
    open_scorer,
)
from zeroband.runtime.join import open_runtime
from zeroband.runtime.node_parts import Entry, HeldPort, TrainingRun
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

SHOWN_S = 1.0
"""Pause between two signs of life while samples are waited for."""

_ROUNDS = 3
"""One round that is left out is an accident, whatever its length."""

_log = get_logger(__name__)


def run(config: RunConfig, departure: Departure) -> None:
    """Train with this node's other ranks, and give everything back at the end."""
    with ExitStack() as stack:
        local = init_local_mesh(kind=config.train.device)
        stack.push(partial(end_ranks, local, departure))
        config, port = open_own_store(config, local, departure, stack)
        train(config, local, departure, stack, port)


def end_ranks(local: LocalMesh, departure: Departure, kind: type[BaseException] | None, *_: object) -> None:
    """Close this node's process groups; where all ranks come here, when all have.

    What rank 0 alone does at its end, such as an export or the last checkpoint, takes minutes, and NCCL's groups end
    with the first rank that closes its own.
    """
    if kind is None or (issubclass(kind, Leaving) and not departure.is_cut_short):
        with contextlib.suppress(RuntimeError):  # another rank failed meanwhile: it says why
            barrier(local)
    local.close()


class FailedSteps:
    """Counts inner steps in a row from which a node learns nothing: gradients, or updates of rounds, are not finite.

    limit: how many there may be, and at least three rounds; None: any number. `has_learned`: before this start.
    Local ranks count the same.
    """

    def __init__(self, limit: int | None = None, *, has_learned: bool = False) -> None:
        self._limit = math.inf if limit is None else limit
        self._has_learned = has_learned
        self._gradients = 0
        self._steps, self._rounds = 0, 0
        """Since the last round that this node's update counted in, and how many it was left out of."""
        self._loss = 0.0

    def note(self, step: int, norm: float, loss: float, rounds: Sequence[RoundReport]) -> None:
        """Count a step. Raises LearnsNothing where it is one too many."""
        self._gradients = 0 if math.isfinite(norm) else self._gradients + 1
        self._steps, self._loss = self._steps + 1, loss
        for round in rounds:
            self._rounds = self._rounds + 1 if round.is_left_out else 0
            if not round.is_left_out:
                self._steps, self._has_learned = 0, True
        lost = self._steps if self._rounds >= _ROUNDS else 0
        if max(lost, self._gradients) >= self._limit:
            raise LearnsNothing(
                f"nothing was learned in {max(lost, self._gradients)} inner steps in a row (train.non_finite_steps), "
                f"up to step {step}: their updates are not finite (gradient norm {norm}, loss {loss}); look at the "
                "data and the rate, and go on from a checkpoint with --resume; where one node alone has this, look at "
                "its hardware"
            )

    def require_something(self) -> None:
        """Raise LearnsNothing at the end of a run that gave a model without a loss, or the one it began with."""
        is_broken = self._gradients > 0 and not math.isfinite(self._loss)
        if self._limit < math.inf and (is_broken or (self._rounds and not self._has_learned)):
            raise LearnsNothing(
                f"nothing was learned in the last {max(self._steps, self._gradients)} inner steps, whose updates are "
                f"not finite (loss {self._loss}), so there is nothing to export; look at the data and the rate"
            )


@dataclass(frozen=True)
class Training:
    """What the loop of this rank works with."""

    node: TrainerParts
    world: TrainingRun
    entry: Entry
    checkpoints: Checkpointing
    report: Report
    evaluations: Evaluations = field(default_factory=Evaluations)
    failed: FailedSteps = field(default_factory=FailedSteps)


def train(
    config: RunConfig, local: LocalMesh, departure: Departure, stack: ExitStack, port: HeldPort | None = None
) -> None:
    """The whole run of this rank; `stack` gives everything back at its end. `port`: is open already, if one is."""
    node = build_trainer(config, local, departure, port)
    stack.callback(node.loader.close)
    sets = open_evaluation_sets(node)
    report = open_report(node, stack)
    barrier(local)  # the node's folder is ours now: another trainer that was started by mistake has been refused
    stack.callback(register_stack_dump(node.node_dir, local.rank))
    compile_model(node)
    world, entry = open_world(node, report, stack, sets)
    joined = entry.enter()
    note_entry(world, entry, report, joined)
    checkpoints = open_checkpoints(node, world, report.events, stack)
    failed = FailedSteps(config.train.non_finite_steps, has_learned=world.outer.inner_step > 0)
    evaluations = open_evaluations(node, world, sets, report)
    training = Training(node, world, entry, checkpoints, report, evaluations, failed)
    if joined:
        training.checkpoints.take_if_due(joined)
    departure.holds_work = True
    while not world.outer.progress.is_complete:
        leave_if_asked(training)
        try:
            train_round(training)
        except (Fenced, RolledBack) as why:
            come_back(training, why)
        except Leaving:  # its time is over, and the others, if there are any, did not come
            if not departure.is_cut_short or local.world_size == 1:  # else local ranks are at different places
                save_if_last(training)
            raise
    failed.require_something()
    finish(node, report)


def leave_if_asked(training: Training) -> None:
    """Raise Leaving on all local ranks where this node was asked to leave; it owes the others nothing here.

    If it is the last node of the run, it saves what it holds first.
    """
    node, outer, report = training.node, training.world.outer, training.report
    if broadcast_json(node.departure.is_asked, node.local):
        for synced in outer.flush():
            report.committed(synced)
        round = outer.round
        save_if_last(training)
        if not node.departure.is_urgent:
            report.events.emit("drained", round=round)
        node.faults.at("leaving", 0)
        raise Leaving(f"left as asked, after round {round}")


def save_if_last(training: Training) -> None:
    """Take a checkpoint if no other node goes on with the run when this one leaves."""
    if (staying := training.world.announce_leaving()) != "others":
        training.checkpoints.take_before_leaving(is_alone=staying == "nobody")


def open_world(
    node: TrainerParts, report: Report, stack: ExitStack, sets: Sequence[EvaluationSet] = ()
) -> tuple[TrainingRun, Entry]:
    """The run that the configuration asks for, and the way into it. `sets`: as for `open_scorer`."""
    if node.config.outer is None:
        return (single := SingleNode(node, report.events)), single
    return open_runtime(node, report.events, stack, open_scorer(node, sets))


def open_evaluations(
    node: TrainerParts, world: TrainingRun, sets: Sequence[EvaluationSet], report: Report
) -> Evaluations:
    """The evaluations that the configuration asks for."""
    if node.config.eval is None:
        return Evaluations()
    return HeldOutEvaluations(node, world, sets, node.config.eval.every_steps, report.events)


def note_entry(world: TrainingRun, entry: Entry, report: Report, joined: Sequence[RoundReport]) -> None:
    """Report in which run this node is, with which round it became a member if with one, and that it trains now."""
    report.belongs_to(world.outer.record["session"])
    for round in joined:
        report.committed(round)
    report.begins(entry.verified_at_s)


def come_back(training: Training, why: Fenced | RolledBack) -> None:
    """Become a member again: the run went on without this node, or went back to a checkpoint."""
    if isinstance(why, Fenced):  # the others go on, and it holds no committed state of theirs that it could save
        leave_if_asked(replace(training, checkpoints=Checkpointing()))
    training.node.inner.zero_grad()
    joined = training.entry.come_back(why)
    note_entry(training.world, training.entry, training.report, joined)
    if joined and isinstance(why, Fenced):
        training.checkpoints.take_if_due(joined)


def finish(node: TrainerParts, report: Report) -> None:
    """Write what the configuration wants of the trained model."""
    config = node.config
    if config.observe.sample_prompt is not None:
        write_sample(node, config.observe.sample_prompt, config.observe.sample_tokens)
        report.sampled(node.node_dir / SAMPLE_FILE)
    report.finished()
    if config.export is not None:
        write_export(node, config.export, report)


def train_round(training: Training) -> None:
    """The inner steps from one boundary to the next, and what they contribute to the outer step."""
    node, outer, checkpoints = training.node, training.world.outer, training.checkpoints
    first, ends_round = outer.inner_step, False
    node.loader.assign(outer.upcoming())
    with LateReports(training) as reports:
        for step in itertools.count(first):
            if ends_round or outer.progress.is_complete:  # a round that travelled may complete the run before
                break
            node.profiler.begin(step + 1)
            before, blocked = outer.progress, Stopwatch()
            passed = make_gradients(training)
            made = take_inner_step(training, step, passed, blocked)
            ends_round = is_round_over(training, step + 1 - first)
            is_boundary = outer.is_boundary(ends_round=ends_round)
            if is_boundary:
                reports.learn(made)
            with blocked:
                made.synced = outer.sync_parameters(step, ends_round=ends_round)
            made.progress, made.is_commit = outer.progress, outer.progress is not before
            if made.is_commit:
                checkpoints.take_if_due(made.synced)
            made.blocked_s, made.measured = blocked.total_s, checkpoints.measured()
            if is_evaluated := training.evaluations.is_due(before, outer.progress):
                if not is_boundary:
                    reports.learn(made)
                made.measured = {**made.measured, **training.evaluations.run(outer.progress.inner_step)}
            reports.end(made, is_late=not (is_boundary or is_evaluated))
            node.profiler.end(step + 1)


class LateReports:
    """Tells outer algorithm and report of each inner step, in order; as a context, of the last one at its end.

    At a boundary at once, else when the next step was given to the device, which so always has work.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._outer = training.world.outer
        self._late: InnerStep | None = None

    def __enter__(self) -> LateReports:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Leaving):
            self._tell_late()

    def learn(self, made: InnerStep) -> None:
        """Tell the algorithm of all steps up to this one, before the hook of a boundary. Waits for the device."""
        self._tell_late()
        self._learn(made)

    def end(self, made: InnerStep, *, is_late: bool) -> None:
        """The hooks of a step were called. `is_late`: it is told of with the next one."""
        if is_late:
            self._tell_late()
            self._late = made
        else:
            self._tell(made, ended_at_s=time.monotonic())

    def _tell_late(self) -> None:
        made, self._late = self._late, None
        if made is not None:
            self._learn(made)
            self._tell(made, ended_at_s=made.shown.ready_at_s)

    def _learn(self, made: InnerStep) -> None:
        if not self._outer.has_own_steps:  # told with the gradient
            return
        with self._training.node.departure.in_step():
            made.read()
        is_finite = math.isfinite(made.grad_norm)
        if not is_finite:
            fields = {"step": made.number, "norm": made.grad_norm, "loss": made.loss}
            _log.warning("non-finite gradient: inner step left out", extra={"fields": fields})
        self._outer.learned(made.passed.tokens if is_finite else 0, made.loss)

    def _tell(self, made: InnerStep, *, ended_at_s: float) -> None:
        made.read()
        made.ended_at_s = ended_at_s
        self._training.report.stepped(made)
        self._training.failed.note(made.number + 1, made.grad_norm, made.loss, made.synced)


def make_gradients(training: Training) -> PassResult:
    """The passes of one inner step. After them nothing of the state has changed, and a copy of it must be whole."""
    node, began_at_s = training.node, time.monotonic()
    with node.departure.in_step():
        passed = forward_backward(node, training.world.show_progress)
    training.checkpoints.settle()
    with node.departure.in_step():
        node.faults.at("inner", training.world.outer.round + 1)
        time.sleep(node.faults.extra_s(time.monotonic() - began_at_s))
    return passed


def is_round_over(training: Training, steps: int) -> bool:
    """Whether the round ends with this step, the `steps`-th in it: one answer on all local ranks."""
    node = training.node
    if node.loader.remaining < node.config.train.batch_size:
        return True
    return not all_ok(not (node.departure.is_urgent or training.world.outer.is_time_over(steps)), node.local)


def take_inner_step(training: Training, step: int, passed: PassResult, blocked: Stopwatch) -> InnerStep:
    """Have the optimizer step by the gradients of this node, which are not waited for, or by those of all nodes.

    A gradient of this node's own that is not finite, or of no target, moves the schedule of the optimizer alone.
    """
    node, outer, found_inf = training.node, training.world.outer, None
    widest = widest_float(passed.nats.device)
    lr, lr_muon, has_own_steps = node.inner.lr, node.inner.lr_muon, outer.has_own_steps
    if not has_own_steps:  # all nodes make this one together, and each of them says with its gradient what it saw
        with node.departure.in_step():
            sum_over_ranks(passed.nats, node.local)
            outer.learned(passed.tokens, mean_of(passed.nats[0].item(), passed.tokens))
    with blocked:
        common_norm = outer.sync_gradients(step, passed.tokens)
    if common_norm is None:
        with node.departure.in_step():
            also = passed.nats if has_own_steps else None
            norm = clip_grad_norm_(node.parameters, node.config.optim.clip_norm, also=also)
        found_inf = (~norm.isfinite() | (passed.tokens == 0)).float() if has_own_steps else None
    else:
        assert not has_own_steps, "nodes that make steps of their own have no gradient in common"
        norm = torch.full((), common_norm, dtype=widest, device=passed.nats.device)
    node.inner.step(found_inf)
    node.inner.zero_grad()
    shown = PendingNumbers(torch.cat([norm.to(widest).view(1), passed.nats.to(widest)]))
    return InnerStep(number=step, lr=lr, lr_muon=lr_muon, passed=passed, shown=shown)


class Stopwatch:
    """Adds up the time spent inside it."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def __enter__(self) -> None:
        self._from_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.monotonic() - self._from_s


def forward_backward(node: TrainerParts, show_progress: Callable[[], None] = noop) -> PassResult:
    """Have the device compute the gradients of one inner step on this rank.

    `show_progress`: called after each micro-batch, and again and again while samples do not come, such as from a
    storage that is away.
    """
    from_s = time.perf_counter()
    while not node.loader.is_ready(SHOWN_S):
        show_progress()
    batches = [batch.to(node.local.device) for batch in node.loader.next_step()]
    data_s = time.perf_counter() - from_s
    targets, names = node.loader.targets_in_step, node.loader.source_names
    by_target = _tells_sources(node)
    scale = gradient_scale(targets, node.local.world_size)
    nats = torch.zeros(1 + len(names) * by_target, device=node.local.device)
    for number, batch in enumerate(batches, start=1):
        set_gradient_sync(node.model, node.placement.reduces_micro_batches or number == len(batches))
        loss = _pass_through(node, batch, scale)
        nats[0] += loss.cross_entropy
        if by_target:
            assert batch.sources is not None and loss.per_target is not None, "rows of a mixture know their sources"
            nats[1:] += sums_by_source(loss.per_target, batch.sources, len(names))
        show_progress()
    read = zip(names, node.loader.targets_by_source, node.loader.passes, strict=False)  # a single source has no name
    sources = {name: SourceResult(tokens, data_pass) for name, tokens, data_pass in read}
    return PassResult(nats, targets, data_s, node.loader.data_pass, sources)


def _tells_sources(node: TrainerParts) -> bool:
    return bool(node.loader.source_names) and not node.model.has_own_loss


def _pass_through(node: TrainerParts, batch: MicroBatch, scale: float) -> TokenLoss:
    """One forward and one backward pass; its loss, detached."""
    loss = node.model(batch.tokens, batch.cu_seqlens, batch.targets, node.config.optim.z_loss, _tells_sources(node))
    (loss.objective * scale).backward()
    return loss


def compile_model(node: TrainerParts) -> None:
    """Have the compiler do its work before this node is a member, for whose first step the others would wait.

    One step's passes and, with [eval] or outer.score, one of those without gradients, over made-up rows of the shapes
    of training. The model, its gradients and the random states are as before. Does nothing where nothing is compiled.
    All local ranks.
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
        set_gradient_sync(node.model, True)
        _pass_through(node, batch, 1.0)
        node.inner.zero_grad()
        if config.eval is not None or scoring_of(config) is not None:
            with evaluating(node.model):
                node.model(batch.tokens, batch.cu_seqlens, batch.targets)
    for buffer, before in buffers:
        buffer.copy_(before)
    if node.local.rank == 0:
        _log.info("the model is compiled", extra={"fields": {"took_s": round(time.monotonic() - from_s, 1)}})


def write_sample(node: TrainerParts, prompt: str, tokens: int) -> None:
    """Continue a prompt with the trained model; into the node's folder of the run directory."""
    ids = torch.tensor(prompt_of(node.tokenizer, prompt).ids.astype("int64"), device=node.local.device)
    context = node.config.data.seq_length
    generated = generate(node.model, ids, max_new_tokens=tokens, temperature=0.8, seed=0, context=context)
    if node.local.rank == 0:
        (node.node_dir / SAMPLE_FILE).write_text(node.tokenizer.decode(generated.tolist()), encoding="utf-8")


def write_export(node: TrainerParts, settings: ExportConfig, report: Report) -> None:
    """Write the trained model as a directory; 4 bytes of memory for each parameter, and 8 more to compare it."""
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
    report.exported(out, describe(check_parity(trained, out, settings.dtype)))

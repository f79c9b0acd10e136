"""A run of several nodes in one process, a thread for each; the store and the lanes between them are in memory.

The members, the mesh (`ElasticDeviceMesh`), the shared buffers and the algorithms are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from tests.memberships import a_member
from tests.memory_store import MemoryRecord, MemoryStore
from tests.unit.elastic.transport.oracle import averaged
from torch import Tensor, nn

from zeroband.config.optim import AdamWConfig, OptimConfig
from zeroband.config.outer import CustomConfig, DdpConfig, DemoConfig, DilocoConfig, RoundsConfig, SparseLocoConfig
from zeroband.config.schema import RollbackConfig
from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.progress import RunShape
from zeroband.elastic.membership.records import Evidence, RoundPlan, Verdict
from zeroband.elastic.membership.round_rules import Rules, Wait
from zeroband.elastic.membership.trust import ScoringRule
from zeroband.elastic.rounds.carriage import Carriage
from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh
from zeroband.elastic.rounds.interfaces import (
    History,
    OuterParts,
    RunLength,
    Scorer,
    Scoring,
)
from zeroband.elastic.rounds.journal import Journal, JournalBounds
from zeroband.elastic.rounds.member import Member
from zeroband.elastic.rounds.phase import PhaseLength
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.store.interface import Store
from zeroband.elastic.transport.base import Gathering, MovedBytes, Rates, RoundRequest
from zeroband.elastic.transport.gloo_plane import lane_bounds, ring_bytes
from zeroband.errors import Fenced, PeerLost, RecoveryFailed, RoundsMissed, RunOver
from zeroband.kernels.codec import CODECS, Codec
from zeroband.kernels.robust import Robustly, combine
from zeroband.model.optim import InnerOptimizer
from zeroband.node.faults import FaultPoints
from zeroband.node.mesh import LocalMesh
from zeroband.node.shared_flags import SharedFlags
from zeroband.outer.many_steps import ManySteps
from zeroband.outer.registry import build_schedule
from zeroband.outer.schedule import Schedule
from zeroband.runtime.auto_rollback import AutoRollback
from zeroband.state.feedback import ErrorFeedback
from zeroband.state.flat import FlatLayout, ShardMap, SharedBuffers
from zeroband.state.fragments import arranged, fragments_of, whole
from zeroband.state.round_state import RoundState, RoundUpdate

DEADLINE_S = 60.0
"""For what must come: no test waits for it, and a busy machine takes seconds for what takes milliseconds."""
STRAGGLERS_S = 1.0
"""By the members' own clock, which stands still but for `FakeRun.hurry`."""
BATCH = 4
CLIP_NORM = 1.0
OPTIM = OptimConfig(adamw=AdamWConfig(lr=0.1), warmup_steps=0, clip_norm=CLIP_NORM)

Algorithm = DilocoConfig | DdpConfig | DemoConfig | SparseLocoConfig | CustomConfig

_T = TypeVar("_T")


class NodeDied(Exception):
    """Stands for SIGKILL: ends a node's thread."""


class RunInMemory(MemoryStore):
    """The run's record as somebody sees it who looks on, and what travels between its lanes."""

    def __init__(self) -> None:
        super().__init__(MemoryRecord())
        self.sent: dict[tuple[str, int], dict[str, Tensor]] = {}
        """(id of a plan, lane) -> what each member put into the all-reduce."""
        self.connected: set[tuple[str, str]] = set()
        """(id of a plan, member) that began the transfer."""

    @property
    def verdicts(self) -> list[Verdict]:
        return self.record.verdicts

    @property
    def plans(self) -> list[RoundPlan]:
        return self.record.plans

    def change(self, change: Callable[[], object]) -> None:
        with self.record.changed:
            change()
            self.record.changed.notify_all()

    def wait_for(self, decide: Callable[[], _T | Wait]) -> _T:
        """The first answer of `decide` that is no Wait; it is called with the record held."""
        return self.record.wait_for(decide)

    def await_connected(self, dying: str) -> None:
        """Wait until the others are in the transfer of the current plan, so that all of them notice a loss."""

        def decide() -> bool | Wait:
            plan = self.plans[-1]
            others = {(plan.id, member) for member in plan.members if member != dying}
            return others <= self.connected or Wait("others to connect")

        self.wait_for(decide)

    def await_ready(self, round: int, member: str) -> None:
        """Wait until a member stands at the boundary of a round."""
        self.wait_for(lambda: member in self.record.ready[round] or Wait(f"{member} to reach round {round}"))

    def await_committed(self, round: int) -> None:
        """Wait until a round has its verdict."""
        self.wait_for(lambda: any(v.round == round for v in self.verdicts) or Wait(f"round {round} to be committed"))

    def require_sound(self, plan: RoundPlan) -> None:
        """Raise PeerLost where a plan cannot be finished: what a member's watcher does for a real data plane."""
        if not self.view(plan.round).can_finish(plan):
            raise PeerLost(f"round {plan.round} cannot be finished")


class MemoryLanes:
    """`elastic.groups.LaneGroups` without sockets. A broken transfer keeps hold of its tensors, as gloo does."""

    keeps_buffers = False

    def __init__(self, store: RunInMemory, member_id: str, lanes: int, codec: Codec, faults: FaultPoints) -> None:
        self._lanes = lanes
        self.codec = codec
        self.abandoned: list[Tensor] = []
        self.damage: Callable[[Tensor], object] | None = None
        """Applied once to what arrives."""
        self.forge: dict[int, Callable[[Tensor], object]] = {}
        """Applied once to what is sent in the gathering of this number."""
        self._store = store
        self._faults = faults
        self.member_id = member_id

    def reduce_mean(
        self,
        request: RoundRequest,
    ) -> MovedBytes:
        plan, member_id, contribution, result = request.plan, request.member_id, request.sent, request.result
        errors, encoded = request.residual, request.encoded
        assert member_id == self.member_id
        self._store.change(lambda: self._store.connected.add((plan.id, self.member_id)))
        share = plan.share(member_id)
        if encoded is not None:
            contribution = self.codec.decode(encoded.contribution, result.numel())
        if request.robust is not None:
            self._combine(contribution, result, plan, request.robust)
            return MovedBytes(0, 0)
        if self.codec.needs_feedback:
            self._average_encoded(contribution, result, plan, errors if share > 0 else None)
            return MovedBytes(0, 0)
        result.copy_(contribution * share if share > 0 else torch.zeros_like(contribution))
        bounds = lane_bounds(result.numel(), self._lanes)
        self.all_reduce([(lane, result[start:stop]) for lane, (start, stop) in enumerate(bounds)], plan)
        if encoded is not None:
            encoded.result.copy_(self.codec.encode(result))
            result.copy_(self.codec.decode(encoded.result, result.numel()))
        moved = ring_bytes(result.numel(), len(plan.members))
        return MovedBytes(moved, moved)

    def _combine(self, contribution: Tensor, result: Tensor, plan: RoundPlan, robust: Robustly) -> None:
        """As the native path, where every member owns everything: all come to the same."""
        sources = self._all_sent(contribution, plan)
        shares, numel = [plan.share(member) for member in plan.members], result.numel()
        counted = zip(sources, shares, strict=True)
        parts = [self.codec.encode(source if share > 0 else torch.zeros(numel)) for source, share in counted]
        combined, measured = combine(robust.rule, self.codec, parts, shares, numel)
        robust.measured.values.copy_(measured.values)
        result.copy_(self.codec.decode(self.codec.encode(combined), numel))

    def _average_encoded(self, contribution: Tensor, result: Tensor, plan: RoundPlan, errors: Tensor | None) -> None:
        """As the native path: all-to-all, the first member owns everything."""
        shares = [plan.share(member) for member in plan.members]
        if errors is not None:
            errors.fill_(float("nan"))
        sources = self._all_sent(contribution, plan)
        mean, taken = averaged(self.codec, sources, shares, (0, *[result.numel()] * len(sources)))
        result.copy_(mean)
        if errors is not None:
            errors.copy_(taken[plan.members.index(self.member_id)])

    def _all_sent(self, contribution: Tensor, plan: RoundPlan) -> list[Tensor]:
        """What all members contribute, in their order."""
        sent = self._store.sent
        self._store.change(lambda: sent.setdefault((plan.id, 0), {}).update({self.member_id: contribution.clone()}))

        def arrived() -> bool | Wait:
            if len(sent[plan.id, 0]) == len(plan.members):
                return True
            self._store.require_sound(plan)
            return Wait("parts of others")

        self._store.wait_for(arrived)
        return [sent[plan.id, 0][member] for member in plan.members]

    def all_reduce(self, parts: Sequence[tuple[int, Tensor]], plan: RoundPlan) -> None:
        if len(plan.members) == 1:
            return
        points = self._faults.transfer(plan.round)
        store, number = self._store, plan.id
        for lane, part in parts:
            sent = {self.member_id: part.clone()}
            store.change(lambda lane=lane, sent=sent: store.sent.setdefault((number, lane), {}).update(sent))

        def arrived() -> bool | Wait:
            if all(len(store.sent[number, lane]) == len(plan.members) for lane, _ in parts):
                return True
            store.require_sound(plan)
            return Wait("parts of others")

        try:
            store.wait_for(arrived)
        except PeerLost:
            self.abandoned += [part for _, part in parts]
            raise
        for lane, part in parts:
            part.copy_(sum((store.sent[number, lane][m] for m in plan.members), torch.zeros_like(part)))
        damage, self.damage = self.damage, None
        if damage is not None:
            damage(parts[0][1])
        points.reach(1.0)

    def gaps(self) -> Evidence:
        return Evidence()

    def gather(
        self,
        request: RoundRequest,
        gathering: Gathering,
    ) -> MovedBytes:
        plan, member_id, payload, result = request.plan, request.member_id, request.sent, request.result
        store, key, sent = self._store, (plan.id, -1 - gathering.number), payload.clone()
        self.forge.pop(gathering.number, lambda payload: None)(sent)
        store.change(lambda: store.connected.add((plan.id, member_id)))
        store.change(lambda: store.sent.setdefault(key, {}).update({member_id: sent}))

        def arrived() -> bool | Wait:
            if len(store.sent[key]) == len(plan.members):
                return True
            store.require_sound(plan)
            return Wait("payloads of others")

        try:
            store.wait_for(arrived)
        except PeerLost:
            self.abandoned.append(result)
            raise
        receives = gathering.receiver in (None, member_id)
        if receives:
            result.copy_(torch.cat([store.sent[key][member] for member in plan.members]))
        self._faults.transfer(plan.round).reach(1.0)
        receivers = len(plan.members) if gathering.receiver is None else 1
        received = gathering.total_bytes - len(payload) if receives else 0
        return MovedBytes(len(payload) * (receivers - receives), received)

    def abandon(self) -> None:
        """Nothing to part from."""

    def measured(self) -> Rates:
        return Rates()

    def close(self) -> None:
        """Nothing to close."""


class ModelOf(nn.Module):
    """Parameters of these names and shapes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *folders, last = name.split(".")
            module: nn.Module = self
            for folder in folders:
                if not hasattr(module, folder):
                    module.add_module(folder, nn.Module())
                module = module.get_submodule(folder)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape)))


class TinyModel(nn.Module):
    """22 parameters, which 3 lanes do not divide; the names are not in the order of the definition."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.bias = nn.Parameter(torch.randn(7, generator=generator))


@dataclass
class FakeNode:
    """One node and what it is made of."""

    member: Member
    lanes: MemoryLanes
    mesh: ElasticDeviceMesh
    model: nn.Module
    inner: InnerOptimizer
    buffers: SharedBuffers
    feedback: ErrorFeedback
    carriage: Carriage
    journal: Journal
    departure: Departure
    faults: FaultPoints
    outer: Schedule[Any]
    loss: float = 0.0
    """Of its next inner steps."""
    steps: int = 0
    """Made since this node was last dealt samples."""
    dealt: int = 0
    """For which it was dealt samples then."""
    made_steps: int = 0
    """By `train`."""
    reports: list[RoundReport] = field(default_factory=list[RoundReport])
    """Of all rounds that its state got."""

    @property
    def dealt_steps(self) -> int:
        """Inner steps for which this node holds samples."""
        return sum(stop - start for start, stop in self.outer.upcoming()) // BATCH

    @property
    def params(self) -> Tensor:
        """(n,) copy of the model's parameters in the canonical order."""
        return torch.cat([p.detach().reshape(-1) for p in self._parameters])

    def set_params(self, flat: Tensor) -> None:
        """As if the inner steps had led here."""
        self._split_into([p.data for p in self._parameters], flat)

    def set_gradient(self, flat: Tensor) -> None:
        """As if the backward pass had given this."""
        gradients = [torch.zeros_like(p) for p in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._split_into(gradients, flat)

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """In the canonical order."""
        return [parameter for _, parameter in sorted(self.model.named_parameters())]

    def _split_into(self, targets: Sequence[Tensor], flat: Tensor) -> None:
        for target, part in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
            target.copy_(part.view_as(target))

    def train(self, take: Callable[[int, Tensor], Tensor], steps: int, tokens: int = 10) -> None:
        """Inner steps as the trainer makes them; `take`: from the number of a step, from 1, and the parameters."""
        for _ in range(steps):
            if self.outer.progress.is_complete:
                return
            assert self.outer.sync_gradients(self.inner.step_count, tokens) is None
            self.set_params(take(self.outer.inner_step + 1, self.params))
            self.inner.seek(self.inner.step_count + 1)
            self.dealt, self.steps = self.dealt if self.steps else self.dealt_steps, self.steps + 1
            assert self.dealt, "a node that is to train holds samples"
            self.made_steps += 1
            is_over = self.steps >= self.dealt
            self.reports += self._end_step(tokens, ends_round=is_over)
            self.steps = 0 if is_over else self.steps

    def diloco_step(self, update: Tensor, tokens: int, *, ends_round: bool | None = None) -> RoundReport | None:
        """An inner step that moves the parameters by `update`, with the hooks around it, as the trainer makes it.

        `ends_round`: None: when the samples are used up.
        """
        assert self.outer.sync_gradients(self.inner.step_count, tokens) is None
        self.set_params(self.params + update)
        self.inner.seek(self.inner.step_count + 1)
        self.steps += 1
        is_over = self.steps >= self.dealt_steps if ends_round is None else ends_round
        reports = self._end_step(tokens, ends_round=is_over)
        self.reports += reports
        self.steps = 0 if is_over else self.steps
        return reports[-1] if reports else None

    def _end_step(self, tokens: int, *, ends_round: bool) -> Sequence[RoundReport]:
        """The hooks after an inner step of this node's own, as late as the trainer calls them."""
        is_boundary = self.outer.is_boundary(ends_round=ends_round)
        if is_boundary:
            self.outer.learned(tokens, self.loss)
        reports = self.outer.sync_parameters(self.inner.step_count - 1, ends_round=ends_round)
        if not is_boundary:
            self.outer.learned(tokens, self.loss)
        return reports

    def gradient_step(self, gradient: Tensor, tokens: int = 10) -> Sequence[RoundReport]:
        """An inner step of DDP or DeMo with this local gradient, as the trainer makes it."""
        self.set_gradient(gradient)
        self.outer.learned(tokens, self.loss)
        self.outer.sync_gradients(self.inner.step_count, tokens)
        self.inner.step()
        self.inner.zero_grad()
        reports = self.outer.sync_parameters(self.inner.step_count - 1, ends_round=True)
        self.reports += reports
        return reports

    def ddp_step(self, gradient: Tensor, tokens: int) -> RoundReport | None:
        """A step whose round is over with it."""
        (report,) = self.gradient_step(gradient, tokens)
        return report

    def take_step(self, update: Tensor, tokens: int) -> RoundReport:
        """A round of one step of whichever algorithm this is."""
        has_inner_steps = isinstance(self.outer, ManySteps)
        report = self.diloco_step(update, tokens, ends_round=True) if has_inner_steps else self.ddp_step(update, tokens)
        return self._last(report)

    def take_steps(self, updates: Sequence[Tensor], tokens: int) -> RoundReport:
        """A round of an algorithm that has many inner steps, with these."""
        reports = [self.diloco_step(u, tokens, ends_round=u is updates[-1]) for u in updates]
        return self._last(reports[-1])

    def _last(self, report: RoundReport | None) -> RoundReport:
        """The report of a round that is over; a late node, which would train on, waits for it without a step."""
        if report is not None:
            return report
        while not (reports := self.outer.flush()):
            pass
        self.reports += reports
        return reports[-1]

    def entry(self, round: int) -> RoundUpdate | None:
        """What its journal keeps of a round."""
        self.journal.settle()
        return self.journal.await_entry(round, timeout_s=0.0)

    def join(self) -> RoundReport | None:
        """Take part as a joiner does that holds a state, caught up as often as it takes."""
        while True:
            try:
                return self.outer.join()
            except RoundsMissed as missed:
                self.outer.catch_up(missed.round)

    def join_and_contribute(self, tokens: int = 10) -> RoundReport:
        """Be a joiner up to the first round that it is in; where it trains before that, it learns nothing."""
        return self.join() or self.take_step(torch.zeros_like(self.params), tokens)

    def receive(self, donor: FakeNode) -> str:
        """Take over the state of another node, as recovery does; the digest that this node finds."""
        copy = donor.outer.copy_state()
        for name, section in copy.sections.items():
            self.buffers[name].copy_(section)
        return self.outer.adopt(copy.round, copy.record)


@dataclass(frozen=True)
class _OfFakeRun:
    """What the node of a name gets from the others of its run, and from the checkpoints that it can read."""

    run: FakeRun
    name: str

    def fetch_entry(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        return self.run.fetch_entry(round, self.name, room)

    def fetch_ahead(self, round: int, room: Callable[[int], Tensor]) -> RoundUpdate:
        return self.run.fetch_entry(round, self.name, room)

    def stage(self, step: int, sections: Sequence[str]) -> RoundState:
        return self.run.stage(step, self.name)


@dataclass
class FakeRun:
    """Nodes by name; their member ids are the names."""

    algorithm: Algorithm
    folder: Path
    local: LocalMesh
    lanes: int = 1
    founders: int = 1
    total_steps: int = 1000
    journal_rounds: int = 8
    quorum: float = 0.5
    flush_every: int | None = None
    model: Callable[[], nn.Module] = TinyModel
    codec: Codec = CODECS["fp32"]
    optim: OptimConfig = OPTIM
    store: RunInMemory = field(default_factory=RunInMemory)
    nodes: dict[str, FakeNode] = field(default_factory=dict)
    checkpoints: dict[int, tuple[RoundState, tuple[str, ...]]] = field(default_factory=dict)
    """By step: the state, and the nodes that can read it."""
    rollback: RollbackConfig | None = None
    memory: Any = None
    """What nodes stamp their state in that are added from now on."""
    scoring: ScoringRule | None = None
    scorer: Callable[[str], Scorer] | None = None
    """Makes what measures losses for the node of a name."""
    corpora: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of the documents that nodes have for themselves."""
    said: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Events of going back, and their rounds."""
    damage: Callable[[Tensor], Tensor] = lambda update: update
    """Done to what a node fetches from a journal."""
    is_link_cut: bool = False
    """Whether nothing comes of what members offer."""
    is_urgent: bool = False
    """Whether the members' clock goes on: from look to look by more than they wait for stragglers."""
    _awaited: set[str] = field(default_factory=set[str])
    now_s: float = 0.0
    until_s: float = field(default_factory=lambda: time.monotonic() + 10 * DEADLINE_S)

    def __getitem__(self, name: str) -> FakeNode:
        return self.nodes[name]

    def add(self, name: str, inject: Sequence[str] = (), pace: int | None = None) -> FakeNode:
        """Build a node; it is in no round yet. `pace`: its inner steps in a round, where they differ from the run's."""
        local = replace(self.local, control=dist.new_group([0], backend="gloo"))
        folder = self.folder / name
        folder.mkdir()
        flags = SharedFlags(folder / "flags", create=True)
        departure = Departure(DEADLINE_S)
        member = self._a_member(MemoryStore(self.store.record), name, name, flags, departure)
        weighs_equally = not isinstance(self.algorithm, DemoConfig) and self.algorithm.weights == "equal"
        is_robust = not isinstance(self.algorithm, DdpConfig) and self.algorithm.robust is not None
        rules = Rules(1, self.founders, STRAGGLERS_S, quorum=self.quorum, counts_equally=weighs_equally)
        is_overlapped = isinstance(self.algorithm, RoundsConfig) and self.algorithm.overlap != 0
        rules = replace(rules, is_robust=is_robust, scoring=self.scoring, hidden=float(is_overlapped))
        model = self.model()
        layout = FlatLayout.of(model)
        has_phases = isinstance(self.algorithm, RoundsConfig)
        steps, seconds = (self.algorithm.phase_steps, self.algorithm.phase_seconds) if has_phases else (1, None)
        rule = "sign" if isinstance(self.algorithm, DemoConfig) else "adamw"

        def die(_action: str) -> None:
            self.store.await_connected(name)
            member.close()
            raise NodeDied(name)

        faults = FaultPoints(inject, strike=die)
        lanes = MemoryLanes(self.store, name, self.lanes, self.codec, faults)
        mesh = ElasticDeviceMesh(local, member, lanes, flags, rules, start_timeout_s=DEADLINE_S, trainer=local)
        fragments, shape = whole(layout), RunShape(self.total_steps, BATCH)
        if isinstance(self.algorithm, RoundsConfig | DemoConfig):
            shape = replace(shape, reads_ahead=self.algorithm.overlap != 0)
        if isinstance(self.algorithm, RoundsConfig):
            count = self.algorithm.fragments
            fragments = fragments_of(layout, count) if count > 1 else fragments
            shape = replace(shape, closing_rounds=count - 1)
        buffers, sent = SharedBuffers(folder, layout.numel, local), ShardMap(arranged(layout, fragments), 0, 1)
        feedback = ErrorFeedback(buffers, sent, self.codec)
        auto_rollback = None if self.rollback is None else self._auto_rollback(self.rollback, member.store, local)
        journal = Journal(folder, JournalBounds(3600.0, 1 << 20, self.journal_rounds))
        parts = OuterParts(
            mesh=mesh,
            model=model,
            inner=InnerOptimizer(model, self.optim, total_steps=self.total_steps, rule=rule),
            buffers=buffers,
            shards=ShardMap(layout, 0, 1),
            fragments=fragments,
            feedback=feedback,
            length=RunLength(shape, PhaseLength(pace or steps, seconds), departure, self.flush_every),
            history=History(journal, _OfFakeRun(self, name), auto_rollback, self.memory),
            faults=faults,
            scoring=Scoring(self.scoring, self.scorer(name)) if self.scoring and self.scorer else None,
            carriage=Carriage(local, buffers, feedback, partial(self.fetch_offer, name)),
        )
        outer = build_schedule(parts, self.algorithm, clip_norm=self.optim.clip_norm)
        rest = (
            parts.inner,
            parts.buffers,
            parts.feedback,
            parts.carriage,
            journal,
            departure,
            parts.faults,
            outer,
        )
        self.nodes[name] = FakeNode(member, lanes, mesh, model, *rest)
        return self.nodes[name]

    def _a_member(self, store: Store, node: str, name: str, flags: SharedFlags, departure: Departure) -> Member:
        shared, corpus = store.found_or_match({}), self.corpora.get(node, SHARED)
        return a_member(store, name, flags, shared=shared, departure=departure, clock=self._clock, corpus=corpus)

    def _clock(self) -> float:
        """Read by whoever waits, before each look."""
        assert time.monotonic() < self.until_s, "a member waits for what never comes"
        verdicts, ready = self.store.verdicts, self.store.record.ready
        if self.is_urgent and (not self._awaited or self._awaited <= {*ready[verdicts[-1].round + 1]}):
            self.now_s += STRAGGLERS_S
        return self.now_s

    @contextmanager
    def hurry(self, *awaited: str) -> Iterator[None]:
        """Have those at the boundary go without stragglers, as soon as a quorum of the members is there.

        `awaited`: members that must be there, too. Where those in time are more than a quorum, the last of them would
        be late or not by chance.
        """
        self.is_urgent, self._awaited = True, {*awaited}
        yield
        self.is_urgent = False

    def close(self) -> None:
        """End all memberships."""
        for node in self.nodes.values():
            node.member.close()
            node.mesh.flags.close()

    def _auto_rollback(self, config: RollbackConfig, store: Store, local: LocalMesh) -> AutoRollback:
        restorer: Any = SimpleNamespace(steps=lambda: sorted(self.checkpoints, reverse=True), is_whole=bool)
        tell: Callable[..., object] = lambda kind, **fields: self.said.append((kind, fields["round"]))  # noqa: E731
        return AutoRollback(config, store, restorer, local, tell)

    def stage(self, step: int, name: str) -> RoundState:
        """The state of a round that was kept as the checkpoint of this step, for a node that has it."""
        if name not in self.checkpoints.get(step, (None, ()))[1]:
            raise RecoveryFailed(f"{name} has no checkpoint of step {step}")
        copy = self.checkpoints[step][0]
        return RoundState(copy.round, copy.record, copy.state_digest)

    def fetch_entry(self, round: int, asker: str, room: Callable[[int], Tensor]) -> RoundUpdate:
        """What a node asks of the others: an entry of their journals."""
        for donor in (node for node in self.nodes.values() if node.member.member_id in self.store.view(round).alive):
            entry = donor.journal.await_entry(round) if donor is not self[asker] else None
            if entry is not None:
                given = self.damage(entry.update)
                update = room(given.numel())
                update.copy_(given)
                return replace(entry, update=update)
        raise RecoveryFailed(f"nobody keeps round {round}")

    def fetch_offer(self, asker: str, member: str, known: str, room: Callable[[int], Tensor]) -> RoundUpdate | None:
        """What a node asks of one that it carries for."""
        assert asker != member
        offer = None if self.is_link_cut else self[member].carriage.offered
        if offer is None:
            raise RecoveryFailed(f"{member} offers nothing")
        if offer.state_digest == known:
            return None
        update = room(offer.update.numel())
        update.copy_(self.damage(offer.update))
        return replace(offer, update=update)

    def settle_journals(self) -> None:
        """Have all nodes keep, and forget, what the rounds so far leave in their journals."""
        for node in self.nodes.values():
            node.journal.settle()

    def catch_up(self, name: str) -> str:
        """Have a node replay what was committed without it; the digest that it has then."""
        node = self[name]
        node.outer.catch_up(self.store.verdicts[-1].round)
        return node.outer.state_digest

    def replace_member(self, name: str) -> None:
        """As after a fence: the node lives on as another member."""
        node = self[name]
        node.member.close()
        node.member = self._a_member(node.member.store, name, f"{name}-again", node.mesh.flags, node.departure)
        node.lanes.member_id = node.member.member_id
        node.mesh.replace_member(node.member)
        node.steps = 0

    def together(self, **works: Callable[[], _T]) -> dict[str, _T | BaseException]:
        """Run a piece of work for each named node at the same time. What one raises is its outcome."""
        with ThreadPoolExecutor(len(works)) as pool:
            running = {name: pool.submit(work) for name, work in works.items()}
            try:
                for job in as_completed(running.values(), timeout=DEADLINE_S):
                    error = job.exception()
                    if error is not None and not isinstance(error, NodeDied | Fenced | RunOver | RolledBack):
                        raise error
            except BaseException:
                for node in self.nodes.values():  # whoever waits at a boundary need not wait any longer
                    node.mesh.flags.set_fenced(True)
                raise
            return {name: job.exception() or job.result() for name, job in running.items()}

    def round(self, tokens: int = 10, **updates: Tensor) -> dict[str, RoundReport]:
        """A round of the named nodes, each with its update (DiLoCo) or gradient (DDP); the reports of who survived."""
        works = {
            name: lambda name=name, update=update: self[name].take_step(update, tokens)
            for name, update in updates.items()
        }
        outcomes = self.together(**works)
        return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, RoundReport)}

    def round_with_joiner(self, joiner: str, tokens: int = 10, **updates: Tensor) -> dict[str, Any]:
        """A round of the named nodes that begins when the joiner stands at its boundary."""
        member_id = self[joiner].member.member_id
        works: dict[str, Callable[[], RoundReport]] = {joiner: partial(self[joiner].join_and_contribute, tokens)}
        for name, update in updates.items():
            works[name] = partial(self._step_beside, member_id, name, update, tokens)
        return self.together(**works)

    def round_with_late(
        self, late: str, steps: Sequence[Tensor], tokens: int = 10, **updates: Tensor
    ) -> dict[str, Any]:
        """A round to which a late node comes at last, with what it learned; the others begin when it is there."""
        works: dict[str, Callable[[], RoundReport]] = {late: partial(self[late].take_steps, steps, tokens)}
        for name, update in updates.items():
            works[name] = partial(self._step_beside, late, name, update, tokens)
        return self.together(**works)

    def _step_beside(self, member_id: str, name: str, update: Tensor, tokens: int) -> RoundReport:
        self.store.await_ready(self[name].outer.round + 1, member_id)
        return self[name].take_step(update, tokens)


StartRun = Callable[..., FakeRun]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What a test opens, closed at its end."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_run(local: LocalMesh, tmp_path: Path) -> Iterator[StartRun]:
    """start_run(algorithm, "a", "b", lanes=3, inject={"b": ["opened@1=SIGKILL"]}): a founded run of these nodes."""
    runs: list[FakeRun] = []

    def start(
        algorithm: Algorithm,
        *names: str,
        lanes: int = 1,
        total_steps: int = 1000,
        journal_rounds: int = 8,
        quorum: float = 0.5,
        codec: str = "fp32",
        inject: Mapping[str, Sequence[str]] | None = None,
        pace: Mapping[str, int] | None = None,
        flush_every: int | None = None,
        model: Callable[[], nn.Module] = TinyModel,
        optim: OptimConfig = OPTIM,
        rollback: RollbackConfig | None = None,
        corpora: Mapping[str, str] | None = None,
        scoring: ScoringRule | None = None,
        scorer: Callable[[str], Scorer] | None = None,
    ) -> FakeRun:
        run = FakeRun(
            algorithm,
            tmp_path,
            local,
            lanes=lanes,
            founders=len(names),
            total_steps=total_steps,
            journal_rounds=journal_rounds,
            quorum=quorum,
            codec=CODECS[codec],
            flush_every=flush_every,
            model=model,
            optim=optim,
            rollback=rollback,
            corpora=corpora or {},
            scoring=scoring,
            scorer=scorer,
        )
        for name in names:
            run.add(name, (inject or {}).get(name, ()), (pace or {}).get(name))
        runs.append(run)
        run.together(**{name: run[name].outer.found for name in names})
        return run

    yield start
    for run in runs:
        run.close()


def make_noise(seed: int, scale: float = 0.1) -> Tensor:
    """(22,) float32, another one for each seed."""
    return scale * torch.randn(22, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def noise() -> Callable[..., Tensor]:
    return make_noise

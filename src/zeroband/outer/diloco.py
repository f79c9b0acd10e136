"""DiLoCo and what it became: many inner steps on each node, then an outer step on the mean of what they changed.

One loop for DiLoCo (arXiv:2311.08105; OpenDiLoCo, arXiv:2407.07852), Streaming DiLoCo (arXiv:2501.18512), which sends a
fragment at a time, and delayed and eager updates (arXiv:2502.12996), where a round travels beside the next inner steps.
Inner optimizer states stay on their nodes. The outer state is that of the means alone, whatever a node trains with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from zeroband.config.outer import DilocoConfig
from zeroband.data.ledger import count
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.coordinator import CoordinatedRounds, RoundCoordinator
from zeroband.elastic.rounds.interfaces import MissedRound, OuterParts, open_buffers
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.rounds.transaction import CONTRIBUTION, Committed, MeanExchange
from zeroband.elastic.transport.gloo_plane import lane_bounds
from zeroband.kernels.scan import norm
from zeroband.node.mesh import barrier, broadcast_json
from zeroband.outer.device_state import DeviceState
from zeroband.outer.inner_parameters import InnerParameters, build_replica
from zeroband.outer.outer_optimizer import OuterSGD, build_outer_optimizer
from zeroband.outer.turns import Turns
from zeroband.state.flat import digest_of, parameter_shards
from zeroband.state.fragments import Fragment, bounds_of

PARAMS, MOMENTUM = "params", "momentum"


class DiLoCo(CoordinatedRounds):
    """Outer state: parameters and momentum, in shared memory. The model holds the inner parameters.

    A phase of inner steps ends with a contribution to the next round, of the fragment whose turn it is. The state gets
    a round `overlap` inner steps after it was contributed to, and before the next contribution at the latest. A flush
    waits for the round at once, after which all nodes train from the outer parameters.
    """

    sections = (PARAMS, MOMENTUM)
    local_sections: tuple[str, ...] = ()

    def __init__(self, parts: OuterParts, config: DilocoConfig) -> None:
        self._parts = parts
        self._buffers = parts.buffers
        self._local = parts.mesh.local
        self._overlap = config.overlap_steps
        self._clips = config.clip_to_median
        self._bounds = bounds_of(parts.fragments)
        self._optimizer = build_outer_optimizer(config, parts.codec)
        open_buffers(parts.buffers, self.sections)
        parts.shards.store(parameter_shards(parts.model), self._buffers[PARAMS])
        self._device = self._open_device_state() if config.state_device == "cuda" else None
        exchange = MeanExchange(
            parts.mesh,
            parts.buffers,
            parts.feedback,
            parts.codec,
            lambda: self._bounds[self._turn()],
            None if self._device is None else self._device.encoded,
        )
        self._coordinator = RoundCoordinator(parts, self.sections, self.replay, exchange)
        self._inner_parameters: InnerParameters = self._device or build_replica(parts, config, self._buffers[PARAMS])
        self._phase_steps = config.phase_steps
        travels = 1.0 if self._overlap is None else self._overlap / self._phase_steps
        self._turns = Turns(len(self._bounds), travels=travels, merge=config.merge, alpha=config.alpha)
        self._coordinator.state_digest = self._digest()

    def _open_device_state(self) -> DeviceState:
        assert isinstance(self._optimizer, OuterSGD), "require_device has seen to that"
        barrier(self._local)  # the ranks have stored their shards
        return DeviceState(
            self._buffers,
            self._parts.shards,
            self._optimizer,
            self._local.device,
            lambda: parameter_shards(self._parts.model),
            params=self._buffers[PARAMS],
            momentum=self._buffers[MOMENTUM],
        )

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Nothing: gradients stay inside the node."""
        return None

    def sync_parameters(self, step: int, tokens: int, *, ends_round: bool) -> Sequence[RoundReport]:
        self._coordinator.count(tokens)
        if ends_round:
            return self._end_phase()
        return self.flush() if self._coordinator.steps == self._overlap else ()

    def flush(self) -> Sequence[RoundReport]:
        if not self._coordinator.is_flying:
            return ()
        report = self._receive(self._coordinator.arrived(), since=self._coordinator.steps / self._phase_steps)
        return [report, *self._close(report)]

    def join(self) -> RoundReport:
        barrier(self._local)
        committed = self._coordinator.commit(self._coordinator.offer(is_joining=True))
        report = self._restart_on(committed)
        newest = [report, *self._close(report)][-1]
        self._coordinator.begin_phase()
        return newest

    # -- the end of a phase -------------------------------------------------------------------------------------

    def _end_phase(self) -> list[RoundReport]:
        """Take over the round that was on its way, contribute, and where the nodes wait for it take over this one too.

        A delayed round is taken over after the contribution: this node learned without it, so its own parameters are
        relative to the outer ones before they move.
        """
        coordinator, reports = self._coordinator, list[RoundReport]()
        before = coordinator.arrived() if coordinator.is_flying else None
        if before is not None and not self._is_delayed:
            reports.append(self._receive(before, since=1.0))
        self._turns.end_phase()
        turn = self._turn()
        is_finite = self._contribute(turn)
        if before is not None and self._is_delayed:
            reports.append(self._apply_committed(before, self._inner_parameters.expect))
        if self.progress.is_complete:
            return reports
        if not is_finite:
            self._parts.inner.forget_moments()
        waits, closes = self._waits_for_the_others(is_finite, is_member_new=before is not None)
        barrier(self._local)
        offer = coordinator.offer(weighted=is_finite, norm=self._norm(turn), trained=self._turns.contribute(turn))
        if waits:
            committed = coordinator.commit(offer)
            is_restart = self._overlap != 0 or closes
            reports.append(self._restart_on(committed) if is_restart else self._receive(committed, since=0.0))
            if not is_finite:
                self._restart()
            reports += self._close(reports[-1], is_due=closes)
        else:
            coordinator.start(offer)
            if before is None and self._is_delayed:
                self._inner_parameters.expect(turn)  # the round that has not arrived counts as one that changed nothing
            share = 1 / len(coordinator.members) if before is None else coordinator.share  # all are equal after a flush
            self._inner_parameters.sent(turn, share, self.progress.outer_step // len(self._bounds) + 1)
        coordinator.begin_phase()
        return reports

    @property
    def _is_delayed(self) -> bool:
        """Whether a mean arrives no sooner than its fragment is sent again: delayed and eager updates of the whole."""
        return self._overlap is None and len(self._bounds) == 1

    def _waits_for_the_others(self, is_finite: bool, *, is_member_new: bool) -> tuple[bool, bool]:
        """Whether training stands still for this round, and whether the other fragments are sent after it at once.

        Then all nodes hold one model.
        """
        coordinator, shape, is_whole = self._coordinator, self._parts.shape, len(self._bounds) == 1
        is_leaving, is_end = self._parts.departure.is_asked, self._is_end(len(self._bounds))
        is_new = is_member_new and coordinator.has_new_members and is_whole
        ends_before_arrival = is_whole and shape.total_steps - self.inner_step <= (self._overlap or 0)
        held = count(self.progress.assigned.get(self._parts.mesh.member_id, ()))
        is_idle = held <= coordinator.steps * shape.batch_size  # until the round has dealt it more
        waits = self._overlap == 0 or not is_finite or is_leaving or is_end or is_new or ends_before_arrival or is_idle
        waits, closes = broadcast_json([waits, is_end and not is_leaving], self._local)
        return waits, closes

    def _close(self, newest: RoundReport, *, is_due: bool = False) -> list[RoundReport]:
        """Send the fragments whose turn it was not, without inner steps in between.

        Where all inner steps of the run are made, whichever node made them; `is_due`: in any case. `newest`: of the
        round before; what this node learned weighs as there, unless it made steps since.
        """
        reports: list[RoundReport] = []
        if not (is_due or self._is_closing()):
            return reports
        weight = newest.weights[newest.members.index(newest.member_id)]
        for _ in self._bounds[1:]:
            if self.progress.is_complete:  # this node came to the closing rounds after the first of them
                break
            turn, made_steps = self._turn(), self._coordinator.steps > 0
            is_finite = self._contribute(turn)
            barrier(self._local)
            if made_steps:
                self._turns.end_phase()
            own, trained = None if made_steps else weight, self._turns.contribute(turn)
            offer = self._coordinator.offer(weighted=is_finite, weight=own, norm=self._norm(turn), trained=trained)
            reports.append(self._restart_on(self._coordinator.commit(offer)))
        return reports

    def _is_closing(self) -> bool:
        """Whether all that the run still lacks are fragments, and this node stays to send them."""
        progress = self.progress
        if progress.is_complete or progress.inner_step < self._parts.shape.total_steps:
            return False
        return not broadcast_json(self._parts.departure.is_asked, self._local)

    def _turn(self) -> int:
        """The fragment of the next round."""
        return self.progress.outer_step % len(self._bounds)

    def _contribute(self, turn: int) -> bool:
        """Write this node's contribution; False on all local ranks if it is not finite somewhere."""
        if self._device is not None:
            is_finite = self._coordinator.is_finite_everywhere(self._device.contribute())
            if is_finite and self._local.rank == 0:
                self._device.encode_borders()
            return is_finite
        shards = self._shards_of(turn)
        anchor = dict(self._parts.shards.parts(self._inner_parameters.anchor, shards))
        contribution = self._buffers[CONTRIBUTION]
        for name, out in self._parts.sent.parts(contribution, shards):
            inner = self._parts.shards.own(name, shards[name]).to("cpu")
            self._optimizer.contribution(anchor[name], inner, out)
        self._parts.feedback.add_to(contribution, shards)
        return self._coordinator.is_contribution_finite(shards)

    def _norm(self, turn: int) -> float:
        """Of the contribution of all local ranks; on local rank 0, where the run asks for it."""
        if not self._clips or self._local.rank != 0:
            return 0.0
        return norm(self._buffers[CONTRIBUTION][self._bounds[turn]])

    def _shards_of(self, turn: int) -> dict[str, Tensor]:
        shards = parameter_shards(self._parts.model)
        return {name: shards[name] for name in self._parts.fragments[turn].names}

    # -- the outer state ----------------------------------------------------------------------------------------

    def _receive(self, committed: Committed, since: float) -> RoundReport:
        """Take over a round, `since` phases after it was contributed to, and merge its fragment with the node's own."""
        self._turns.receive(self._turn(), since, committed.verdict.opening.longest)
        return self._apply_committed(committed, self._inner_parameters.receive)

    def _restart_on(self, committed: Committed) -> RoundReport:
        """Take over a round, and train its fragment from the outer parameters."""
        self._turns.restart(self._turn())
        return self._apply_committed(committed, self._inner_parameters.restart)

    def _apply_committed(self, committed: Committed, merge_inner: Callable[[int], None]) -> RoundReport:
        """Take the outer step of a committed round. `merge_inner`: brings its fragment of the model up to it.

        The model that a run ends with is the outer one, whatever a node trained on with meanwhile.
        """
        started_at_s, turn = time.monotonic(), self._turn()
        record = committed.verdict.record
        with self._coordinator.changing_state():
            if self._device is not None and record["weight"] > 0:
                self._device.take_step(outer_step=self._step_of(record))  # while the CPU does
            self._apply(turn, committed.result, record)
            self._coordinator.advance(committed.verdict, self._digest())
        if self.progress.is_complete:
            self._restart()
        else:
            merge_inner(turn)
        self._parts.inner.seek(self.inner_step)  # nodes that made fewer steps follow the run's schedule
        self._coordinator.keep_in_journal(committed)
        self._parts.faults.at("applied", self.round)
        return self._coordinator.report(committed, time.monotonic() - started_at_s)

    def _apply(self, turn: int, mean: Tensor, record: Mapping[str, Any]) -> None:
        """Take the outer step, each local rank on its part.

        What this node learned and has not contributed stays what it is, relative to the outer parameters.
        """
        if record["weight"] > 0:
            contribution = self._buffers[CONTRIBUTION][self._bounds[turn]]
            step = self._step_of(record)
            for here, there in self._parts_of_rank(self._parts.fragments[turn]):
                params, momentum = self._buffers[PARAMS][here], self._buffers[MOMENTUM][here]
                self._optimizer.detach(params, contribution[there])
                self._optimizer.apply(params, momentum, mean[there], outer_step=step)
                self._optimizer.attach(params, contribution[there])
        barrier(self._local)

    def _step_of(self, record: Mapping[str, Any]) -> int:
        """Which outer step of its fragment a round is, from 1."""
        return (Progress.from_record(record["progress"]).outer_step - 1) // len(self._bounds) + 1

    def _parts_of_rank(self, fragment: Fragment) -> Iterator[tuple[slice, slice]]:
        """This rank's share of a fragment: where it lies in the outer state, and where in the fragment."""
        offset = 0
        for first, last in fragment.ranges:
            start, stop = lane_bounds(last - first, self._local.world_size)[self._local.rank]
            yield slice(first + start, first + stop), slice(offset + start, offset + stop)
            offset += last - first

    def _restart(self) -> None:
        """Train from the outer parameters."""
        for turn in range(len(self._bounds)):
            self._turns.restart(turn)
            self._inner_parameters.restart(turn)

    def _digest(self) -> str:
        barrier(self._local)
        return digest_of(self._buffers[PARAMS], self._buffers[MOMENTUM]) if self._local.rank == 0 else ""

    def adopt(self, round: int, record: Mapping[str, Any], sections: Mapping[str, Tensor] | None = None) -> str:
        with self._coordinator.changing_state(sections):
            self._coordinator.record_state(round, record, self._digest())
        self._restart()
        self._parts.inner.seek(self.progress.inner_step)
        return self._coordinator.state_digest

    def replay(self, missed: MissedRound) -> str:
        turn = self._turn()
        with self._coordinator.changing_state():
            self._apply(turn, missed.result, missed.record)
            self._coordinator.record_state(missed.round, missed.record, self._digest())
        self._inner_parameters.restart(turn)
        self._parts.inner.seek(self.progress.inner_step)
        return self._coordinator.state_digest

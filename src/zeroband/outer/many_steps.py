"""The schedule whose rounds are many inner steps: when which fragment is contributed, and when a round is applied.

The nodes combine their contributions, by default into the mean of their pseudo-gradients (outer minus inner
parameters). The outer state takes a step by the result, and the nodes continue training from there. One loop serves
rounds that training waits for (DiLoCo, arXiv:2311.08105), fragments that are sent in turn (Streaming DiLoCo,
arXiv:2501.18512), and rounds that overlap the next inner steps (delayed and eager updates, arXiv:2502.12996).
Inner optimizer states stay on their nodes. The outer state depends on the results alone; `outer/merge.py` decides which
parameters a node trains with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from zeroband.config.outer import RoundsConfig
from zeroband.data.ledger import Range, count
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import Ready
from zeroband.elastic.rounds.background import BoundaryWatch
from zeroband.elastic.rounds.interfaces import CONTRIBUTION, OuterParts, open_buffers
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.rounds.runner import Committed
from zeroband.errors import RoundsMissed
from zeroband.kernels.one_rounding import OneRounding
from zeroband.node.mesh import barrier, broadcast_json
from zeroband.observe.log import get_logger
from zeroband.outer.algorithm import PARAMS, Algorithm
from zeroband.outer.merge import FragmentDrift
from zeroband.outer.schedule import Schedule
from zeroband.state.flat import parameter_shards
from zeroband.state.fragments import Fragment, bounds_of
from zeroband.state.round_state import RoundUpdate

_log = get_logger(__name__)


class ManySteps(Schedule[Algorithm]):
    """Rounds of many inner steps. The outer state (parameters and the algorithm's other sections) is in shared memory.

    The model holds the inner parameters. A phase of inner steps ends with a contribution of the current fragment to the
    next round. The state takes a round `overlap` inner steps after its contribution, at the latest before the next
    contribution. A flush waits for the round at once; then all nodes train from the outer parameters.
    """

    def __init__(self, parts: OuterParts, algorithm: Algorithm, config: RoundsConfig) -> None:
        super().__init__(parts, algorithm, algorithm.exchange())
        self._overlap = config.overlap_steps
        self._phase_steps = config.phase_steps
        self._bounds = bounds_of(parts.fragments)
        travels = 1.0 if self._overlap is None else self._overlap / self._phase_steps
        self._drift = FragmentDrift(len(self._bounds), travels=travels, merge=config.merge, alpha=config.alpha)
        open_buffers(parts.buffers, self.sections)
        parts.shards.store(parameter_shards(parts.model), parts.buffers[PARAMS])
        parts.buffers.collect(PARAMS, parts.shards, parameter_shards(parts.model))
        self._merge = algorithm.merge()
        if self._merge.keeps_delta and not algorithm.sends_parameters:
            self._runner.let_carry()
        self._is_late = False
        """A round was committed without the newest contribution, which holds all of delta at that time."""
        self._rebases = False
        """Replayed rounds keep delta: the node has trained, and that has not counted yet."""
        self._round_steps = 0
        """Inner steps by which the newest replayed round advanced the run."""
        self._ahead = 0.0
        """Fraction of the current phase that is in the newest contribution already."""
        self._watch: BoundaryWatch | None = None
        """Checks whether a member stands at the next boundary, while no round of this node is under way."""
        self._is_slower = False
        """The others end their phases before this node has made all steps of its own, which no time ends."""
        self._state.digest = self._state.compute_digest()

    # -- the trainer's hooks ------------------------------------------------------------------------------------

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Do nothing: gradients stay inside the node."""
        return None

    def is_boundary(self, *, ends_round: bool) -> bool:
        return ends_round or self._is_late or self._learned.steps + 1 == self._overlap

    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]:
        self._count_step()
        if ends_round:
            return self._end_phase()
        if self._is_late:
            return self.flush() if broadcast_json(self._is_overdue(), self._parts.mesh.trainer) else ()
        return self.flush() if self._learned.steps == self._overlap else ()

    def _is_overdue(self) -> bool:
        """Whether a late node can apply a round now, instead of training on relative to older parameters."""
        return not self._dealt and self._runner.is_arrived

    def is_time_over(self, steps: int) -> bool:
        self._parts.length.phase_length.follow(self._runner.period_s if self._is_slower else None)
        return super().is_time_over(steps) or self._is_called()

    def _is_called(self) -> bool:
        """Whether the phase ends now because of the others' rounds. Local rank 0 only.

        Either one was committed without this node, or a member stands at the boundary of the next one. So a member that
        is slower than the others, or whose round was committed without it, counts in that round; with
        timed phases that overlap a round, a joiner does, too. A member at the boundary can serve the newest round,
        which this node lacks; after the next verdict no member has applied that one for a whole phase.
        """
        if self._local.rank != 0:
            return False
        joins = self._claimed is not None and self._parts.length.phase_length.is_by_time and self._is_delayed
        is_apart = self._runner.was_missed or ((joins or self._is_slower) and not self._runner.is_under_way)
        if self._watch is None and is_apart:
            self._watch = BoundaryWatch(self._parts.mesh.is_boundary_reached)
        return self._is_behind() or (self._watch is not None and self._watch.is_called)

    def _is_behind(self) -> bool:
        """Whether a round was committed without this node in its current phase, and can be applied at once."""
        if self._runner.is_under_way or self._claimed is not None or self._parts.length.shape.reads_ahead:
            return False
        return (self._parts.mesh.member.known_round or 0) > self.round

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def abandon(self) -> None:
        self._close_watch()
        super().abandon()

    def flush(self) -> Sequence[RoundReport]:
        if self._dealt:  # phases are over that no contribution holds
            return self._end_phase()
        since = self._learned.steps / self._phase_steps
        committed = self._runner.arrived(partial(self._missed, since)) if self._runner.is_under_way else None
        if committed is None:
            return ()
        report = self._arrive(committed, since)
        return [report, *self._close(report)]

    def join(self) -> None:
        """Start training at once on claimed samples; the first contribution makes this node a member.

        Until then it is treated like a late member: rounds without it deal it samples, and its training counts in full
        in the first round that includes it. With overlapped rounds it may start a round behind: members have not
        applied the newest one either. If the run has no inner steps left, it claims nothing.
        """
        barrier(self._local)
        newest = self._parts.mesh.newest_round(self.round) - (self._overlap != 0)
        if newest > self.round:
            raise RoundsMissed(newest)
        shape, progress = self._parts.length.shape, self.progress
        others = max((count(spans) for spans in progress.assigned.values()), default=0) // shape.batch_size
        samples = self._wanted_steps(0, phases=2 if shape.reads_ahead else 1, others=others) * shape.batch_size
        if samples:
            self._claimed = self._parts.mesh.claim_samples(samples)
        self._begin_phase()

    # -- the end of a phase -------------------------------------------------------------------------------------

    def _end_phase(self) -> list[RoundReport]:
        """Apply the background round and contribute this phase's training.

        While a carrier still holds the previous contribution, another phase is added to this one instead.
        """
        was_called = self._watch is not None and self._watch.is_called
        self._is_slower &= was_called or self._learned.steps_of_phase < self._phase_steps
        self._close_watch()
        self._parts.length.phase_length.learn(time.monotonic(), self._learned.steps_of_phase)
        rest = 1.0 - self._ahead if self._learned.steps_of_phase else 0.0
        self._dealt = self._dealt_meanwhile()
        if self._dealt:
            self._drift.end_phase(rest)
            self._learned.end_phase()
            self._ahead = 0.0
            self._parts.length.phase_length.begin(time.monotonic())
            return []
        before = self._runner.arrived(partial(self._missed, rest)) if self._runner.is_under_way else None
        delayed = before if self._is_delayed and not self._is_late else None
        reports = [] if before is None or before is delayed else [self._arrive(before, since=1.0)]
        if self._learned.steps > 0:
            self._drift.end_phase(rest)
            reports += self._contribute_phase(delayed)
        elif reports:  # the round that counts what was late has this phase, too
            reports += self._close(reports[-1])
        self._begin_phase()
        return reports

    def _dealt_meanwhile(self) -> Sequence[Range]:
        """Samples from rounds without this node, if it may train another phase on top of this one.

        Otherwise waits for the round that is under way. The same on all local ranks. The ledger limits how many
        uncounted phases a node may hold.
        """
        carriage = self._runner.carriage
        if carriage is None or not self._runner.is_under_way:
            return ()
        member_id, batch_size = self._parts.mesh.member_id, self._parts.length.shape.batch_size
        used = (self._learned.offered_steps + self._learned.steps) * batch_size
        spans = list[Range]()

        def are_there(progress: Progress) -> bool:
            return count(progress.assigned.get(member_id, ())) >= used + batch_size

        is_last = self._parts.length.departure.is_asked or self.inner_step >= self._parts.length.shape.total_steps
        if self._local.rank == 0 and not is_last:
            followed = self._runner.await_samples(are_there)
            spans = [] if followed is None else list(followed.assigned[member_id])
        return [(first, last) for first, last in broadcast_json(spans, self._parts.mesh.trainer)]

    def _contribute_phase(self, delayed: Committed | None) -> list[RoundReport]:
        """Contribute to the next round; if the nodes wait for it, apply it at once.

        A delayed round is applied after the contribution: this node trained without it, so its parameters are relative
        to the outer ones before that step.
        """
        reports = list[RoundReport]()
        if delayed is not None:
            self._merge.on_counted(self._runner.fragment_index, delayed.verdict.plan.share(self._parts.mesh.member_id))
        elif self._claimed is not None and self._overlap != 0:
            self._catch_up_first()
        fragment_index = self._runner.fragment_index
        is_finite = self._contribute(fragment_index)
        if delayed is not None:
            reports.append(self._apply_committed(delayed, self._merge.on_late_apply))
        if self.progress.is_complete:
            fields = {"round": self.round, "steps": self._learned.steps}
            _log.info(
                "the run is complete; inner steps made during its last round do not count", extra={"fields": fields}
            )
            return reports
        if not is_finite:
            self._parts.inner.forget_moments()
        waits, closes = self._waits_for_the_others(is_finite)
        barrier(self._local)
        ready = self._offer(weighted=is_finite, phase_fraction=self._drift.contribute(fragment_index))
        if self._runner.is_slow and not closes and self._may_train_on():
            self._begin_anew(fragment_index)
            self._runner.start(ready)  # a carrier brings it
            return reports
        if not waits:
            self._send(ready, fragment_index, is_first=delayed is None)
            return reports
        committed = self._commit(ready)
        if committed is None:
            return reports
        is_restart = self._overlap != 0 or closes or self._is_late
        reports.append(self._restart_on(committed) if is_restart else self._receive(committed, since=0.0))
        if not is_finite:
            self._restart()
        return reports + self._close(reports[-1], is_due=closes)

    def _send(self, ready: Ready, fragment_index: int, *, is_first: bool) -> None:
        """Start a round that overlaps the next inner steps. `is_first`: no round overlapped this phase."""
        self._runner.start(ready)
        if is_first and self._is_delayed:
            self._merge.on_late_apply(fragment_index)  # before the first result, the missing round counts as zero
        plan, weight, others = self._runner.plan, ready.weight, self._state.record["weight"]
        if plan is None:  # this node joined
            share = weight / max(1, weight + others)
        else:
            share = plan.expected_share(self._parts.mesh.member_id, weight)
        self._merge.on_sent(fragment_index, share, self.progress.outer_step // len(self._bounds) + 1)

    @property
    def _is_delayed(self) -> bool:
        """Whether a result arrives when its fragment is sent again: delayed and eager updates of the whole model."""
        return self._overlap is None and len(self._bounds) == 1

    def _waits_for_the_others(self, is_finite: bool) -> tuple[bool, bool]:
        """Whether training waits for this round, and whether the other fragments follow at once.

        After both, all nodes hold the same model.
        """
        shape, is_whole = self._parts.length.shape, len(self._bounds) == 1
        is_leaving, is_end = self._parts.length.departure.is_asked, self._is_end(len(self._bounds))
        ends_before_arrival = is_whole and shape.total_steps - self.inner_step <= (self._overlap or 0)
        is_idle = count(self._held) <= self._learned.steps * shape.batch_size  # until the round has dealt it more
        waits = self._overlap == 0 or not is_finite or is_leaving or is_end or ends_before_arrival or is_idle
        waits, closes = broadcast_json([waits, is_end and not is_leaving], self._local)
        return waits, closes

    def _close(self, newest: RoundReport, *, is_due: bool = False) -> list[RoundReport]:
        """Send the remaining fragments without inner steps in between, if the run's inner steps are all made.

        `is_due`: send them in any case. `newest`: report of the previous round; its weight applies again unless this
        node has made steps since.
        """
        reports: list[RoundReport] = []
        if not (is_due or self._is_closing()):
            return reports
        weight = newest.weights[newest.members.index(newest.member_id)]
        for _ in self._bounds[1:]:
            if self.progress.is_complete:  # this node came to the closing rounds after the first of them
                break
            fragment_index, made_steps = self._runner.fragment_index, self._learned.steps > 0
            is_finite = self._contribute(fragment_index)
            barrier(self._local)
            if made_steps:
                self._drift.end_phase()
            own, phase_fraction = None if made_steps else weight, self._drift.contribute(fragment_index)
            ready = self._offer(weighted=is_finite, weight=own, phase_fraction=phase_fraction)
            committed = self._commit(ready)
            if committed is None:
                break
            reports.append(self._restart_on(committed))
        return reports

    def _is_closing(self) -> bool:
        """Whether the run only lacks fragments, and this node stays to send them."""
        progress = self.progress
        if progress.is_complete or progress.inner_step < self._parts.length.shape.total_steps:
            return False
        return not broadcast_json(self._parts.length.departure.is_asked, self._local)

    # -- a round: send the contribution, apply the result ---------------------------------------------------------

    def _contribute(self, fragment_index: int) -> bool:
        """Write this node's contribution of a fragment; False on all local ranks if any value is not finite."""
        began_at_s = time.monotonic()
        sizes = self._merge.write(fragment_index, self._algorithm.contribute)
        is_finite = self.exchange.load(self.round + 1, fragment_index, sizes, sizes)
        self._contribute_s = time.monotonic() - began_at_s
        return is_finite

    def _commit(self, ready: Ready) -> Committed | None:
        return self._runner.commit(ready, partial(self._missed, 0.0))

    def _arrive(self, committed: Committed, since: float) -> RoundReport:
        """Apply a background round, `since` phases after its contribution.

        A late node restarted from the outer parameters when it contributed, so all training since then stays.
        """
        if not self._is_late:
            return self._receive(committed, since)
        if self._learned.steps == 0:
            return self._restart_on(committed)
        follow = self._merge.rebase_after_step(self._runner.fragment_index)
        return self._apply_committed(committed, lambda _fragment_index: follow())

    def _receive(self, committed: Committed, since: float) -> RoundReport:
        """Apply a round, `since` phases after its contribution, and merge its fragment into the node's parameters."""
        self._drift.receive(self._runner.fragment_index, since, committed.verdict.plan.max_phase_fraction)
        return self._apply_committed(committed, self._merge.receive)

    def _restart_on(self, committed: Committed) -> RoundReport:
        """Apply a round, and continue its fragment from the outer parameters."""
        self._drift.restart(self._runner.fragment_index)
        return self._apply_committed(committed, self._merge.restart)

    def _apply_committed(self, committed: Committed, merge: Callable[[int], None]) -> RoundReport:
        """Take the outer step of a committed round. `merge`: updates its fragment of the model.

        A run ends with the outer parameters in the model, whatever a node trained with meanwhile.
        """
        started_at_s, fragment_index = time.monotonic(), self._runner.fragment_index
        record, self._is_late = committed.verdict.record, False
        with self._state.changing():
            if record["weight"] > 0:
                self._merge.take_step(self._step_number(record))
            self._step(fragment_index, committed.result, record, but=())
            self._advance(committed.verdict, self._state.compute_digest())
        if self.progress.is_complete:
            self._restart()
        else:
            merge(fragment_index)
        self._parts.inner.seek(self.inner_step)  # nodes that made fewer steps follow the run's schedule
        return self._applied(committed, since_s=started_at_s)

    # -- the outer state ----------------------------------------------------------------------------------------

    def _step(
        self, fragment_index: int, result: Tensor, record: Mapping[str, Any], but: Sequence[tuple[int, int]]
    ) -> None:
        """Take the outer step, each local rank on its part. `but`: values of the sections that have taken it already.

        A contribution that no round has counted yet stays relative to the outer parameters.
        """
        if record["weight"] > 0:
            buffers, number = self._parts.buffers, self._step_number(record)
            contribution, is_absolute = (
                buffers[CONTRIBUTION][self._bounds[fragment_index]],
                self._algorithm.sends_parameters,
            )
            for here, there in without(but, self._parts_of_rank(self._parts.fragments[fragment_index])):
                outer = {name: buffers[name][here] for name in self.sections}
                if is_absolute:
                    contribution[there].sub_(outer[PARAMS])
                with OneRounding():
                    self._algorithm.step(outer, result[there], outer_step=number)
                if is_absolute:
                    contribution[there].add_(outer[PARAMS])
        barrier(self._local)
        self._parts.buffers.spread(PARAMS, self._parts.shards, self._parts.fragments[fragment_index].names)

    def _step_number(self, record: Mapping[str, Any]) -> int:
        """Number of a round among the outer steps of its fragment, from 1."""
        return self._algorithm.step_number(record, len(self._bounds))

    def _parts_of_rank(self, fragment: Fragment) -> Iterator[tuple[slice, slice]]:
        """This rank's part of a fragment: its position in the outer state, and in the fragment."""
        offset = 0
        for first, last in fragment.ranges:
            start, stop = self._local.part_of(last - first)
            yield slice(first + start, first + stop), slice(offset + start, offset + stop)
            offset += last - first

    def _restart(self) -> None:
        """Train from the outer parameters."""
        for fragment_index in range(len(self._bounds)):
            self._drift.restart(fragment_index)
            self._merge.restart(fragment_index)

    def _take_over(self, round: int, record: Mapping[str, Any], sections: Mapping[str, Tensor] | None) -> None:
        self._is_late = self._is_slower = False
        with self._state.changing(sections):
            self._state.note(round, record, self._state.compute_digest())
        self._parts.buffers.spread(PARAMS, self._parts.shards, parameter_shards(self._parts.model))
        self._restart()
        self._parts.inner.seek(self.progress.inner_step)

    def replay(self, update: RoundUpdate, result: Tensor, has_already: Sequence[tuple[int, int]] = ()) -> str:
        fragment_index, before = self._runner.fragment_index, self.progress
        follow = self._merge.rebase_after_step(fragment_index) if self._rebases else None
        with self._state.changing():
            self._step(fragment_index, result, update.record, but=has_already)
            self._state.note(update.round, update.record, self._state.compute_digest())
        if follow is None:
            self._merge.restart(fragment_index)
        else:
            follow()
        self._round_steps = self.progress.inner_step - before.inner_step
        self._parts.inner.seek(self.progress.inner_step)
        return self.state_digest

    # -- being late ---------------------------------------------------------------------------------------------

    def _begin_phase(self) -> None:
        self._close_watch()
        self._ahead = 0.0
        super()._begin_phase()

    def _missed(self, since: float, round: int, ready: Ready, is_counted: bool) -> Ready | None:
        """Catch up with a round that the others committed without this node, and continue training.

        The uncounted contribution and the training in the `since` phases after it become the contribution to the next
        round, of that round's fragment; delta restarts at 0. The node waits for the next round if that is the last one,
        if no samples are left, if this node leaves, or if all nodes take a checkpoint then. `is_counted`: a carrier
        brought the contribution to this round; the training since then stays in delta.
        """
        if is_counted:
            self._carried(round, ready)
            return None
        self._is_slower = not self._parts.length.phase_length.is_by_time
        has_more, keeps = self._learned.steps > 0, self._merge.keeps_delta and not self._learned.is_left_out
        is_other = keeps and (has_more or len(self._bounds) > 1)
        if is_other:
            self._take_back(self._runner.fragment_index)
        ready = self._rebase(round, ready)
        if has_more:
            self._drift.end_phase(since)
            self._ahead = since
        if is_other:
            ready = self._contribute_anew(ready)
        self._begin_anew(self._runner.fragment_index)
        self._parts.inner.seek(self.inner_step)
        if not self._may_train_on():
            return ready
        _log.info("late; trains on while its contribution waits for the next round", extra={"fields": {"round": round}})
        self._runner.start(ready)
        return None

    def _carried(self, round: int, ready: Ready) -> None:
        """Catch up with a round that counts this node's contribution, brought by a carrier."""
        self._rebase(round, ready)
        self._learned.count()
        self._learned.catch_up()
        self._is_late = False
        if self._learned.steps == 0:
            self._restart()
        self._parts.inner.seek(self.inner_step)

    def _rebase(self, round: int, ready: Ready) -> Ready:
        """Catch up, keeping delta relative to the outer parameters; returns the record for the next round."""
        self._rebases = True
        try:
            return self._caught_up(round, ready)
        finally:
            self._rebases = False

    def _begin_anew(self, fragment_index: int) -> None:
        """Restart from the outer parameters while the contribution waits for a round that counts it."""
        self._is_late = True
        self._drift.restart(fragment_index)
        self._merge.restart(fragment_index)

    def _catch_up_first(self) -> None:
        """Catch up before the first contribution of this node, which must be relative to the newest round."""
        if (newest := self._parts.mesh.newest_round(self.round)) > self.round:
            self._rebases = True
            try:
                self._catch_up_as_member(newest)
            finally:
                self._rebases = False
            self._parts.inner.seek(self.inner_step)

    def _take_back(self, fragment_index: int) -> None:
        """Put the last contribution back into delta, or into the exchange's memory if it has one."""
        self._learned.take_back()
        is_kept = self.exchange.has_memory
        if is_kept:
            self.exchange.conclude(counts=False)
        elif self._algorithm.sends_parameters:
            contribution, params = (
                self._parts.buffers[CONTRIBUTION][self._bounds[fragment_index]],
                self._parts.buffers[PARAMS],
            )
            for here, there in self._parts_of_rank(self._parts.fragments[fragment_index]):
                contribution[there].neg_().add_(params[here])
            barrier(self._local)
            names = self._parts.fragments[fragment_index].names
            self._parts.buffers.spread(CONTRIBUTION, self._parts.wire_layout, names)
        barrier(self._local)
        self._merge.take_back(fragment_index, is_kept=is_kept)
        if self._is_late:
            self._drift.take_back(fragment_index)

    def _contribute_anew(self, before: Ready) -> Ready:
        """Contribute all of delta in place of the previous contribution, whose record this was."""
        fragment_index = self._runner.fragment_index
        is_finite = self._contribute(fragment_index)
        if not is_finite:
            self._parts.inner.forget_moments()
        barrier(self._local)
        weight = None if self._learned.steps else before.weight
        ready = self._offer(weighted=is_finite, weight=weight, phase_fraction=self._drift.contribute(fragment_index))
        if not is_finite:
            self._restart()
        return replace(ready, round=before.round)

    def _may_train_on(self) -> bool:
        """Whether there are samples to train on, and a round after the next one in which that would count.

        The same on all local ranks.
        """
        shape, is_asked = self._parts.length.shape, self._parts.length.departure.is_asked
        advanced_steps = max(self._learned.offered_phase_steps, self._round_steps)
        is_last = self.progress.inner_step + advanced_steps >= shape.total_steps or self._is_end(len(self._bounds))
        has_samples = count(self.upcoming()) >= shape.batch_size
        may_go = has_samples and not (is_last or is_asked or self._learned.is_left_out)
        return bool(broadcast_json(may_go and self._merge.keeps_delta, self._local))


def without(but: Sequence[tuple[int, int]], parts: Iterable[tuple[slice, slice]]) -> Iterator[tuple[slice, slice]]:
    """What is left of parts, each with where it lies elsewhere, without some ascending ranges of them."""
    for here, there in parts:
        shift, at = there.start - here.start, here.start
        for first, last in (*but, (here.stop, here.stop)):
            stop = min(first, here.stop)
            if at < stop:
                yield slice(at, stop), slice(at + shift, stop + shift)
            at = max(at, last)

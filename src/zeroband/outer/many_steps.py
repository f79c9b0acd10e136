"""What algorithms have in common whose rounds are many inner steps: a schedule of contributions, and a state to step.

The nodes make something together of what each of them learned, by default the mean of their pseudo-gradients, which are
outer minus inner parameters. The outer state takes a step by it, and the nodes train on from there. One loop for rounds
that training waits for (DiLoCo, arXiv:2311.08105), for fragments that are sent one after the other (Streaming DiLoCo,
arXiv:2501.18512), and for rounds that travel beside the next inner steps (delayed and eager updates, arXiv:2502.12996).
Inner optimizer states stay on their nodes. The outer state is that of the results alone, whatever a node trains with.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroband.config.outer import OuterSGDConfig, RoundsConfig
from zeroband.config.section import Section
from zeroband.data.ledger import count
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.coordinator import Committed, Offer, RoundCoordinator
from zeroband.elastic.rounds.exchange import CONTRIBUTION, Exchange, MeanExchange
from zeroband.elastic.rounds.interfaces import LaterPart, OuterParts, open_buffers
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.transport.gloo_plane import lane_bounds
from zeroband.node.mesh import barrier, broadcast_json
from zeroband.outer.fragment_drift import FragmentDrift
from zeroband.outer.inner_parameters import InnerParameters, build_inner_parameters
from zeroband.outer.robust import rule_of
from zeroband.state.flat import parameter_shards
from zeroband.state.fragments import Fragment, bounds_of
from zeroband.state.round_state import RoundUpdate

PARAMS = "params"


class ManySteps(RoundCoordinator):
    """Outer state: the parameters, and what else `sections` names, in shared memory. The model holds the inner ones.

    A phase of inner steps ends with a contribution to the next round, of the fragment whose turn it is. The state gets
    a round `overlap` inner steps after it was contributed to, and before the next contribution at the latest. A flush
    waits for the round at once, after which all nodes train from the outer parameters.

    `config`: the schedule. `settings`: the algorithm's own knobs. `exchange`: of a round; None: the mean of the
    contributions, in `comm.codec`. `inner_parameters`: None: as the schedule asks for.
    """

    Settings: type[Section] = Section
    """Knobs of an algorithm in a file of its own (`outer/custom.py`)."""
    sections = (PARAMS,)
    """The first are the parameters; the others begin as zeros."""
    outer_sgd: OuterSGDConfig | None = None
    """The SGD that `take_step` is, which eager updates need to know; None: it is something else."""

    def __init__(
        self,
        parts: OuterParts,
        config: RoundsConfig,
        settings: Any = None,
        *,
        exchange: Exchange | None = None,
        inner_parameters: InnerParameters | None = None,
    ) -> None:
        self.settings = settings
        mean = MeanExchange(
            parts.mesh, parts.buffers, parts.feedback, parts.codec, parts.fragments, rule=rule_of(config.robust)
        )
        super().__init__(parts, exchange or mean)
        self._overlap = config.overlap_steps
        self._phase_steps = config.phase_steps
        self._bounds = bounds_of(parts.fragments)
        travels = 1.0 if self._overlap is None else self._overlap / self._phase_steps
        self._turns = FragmentDrift(len(self._bounds), travels=travels, merge=config.merge, alpha=config.alpha)
        open_buffers(parts.buffers, self.sections)
        parts.shards.store(parameter_shards(parts.model), self._buffers[PARAMS])
        self._inner_parameters = inner_parameters or build_inner_parameters(
            parts, config, self._buffers[PARAMS], self.outer_sgd
        )
        self._is_late = False
        """It catches up, and has learned what has not counted yet."""
        self.state_digest = self._digest()

    # -- what an algorithm says of itself -----------------------------------------------------------------------

    @abstractmethod
    def take_step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        """Take the outer step in place, the `outer_step`-th of these parameters, from 1.

        `outer`: the same part of each section; `result`: of what the nodes made together. All (n,) float32 on CPU; the
        bits must not depend on where a part begins, nor on the processor: every operation rounds once, none is fused.
        """
        ...

    def contribute(self, turn: int) -> bool:
        """Write this node's contribution; False on all local ranks if it is not finite somewhere."""
        written = self._write_contribution(turn)
        self._parts.feedback.add_to(self._buffers[CONTRIBUTION], written)
        return self._is_contribution_finite(written)

    def _measure(self, anchor: Tensor, inner: Tensor, out: Tensor) -> None:
        """Write what is sent of a shard: the pseudo-gradient. `anchor`: the outer parameters, as this node has them."""
        torch.sub(anchor, inner, out=out)

    def _take_step(self, outer: Mapping[str, Tensor], result: Tensor, contribution: Tensor, outer_step: int) -> None:
        """Take the outer step. What this node contributed and nobody has got yet stays relative to the parameters."""
        self.take_step(outer, result, outer_step=outer_step)

    # -- the trainer's hooks ------------------------------------------------------------------------------------

    def sync_gradients(self, step: int, tokens: int) -> float | None:
        """Do nothing: gradients stay inside the node."""
        return None

    def is_boundary(self, *, ends_round: bool) -> bool:
        return ends_round or self._steps + 1 == self._overlap

    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]:
        self._count_step()
        if ends_round:
            return self._end_phase()
        return self.flush() if self._steps == self._overlap else ()

    def flush(self) -> Sequence[RoundReport]:
        if not self._is_under_way:
            return ()
        report = self._receive(self._arrived(), since=self._steps / self._phase_steps)
        return [report, *self._close(report)]

    def join(self) -> RoundReport:
        """Take part in the next round with weight 0, which makes this node a member."""
        barrier(self._local)
        report = self._restart_on(self._commit(self._offer(is_joining=True)))
        newest = [report, *self._close(report)][-1]
        self._begin_phase()
        return newest

    # -- the end of a phase -------------------------------------------------------------------------------------

    def _end_phase(self) -> list[RoundReport]:
        """Take over the round that was on its way, contribute, and where the nodes wait for it take over this one too.

        A delayed round is taken over after the contribution: this node learned without it, so its own parameters are
        relative to the outer ones before they move.
        """
        reports = list[RoundReport]()
        before = self._arrived() if self._is_under_way else None
        if before is not None and not self._is_delayed:
            reports.append(self._receive(before, since=1.0))
        if before is not None and self._is_delayed:
            self._inner_parameters.counted(self._turn, before.verdict.opening.share(self._parts.mesh.member_id))
        self._turns.end_phase()
        turn = self._turn
        is_finite = self.contribute(turn)
        if before is not None and self._is_delayed:
            reports.append(self._apply_committed(before, self._inner_parameters.expect))
        if self.progress.is_complete:
            return reports
        if not is_finite:
            self._parts.inner.forget_moments()
        waits, closes = self._waits_for_the_others(is_finite, is_member_new=before is not None)
        barrier(self._local)
        offer = self._offer(weighted=is_finite, trained=self._turns.contribute(turn))
        if waits:
            committed = self._commit(offer)
            is_restart = self._overlap != 0 or closes
            reports.append(self._restart_on(committed) if is_restart else self._receive(committed, since=0.0))
            if not is_finite:
                self._restart()
            reports += self._close(reports[-1], is_due=closes)
        else:
            self._start(offer)
            if before is None and self._is_delayed:
                self._inner_parameters.expect(turn)  # the round that has not arrived counts as one that changed nothing
            assert self._opening is not None, "this node was in a round before"
            share = self._opening.expected_share(self._parts.mesh.member_id, offer.weight)
            self._inner_parameters.sent(turn, share, self.progress.outer_step // len(self._bounds) + 1)
        self._begin_phase()
        return reports

    @property
    def _is_delayed(self) -> bool:
        """Whether a result arrives when its fragment is sent again: delayed and eager updates of the whole."""
        return self._overlap is None and len(self._bounds) == 1

    def _waits_for_the_others(self, is_finite: bool, *, is_member_new: bool) -> tuple[bool, bool]:
        """Whether training stands still for this round, and whether the other fragments are sent after it at once.

        Then all nodes hold one model.
        """
        shape, is_whole = self._parts.schedule.shape, len(self._bounds) == 1
        is_leaving, is_end = self._parts.departure.is_asked, self._is_end(len(self._bounds))
        is_new = is_member_new and self._has_new_members and is_whole
        ends_before_arrival = is_whole and shape.total_steps - self.inner_step <= (self._overlap or 0)
        held = count(self.progress.assigned.get(self._parts.mesh.member_id, ()))
        is_idle = held <= self._steps * shape.batch_size  # until the round has dealt it more
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
            turn, made_steps = self._turn, self._steps > 0
            is_finite = self.contribute(turn)
            barrier(self._local)
            if made_steps:
                self._turns.end_phase()
            own, trained = None if made_steps else weight, self._turns.contribute(turn)
            offer = self._offer(weighted=is_finite, weight=own, trained=trained)
            reports.append(self._restart_on(self._commit(offer)))
        return reports

    def _is_closing(self) -> bool:
        """Whether all that the run still lacks are fragments, and this node stays to send them."""
        progress = self.progress
        if progress.is_complete or progress.inner_step < self._parts.schedule.shape.total_steps:
            return False
        return not broadcast_json(self._parts.departure.is_asked, self._local)

    def _write_contribution(self, turn: int) -> dict[str, Tensor]:
        """What this rank writes into the contribution buffer of a fragment, by parameter."""
        shards = parameter_shards(self._parts.model)
        names = self._parts.fragments[turn].names
        anchor = dict(self._parts.shards.parts(self._inner_parameters.anchor, names))
        written = dict(self._parts.wire_layout.parts(self._buffers[CONTRIBUTION], names))
        for name, out in written.items():
            self._measure(anchor[name], self._parts.shards.own(name, shards[name]).to("cpu"), out)
        return written

    # -- the outer state ----------------------------------------------------------------------------------------

    def _receive(self, committed: Committed, since: float) -> RoundReport:
        """Take over a round, `since` phases after it was contributed to, and merge its fragment with the node's own."""
        self._turns.receive(self._turn, since, committed.verdict.opening.longest)
        return self._apply_committed(committed, self._inner_parameters.receive)

    def _restart_on(self, committed: Committed) -> RoundReport:
        """Take over a round, and train its fragment from the outer parameters."""
        self._turns.restart(self._turn)
        return self._apply_committed(committed, self._inner_parameters.restart)

    def _apply_committed(self, committed: Committed, merge_inner: Callable[[int], None]) -> RoundReport:
        """Take the outer step of a committed round. `merge_inner`: brings its fragment of the model up to it.

        The model that a run ends with is the outer one, whatever a node trained on with meanwhile.
        """
        started_at_s, turn = time.monotonic(), self._turn
        record = committed.verdict.record
        with self._changing_state():
            if record["weight"] > 0:
                self._inner_parameters.take_step(self._step_of(record))
            self._apply(turn, committed.result, record, but=())
            self._advance(committed.verdict, self._digest())
        if self.progress.is_complete:
            self._restart()
        else:
            merge_inner(turn)
        self._parts.inner.seek(self.inner_step)  # nodes that made fewer steps follow the run's schedule
        self._keep_in_journal(committed)
        self._parts.faults.at("applied", self.round)
        return self._report(committed, time.monotonic() - started_at_s)

    def _apply(self, turn: int, result: Tensor, record: Mapping[str, Any], but: Sequence[tuple[int, int]]) -> None:
        """Take the outer step, each local rank on its part. `but`: values of the sections that have taken it."""
        if record["weight"] > 0:
            contribution, step = self._buffers[CONTRIBUTION][self._bounds[turn]], self._step_of(record)
            for here, there in without(but, self._parts_of_rank(self._parts.fragments[turn])):
                outer = {name: self._buffers[name][here] for name in self.sections}
                self._take_step(outer, result[there], contribution[there], step)
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

    def adopt(
        self,
        round: int,
        record: Mapping[str, Any],
        sections: Mapping[str, Tensor] | None = None,
        later: Sequence[LaterPart] = (),
    ) -> str:
        """Take the state that was written into the section buffers; returns its digest."""
        self._later = later
        with self._changing_state(sections):
            self._record_state(round, record, self._digest())
        self._restart()
        self._parts.inner.seek(self.progress.inner_step)
        return self.state_digest

    def replay(self, update: RoundUpdate, result: Tensor, has_already: Sequence[tuple[int, int]] = ()) -> str:
        turn, inner = self._turn, self._inner_parameters
        follow = inner.following(turn) if self._is_late else partial(inner.restart, turn)
        with self._changing_state():
            self._apply(turn, result, update.record, but=has_already)
            self._record_state(update.round, update.record, self._digest())
        follow()
        self._parts.inner.seek(self.inner_step if self._is_late else self.progress.inner_step)
        return self.state_digest

    # -- being late ---------------------------------------------------------------------------------------------

    def _catch_up_as_member(self, round: int) -> None:
        """Catch up with what this node learned left as it is: relative to where the outer parameters go meanwhile."""
        if len(self._bounds) > 1:
            self._withdraw(self._turn)
        self._is_late = True
        try:
            super()._catch_up_as_member(round)
        finally:
            self._is_late = False

    def _withdraw(self, turn: int) -> None:
        """Another fragment's turn has come before a contribution to this one was sent.

        It is made anew when its turn comes again, since what was learned still lies in the inner parameters.
        """

    def _offered_again(self, offer: Offer) -> Offer:
        """Return the same contribution; where there are fragments, that of the one whose turn it is now."""
        offer = super()._offered_again(offer)
        if len(self._bounds) == 1:
            return offer
        turn = self._turn
        is_finite = self.contribute(turn)
        barrier(self._local)
        weight = offer.weight if is_finite else 0
        largest = self._largest if weight and self.exchange.is_mean else None
        return replace(offer, weight=weight, trained=self._turns.contribute(turn), largest=largest)


def without(but: Sequence[tuple[int, int]], parts: Iterable[tuple[slice, slice]]) -> Iterator[tuple[slice, slice]]:
    """What is left of parts, each with where it lies elsewhere, without some ascending ranges of them."""
    for here, there in parts:
        shift, at = there.start - here.start, here.start
        for first, last in (*but, (here.stop, here.stop)):
            stop = min(first, here.stop)
            if at < stop:
                yield slice(at, stop), slice(at + shift, stop + shift)
            at = max(at, last)

"""Base of both schedules of rounds: a node between its rounds, and its interface to the rest of the program.

A schedule holds a runner, which runs rounds, and an algorithm, which makes contributions and applies results. There are
two: `ManySteps`, with rounds of many inner steps, and `EveryStep`, with rounds of one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from zeroband.data.ledger import Range, take
from zeroband.elastic.membership.loss_record import LossRecord
from zeroband.elastic.membership.progress import Progress, valid_claims
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, Claim, Ready, Verdict
from zeroband.elastic.rounds.exchange import Exchange
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.elastic.rounds.outer_state import LaterPart, OuterState
from zeroband.elastic.rounds.phase import Uncounted
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.rounds.runner import APPLIED_S, Committed, RoundRunner
from zeroband.errors import Fenced, RecoveryFailed
from zeroband.outer.algorithm import AnyAlgorithm
from zeroband.state.round_state import LiveState, RoundState, RoundUpdate

_A = TypeVar("_A", bound=AnyAlgorithm)


class Schedule(ABC, Generic[_A]):
    """Decides when a node contributes and which parameters it trains with meanwhile. Also the trainer's `SyncHooks`.

    All local ranks call each method, unless it says otherwise.
    """

    has_own_steps = True
    """Whether nodes make different inner steps; False: all nodes make the same ones."""

    def __init__(self, parts: OuterParts, algorithm: _A, exchange: Exchange) -> None:
        self.exchange = exchange
        self._parts = parts
        self._local = parts.mesh.local
        self._state = OuterState(parts.buffers, algorithm.sections, parts.mesh.local, parts.history.memory)
        self._runner = RoundRunner(parts, self._state, exchange, algorithm)
        self._learned = Uncounted()
        self._contribute_s = 0.0
        """Time in which the last contribution was written; reported with its own round, which may end later."""
        self._claimed: Claim | None = None
        """Samples that this node trains on before a round has dealt it any."""
        self._dealt: Sequence[Range] = ()
        """Samples dealt by rounds that the state does not hold yet, while this node trains on during them; else ()."""
        self._algorithm = algorithm

    # -- the outer state ----------------------------------------------------------------------------------------

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the buffers that make up the outer state."""
        return self._state.sections

    @property
    def local_sections(self) -> tuple[str, ...]:
        """Names of the buffers that only this node has; saved with its inner optimizer."""
        return self._algorithm.local_sections

    @property
    def has_moments(self) -> bool:
        """Whether the outer state holds the inner optimizer's moments."""
        return self._algorithm.has_moments

    @property
    def state_digest(self) -> str:
        """Digest of the outer state; local rank 0 only, empty on the others."""
        return self._state.digest

    @property
    def progress(self) -> Progress:
        """How far the run is after the newest committed round."""
        return self._state.progress

    @property
    def round(self) -> int:
        """The newest committed round that this node's state holds; -1 before the founding."""
        return self._state.round

    @property
    def record(self) -> Mapping[str, Any]:
        """Record of that round's verdict: the progress, and the run's session."""
        return self._state.record

    def live_state(self) -> LiveState:
        """The outer state itself. Any thread of local rank 0."""
        return self._state.live()

    def copy_state(self) -> RoundState:
        """A copy of the outer state. Any thread of local rank 0."""
        return self._state.copy()

    def adopt(
        self,
        round: int,
        record: Mapping[str, Any],
        sections: Mapping[str, Tensor] | None = None,
        later: Sequence[LaterPart] = (),
    ) -> str:
        """Adopt the state in the section buffers; returns its digest.

        `sections`: written into the buffers first; local rank 0 has them for all. `later`: parts of the state that are
        from later rounds, ascending; `catch_up` to the newest of these makes the state consistent. Drops this node's
        training that has not counted.
        """
        self._learned, self._claimed, self._dealt = Uncounted(), None, ()
        self._parts.feedback.forget()
        self._state.later = later
        self._take_over(round, record, sections)
        self._begin_phase()
        return self.state_digest

    @abstractmethod
    def _take_over(self, round: int, record: Mapping[str, Any], sections: Mapping[str, Tensor] | None) -> None:
        """Load the model, the inner optimizer and the state from the section buffers."""
        ...

    @abstractmethod
    def replay(self, update: RoundUpdate, result: Tensor, has_already: Sequence[tuple[int, int]] = ()) -> str:
        """Apply a round that this node was not in; returns the digest of the state after it.

        `result`: of the round, (n,) float32 on CPU, shared by the local ranks. `has_already`: ranges [start, stop) of
        the sections that include this round already, ascending.
        """
        ...

    # -- what this node does between rounds ---------------------------------------------------------------------

    @property
    def inner_step(self) -> int:
        """Inner steps of this node: those of the run, of a round under way, and since."""
        return self.progress.inner_step + self._learned.offered_phase_steps + self._learned.steps_ahead

    def upcoming(self) -> Sequence[Range]:
        """Samples that this node trains on until its next contribution."""
        shape, made = self._parts.length.shape, self._learned.offered_steps + self._learned.past_steps
        _, ahead = take(self._held, made * shape.batch_size)
        steps = min(self._parts.length.phase_length.most_steps, max(0, shape.total_steps - self.inner_step))
        return take(ahead, steps * shape.batch_size)[0]

    @property
    def _held(self) -> Sequence[Range]:
        """Samples that this node was dealt, or claimed."""
        claimed = () if self._claimed is None else (self._claimed.span,)
        return self._dealt or self.progress.assigned.get(self._parts.mesh.member_id, claimed)

    @abstractmethod
    def sync_gradients(self, step: int, tokens: int) -> float | None: ...

    @abstractmethod
    def sync_parameters(self, step: int, *, ends_round: bool) -> Sequence[RoundReport]: ...

    def is_boundary(self, *, ends_round: bool) -> bool:
        """Whether the hook after this step needs the results of all steps so far; True suits any algorithm."""
        return True

    def learned(self, tokens: int, loss: float) -> None:
        """Add an inner step's results to the next contribution. `tokens`: 0 if its gradient was not finite."""
        self._learned.learn(tokens, loss)

    def is_time_over(self, steps: int) -> bool:
        """Whether the phase should end with its `steps`-th inner step: its time is over, or a rollback is due."""
        watch = self._parts.history.auto_rollback
        goes_back = watch is not None and watch.is_due(LossRecord.of(self.record))
        phase_length = self._parts.length.phase_length
        phase_length.count_from(self._runner.opened_at_s)
        return goes_back or phase_length.is_over(time.monotonic(), steps)

    def flush(self) -> Sequence[RoundReport]:
        """Wait for the background round, if there is one, and apply it; returns the reports."""
        return ()

    def _count_step(self) -> None:
        """Add an inner step, and show the guardian that this node trains."""
        self._learned.steps += 1
        if self._local.rank == 0:
            self._parts.mesh.flags.advance()

    def _begin_phase(self) -> None:
        """Begin the inner steps up to the next contribution."""
        self._learned.clear()
        self._parts.length.phase_length.begin(time.monotonic())

    def _is_end(self, rounds: int = 1) -> bool:
        """Whether all nodes wait after `rounds` more rounds, so that no round is under way then.

        They do when all inner steps of the run are made, and for checkpoints that must resume bit for bit.
        """
        length = self._parts.length
        every, is_last = length.flush_every, self.inner_step >= length.shape.total_steps
        return is_last or (every is not None and (self.progress.outer_step + rounds) % every == 0)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def found(self, round: int = BOOTSTRAP_ROUND) -> RoundReport:
        """Start the run together with the other founders, in this round. Raises Fenced if it started without this node.

        The run starts from the initial state, or from an adopted one.
        """
        self._parts.feedback.forget()
        ready = Ready(round, 0, self.state_digest, 0, self._wanted_steps(0, phases=1))
        founded = self._runner.found(ready)
        self._learned = Uncounted()
        self._begin_phase()
        return self._runner.report(founded)

    @abstractmethod
    def join(self) -> RoundReport | None:
        """Join the other nodes' training; returns the round that made this node a member, if one must before it trains.

        Raises RoundsMissed if the members committed rounds without it: call `catch_up` for these, then retry.
        """
        ...

    def catch_up(self, round: int) -> None:
        """Replay the rounds up to this one from the members' journals.

        Raises RunOver if the run ended with the last of them, RecoveryFailed if no member has them.
        """
        self._runner.catch_up(round, self.replay)

    def _catch_up_as_member(self, round: int) -> None:
        """Catch up after this node was late. Raises Fenced if it cannot.

        Members whose rounds overlap training put a round into their journals when they apply it, up to a phase later.
        """
        while True:
            may_come = self._parts.length.shape.reads_ahead and self._parts.mesh.is_newest(round)
            try:
                self.catch_up(round)
                break
            except RecoveryFailed as error:
                if not may_come or self.round != round - 1:
                    raise Fenced(f"this node was late and cannot catch up: {error}") from error
            time.sleep(APPLIED_S)
        if self._claimed is not None:
            self._settle_claim(self._claimed)

    def _settle_claim(self, claim: Claim) -> None:
        """Forget the claim once a round has dealt it to this node. Raises Fenced if none can any more."""
        member_id, progress = self._parts.mesh.member_id, self.progress
        if progress.assigned.get(member_id, ())[:1] == (claim.span,):
            self._claimed = None
        elif not valid_claims(progress.ledgers, {member_id: claim}):
            raise Fenced(f"samples {claim.start}..{claim.stop}, which this node claimed, were dealt to others")

    def _caught_up(self, round: int, ready: Ready, is_counted: bool = False) -> Ready:
        """Catch up with a round that the others committed without this node; returns the record for the next round.

        `is_counted`: as in `Missed`; False if contributions are not carried.
        """
        self._catch_up_as_member(round)
        left = self._parts.length.shape.total_steps - self.progress.inner_step - (ready.phase_steps or ready.steps)
        return replace(ready, steps_requested=min(ready.steps_requested, max(left, 0)), claim=self._claimed)

    def _offer(
        self,
        *,
        is_joining: bool = False,
        weighted: bool = True,
        weight: int | None = None,
        phase_fraction: float = 1.0,
    ) -> Ready:
        """What this node offers to the next round: its training since the last offer; the counters restart from here.

        `weighted`: whether it counts; a joiner's never does. `weight`: None: the tokens since then. `phase_fraction`:
        as in `Ready`.
        """
        parts, learned, is_leaving = self._parts, self._learned, self._parts.length.departure.is_asked
        if is_joining:  # its samples from before it was excluded went back to the run
            learned.clear()
            parts.feedback.forget()
        counts, ahead = weighted and not is_joining, 2 if parts.length.shape.reads_ahead else 1
        ready = Ready(
            round=self.round + 1,
            weight=(learned.tokens if weight is None else weight) if counts else 0,
            state_digest=self.state_digest,
            steps=learned.steps,
            phase_steps=learned.phase_steps if learned.phase_steps < learned.steps else None,
            steps_requested=0 if is_leaving else self._wanted_steps(learned.phase_steps, phases=ahead),
            loss=learned.loss,
            phase_fraction=phase_fraction,
            largest=self.exchange.largest if counts else None,
            claim=self._claimed,
        )
        learned.offer(contribute_s=self._contribute_s, is_left_out=not (weighted or is_joining))
        return ready

    def _wanted_steps(self, steps: int, *, phases: int, others: int = 0) -> int:
        """Return the inner steps to hold samples for after a round with these steps, up to the end of the run.

        `others`: as in `PhaseLength.wanted_steps`.
        """
        left = self._parts.length.shape.total_steps - self.progress.inner_step - steps
        return min(self._parts.length.phase_length.wanted_steps(others) * phases, max(left, 0))

    def _advance(self, verdict: Verdict, digest: str) -> None:
        """Note that the state now holds a committed round that this node was in."""
        self._learned.count()
        self._claimed = None
        self._runner.advance(verdict, digest)

    def _applied(self, committed: Committed, *, since_s: float) -> RoundReport:
        """Add an applied round to the journal; returns its report. `since_s`: when applying it began."""
        self._runner.keep(committed)
        learned = self._learned
        own_s = learned.contribute_s + committed.costs.hash_s + time.monotonic() - since_s
        return self._runner.report(
            committed, apply_s=own_s, uncommitted_tokens=learned.tokens, is_left_out=learned.is_left_out
        )

    @property
    def needs_link(self) -> bool:
        """Whether training is blocked on a transfer of contributions that owns the link. Any thread."""
        return self._runner.needs_link

    def abandon(self) -> None:
        """Give up the round under way because this trainer ends."""
        self._runner.abandon()
        self._algorithm.close()

"""The rounds of this node. Each round is a transaction: opened, exchanged, voted on, committed.

No member applies a result before its verdict. If a round loses a member, it is reopened with the survivors; their
contributions stay unchanged until the verdict, so no inner step is lost. This file knows no algorithm and no inner
step: a schedule (`outer/schedule.py`) supplies the contribution and applies the committed result.

The path of a round: `commit`, `_finish` (repeats until it counts), `_bring`, `_attempt`, `_announce`,
`_run_until_committed`, `_run_attempt`, `_vote`. `start` runs `_bring` in a thread, and `arrived` finishes it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from zeroband.elastic.membership import trust
from zeroband.elastic.membership.blame import refusal
from zeroband.elastic.membership.loss_record import RECORD, LossRecord
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, Evidence, Ready, RoundPlan, Verdict, session_after
from zeroband.elastic.rounds.background import BackgroundRound
from zeroband.elastic.rounds.carriage import Carriage, FetchAhead
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.elastic.rounds.exchange import Exchange
from zeroband.elastic.rounds.interfaces import CONTRIBUTION, OuterParts, verify
from zeroband.elastic.rounds.outer_state import OuterState
from zeroband.elastic.rounds.phase import TransferWindow
from zeroband.elastic.rounds.rollback import RolledBack, describe_return
from zeroband.elastic.rounds.round_report import RoundCosts, RoundReport
from zeroband.errors import Fenced, PeerLost, RecoveryFailed, RoundFailed, RoundsMissed, RunOver
from zeroband.observe.log import get_logger
from zeroband.state.digest import digest_of
from zeroband.state.round_state import RoundState, RoundUpdate

_log = get_logger(__name__)

_DRAIN_S = 1.0
"""Longest time that donors pause while their node stands at the boundary, so that queues drain before a transfer."""
_ABANDON_S = 5.0
_LOOK_S = 0.05
"""Interval of checks whether a round without this node has dealt it samples."""
APPLIED_S = 0.5
"""Pause before asking members again for a round that they have not applied yet."""
FIRST_PAUSE_S = 0.125
_MOST_PAUSE_S = 4.0
MOST_RETRIES = 24
"""Most times that a round is reopened although no member was lost. The pauses before it grow: some minutes in all, and
more if transfers stall."""
_ALL_VERSIONS = 2**62
_HALF = 0.5
"""The log names a member whose factor (`trust`) falls below this."""


@dataclass(frozen=True)
class Committed:
    """A round whose result all members hold, and what it cost this node."""

    verdict: Verdict
    result: Tensor
    """The result, valid until the next round; empty if the round reduced nothing."""
    costs: RoundCosts


class DescribesRounds(Protocol):
    """An algorithm's additions to a round: to its verdict's record and to this node's next `Ready`."""

    def describe(self, plan: RoundPlan, result: Tensor, before: Mapping[str, Any]) -> Mapping[str, Any]:
        """Entries of the verdict's record, besides the progress. `before`: the previous record. Local rank 0."""
        ...

    def describe_founding(self, before: Mapping[str, Any]) -> Mapping[str, Any]:
        """Entries of the founding verdict's record, besides the progress. `before`: the previous record, if any."""
        ...

    def score(self, verdict: Verdict, fragment_index: int) -> tuple[float | None, ...]:
        """Measure the drawn payloads of a committed round before it is applied; returns `Ready.gains`."""
        ...


Missed = Callable[[int, Ready, bool], Ready | None]
"""Catches up with a round committed without this node; returns the record for the next round.

The last argument: this node's contribution counted in the missed round. Returns None then, or if the next round was
started during training.
"""
Replay = Callable[[RoundUpdate, Tensor, Sequence[tuple[int, int]]], str]
"""Applies a round that this node was not in; returns the digest of the state after it. See `Schedule.replay`."""


class RoundRunner:
    """Runs this node's rounds. All local ranks call each method, unless it says otherwise.

    `exchange`: makes a round's result.
    """

    def __init__(self, parts: OuterParts, state: OuterState, exchange: Exchange, algorithm: DescribesRounds) -> None:
        self.plan: RoundPlan | None = None
        """Plan of the newest round that this node was in."""
        self._opened = BOOTSTRAP_ROUND
        self.opened_at_s = -math.inf
        """Monotonic time at which the newest round was opened to this node."""
        self.period_s: float | None = None
        """Time from the opening of the round before that one; None if that one was not opened to this node."""
        self._parts = parts
        self._state = state
        self._exchange = exchange
        self._algorithm = algorithm
        self.carriage: Carriage | None = None
        """Carries contributions over slow links; None: this node takes no part in that."""
        self._ahead = FetchAhead(self._fetch_ahead)
        self._offered = ""
        """Name under which a carrier may fetch this node's contribution; empty: none is offered."""
        self.is_slow = False
        """In the newest round this node's link was too slow for the exchange."""
        self._followed: Progress | None = None
        """The run's progress after the newest round that did not count the contribution offered to a carrier."""
        self._background: tuple[Ready, BackgroundRound[Committed | Verdict]] | None = None
        self._is_awaited = False
        """Training is blocked on a round."""
        self._travel: TransferWindow | None = None
        """The current transfer of contributions."""
        self._travelled_at_s = -math.inf
        self._exchanged: RoundPlan | None = None
        """The plan whose contributions the exchange moved last."""
        self._is_joining = False
        """Whether this node brings its contribution as a joiner, which is in no round yet."""
        self._gains: tuple[int, tuple[float | None, ...]] = BOOTSTRAP_ROUND, ()
        """A round, and the `Ready.gains` that this node reports in it."""

    @property
    def fragment_index(self) -> int:
        """The fragment of the next round."""
        return self._state.progress.outer_step % len(self._parts.fragments)

    def let_carry(self) -> None:
        """Allow contributions, this node's and others', to be carried; called by schedules that support it."""
        self.carriage = self._exchange.carriage

    # -- a round: training waits for it, or continues meanwhile -------------------------------------------------------

    def commit(self, ready: Ready, missed: Missed, *, is_joining: bool = False) -> Committed | None:
        """Run the next round with this node's contribution; catch up with rounds that it misses.

        Returns None if `missed` started the next round during training, or if a carrier brought the contribution to a
        round without this node (no round is under way then). Raises RoundsMissed for a joiner, which catches up itself.
        """
        self._is_joining = is_joining
        return self._finish(ready, partial(self._bring, ready), missed)

    def start(self, ready: Ready) -> None:
        """Begin the next round in the background; it owns the contribution and the result until `arrived`."""
        self._parts.mesh.flags.count_only(threading.get_ident())
        self._followed, self._is_joining = None, False
        self._background = ready, BackgroundRound(partial(self._bring, ready))

    @property
    def is_under_way(self) -> bool:
        """Whether a round runs in the background."""
        return self._background is not None

    @property
    def was_missed(self) -> bool:
        """Whether the round that was started during training was committed without this node."""
        return self._background is not None and isinstance(self._background[1].outcome, Verdict)

    @property
    def is_arrived(self) -> bool:
        """Whether the background round is over and can be applied at once.

        If rounds overlap training, members have not applied one that was committed without this node yet.
        """
        outcome = None if self._background is None else self._background[1].outcome
        return isinstance(outcome, Committed) or (
            isinstance(outcome, Verdict) and not self._parts.length.shape.reads_ahead
        )

    def await_samples(self, are_there: Callable[[Progress], bool]) -> Progress | None:
        """Wait until the background round is over, or until a round without this node has dealt it samples.

        `are_there`: tells this from the run's progress, which is ahead of the state's. Returns that progress; None if
        the background round is over. Local rank 0 only.
        """
        assert self._background is not None, "no round is on its way"
        flags, background = self._parts.mesh.flags, self._background[1]
        flags.count_only(None)
        within_s = 0.0
        while not background.is_over(within_s):
            if (followed := self._followed) is not None and are_there(followed):
                flags.count_only(threading.get_ident())
                return followed
            within_s = _LOOK_S
        return None

    def arrived(self, missed: Missed) -> Committed | None:
        """Wait for the background round; the state does not hold it yet. Returns and raises as `commit`."""
        assert self._background is not None, "no round is on its way"
        ready, background = self._background
        self._parts.mesh.flags.count_only(None)

        def bring() -> Committed | Verdict:
            try:
                outcome = background.wait()
            finally:
                self._background = None
            if isinstance(outcome, Verdict) and not self._counts_in(outcome):  # and maybe others followed
                newest = self._parts.mesh.await_turn(outcome.round, is_member=True)
                assert isinstance(newest, Verdict), "a round that is committed is not open"
                return newest
            return outcome

        return self._finish(ready, bring, missed)

    def abandon(self) -> None:
        """Give up the background round because this trainer ends."""
        if self._background is not None:
            flags = self._parts.mesh.flags
            flags.set_fenced(True)
            flags.abort(_ALL_VERSIONS)
            if not self._background[1].is_over(_ABANDON_S):
                _log.warning("background outer step did not stop")

    @property
    def needs_link(self) -> bool:
        """Whether training is blocked on a transfer of contributions that owns the link. Any thread."""
        travel = self._travel
        return self._is_awaited and travel is not None and travel.owns_link(time.monotonic())

    def _bring(self, ready: Ready) -> Committed | Verdict:
        """Bring the contribution to the next round, through a carrier if this node's link is slow."""
        return (
            self._offer_until_counted(ready) if self.is_slow and self._can_be_carried(ready) else self._attempt(ready)
        )

    def _can_be_carried(self, ready: Ready) -> bool:
        """Whether another member may bring it."""
        return self.carriage is not None and ready.weight > 0

    def _offer_until_counted(self, ready: Ready) -> Committed | Verdict:
        """Offer the contribution to a carrier at each boundary until it counts or this node must bring it itself.

        Rounds that the others commit meanwhile are fetched during training; the state does not hold them yet.
        """
        carriage, mesh, number = self.carriage, self._parts.mesh, self._state.round + 1
        assert carriage is not None, "the schedule lets it carry"
        self._offered = self._offered or carriage.offer(number, self._parts.buffers[CONTRIBUTION])
        while True:
            outcome = self._attempt(ready, number)
            if isinstance(outcome, Committed) or outcome.plan.rollback is not None:
                return outcome
            for missed in range(number, outcome.round + 1) if mesh.local.rank == 0 else ():
                self._ahead.want(missed)
            number, plan = outcome.round + 1, outcome.plan
            progress = self._followed = Progress.of_verdict(outcome)
            left = self._parts.length.shape.total_steps - progress.inner_step
            # Only members with the newest state take part in the last round.
            ends_next = left <= max(ready.steps, *plan.steps)
            if ends_next or not self.is_slow or plan.is_counted(mesh.member_id, self._offered):
                return outcome
            ready = replace(ready, steps_requested=min(ready.steps_requested, left - ready.steps))

    def _fetch_ahead(self, round: int) -> RoundUpdate:
        """Fetch a round in any thread; if rounds overlap training, members have it up to a phase after its verdict."""
        history, reads_ahead = self._parts.history, self._parts.length.shape.reads_ahead
        while True:
            may_come = reads_ahead and self._parts.mesh.member.is_newest(round)
            try:
                return history.source.fetch_ahead(round, history.journal.room)
            except RecoveryFailed:
                if not may_come:
                    raise
            time.sleep(APPLIED_S)

    def _attempt(self, ready: Ready, number: int | None = None) -> Committed | Verdict:
        """Run a round; returns the others' verdict if they committed it without this node.

        `number`: its number, if it is later than the state's next round.
        """
        outcome = self._announce_and_run(ready, self._state.round + 1 if number is None else number)
        plan = outcome.verdict.plan if isinstance(outcome, Committed) else outcome.plan
        self.is_slow = any(carried.member == self._parts.mesh.member_id for carried in plan.carried)
        return outcome

    def _announce_and_run(self, ready: Ready, round: int) -> Committed | Verdict:
        history = self._parts.history
        if history.auto_rollback is not None and not self._is_joining:
            history.auto_rollback.answer(self._state.round, LossRecord.of(self._state.record))
        history.journal.settle()  # the result's memory is the next one's
        if not self._is_joining:
            self._travel = TransferWindow(time.monotonic(), self._travelled_at_s, at_most_s=_DRAIN_S)
        costs = self._announce(round, ready)
        try:
            return self._run_until_committed(round, costs, is_member=not self._is_joining)
        except Fenced as fence:
            if not self._is_joining or self._parts.mesh.is_fenced:
                raise
            raise RoundsMissed(round) from fence
        finally:
            self._travel = None

    def _announce(self, round: int, ready: Ready) -> RoundCosts:
        """Announce the round, with this node's newest digest and gains, and what it may carry or have carried.

        Returns the round's costs so far: the wait for a store that does not answer.
        """
        faults, passes, from_s = self._parts.faults, not self._is_joining, time.monotonic()
        if passes:
            faults.at("ready", round)
        scored_for, gains = self._gains
        is_behind = round != self._state.round + 1  # then it is no member, even where rounds changed nothing
        may_be_carried = self._can_be_carried(ready) and passes
        ready = replace(
            ready,
            round=round,
            state_digest=f"{self._state.digest} of round {self._state.round}" if is_behind else self._state.digest,
            gains=gains if scored_for == round else (),
            offer=self._offered if may_be_carried else None,
            carries=self.carriage.whole() if self.carriage is not None and passes else (),
        )
        self._parts.mesh.announce_ready(ready)
        if passes:
            faults.at("leaving", 0) if self._parts.length.departure.is_asked else faults.at("waiting", round)
        return RoundCosts(wait_s=time.monotonic() - from_s)

    def _run_until_committed(
        self, round: int, costs: RoundCosts, *, is_member: bool, founds: bool = False
    ) -> Committed | Verdict:
        """Retry a round until it is committed; returns the verdict alone if that was without this node.

        Raises Fenced if the run went on without this node.
        """
        while True:
            waited_from_s = time.monotonic()
            plan = self._parts.mesh.await_turn(round, is_member=is_member)
            if isinstance(plan, Verdict):
                return plan
            if round > self._opened:  # a retried one does not make the phase longer
                self.period_s = time.monotonic() - self.opened_at_s if round == self._opened + 1 else None
                self._opened, self.opened_at_s = round, time.monotonic()
            self._pause_before(plan)
            costs.wait_s += time.monotonic() - waited_from_s
            try:
                return self._found_by(plan, costs) if founds else self._run_attempt(plan, costs)
            except PeerLost as error:
                costs.failures.append(str(error))
                _log.warning("round opened again", extra={"fields": {"round": round, "why": str(error)}})
                self._parts.mesh.testify(plan, self._testimony_on(plan))
                self._exchange.discard()

    def _pause_before(self, plan: RoundPlan) -> None:
        """Pause, longer each time, before a round that failed although no member was lost; all members do.

        Raises RoundFailed if that happened too often: an operator must look at it.
        """
        if plan.retries > MOST_RETRIES:
            raise RoundFailed(
                f"round {plan.round} was opened {plan.retries + 1} times to {len(plan.members)} members of "
                f"which none was lost, and came to no result; the events `blamed` and `round_retried` say what was seen"
            )
        if plan.retries:
            time.sleep(min(FIRST_PAUSE_S * 2 ** (plan.retries - 1), _MOST_PAUSE_S))

    def _run_attempt(self, plan: RoundPlan, costs: RoundCosts) -> Committed:
        """Exchange contributions (or stage a rollback) as planned, and vote. Raises PeerLost if the plan fails."""
        faults, round, fragment_index = self._parts.faults, plan.round, self.fragment_index
        faults.at("opened", round)
        if self.carriage is not None:
            self.carriage.look(plan, self._parts.mesh.member_id)
        if plan.rollback is not None:
            staged = self._stage(plan, plan.rollback)
            committed = self._vote(plan, staged.state_digest, costs, record=self._describe_return(staged, plan))
        else:
            self._travel, self._exchanged = TransferWindow(time.monotonic(), self._travelled_at_s), plan
            try:
                transfer = self._exchange.run(plan, fragment_index)
                costs.add(transfer)
            finally:
                self._travel, self._travelled_at_s = None, time.monotonic()
            faults.at("reduced", round)
            result = self._exchange.result_of(fragment_index)
            digest, hashed_from_s = "", time.monotonic()
            if self._parts.mesh.local.rank == 0:
                digest = digest_of(result)
                costs.hash_s += time.monotonic() - hashed_from_s
            vote = refusal(self._parts.mesh.member_id) if transfer.is_refused else digest
            committed = self._vote(plan, vote, costs, result=result)
        faults.at("committed", round)
        return committed

    def _testimony_on(self, plan: RoundPlan) -> Callable[[], Evidence]:
        """This node's evidence on a failed plan; empty for a rollback or a founding."""
        exchanges = plan.rollback is None and self._exchanged == plan
        return self._exchange.testimony if exchanges else Evidence

    def _vote(
        self,
        plan: RoundPlan,
        digest: str,
        costs: RoundCosts,
        *,
        result: Tensor | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> Committed:
        """Vote for a digest and wait for the verdict. `record`: the verdict's record; None: derived from the result.

        The vote binds both, so no member can write another verdict.
        """
        mesh, waited_from_s = self._parts.mesh, time.monotonic()
        if result is not None and mesh.local.rank == 0:
            record = self._describe_round(plan, result, {} if costs.newest is None else costs.newest.agreement)
        record = record or {}
        mesh.vote(plan, digest, record)
        if result is not None:
            self._parts.faults.at("voted", plan.round)
        verdict = mesh.await_verdict(plan, record)
        costs.wait_s += time.monotonic() - waited_from_s
        return Committed(verdict, torch.empty(0) if result is None else result, costs)

    def _describe_round(self, plan: RoundPlan, result: Tensor, agreement: Mapping[str, float]) -> Mapping[str, Any]:
        state, scores = self._state, dict[str, dict[str, float]]()
        if plan.trust:
            scores[trust.RECORD] = trust.scores_after(state.record, plan, agreement)
        if self._parts.scoring is not None and self._parts.scoring.rule.counts:
            scores[trust.GAIN] = trust.gains_after(state.record, plan)
        return {
            "progress": state.progress.after(plan, self._parts.length.shape).to_record(),
            "weight": plan.total_weight,
            "state_before": state.digest,
            "session": state.record["session"],
            RECORD: LossRecord.of(state.record).after(plan, state.progress.inner_step).to_record(),
            **scores,
            **self._algorithm.describe(plan, result, state.record),
        }

    def _finish(self, ready: Ready, bring: Callable[[], Committed | Verdict], missed: Missed) -> Committed | None:
        """Repeat rounds until one with this node's contribution is committed; returns as `commit`.

        `bring`: makes the first attempt.
        """
        self._is_awaited = True
        try:
            outcome = bring()
            while not isinstance(outcome, Committed):
                if self._is_joining:
                    raise RoundsMissed(outcome.round)
                counts = self._counts_in(outcome)
                if not counts:
                    self._withdraw()
                waiting = missed(outcome.round, ready, counts)
                if counts:
                    return self._settle_carried()
                if waiting is None:
                    return None
                ready = waiting
                outcome = self._bring(ready)
            if outcome.verdict.plan.rollback is not None:
                raise self._rolled_back(outcome)
        except (Fenced, RolledBack):
            self._withdraw()
            self._exchange.conclude(counts=False)
            raise
        finally:
            self._is_awaited = False
        self._withdraw()
        self._exchange.conclude(counts=ready.weight > 0)
        scored_from_s = time.monotonic()
        self._gains = outcome.verdict.round + 1, self._algorithm.score(outcome.verdict, self.fragment_index)
        if self._gains[1]:
            outcome.costs.score_s = time.monotonic() - scored_from_s
        return outcome

    def _counts_in(self, verdict: Verdict) -> bool:
        """Whether this node's carried contribution counts in a round that it was not in."""
        return verdict.plan.is_counted(self._parts.mesh.member_id, self._offered)

    def _settle_carried(self) -> None:
        """Settle this node's contribution, which a carrier brought to a round without it."""
        assert self.carriage is not None, "it was carried"
        self.carriage.settle(self._parts.buffers[CONTRIBUTION])
        self._offered = ""

    def _withdraw(self) -> None:
        """Withdraw the contribution from carriers."""
        self._offered = ""
        if self.carriage is not None:
            self.carriage.withdraw()

    # -- what a committed round leaves --------------------------------------------------------------------------------

    def advance(self, verdict: Verdict, digest: str) -> None:
        """Note that the state now holds a committed round that this node was in."""
        self._state.note(verdict.round, verdict.record, digest)
        self.plan = verdict.plan

    def keep(self, committed: Committed) -> None:
        """Add an applied round to the journal, from which others replay it. Local rank 0 keeps it for all ranks."""
        if self._parts.mesh.local.rank == 0:
            pack = partial(self._exchange.pack, committed.result)
            journal, state = self._parts.history.journal, self._state
            record, values = committed.verdict.record, committed.result.numel()
            journal.record(state.round, pack, record, state.digest, values=values)
        self._parts.faults.at("applied", self._state.round)

    def report(
        self, committed: Committed, *, apply_s: float = 0.0, uncommitted_tokens: int = 0, is_left_out: bool = False
    ) -> RoundReport:
        """Report on a round of this node, once the state holds it."""
        plan, costs, member_id = committed.verdict.plan, committed.costs, self._parts.mesh.member_id
        batch_size = self._parts.length.shape.batch_size
        return RoundReport(
            round=plan.round,
            epoch=plan.epoch,
            member_id=member_id,
            members=plan.members,
            weights=plan.weights,
            samples=tuple(steps * batch_size for steps in plan.steps),
            late=plan.late,
            leaving=plan.leaving,
            claims=plan.claim_records(),
            state_digest=self._state.digest,
            progress=self._state.progress,
            carried=tuple((c.member, c.weight, c.steps * batch_size) for c in plan.counted),
            wait_s=costs.wait_s,
            transfer_s=costs.transfer_s,
            apply_s=apply_s,
            sent_bytes=costs.sent_bytes,
            received_bytes=costs.received_bytes,
            wide_bytes=costs.wide_bytes,
            failures=tuple(costs.failures),
            is_left_out=is_left_out,
            uncommitted_tokens=uncommitted_tokens,
            refused=() if costs.newest is None else costs.newest.refused,
            payload_bytes=None if costs.newest is None else costs.newest.payload_bytes,
            trust=self._trust_in(member_id, plan),
            gains=tuple((gain.member, gain.ratio) for gain in plan.gains),
            score_s=costs.score_s,
        )

    def _trust_in(self, member_id: str, plan: RoundPlan) -> float | None:
        """This node's factor from now on for its agreement with the others; None if the run does not use it."""
        if not plan.trust:
            return None
        record, before = self._state.record, plan.trust
        now = trust.trust_of(plan.members, record)
        for member, was, weight in zip(plan.members, before, now, strict=True):
            if (was < _HALF) != (weight < _HALF) and self._parts.mesh.local.rank == 0:
                scores = {name: trust.scores_of(record, name).get(member) for name in (trust.RECORD, trust.GAIN)}
                _log.warning(
                    "a member's contributions disagree with the others' or raise their loss, and count less"
                    if weight < _HALF
                    else "a member's contributions count again",
                    extra={"fields": {"round": plan.round, "member_id": member, "weight": round(weight, 2), **scores}},
                )
        return now[plan.members.index(member_id)]

    # -- rounds that this node was not in -----------------------------------------------------------------------------

    def catch_up(self, round: int, replay: Replay) -> None:
        """Replay the rounds up to this one from the others' journals; keep verified ones in this node's journal.

        Raises RunOver if the run is complete, RecoveryFailed if no member has them.
        """
        history, state, local = self._parts.history, self._state, self._parts.mesh.local
        on_disk: list[Tensor] = []

        def room(nbytes: int) -> Tensor:
            try:
                on_disk.append(history.journal.room(nbytes))
            except OSError as error:
                _log.warning("no room for the journal, so memory is used", extra={"fields": {"error": str(error)}})
                return torch.empty(nbytes, dtype=torch.uint8)
            return on_disk[-1]

        for number in range(state.round + 1, round + 1):
            fragment_index = self.fragment_index
            fetched = self._fetched_ahead(number)
            if fetched is None:
                fetched = history.source.fetch_entry(number, partial(self._exchange.room, fragment_index, room=room))
            elif local.rank == 0:
                on_disk.append(fetched.update)
            self._exchange.unpack(fragment_index, fetched.update if local.rank == 0 else None)
            has_already = [(start, stop) for start, stop, newest in state.later if newest >= number]
            found = replay(fetched, self._exchange.result_of(fragment_index), has_already)
            update = on_disk.pop() if on_disk else None
            if state.is_one_round:
                verify(found, fetched.state_digest, f"the state after round {number}", local)
                if update is not None:
                    history.journal.add(replace(fetched, update=update))
        if state.progress.is_complete:
            raise RunOver(f"the run ended with round {state.round}, without this node")

    def _fetched_ahead(self, round: int) -> RoundUpdate | None:
        """A round that was fetched during training, on all local ranks; None if it was not."""
        taken = list[RoundUpdate]()

        def take() -> Mapping[str, Any] | None:
            update = self._ahead.take(round, self._parts.mesh.flags.advance)
            if update is None:
                return None
            taken.append(update)
            return {"record": update.record, "state_digest": update.state_digest}

        said = on_first_rank(self._parts.mesh.local, take)
        if said is None:
            return None
        return RoundUpdate(round, taken[0].update if taken else torch.empty(0, dtype=torch.uint8), **said)

    # -- the founding, and going back ---------------------------------------------------------------------------------

    def found(self, ready: Ready) -> Committed:
        """Agree with the other founders that all hold the same state: the initial one, or a checkpoint's.

        Nothing is reduced. Raises Fenced if the run started without this node.
        """
        self._is_joining = True
        costs = self._announce(ready.round, ready)
        founded = self._run_until_committed(ready.round, costs, is_member=False, founds=True)
        if isinstance(founded, Verdict):
            raise Fenced(f"{len(founded.members)} others founded the run")
        self.advance(founded.verdict, self._state.digest)
        return founded

    def _found_by(self, plan: RoundPlan, costs: RoundCosts) -> Committed:
        """Vote for this node's state as the one that the run starts from. Raises PeerLost."""
        state = self._state
        after_round = state.round if state.round >= BOOTSTRAP_ROUND else None
        progress = state.progress.begin(plan, self._parts.length.shape, after_round=after_round)
        said = {"progress": progress.to_record(), "weight": 0, "state_before": state.digest}
        said[RECORD] = LossRecord.of(state.record).carried().to_record()
        if state.record.get("session"):  # the checkpoint's: surviving members of it learn that they were left behind
            said["session_before"] = state.record["session"]
        record = {**said, "session": session_after(plan), **self._algorithm.describe_founding(state.record)}
        return self._vote(plan, state.digest, costs, record=record)

    def _stage(self, plan: RoundPlan, step: int) -> RoundState:
        """Load the checkpoint that a plan names. If that fails, cancels the order and raises PeerLost."""
        try:
            return self._parts.history.source.stage(step, self._state.sections)
        except RecoveryFailed as error:
            self._parts.mesh.refuse_rollback(plan, str(error))
            raise PeerLost(f"round {plan.round} does not go back: {error}") from error

    def _describe_return(self, staged: RoundState, plan: RoundPlan) -> Mapping[str, Any]:
        before = {"state_before": self._state.digest, "session": self._state.record["session"]}
        return describe_return(staged, plan, self._parts.length.shape, self._state.progress, before)

    def _rolled_back(self, committed: Committed) -> RolledBack:
        verdict, record = committed.verdict, committed.verdict.record
        progress, step = Progress.from_record(record["progress"]), verdict.plan.rollback
        assert step is not None
        report = replace(self.report(committed), progress=progress, state_digest=verdict.digest)
        self._parts.history.journal.cut(verdict.round)
        return RolledBack(step, report, record)

"""The rounds of an outer algorithm, each of them a transaction: opened, exchanged, voted on, committed.

Nobody applies a result before its verdict. A round that loses a member is opened again with the survivors; their
contributions stay untouched until the verdict, so no inner step is lost.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroband.config.ranges import MOST_LOSS
from zeroband.data.ledger import Range, take
from zeroband.elastic.membership import trust
from zeroband.elastic.membership.blame import refusal
from zeroband.elastic.membership.loss_record import RECORD, LossRecord
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import FOUNDING_ROUND, Evidence, Opening, Ready, Verdict, session_after
from zeroband.elastic.rounds.background import BackgroundRound
from zeroband.elastic.rounds.exchange import CONTRIBUTION, Exchange
from zeroband.elastic.rounds.interfaces import LaterPart, OuterParts, verify
from zeroband.elastic.rounds.phase import TransferWindow
from zeroband.elastic.rounds.rollback import RolledBack, describe_return
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.transport.base import Transfer, sum_known
from zeroband.errors import Fenced, PeerLost, RecoveryFailed, RoundFailed, RoundsMissed, RunOver
from zeroband.kernels.scan import largest
from zeroband.node.mesh import all_ok, barrier, max_over_ranks
from zeroband.observe.log import get_logger
from zeroband.state.flat import digest_of
from zeroband.state.round_state import LiveState, RoundState, RoundUpdate

_log = get_logger(__name__)

_DRAIN_S = 1.0
"""Donors hold back from when their node stands at the boundary, for so long at most: queues drain before a transfer."""
_ABANDON_S = 5.0
FIRST_PAUSE_S = 0.125
_MOST_PAUSE_S = 4.0
MOST_RETRIES = 24
"""So often a round is opened again without a member being lost. The waits before grow: some minutes in all, and longer
where transfers stand still."""
_ALL_VERSIONS = 2**62
_HALF = 0.5
"""A member that counts less is named in the log."""


@dataclass(frozen=True)
class Offer:
    """What a node brings to a round, fixed when it begins."""

    weight: int
    """Tokens; 0: it counts for nothing."""
    steps: int
    steps_requested: int
    loss: float | None = None
    """Mean loss of its steps, in nats per token; None: there are none, or it is not finite."""
    trained: float = 1.0
    """Training behind the contribution, as `Ready.trained` says."""
    largest: float | None = None
    """Largest size of a value in the contribution to a mean; None: not known."""
    is_joining: bool = False
    is_leaving: bool = False
    is_left_out: bool = False
    """It learned something that is not finite."""
    round: int = FOUNDING_ROUND
    """The first that it could count in."""


@dataclass
class RoundCosts:
    """What a round cost this node, over all its attempts."""

    wait_s: float = 0.0
    transfer_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    wide_bytes: int | None = None
    """Part of those sent that went to other sites; None: there were no sites."""
    score_s: float | None = None
    """What measuring the worth of its payloads took; None: it was not measured."""
    failures: list[str] = field(default_factory=list[str])
    """Why the round was opened again, once for each time."""
    newest: Transfer | None = None
    """The transfer of the newest attempt."""

    def add(self, transfer: Transfer) -> None:
        self.newest = transfer
        self.transfer_s += transfer.took_s
        self.sent_bytes += transfer.sent_bytes
        self.received_bytes += transfer.received_bytes
        self.wide_bytes = sum_known((self.wide_bytes, transfer.wide_bytes))


@dataclass(frozen=True)
class Committed:
    """A round whose result all members hold, and what it cost this node."""

    verdict: Verdict
    result: Tensor
    """What the members made together, valid until the next round; empty where they made nothing."""
    costs: RoundCosts


class RoundCoordinator(ABC):
    """The base of every outer algorithm, which says what it contributes and how a result changes the outer state.

    All methods are called by all local ranks, but for `copy_state`. `exchange`: makes a round's result.
    """

    sections: tuple[str, ...]
    """Names of the buffers that make up the outer state."""
    local_sections: tuple[str, ...] = ()
    """Names of the buffers that only this node has; saved with its inner optimizer."""
    has_own_steps = True
    """Whether this node makes inner steps of its own; False: all nodes make the same one."""

    def __init__(self, parts: OuterParts, exchange: Exchange) -> None:
        self.round = -1
        self.progress = Progress.at_start()
        self.record: Mapping[str, Any] = {}
        """What the newest verdict recorded."""
        self.state_digest = ""
        self.exchange = exchange
        self.state_lock = threading.Lock()
        """Held by local rank 0 while the sections change."""
        self._parts = parts
        self._schedule, self._history = parts.schedule, parts.history
        self._buffers = parts.buffers
        self._local = parts.mesh.local
        self._opening: Opening | None = None
        """That of the newest round which this node was in."""
        self._later: Sequence[LaterPart] = ()
        """Parts of the state that was taken over which were of later rounds; meaningless once the state is at these."""
        self._has_new_members = False
        """The newest round had other members than the one before."""
        self._tokens = 0
        self._steps = 0
        """Inner steps since the last contribution."""
        self._offered_steps = 0
        """Inner steps in a round that the state does not hold yet."""
        self._background: tuple[Offer, BackgroundRound[Committed | Verdict]] | None = None
        self._is_awaited = False
        """Training stands still for a round."""
        self._travel: TransferWindow | None = None
        """Contributions that are on their way."""
        self._travelled_at_s = -math.inf
        self._exchanged: Opening | None = None
        """The opening whose contributions the exchange moved last."""
        self._loss_sum = 0.0
        self._is_left_out = False
        self._largest: float | None = None
        """Largest size of a value in the contribution buffer; None: not known."""
        self._gains: tuple[int, tuple[float | None, ...]] = FOUNDING_ROUND, ()
        """What this node says in the ready of a round: `Ready.gains` of the one before."""

    # -- what an algorithm says of itself -----------------------------------------------------------------------

    @abstractmethod
    def replay(self, update: RoundUpdate, result: Tensor, has_already: Sequence[tuple[int, int]] = ()) -> str:
        """Catch up by a round that was committed while this node was late or joining; the digest after it."""
        ...

    def _describe(self, result: Tensor) -> Mapping[str, Any]:
        """What the verdict says of a result, beside the progress. Local rank 0."""
        return {}

    def _score(self, verdict: Verdict) -> tuple[float | None, ...]:
        """Measure the payloads that are drawn of a committed round, before it is applied; as in `Ready.gains`."""
        return ()

    def _describe_founding(self) -> Mapping[str, Any]:
        """What the founding's verdict says, beside the progress."""
        return {}

    @property
    def _turn(self) -> int:
        """The fragment of the next round."""
        return self.progress.outer_step % len(self._parts.fragments)

    # -- what this node does between rounds ---------------------------------------------------------------------

    @property
    def inner_step(self) -> int:
        """Inner steps behind this node: those of the run, of a round on its way, and since."""
        return self.progress.inner_step + self._offered_steps + self._steps

    def upcoming(self) -> Sequence[Range]:
        """The samples that this node trains on up to its next contribution."""
        shape, held = self._schedule.shape, self.progress.assigned.get(self._parts.mesh.member_id, ())
        _, ahead = take(held, self._offered_steps * shape.batch_size)
        steps = min(self._schedule.phase_length.most_steps, max(0, shape.total_steps - self.inner_step))
        return take(ahead, steps * shape.batch_size)[0]

    def flush(self) -> Sequence[RoundReport]:
        """Wait for a round that is on its way beside training, and take its state over; the reports of what came."""
        return ()

    def is_time_over(self, steps: int) -> bool:
        """Whether the phase should end with its `steps`-th inner step."""
        return self._goes_back or self._schedule.phase_length.is_over(time.monotonic(), steps)

    @property
    def _goes_back(self) -> bool:
        """Whether the newest round called for going back, so that the steps until then are in vain."""
        watch = self._history.auto_rollback
        return watch is not None and watch.is_due(LossRecord.of(self.record))

    def learned(self, tokens: int, loss: float) -> None:
        """Count what an inner step showed, for the next contribution. `tokens`: 0 where this node learned nothing."""
        self._loss_sum += loss * tokens if tokens else 0.0
        self._tokens += tokens

    def is_boundary(self, *, ends_round: bool) -> bool:
        """Whether the hook after this step needs all that was learned up to it; it may in any algorithm."""
        return True

    def _count_step(self) -> None:
        """Add an inner step, and show the guardian that this node trains."""
        self._steps += 1
        if self._local.rank == 0:
            self._parts.mesh.flags.advance()

    def _begin_phase(self) -> None:
        """Training goes on: the inner steps until the next contribution begin."""
        self._tokens, self._steps, self._loss_sum = 0, 0, 0.0
        self._schedule.phase_length.begin(time.monotonic())

    def _is_end(self, rounds: int = 1) -> bool:
        """Whether all nodes wait after so many more rounds, and nothing is on its way then.

        So it is when all inner steps of the run are made, and for a checkpoint that is gone on from to the last bit.
        """
        every, is_last = self._schedule.flush_every, self.inner_step >= self._schedule.shape.total_steps
        return is_last or (every is not None and (self.progress.outer_step + rounds) % every == 0)

    def _is_contribution_finite(self, names: Iterable[str]) -> bool:
        """Whether what lies in the contribution buffer may be sent: the same on all local ranks, and said if not.

        `names`: parameters that this rank has shards of.
        """
        sizes = {
            name: largest(part) for name, part in self._parts.wire_layout.parts(self._buffers[CONTRIBUTION], names)
        }
        is_finite = self._is_finite_everywhere([name for name, size in sizes.items() if not math.isfinite(size)])
        self._largest = max_over_ranks(max(sizes.values(), default=0.0), self._local) if is_finite else None
        return is_finite

    def _is_finite_everywhere(self, spoilt: Sequence[str]) -> bool:
        """Whether no local rank has parameters that are not finite, `spoilt`; said if one has."""
        if spoilt:
            fields = {"round": self.round + 1, "parameters": len(spoilt), "first": spoilt[0]}
            _log.warning("non-finite update: weight 0 this round", extra={"fields": fields})
        return all_ok(not spoilt, self._local)

    # -- a round ------------------------------------------------------------------------------------------------

    def _offer(
        self,
        *,
        is_joining: bool = False,
        weighted: bool = True,
        weight: int | None = None,
        trained: float = 1.0,
    ) -> Offer:
        """What this node brings to the next round: what it learned since its last one, which is counted anew from here.

        `weighted`: whether that counts; that of a joiner never does. `weight`: None: the tokens since then.
        `trained`: as in `Ready`.
        """
        parts, is_leaving = self._parts, self._parts.departure.is_asked
        if is_joining:  # what it did before it was voted out went back to the run
            self._tokens, self._steps, self._loss_sum = 0, 0, 0.0
            parts.feedback.forget()
        self._schedule.phase_length.learn(time.monotonic(), self._steps)
        counts = weighted and not is_joining
        tokens, self._tokens = self._tokens, 0
        steps, self._steps = self._steps, 0
        nats, self._loss_sum = self._loss_sum, 0.0
        self._offered_steps = steps
        return Offer(
            weight=(tokens if weight is None else weight) if counts else 0,
            steps=steps,
            steps_requested=0
            if is_leaving
            else self._wanted_steps(steps, phases=2 if self._schedule.shape.reads_ahead else 1),
            loss=nats / tokens if tokens and abs(nats) <= MOST_LOSS * tokens else None,
            trained=trained,
            largest=self._largest if counts and self.exchange.is_mean else None,
            is_joining=is_joining,
            is_leaving=is_leaving,
            is_left_out=not (weighted or is_joining),
            round=self.round + 1,
        )

    def _wanted_steps(self, steps: int, *, phases: int) -> int:
        """For which to hold samples after a round with these steps of this node, as far as the run lasts."""
        left = self._schedule.shape.total_steps - self.progress.inner_step - steps
        return min(self._schedule.phase_length.wanted_steps() * phases, max(left, 0))

    def _commit(self, offer: Offer) -> Committed:
        """Run the next round's transaction with what is contributed; catch up with rounds that it misses.

        Raises RoundsMissed for a joiner, who catches up by itself.
        """
        return self._finish(offer, partial(self._attempt, offer))

    def _start(self, offer: Offer) -> None:
        """Begin the next round beside training; what is contributed and the result are its own until `_arrived`."""
        self._parts.mesh.flags.count_only(threading.get_ident())
        self._background = offer, BackgroundRound(partial(self._attempt, offer))

    @property
    def needs_link(self) -> bool:
        """Whether training stands still until contributions have travelled, and the link is theirs. Any thread."""
        travel = self._travel
        return self._is_awaited and travel is not None and travel.owns_link(time.monotonic())

    @property
    def _is_under_way(self) -> bool:
        """Whether a round is on its way beside training."""
        return self._background is not None

    def _arrived(self) -> Committed:
        """Wait for the round that was started. The state does not hold it yet. Raises what `_commit` raises."""
        assert self._background is not None, "no round is on its way"
        (offer, background), flags = self._background, self._parts.mesh.flags
        flags.count_only(None)
        try:
            return self._finish(offer, background.wait)
        finally:
            self._background = None

    def abandon(self) -> None:
        """Give up a round that is on its way: this trainer ends."""
        if self._background is not None:
            flags = self._parts.mesh.flags
            flags.set_fenced(True)
            flags.abort(_ALL_VERSIONS)
            if not self._background[1].is_over(_ABANDON_S):
                _log.warning("background outer step did not stop")

    def _attempt(self, offer: Offer) -> Committed | Verdict:
        """The next round, or the verdict of the others where they committed it without this node."""
        watch, round = self._history.auto_rollback, self.round + 1
        if watch is not None and not offer.is_joining:
            watch.answer(self.round, LossRecord.of(self.record))
        self._history.journal.settle()  # the result's memory is the next one's
        if not offer.is_joining:
            self._travel = TransferWindow(time.monotonic(), self._travelled_at_s, at_most_s=_DRAIN_S)
        self._announce(round, offer)
        try:
            return self._run_until_committed(round, is_member=not offer.is_joining)
        except Fenced as fence:
            if not offer.is_joining or self._parts.mesh.is_fenced:
                raise
            raise RoundsMissed(round) from fence
        finally:
            self._travel = None

    def _announce(self, round: int, offer: Offer) -> None:
        faults, passes = self._parts.faults, not offer.is_joining
        if passes:
            faults.at("ready", round)
        ready = Ready(round, offer.weight, self.state_digest, offer.steps, offer.steps_requested)
        ready = replace(ready, loss=offer.loss, trained=offer.trained)
        scored_for, gains = self._gains
        ready = replace(ready, largest=offer.largest, gains=gains if scored_for == round else ())
        ready = replace(ready, missed=round - offer.round if passes else 0)
        self._parts.mesh.announce_ready(ready)
        if passes:
            faults.at("leaving", 0) if offer.is_leaving else faults.at("waiting", round)

    def _run_until_committed(self, round: int, *, is_member: bool, founds: bool = False) -> Committed | Verdict:
        """Bring a round to its verdict with whoever is left. Returns that of others who committed it without this node.

        Raises Fenced when the run went on without this node.
        """
        costs = RoundCosts()
        while True:
            waited_from_s = time.monotonic()
            opening = self._parts.mesh.await_turn(round, is_member=is_member)
            if isinstance(opening, Verdict):
                return opening
            self._pause_before(opening)
            costs.wait_s += time.monotonic() - waited_from_s
            try:
                return self._found_by(opening, costs) if founds else self._run_attempt(opening, costs)
            except PeerLost as error:
                costs.failures.append(str(error))
                _log.warning("round opened again", extra={"fields": {"round": round, "why": str(error)}})
                self._parts.mesh.testify(opening, self._testimony_on(opening))
                self.exchange.discard()

    def _testimony_on(self, opening: Opening) -> Callable[[], Evidence]:
        """What this node saw of an opening that failed; nothing where it went back or founded the run."""
        exchanges = opening.rollback is None and self._exchanged == opening
        return self.exchange.testimony if exchanges else Evidence

    def _pause_before(self, opening: Opening) -> None:
        """Wait a moment, longer each time, where a round was given up although no member was lost.

        All members do. Raises RoundFailed where that happened too often: who trains on needs a person.
        """
        if opening.retries > MOST_RETRIES:
            raise RoundFailed(
                f"round {opening.round} was opened {opening.retries + 1} times to {len(opening.members)} members of "
                f"which none was lost, and came to no result; the events `blamed` and `round_retried` say what was seen"
            )
        if opening.retries:
            time.sleep(min(FIRST_PAUSE_S * 2 ** (opening.retries - 1), _MOST_PAUSE_S))

    def _run_attempt(self, opening: Opening, costs: RoundCosts) -> Committed:
        """Make what an opening asks for, and have it committed. Raises PeerLost where that does not come about."""
        faults, round, turn = self._parts.faults, opening.round, self._turn
        faults.at("opened", round)
        if opening.rollback is not None:
            staged = self._stage(opening, opening.rollback)
            committed = self._vote(opening, staged.state_digest, costs, record=self._describe_return(staged, opening))
        else:
            self._travel, self._exchanged = TransferWindow(time.monotonic(), self._travelled_at_s), opening
            try:
                transfer = self.exchange.run(opening, turn)
                costs.add(transfer)
            finally:
                self._travel, self._travelled_at_s = None, time.monotonic()
            faults.at("reduced", round)
            result = self.exchange.result_of(turn)
            digest = digest_of(result) if self._local.rank == 0 else ""
            vote = refusal(self._parts.mesh.member_id) if transfer.is_refused else digest
            committed = self._vote(opening, vote, costs, result=result)
        faults.at("committed", round)
        return committed

    def _vote(
        self,
        opening: Opening,
        digest: str,
        costs: RoundCosts,
        *,
        result: Tensor | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> Committed:
        """Vote for a digest, and wait for the verdict. `record`: what it would say; None: what follows from the result.

        The vote binds both, so that no member can write another verdict.
        """
        mesh, waited_from_s = self._parts.mesh, time.monotonic()
        if result is not None and self._local.rank == 0:
            record = self._describe_round(opening, result, {} if costs.newest is None else costs.newest.agreement)
        record = record or {}
        mesh.vote(opening, digest, record)
        if result is not None:
            self._parts.faults.at("voted", opening.round)
        verdict = mesh.await_verdict(opening, record)
        costs.wait_s += time.monotonic() - waited_from_s
        return Committed(verdict, torch.empty(0) if result is None else result, costs)

    def _describe_round(self, opening: Opening, result: Tensor, agreement: Mapping[str, float]) -> Mapping[str, Any]:
        scores = dict[str, dict[str, float]]()
        if opening.trust:
            scores[trust.RECORD] = trust.scores_after(self.record, opening, agreement)
        if self._parts.scoring is not None and self._parts.scoring.rule.counts:
            scores[trust.GAIN] = trust.gains_after(self.record, opening)
        return {
            "progress": self.progress.after(opening, self._schedule.shape).to_record(),
            "weight": opening.total_weight,
            "state_before": self.state_digest,
            "session": self.record["session"],
            RECORD: LossRecord.of(self.record).after(opening, self.progress.inner_step).to_record(),
            **scores,
            **self._describe(result),
        }

    def _finish(self, offer: Offer, bring: Callable[[], Committed | Verdict]) -> Committed:
        """Have a round committed that this node is in. `bring`: the first attempt."""
        self._is_awaited = True
        try:
            outcome = bring()
            while not isinstance(outcome, Committed):
                if offer.is_joining:
                    raise RoundsMissed(outcome.round)
                self._catch_up_as_member(outcome.round)
                offer = self._offered_again(offer)
                outcome = self._attempt(offer)
            self._is_left_out = offer.is_left_out
            if outcome.verdict.opening.rollback is not None:
                raise self._rolled_back(outcome)
        except (Fenced, RolledBack):
            self.exchange.conclude(counts=False)
            raise
        finally:
            self._is_awaited = False
        self.exchange.conclude(counts=offer.weight > 0)
        scored_from_s = time.monotonic()
        self._gains = outcome.verdict.round + 1, self._score(outcome.verdict)
        if self._gains[1]:
            outcome.costs.score_s = time.monotonic() - scored_from_s
        return outcome

    def _offered_again(self, offer: Offer) -> Offer:
        """What this node brings to a later round than the one that it was meant for."""
        left = self._schedule.shape.total_steps - self.progress.inner_step - offer.steps
        return replace(offer, steps_requested=min(offer.steps_requested, max(left, 0)))

    def _catch_up_as_member(self, round: int) -> None:
        """Catch up after this node was late. Raises Fenced where it cannot."""
        try:
            self.catch_up(round)
        except RecoveryFailed as error:
            raise Fenced(f"this node was late and cannot catch up: {error}") from error

    def catch_up(self, round: int) -> None:
        """Replay the rounds up to this one from the others' journals, and keep those that verify in this node's.

        Raises RunOver when that was the last, RecoveryFailed where nobody keeps them.
        """
        on_disk: list[Tensor] = []

        def room(nbytes: int) -> Tensor:
            try:
                on_disk.append(self._history.journal.room(nbytes))
            except OSError as error:
                _log.warning("no room for the journal, so memory is used", extra={"fields": {"error": str(error)}})
                return torch.empty(nbytes, dtype=torch.uint8)
            return on_disk[-1]

        for number in range(self.round + 1, round + 1):
            turn = self._turn
            fetched = self._history.source.fetch_entry(number, partial(self.exchange.room, turn, room=room))
            self.exchange.unpack(turn, fetched.update if self._local.rank == 0 else None)
            has_already = [(start, stop) for start, stop, newest in self._later if newest >= number]
            found = self.replay(fetched, self.exchange.result_of(turn), has_already)
            update = on_disk.pop() if on_disk else None
            if self._is_one_state:
                verify(found, fetched.state_digest, f"the state after round {number}", self._local)
                if update is not None:
                    self._history.journal.add(replace(fetched, update=update))
        if self.progress.is_complete:
            raise RunOver(f"the run ended with round {self.round}, without this node")

    # -- the founding, and going back ---------------------------------------------------------------------------

    def found(self, round: int = FOUNDING_ROUND) -> RoundReport:
        """Agree with the other founders on the state that all of them hold: the initial one, or that of a checkpoint.

        Nothing is reduced. Raises Fenced if the run started without this node.
        """
        self._parts.feedback.forget()
        self._announce(round, Offer(0, 0, self._wanted_steps(0, phases=1), is_joining=True))
        founded = self._run_until_committed(round, is_member=False, founds=True)
        if isinstance(founded, Verdict):
            raise Fenced(f"{len(founded.members)} others founded the run")
        self._advance(founded.verdict, self.state_digest)
        self._begin_phase()
        return self._report(founded, apply_s=0.0)

    def _found_by(self, opening: Opening, costs: RoundCosts) -> Committed:
        """Vote for the state that this node holds, with which a line of rounds begins. Raises PeerLost."""
        after_round = self.round if self.round >= FOUNDING_ROUND else None
        progress = self.progress.begin(opening, self._schedule.shape, after_round=after_round)
        said = {"progress": progress.to_record(), "weight": 0, "state_before": self.state_digest}
        said[RECORD] = LossRecord.of(self.record).carried().to_record()
        if self.record.get("session"):  # of the checkpoint: who is left of that session finds itself left behind
            said["session_before"] = self.record["session"]
        record = {**said, "session": session_after(opening), **self._describe_founding()}
        return self._vote(opening, self.state_digest, costs, record=record)

    def _stage(self, opening: Opening, step: int) -> RoundState:
        """The checkpoint that an opening names. Raises PeerLost where it cannot be had: the order is taken back."""
        try:
            return self._history.source.stage(step, self.sections)
        except RecoveryFailed as error:
            self._parts.mesh.refuse_rollback(opening, str(error))
            raise PeerLost(f"round {opening.round} does not go back: {error}") from error

    def _describe_return(self, staged: RoundState, opening: Opening) -> Mapping[str, Any]:
        before = {"state_before": self.state_digest, "session": self.record["session"]}
        return describe_return(staged, opening, self._schedule.shape, self.progress, before)

    def _rolled_back(self, committed: Committed) -> RolledBack:
        verdict, record = committed.verdict, committed.verdict.record
        progress, step = Progress.from_record(record["progress"]), verdict.opening.rollback
        assert step is not None
        report = replace(self._report(committed, apply_s=0.0), progress=progress, state_digest=verdict.digest)
        self._history.journal.cut(verdict.round)
        self._offered_steps = 0
        self._parts.feedback.forget()
        self._begin_phase()
        return RolledBack(step, report, record)

    # -- the outer state ----------------------------------------------------------------------------------------

    @contextmanager
    def _changing_state(self, sections: Mapping[str, Tensor] | None = None) -> Generator[None]:
        """Keep copies away while the sections are written to; ends with `_record_state`.

        `sections`: what is copied into them, if anything is. Local rank 0 holds the lock, and the others may write when
        they have passed.
        """
        with self.state_lock:
            for name, section in (sections or {}).items():
                self._buffers[name].copy_(section)
            barrier(self._local)
            yield

    def _advance(self, verdict: Verdict, state: str) -> None:
        """Note that the state now holds a committed round."""
        self._offered_steps = 0
        self._record_state(verdict.round, verdict.record, state)
        before, self._opening = self._opening, verdict.opening
        self._has_new_members = before is None or before.members != verdict.members

    def _record_state(self, round: int, record: Mapping[str, Any], state: str) -> None:
        """Note which round the state holds, however it came to it."""
        self.round = round
        self.record = record
        self.progress = Progress.from_record(record["progress"])
        self.state_digest = state
        if self._history.memory is not None and self._is_one_state:
            self._history.memory.stamp(self.sections, round, record, state)

    def _digest(self) -> str:
        """Digest of the outer state; local rank 0 only, empty on the others."""
        barrier(self._local)
        return digest_of(*(self._buffers[name] for name in self.sections)) if self._local.rank == 0 else ""

    @property
    def _is_one_state(self) -> bool:
        """Whether all of the sections are of this round."""
        return all(newest <= self.round for *_, newest in self._later)

    def live_state(self) -> LiveState:
        """The outer state itself. Any thread of local rank 0."""
        with self.state_lock:
            sections = {name: self._buffers[name] for name in self.sections}
            now: Callable[[], int] = lambda: self.round  # noqa: E731
            return LiveState(self.round, self.record, self.state_digest, sections, lock=self.state_lock, round_now=now)

    def copy_state(self) -> RoundState:
        """A copy of the outer state. Any thread of local rank 0."""
        with self.state_lock:
            sections = {name: self._buffers[name].clone() for name in self.sections}
            return RoundState(self.round, self.record, self.state_digest, sections)

    def _keep_in_journal(self, committed: Committed) -> None:
        """Add a committed round to the journal. Local rank 0 keeps it for all."""
        if self._local.rank == 0:
            pack = partial(self.exchange.pack, committed.result)
            self._history.journal.record(self.round, pack, committed.verdict.record, self.state_digest)

    def _trust_in(self, member_id: str, opening: Opening) -> float | None:
        """What this node counts from here on for how it agreed; None where the run does not ask for it."""
        if not opening.trust:
            return None
        before, now = opening.trust, trust.trust_of(opening.members, self.record)
        for member, was, weight in zip(opening.members, before, now, strict=True):
            if (was < _HALF) != (weight < _HALF) and self._local.rank == 0:
                scores = {name: trust.scores_of(self.record, name).get(member) for name in (trust.RECORD, trust.GAIN)}
                _log.warning(
                    "a member's contributions disagree with the others' or raise their loss, and count less"
                    if weight < _HALF
                    else "a member's contributions count again",
                    extra={
                        "fields": {"round": opening.round, "member_id": member, "weight": round(weight, 2), **scores}
                    },
                )
        return now[opening.members.index(member_id)]

    def _report(self, committed: Committed, apply_s: float) -> RoundReport:
        opening, costs, member_id = committed.verdict.opening, committed.costs, self._parts.mesh.member_id
        return RoundReport(
            round=opening.round,
            epoch=opening.epoch,
            member_id=member_id,
            members=opening.members,
            weights=opening.weights,
            samples=tuple(steps * self._schedule.shape.batch_size for steps in opening.steps),
            late=opening.late,
            state_digest=self.state_digest,
            progress=self.progress,
            wait_s=costs.wait_s,
            transfer_s=costs.transfer_s,
            apply_s=apply_s,
            sent_bytes=costs.sent_bytes,
            received_bytes=costs.received_bytes,
            wide_bytes=costs.wide_bytes,
            failures=tuple(costs.failures),
            is_left_out=self._is_left_out,
            uncommitted_tokens=self._tokens,
            refused=() if costs.newest is None else costs.newest.refused,
            payload_bytes=None if costs.newest is None else costs.newest.payload_bytes,
            trust=self._trust_in(member_id, opening),
            gains=tuple((gain.member, gain.ratio) for gain in opening.gains),
            score_s=costs.score_s,
        )

"""The bookkeeping of rounds that the algorithms share: opened, committed, caught up with, gone back from."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from zeroband.data.ledger import Range, take
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import FOUNDING_ROUND, Opening, Ready, Verdict
from zeroband.elastic.rounds.background import BackgroundRound
from zeroband.elastic.rounds.interfaces import MissedRound, OuterParts, StateCopy, verify
from zeroband.elastic.rounds.loss_record import RECORD, LossRecord
from zeroband.elastic.rounds.rollback import RolledBack, describe_return
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.rounds.transaction import CONTRIBUTION, Committed, Exchange, MeanExchange, commit_round, found_run
from zeroband.errors import Fenced, RecoveryFailed, RoundsMissed, RunOver
from zeroband.kernels.scan import all_finite
from zeroband.node.mesh import all_ok, barrier
from zeroband.observe.log import get_logger
from zeroband.state.flat import SharedBuffers

_log = get_logger(__name__)

Extra = Callable[[Tensor], Mapping[str, Any]]
"""From a round's result: what an algorithm adds to its verdict."""

_ABANDON_S = 5.0
_ALL_VERSIONS = 2**62


def nothing_more(result: Tensor) -> Mapping[str, Any]:
    """The algorithm adds nothing to a verdict."""
    return {}


@dataclass(frozen=True)
class Offer:
    """What a node brings to a round, fixed when it begins."""

    weight: int
    """Tokens; 0: it counts for nothing."""
    steps: int
    steps_requested: int
    norm: float = 0.0
    """Of the contribution; 0: nobody asks."""
    loss: float | None = None
    """Of its steps, in nats per token; None: there are none, or it is not finite."""
    trained: float = 1.0
    """As in `Ready`."""
    is_joining: bool = False
    is_leaving: bool = False
    is_left_out: bool = False
    """It learned something that is not finite."""


class RoundCoordinator:
    """The bookkeeping of rounds that the algorithms share by composition.

    `sections`: of the outer state. `replay`: the algorithm's, for rounds that were committed while this node was late
    or joining. `exchange`: of a round; None: the mean of the contributions.
    """

    def __init__(
        self,
        parts: OuterParts,
        sections: tuple[str, ...],
        replay: Callable[[MissedRound], str],
        exchange: Exchange | None = None,
    ) -> None:
        self.parts = parts
        self._exchange = exchange or MeanExchange(parts.mesh, parts.buffers, parts.feedback, parts.codec)
        self._sections = sections
        self.round = -1
        self.progress = Progress.at_start()
        self.record: Mapping[str, Any] = {}
        self.state_digest = ""
        self.share = 0.0
        """Of this node in the newest round."""
        self.members: tuple[str, ...] = ()
        """Of the newest round."""
        self.has_new_members = False
        """The newest round had other members than the one before."""
        self.state_lock = threading.Lock()
        """Held by local rank 0 while the sections change."""
        self._replay = replay
        self._tokens = 0
        self._steps = 0
        self._offered_steps = 0
        """In a round that the state does not hold yet."""
        self._background: tuple[Offer, Extra, BackgroundRound[Committed | Verdict]] | None = None
        self._loss_sum = 0.0
        self._is_left_out = False

    @contextmanager
    def changing_state(self, sections: Mapping[str, Tensor] | None = None) -> Generator[None]:
        """While the sections are written to; ends with `settle`. `sections`: what is copied into them, if anything is.

        Local rank 0 holds the lock, and the others may write when they have passed.
        """
        with self.state_lock:
            for name, section in (sections or {}).items():
                self.parts.buffers[name].copy_(section)
            barrier(self.parts.mesh.local)
            yield

    # -- what this node does between rounds ---------------------------------------------------------------------

    @property
    def is_flying(self) -> bool:
        """Whether a round is on its way beside training."""
        return self._background is not None

    @property
    def steps(self) -> int:
        """Inner steps since the last contribution."""
        return self._steps

    @property
    def inner_step(self) -> int:
        """Inner steps behind this node: those of the run, of a round on its way, and since."""
        return self.progress.inner_step + self._offered_steps + self._steps

    @property
    def is_last(self) -> bool:
        """Whether all inner steps of the run are made."""
        return self.inner_step >= self.parts.shape.total_steps

    def upcoming(self) -> tuple[Range, ...]:
        """The samples that this node trains on up to its next contribution."""
        shape, held = self.parts.shape, self.progress.assigned.get(self.parts.mesh.member_id, ())
        _, ahead = take(held, self._offered_steps * shape.batch_size)
        steps = min(self.parts.phase_length.most_steps, max(0, shape.total_steps - self.inner_step))
        return take(ahead, steps * shape.batch_size)[0]

    def count(self, tokens: int) -> None:
        """Add an inner step, and show the guardian that this node trains. `tokens`: 0 where it learned nothing."""
        self._loss_sum += self.parts.step_loss.nats * tokens if tokens else 0.0
        self._tokens += tokens
        self._steps += 1
        if self.parts.mesh.local.rank == 0:
            self.parts.mesh.flags.advance()

    def is_time_over(self, steps: int) -> bool:
        """Whether the phase should end with its `steps`-th inner step."""
        return self.goes_back or self.parts.phase_length.is_over(time.monotonic(), steps)

    def begin_phase(self) -> None:
        """Training goes on: the inner steps until the next contribution begin."""
        self._tokens, self._steps, self._loss_sum = 0, 0, 0.0
        self.parts.phase_length.begin(time.monotonic())

    def found(self, round: int, extra: Mapping[str, Any]) -> RoundReport:
        """Agree with the other founders on the state that all of them hold: the initial one, or that of a checkpoint.

        `extra`: what the algorithm adds to the verdict's record. Raises Fenced if the run started without this node.
        """
        self.parts.feedback.forget()
        self._announce(round, Offer(0, 0, self._wanted_steps(0, phases=1), is_joining=True))
        founded = found_run(self.parts.mesh, round, self.state_digest, partial(self.describe_founding, extra))
        self.advance(founded.verdict, self.state_digest)
        self.begin_phase()
        return self.report(founded, apply_s=0.0)

    def describe_founding(self, extra: Mapping[str, Any], opening: Opening) -> Mapping[str, Any]:
        """What a verdict says that begins a line of rounds with the state that this node holds."""
        after_round = self.round if self.round >= FOUNDING_ROUND else None
        progress = self.progress.begin(opening, self.parts.shape, after_round=after_round)
        said = {"progress": progress.to_record(), "weight": 0, "state_before": self.state_digest}
        said[RECORD] = LossRecord.of(self.record).carried().to_record()
        if self.record.get("session"):  # of the checkpoint: who is left of that session finds itself left behind
            said["session_before"] = self.record["session"]
        return {**said, "session": uuid.uuid4().hex, **extra}

    def _vote_to_go_back(self, opening: Opening) -> tuple[str, Callable[[], Mapping[str, Any]]]:
        """Stage the checkpoint that an opening names; its digest, and what the verdict will say."""
        assert opening.rollback is not None
        staged = self.parts.stage(opening.rollback)
        before = {"state_before": self.state_digest, "session": self.record["session"]}
        return staged.state_digest, lambda: describe_return(staged, opening, self.parts.shape, self.progress, before)

    def _announce(self, round: int, offer: Offer) -> None:
        faults, passes = self.parts.faults, not offer.is_joining
        if passes:
            faults.at("ready", round)
        ready = Ready(round, offer.weight, self.state_digest, offer.steps, offer.steps_requested)
        self.parts.mesh.announce_ready(replace(ready, norm=offer.norm, loss=offer.loss, trained=offer.trained))
        if passes:
            faults.at("leaving", 0) if offer.is_leaving else faults.at("waiting", round)

    @property
    def goes_back(self) -> bool:
        """Whether the newest round called for going back, so that the steps until then are in vain."""
        watch = self.parts.auto_rollback
        return watch is not None and watch.is_due(LossRecord.of(self.record))

    def _wanted_steps(self, steps: int, *, phases: int) -> int:
        """For which to hold samples after a round with these steps of this node, as far as the run lasts."""
        left = self.parts.shape.total_steps - self.progress.inner_step - steps
        return min(self.parts.phase_length.wanted_steps() * phases, max(left, 0))

    # -- rounds -------------------------------------------------------------------------------------------------

    def offer(
        self,
        *,
        is_joining: bool = False,
        weighted: bool = True,
        weight: int | None = None,
        norm: float = 0.0,
        trained: float = 1.0,
    ) -> Offer:
        """What this node brings to the next round: what it learned since its last one, which is counted anew from here.

        `weighted`: whether that counts; that of a joiner never does. `weight`: None: the tokens since then. `norm`,
        `trained`: as in `Ready`.
        """
        parts, is_leaving = self.parts, self.parts.departure.is_asked
        if is_joining:  # what it did before it was voted out went back to the run
            self._tokens, self._steps, self._loss_sum = 0, 0, 0.0
            parts.feedback.forget()
        parts.phase_length.learn(time.monotonic(), self._steps)
        counts = weighted and not is_joining
        tokens, self._tokens = self._tokens, 0
        steps, self._steps = self._steps, 0
        nats, self._loss_sum = self._loss_sum, 0.0
        self._offered_steps = steps
        return Offer(
            weight=(tokens if weight is None else weight) if counts else 0,
            steps=steps,
            steps_requested=0 if is_leaving else self._wanted_steps(steps, phases=2 if parts.shape.reads_ahead else 1),
            norm=norm if counts else 0.0,
            loss=nats / tokens if tokens and math.isfinite(nats) else None,
            trained=trained,
            is_joining=is_joining,
            is_leaving=is_leaving,
            is_left_out=not (weighted or is_joining),
        )

    def commit(self, offer: Offer, extra: Extra = nothing_more) -> Committed:
        """Run the next round's transaction with what lies in the contribution buffer; catch up with rounds it misses.

        `extra`: what the algorithm adds to the verdict's record. Raises RoundsMissed for a joiner, who catches up by
        itself.
        """
        return self._finish(offer, extra, self._attempt(offer, extra))

    def start(self, offer: Offer, extra: Extra = nothing_more) -> None:
        """Begin the next round beside training; the contribution and result buffers are its own until `arrived`."""
        self.parts.mesh.flags.count_only(threading.get_ident())
        self._background = offer, extra, BackgroundRound(partial(self._attempt, offer, extra))

    def arrived(self) -> Committed:
        """Wait for the round that was started. The state does not hold it yet. Raises what `commit` raises."""
        assert self._background is not None, "no round is on its way"
        (offer, extra, background), flags = self._background, self.parts.mesh.flags
        flags.count_only(None)
        try:
            return self._finish(offer, extra, background.wait())
        finally:
            self._background = None

    def abandon(self) -> None:
        """Give up a round that is on its way: this trainer ends."""
        if self._background is not None:
            flags = self.parts.mesh.flags
            flags.set_fenced(True)
            flags.abort(_ALL_VERSIONS)
            if not self._background[2].is_over(_ABANDON_S):
                _log.warning("the outer step beside training does not end")

    def _attempt(self, offer: Offer, extra: Extra) -> Committed | Verdict:
        """The next round, or the verdict of the others where they committed it without this node."""
        parts, round = self.parts, self.round + 1
        if parts.auto_rollback is not None and not offer.is_joining:
            parts.auto_rollback.answer(self.round, LossRecord.of(self.record))
        parts.journal.settle()  # the result's memory is the next one's
        self._announce(round, offer)
        await_turn = partial(parts.mesh.await_turn, round, is_member=not offer.is_joining)
        describe = partial(self._describe, extra)
        try:
            return commit_round(parts.mesh, self._exchange, await_turn, describe, self._vote_to_go_back, parts.faults)
        except Fenced as fence:
            if not offer.is_joining or parts.mesh.is_fenced:
                raise
            raise RoundsMissed(round) from fence

    def _finish(self, offer: Offer, extra: Extra, outcome: Committed | Verdict) -> Committed:
        while not isinstance(outcome, Committed):
            if offer.is_joining:
                raise RoundsMissed(outcome.round)
            try:
                self.catch_up(outcome.round)
            except RecoveryFailed as error:
                raise Fenced(f"this node was late and cannot catch up: {error}") from error
            outcome = self._attempt(offer, extra)
        self._is_left_out = offer.is_left_out
        if outcome.verdict.opening.rollback is not None:
            raise self._rolled_back(outcome)
        return outcome

    def is_contribution_finite(self, names: Iterable[str]) -> bool:
        """Whether what lies in the contribution buffer may be sent: the same on all local ranks, and said if not.

        `names`: of the parameters that this rank has shards of.
        """
        written = self.parts.sent.parts(self.parts.buffers[CONTRIBUTION], names)
        return self.is_finite_everywhere([name for name, part in written if not all_finite(part)])

    def is_finite_everywhere(self, spoilt: Sequence[str]) -> bool:
        """Whether no local rank has parameters that are not finite, `spoilt`; said if one has."""
        if spoilt:
            fields = {"round": self.round + 1, "parameters": len(spoilt), "first": spoilt[0]}
            _log.warning("what this node learned is not finite, so it is left out", extra={"fields": fields})
        return all_ok(not spoilt, self.parts.mesh.local)

    def _rolled_back(self, committed: Committed) -> RolledBack:
        verdict, record = committed.verdict, committed.verdict.record
        progress, step = Progress.from_record(record["progress"]), verdict.opening.rollback
        assert step is not None
        report = replace(self.report(committed, apply_s=0.0), progress=progress, state_digest=verdict.digest)
        self.parts.journal.cut(verdict.round)
        self._offered_steps = 0
        self.parts.feedback.forget()
        self.begin_phase()
        return RolledBack(step, report, record)

    def _describe(self, extra: Extra, opening: Opening, result: Tensor) -> Mapping[str, Any]:
        progress = self.progress.after(opening, self.parts.shape)
        return {
            "progress": progress.to_record(),
            "weight": opening.total_weight,
            "state_before": self.state_digest,
            "session": self.record["session"],
            RECORD: LossRecord.of(self.record).after(opening, self.progress.inner_step).to_record(),
            **extra(result),
        }

    def catch_up(self, round: int) -> None:
        """Replay the rounds up to this one from the others' journals.

        Raises RunOver when that was the last, RecoveryFailed where nobody keeps them.
        """
        for number in range(self.round + 1, round + 1):
            fetched = self.parts.fetch_entry(number, self._exchange.room)
            self._exchange.unpack(fetched.update)
            missed = MissedRound(number, self._exchange.result, fetched.record, fetched.state_digest)
            verify(self._replay(missed), fetched.state_digest, f"the state after round {number}", self.parts.mesh.local)
        if self.progress.is_complete:
            raise RunOver(f"the run ended with round {self.round}, without this node")

    def advance(self, verdict: Verdict, state: str) -> None:
        """Note that the state now holds a committed round."""
        self._offered_steps = 0
        self.record_state(verdict.round, verdict.record, state)
        opening, own = verdict.opening, self.parts.mesh.member_id
        self.share = opening.share(own)
        self.has_new_members, self.members = opening.members != self.members, opening.members

    def record_state(self, round: int, record: Mapping[str, Any], state: str) -> None:
        """Note which round the state holds, however it came to it."""
        self.round = round
        self.record = record
        self.progress = Progress.from_record(record["progress"])
        self.state_digest = state
        if self.parts.memory is not None:
            self.parts.memory.stamp(self._sections, round, record, state)

    def keep_in_journal(self, committed: Committed) -> None:
        """Add a committed round to the journal. Local rank 0 keeps it for all."""
        if self.parts.mesh.local.rank == 0:
            pack = partial(self._exchange.pack, committed.result)
            self.parts.journal.record(self.round, pack, committed.verdict.record, self.state_digest)

    def report(self, committed: Committed, apply_s: float) -> RoundReport:
        opening = committed.verdict.opening
        return RoundReport(
            round=opening.round,
            epoch=opening.epoch,
            member_id=self.parts.mesh.member_id,
            members=opening.members,
            weights=opening.weights,
            samples=tuple(steps * self.parts.shape.batch_size for steps in opening.steps),
            late=opening.late,
            state_digest=self.state_digest,
            progress=self.progress,
            wait_s=committed.wait_s,
            transfer_s=committed.transfer_s,
            apply_s=apply_s,
            sent_bytes=committed.sent_bytes,
            received_bytes=committed.received_bytes,
            failures=committed.failures,
            is_left_out=self._is_left_out,
            uncommitted_tokens=self._tokens,
            clip=opening.clip(self.parts.mesh.member_id),
        )


class CoordinatedRounds:
    """The part of `OuterAlgorithm` that is the same for all. A subclass sets `_coordinator` and `_buffers`."""

    sections: tuple[str, ...]
    _coordinator: RoundCoordinator
    _buffers: SharedBuffers

    @property
    def round(self) -> int:
        return self._coordinator.round

    @property
    def progress(self) -> Progress:
        return self._coordinator.progress

    @property
    def record(self) -> Mapping[str, Any]:
        return self._coordinator.record

    @property
    def state_digest(self) -> str:
        return self._coordinator.state_digest

    @property
    def inner_step(self) -> int:
        return self._coordinator.inner_step

    def upcoming(self) -> Sequence[Range]:
        return self._coordinator.upcoming()

    def found(self, round: int = FOUNDING_ROUND) -> RoundReport:
        return self._coordinator.found(round, self._at_founding())

    def _at_founding(self) -> Mapping[str, Any]:
        """What the founding's verdict says beside the progress."""
        return {}

    def catch_up(self, round: int) -> None:
        self._coordinator.catch_up(round)

    def is_time_over(self, steps: int) -> bool:
        return self._coordinator.is_time_over(steps)

    def flush(self) -> Sequence[RoundReport]:
        """Nothing is on its way while training goes on."""
        return ()

    def _is_end(self, rounds: int = 1) -> bool:
        """Whether all nodes wait after so many more rounds, and nothing is on its way then.

        So it is when all inner steps of the run are made, and for a checkpoint that is gone on from to the last bit.
        """
        every = self._coordinator.parts.flush_every
        return self._coordinator.is_last or (every is not None and (self.progress.outer_step + rounds) % every == 0)

    def abandon(self) -> None:
        self._coordinator.abandon()

    def copy_state(self) -> StateCopy:
        with self._coordinator.state_lock:
            sections = {name: self._buffers[name].clone() for name in self.sections}
            return StateCopy(
                self._coordinator.round, sections, self._coordinator.record, self._coordinator.state_digest
            )

"""The bookkeeping of rounds that the algorithms share: opened, committed, caught up with, gone back from."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroband.elastic.epoch import FOUNDING_ROUND, Opening, Ready, Verdict
from zeroband.elastic.progress import Progress
from zeroband.errors import Fenced, RecoveryFailed, RunOver
from zeroband.observe.log import get_logger
from zeroband.outer.base import OuterParts, RoundReport, verify
from zeroband.outer.journal import JournalEntry
from zeroband.outer.rollback import RolledBack, describe_return
from zeroband.outer.transaction import (
    CONTRIBUTION,
    RESULT,
    Committed,
    Exchange,
    MeanExchange,
    commit_round,
    found_run,
)
from zeroband.parallel import all_ok, barrier

_log = get_logger(__name__)


class RoundKeeper:
    """The bookkeeping of rounds that the algorithms share by composition.

    `sections`: of the outer state. `replay`: the algorithm's, for rounds that were committed while this node was late
    or joining. `exchange`: of a round; None: the mean of the contributions.
    """

    def __init__(
        self,
        parts: OuterParts,
        sections: tuple[str, ...],
        replay: Callable[[JournalEntry], str],
        exchange: Exchange | None = None,
    ) -> None:
        self.parts = parts
        self._exchange = exchange or MeanExchange(parts.mesh, parts.buffers, parts.feedback.residual)
        self._sections = sections
        self.round = -1
        self.progress = Progress.at_start()
        self.payload: Mapping[str, Any] = {}
        self.state = ""
        self.state_lock = threading.Lock()
        """Held by local rank 0 while the sections change."""
        self._replay = replay
        self._tokens = 0
        self._steps = 0
        self._is_left_out = False

    @contextmanager
    def changing_state(self, sections: Mapping[str, Tensor] | None = None) -> Generator[None]:
        """While the sections are written to; ends with `settle`. `sections`: what is copied into them, if anything is.

        Local rank 0 holds the lock, and the others may write when they have passed.
        """
        with self.state_lock:
            if self.parts.memory is not None:
                self.parts.memory.spoil()
            for name, section in (sections or {}).items():
                self.parts.buffers[name].copy_(section)
            barrier(self.parts.mesh.local)
            yield

    def count(self, tokens: int) -> None:
        """Add an inner step to the round in progress, and show the guardian that this node trains."""
        self._tokens += tokens
        self._steps += 1
        if self.parts.mesh.local.rank == 0:
            self.parts.mesh.board.advance()

    def found(self, round: int, extra: Mapping[str, Any]) -> RoundReport:
        """Agree with the other founders on the state that all of them hold: the initial one, or that of a checkpoint.

        `extra`: what the algorithm adds to the verdict's payload. Raises Fenced if the run started without this node.
        """
        self._announce(round, 0, passes_faults=False)

        founded = found_run(self.parts.mesh, round, self.state, partial(self.describe_beginning, extra))
        self.advance(founded.verdict, self.state)
        return self.report(founded, apply_s=0.0)

    def describe_beginning(self, extra: Mapping[str, Any], opening: Opening) -> Mapping[str, Any]:
        """What a verdict says that begins a line of rounds with the state that this node holds."""
        after_round = self.round if self.round >= FOUNDING_ROUND else None
        progress = self.progress.begin(opening, self.parts.shape, after_round=after_round)
        said = {"progress": progress.to_record(), "weight": 0, "state_before": self.state}
        return {**said, "session": uuid.uuid4().hex, **extra}

    def _vote_to_go_back(self, opening: Opening) -> tuple[str, Callable[[], Mapping[str, Any]]]:
        """Stage the checkpoint that an opening names; its digest, and what the verdict will say."""
        assert opening.rollback is not None
        staged = self.parts.stage(opening.rollback)
        before = {"state_before": self.state, "session": self.payload["session"]}
        return staged.state, lambda: describe_return(staged, opening, self.parts.shape, before)

    def _announce(self, round: int, weight: int, *, passes_faults: bool) -> None:
        faults, leaves = self.parts.faults, self.parts.departure.is_asked
        if passes_faults:
            faults.at("ready", round)
        self.parts.mesh.announce_ready(Ready(round, weight, self.state, self._steps, self._wanted_steps()))
        if passes_faults:
            faults.at("leaving", 0) if leaves else faults.at("waiting", round)

    def _wanted_steps(self) -> int:
        """For the next round, as far as the run lasts; none when this node leaves."""
        if self.parts.departure.is_asked:
            return 0
        left = self.parts.shape.total_steps - self.progress.inner_step - self._steps
        return min(self.parts.pace.wanted_steps(), max(left, 0))

    def commit(
        self,
        *,
        is_joining: bool = False,
        weighted: bool = True,
        extra: Callable[[Tensor], Mapping[str, Any]] = lambda result: {},
    ) -> Committed:
        """Run the next round's transaction with what lies in the contribution buffer; catch up with rounds it misses.

        `weighted`: whether this node's update counts; that of a joiner never does. `extra`: what the algorithm adds to
        the verdict's payload.
        """
        parts = self.parts
        if is_joining:  # what it did before it was voted out went back to the run
            self._tokens = self._steps = 0
            parts.feedback.forget()
        parts.pace.learn(time.monotonic(), self._steps)
        self._is_left_out = not (weighted or is_joining)
        weight = self._tokens if weighted and not is_joining else 0
        while True:
            round = self.round + 1
            self._announce(round, weight, passes_faults=not is_joining)
            await_turn = partial(parts.mesh.await_turn, round, is_member=not is_joining)
            try:
                describe = partial(self._describe, extra)
                outcome = commit_round(
                    parts.mesh, self._exchange, await_turn, describe, self._vote_to_go_back, parts.faults
                )
            except Fenced as fence:
                if not is_joining or parts.mesh.is_fenced:
                    raise
                _log.info("missed a round while joining", extra={"fields": {"why": str(fence)}})
                continue
            if isinstance(outcome, Committed):
                if outcome.verdict.opening.rollback is not None:
                    raise self._rolled_back(outcome)
                return outcome
            self._catch_up(outcome.round, is_joining=is_joining)

    def is_contribution_finite(self, names: Iterable[str]) -> bool:
        """Whether what lies in the contribution buffer may be sent: the same on all local ranks, and said if not.

        `names`: of the parameters that this rank has shards of.
        """
        written = self.parts.shards.parts(self.parts.buffers[CONTRIBUTION], names)
        return self.is_finite_everywhere([name for name, part in written if not torch.isfinite(part).all()])

    def is_finite_everywhere(self, spoilt: Sequence[str]) -> bool:
        """Whether no local rank has parameters that are not finite, `spoilt`; said if one has."""
        if spoilt:
            fields = {"round": self.round + 1, "parameters": len(spoilt), "first": spoilt[0]}
            _log.warning("what this node learned is not finite, so it is left out", extra={"fields": fields})
        return all_ok(not spoilt, self.parts.mesh.local)

    def _rolled_back(self, committed: Committed) -> RolledBack:
        verdict, payload = committed.verdict, committed.verdict.payload
        progress, step = Progress.from_record(payload["progress"]), verdict.opening.rollback
        assert step is not None
        report = replace(self.report(committed, apply_s=0.0), progress=progress, state=verdict.digest)
        self.parts.journal.cut(verdict.round)
        self._tokens = self._steps = 0
        self.parts.pace.begin(time.monotonic())
        return RolledBack(step, report, payload)

    def _describe(
        self, extra: Callable[[Tensor], Mapping[str, Any]], opening: Opening, result: Tensor
    ) -> Mapping[str, Any]:
        progress = self.progress.after(opening, self.parts.shape)
        return {
            "progress": progress.to_record(),
            "weight": opening.total_weight,
            "state_before": self.state,
            "session": self.payload["session"],
            **extra(result),
        }

    def _catch_up(self, round: int, *, is_joining: bool) -> None:
        """Replay the rounds up to this one from the others' journals.

        Raises RunOver when that was the last, and where nobody keeps them RecoveryFailed, or Fenced for a member.
        """
        try:
            for missed in range(self.round + 1, round + 1):
                fetched = self.parts.fetch_entry(missed)
                entry = JournalEntry(missed, self.parts.buffers[RESULT], fetched.payload, fetched.state)
                verify(self._replay(entry), fetched.state, f"the state after round {missed}", self.parts.mesh.local)
        except RecoveryFailed as error:
            if is_joining:
                raise
            raise Fenced(f"this node was late and cannot catch up: {error}") from error
        if self.progress.is_complete:
            raise RunOver(f"the run ended with round {self.round}, without this node")

    def advance(self, verdict: Verdict, state: str) -> None:
        """Note that the state now holds a committed round, and begin the next one."""
        self.settle(verdict.round, verdict.payload, state)
        self._tokens = self._steps = 0
        self.parts.pace.begin(time.monotonic())

    def settle(self, round: int, payload: Mapping[str, Any], state: str) -> None:
        """Note which round the state holds, however it came to it."""
        self.round = round
        self.payload = payload
        self.progress = Progress.from_record(payload["progress"])
        self.state = state
        if self.parts.memory is not None:
            self.parts.memory.stamp(self._sections, round, payload, state)

    def record(self, committed: Committed) -> None:
        """Add a committed round to the journal. Local rank 0 keeps it for all."""
        if self.parts.mesh.local.rank == 0:
            entry = JournalEntry(self.round, committed.result.clone(), committed.verdict.payload, self.state)
            self.parts.journal.add(entry)

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
            state=self.state,
            progress=self.progress,
            wait_s=committed.wait_s,
            transfer_s=committed.transfer_s,
            apply_s=apply_s,
            sent_bytes=committed.sent_bytes,
            received_bytes=committed.received_bytes,
            failures=committed.failures,
            is_left_out=self._is_left_out,
        )

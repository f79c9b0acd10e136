"""ElasticDeviceMesh: the node's local FSDP2 mesh joined with the lanes to the other nodes of the epoch.

Every method is called by all local ranks, in the same order. Local rank 0 speaks to the store and decides; the others
learn the decision, or the same error, through the local mesh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zeroband.elastic.membership.epoch import Rules
from zeroband.elastic.membership.records import Opening, Ready, Verdict, from_record, to_record
from zeroband.elastic.rounds.member import Member
from zeroband.elastic.transport.base import DataPlane, Gathering, Transfer
from zeroband.elastic.transport.engine import Encoded
from zeroband.errors import (
    ConfigError,
    Fenced,
    Leaving,
    PeerLost,
    RecoveryFailed,
    RunOver,
    StoreLost,
    TransferStalled,
    ZerobandError,
)
from zeroband.node.mesh import LocalMesh, all_ok, broadcast_json
from zeroband.node.shared_flags import SharedFlags

_TRAVELLING_ERRORS: tuple[type[ZerobandError], ...] = (
    ConfigError,
    Fenced,
    Leaving,
    PeerLost,
    RecoveryFailed,
    RunOver,
    StoreLost,
)


def on_first_rank(local: LocalMesh, work: Callable[[], Any]) -> Any:
    """Run `work` on local rank 0 and return its JSON-ready value, or raise its error, on every local rank."""
    outcome: dict[str, Any] = {}
    if local.rank == 0:
        try:
            outcome = {"value": work()}
        except _TRAVELLING_ERRORS as error:
            kind = next(i for i, kind in enumerate(_TRAVELLING_ERRORS) if isinstance(error, kind))
            outcome = {"error": kind, "message": str(error)}
    outcome = broadcast_json(outcome, local)
    if "error" in outcome:
        raise _TRAVELLING_ERRORS[outcome["error"]](outcome["message"])
    return outcome["value"]


class ElasticDeviceMesh:
    """Rounds with the other nodes. `member` is there on local rank 0 only; `member_id` on all."""

    def __init__(
        self,
        local: LocalMesh,
        member: Member | None,
        plane: DataPlane,
        flags: SharedFlags,
        rules: Rules,
        *,
        start_timeout_s: float,
    ) -> None:
        self.local = local
        self.flags = flags
        self._member = member
        self._plane = plane
        self._rules = rules
        self._start_deadline_s = time.monotonic() + start_timeout_s
        self.member_id: str = on_first_rank(local, lambda: self.member.member_id)

    @property
    def member(self) -> Member:
        assert self._member is not None, "only local rank 0 holds the membership"
        return self._member

    @property
    def keeps_buffers(self) -> bool:
        """Whether a result buffer may be used again after PeerLost."""
        return self._plane.keeps_buffers

    @property
    def is_fenced(self) -> bool:
        """Whether the lease was refused: the run went on without this node."""
        return bool(on_first_rank(self.local, lambda: self.flags.is_fenced))

    def replace_member(self, member: Member | None) -> None:
        """Go on as another member after a fence."""
        self._member = member
        self._plane.leave_behind()
        self.member_id = on_first_rank(self.local, lambda: self.member.member_id)

    # -- rounds -------------------------------------------------------------------------------------------------

    def announce_ready(self, ready: Ready) -> None:
        """Tell the others that this node stands at the boundary, and what its links were seen to carry."""

        def announce() -> None:
            rates = self._plane.measured()
            self.member.announce_ready(replace(ready, rate=rates.own, links=rates.links, took_ms=rates.took_ms))

        on_first_rank(self.local, announce)

    def await_turn(self, round: int, *, is_member: bool) -> Opening | Verdict:
        """Wait until the round is open to this node, or was committed without it: then catch up and ask again.

        `is_member`: it took part in the last round, so that a round without it means Fenced, unless it was only late.
        """

        def wait() -> dict[str, Any]:
            outcome = self.member.await_turn(
                round, self._rules, is_member=is_member, start_deadline_s=self._start_deadline_s
            )
            return {"is_opening": isinstance(outcome, Opening), "record": to_record(outcome)}

        outcome = on_first_rank(self.local, wait)
        return (
            from_record(Opening, outcome["record"])
            if outcome["is_opening"]
            else from_record(Verdict, outcome["record"])
        )

    def reduce_mean(
        self,
        contribution: torch.Tensor,
        result: torch.Tensor,
        opening: Opening,
        on_progress: Callable[[float], None] = lambda share: None,
        stops: Sequence[float] = (),
        errors: torch.Tensor | None = None,
        encoded: Encoded | None = None,
    ) -> Transfer:
        """The weighted mean of the members' contributions, into `result`, bit-identical on all of them.

        Shapes: all (n,) float32 on CPU, mapped by all local ranks. `contribution` is left as it is. `errors`,
        `encoded`: as in `DataPlane.reduce_mean`. `on_progress`: called with the share of this rank's transfer that is
        done, in 0..1. `stops`: shares at which it stands still meanwhile.
        Raises PeerLost on all local ranks; then `result` must be replaced unless `keeps_buffers`.
        """

        def move(moved: Callable[[float], None]) -> tuple[int, int]:
            return self._plane.reduce_mean(contribution, result, opening, self.member_id, moved, stops, errors, encoded)

        return self._transfer(move, opening, on_progress)

    def gather(
        self,
        payload: torch.Tensor,
        result: torch.Tensor,
        gathering: Gathering,
        opening: Opening,
        on_progress: Callable[[float], None] = lambda share: None,
        stops: Sequence[float] = (),
    ) -> Transfer:
        """The members' payloads, one behind the other, into `result`: the same bytes on all of them that receive.

        As `DataPlane.gather`; `result` must be replaced after PeerLost, unless `keeps_buffers`.
        """

        def move(moved: Callable[[float], None]) -> tuple[int, int]:
            return self._plane.gather(payload, result, gathering, opening, self.member_id, moved, stops)

        return self._transfer(move, opening, on_progress)

    def _transfer(
        self,
        move: Callable[[Callable[[float], None]], tuple[int, int]],
        opening: Opening,
        on_progress: Callable[[float], None],
    ) -> Transfer:
        """Move bytes between nodes, with the opening watched. Raises PeerLost on all local ranks."""
        started_at_s = time.monotonic()
        reason, sent, received = "", 0, 0
        if self.local.rank == 0:
            self.member.watch(opening)

        def moved(done: float) -> None:
            if self.local.rank == 0:
                self.flags.advance()  # a transfer that stands still must not look alive to the guardian
            on_progress(done)

        try:
            sent, received = move(moved)
        except PeerLost as error:
            reason = str(error)
            self.flags.abort(opening.version)
            if isinstance(error, TransferStalled) and self.local.rank == 0:
                self.member.tell_stall(opening, error)
        if not all_ok(not reason, self.local):
            self._give_up(opening, reason or "another local rank lost its lane")
        return Transfer(time.monotonic() - started_at_s, sent, received)

    def _give_up(self, opening: Opening, reason: str) -> None:
        self._plane.leave_behind()

        def report() -> None:
            self.member.watch(None)
            self.member.report_failure(opening, reason)
            self.member.record_stall(opening.round, reason)

        on_first_rank(self.local, report)
        raise PeerLost(reason)

    def commit(self, opening: Opening, digest: str, record: Callable[[], Mapping[str, Any]]) -> Verdict:
        """Vote for a result and wait for the verdict. `record` is called on local rank 0 only.

        Raises PeerLost if the round has to be opened again, and Fenced if it was committed without this node.
        """

        def vote() -> dict[str, Any]:
            self.member.vote(opening, digest)
            try:
                return to_record(self.member.await_verdict(opening, record()))
            except PeerLost as error:
                self.member.record_stall(opening.round, str(error))
                raise
            finally:
                self.member.watch(None)

        try:
            return from_record(Verdict, on_first_rank(self.local, vote))
        except PeerLost:
            self._plane.leave_behind()
            raise

    def refuse_rollback(self, opening: Opening, reason: str) -> None:
        """The checkpoint that an opening goes back to cannot be had here: the run goes on as it was."""
        on_first_rank(self.local, lambda: self.member.refuse_rollback(opening, reason))

    def close(self) -> None:
        """Leave the run."""
        self._plane.close()
        if self._member is not None:
            self._member.close()

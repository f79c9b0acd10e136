"""ElasticDeviceMesh: the node's local FSDP2 mesh and the data plane to the other members of the epoch.

Every method is called by all local ranks, in the same order. Local rank 0 speaks to the store and decides; the others
learn the decision, or the same error, through the local mesh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zeroband.elastic.membership.records import Claim, Evidence, Ready, RoundPlan, Verdict, from_json, to_json
from zeroband.elastic.membership.round_rules import Rules
from zeroband.elastic.rounds.member import Member
from zeroband.elastic.transport.base import DataPlane, Gathering, MovedBytes, RoundRequest, Transfer
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
from zeroband.node.mesh import LocalMesh, all_ok, broadcast_json, gather_json
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
    return _value_of(broadcast_json(_outcome_of(work) if local.rank == 0 else {}, local))


def on_each_machine(local: LocalMesh, work: Callable[[], Any]) -> None:
    """Run `work` on the first rank of each machine of the node; raises the first one's error on all ranks."""
    for outcome in gather_json(_outcome_of(work) if local.local_rank == 0 else {"value": None}, local):
        _value_of(outcome)


def record_on_first_rank(local: LocalMesh, kinds: Sequence[type[Any]], work: Callable[[], Any]) -> Any:
    """Like `on_first_rank`, for a record of one of these kinds. A node with a single rank gets the object itself."""
    if local.world_size == 1:
        return _value_of(_outcome_of(work))

    def told() -> tuple[int, str]:
        record = work()
        return kinds.index(type(record)), to_json(record)

    kind, text = on_first_rank(local, told)
    return from_json(kinds[kind], text)


def _outcome_of(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except _TRAVELLING_ERRORS as error:
        kind = next(i for i, kind in enumerate(_TRAVELLING_ERRORS) if isinstance(error, kind))
        return {"error": kind, "message": str(error)}


def _value_of(outcome: Mapping[str, Any]) -> Any:
    if "error" in outcome:
        raise _TRAVELLING_ERRORS[outcome["error"]](outcome["message"])
    return outcome["value"]


class ElasticDeviceMesh:
    """Rounds with the other nodes, for all local ranks. `member` exists on local rank 0 only; `member_id` on all.

    `trainer`: the same ranks as `local`, with the group in which the training thread decides while a round is under way
    in another thread.
    """

    def __init__(
        self,
        local: LocalMesh,
        member: Member | None,
        plane: DataPlane,
        flags: SharedFlags,
        rules: Rules,
        *,
        start_timeout_s: float,
        trainer: LocalMesh,
    ) -> None:
        self.local = local
        self.trainer = trainer
        self.flags = flags
        self._member = member
        self._plane = plane
        self._rules = rules
        self._start_deadline_s = time.monotonic() + start_timeout_s
        self.member_id: str = on_first_rank(local, lambda: self.member.member_id)

    @property
    def is_start_over(self) -> bool:
        """Whether founders wait for no further node."""
        return time.monotonic() > self._start_deadline_s

    @property
    def member(self) -> Member:
        assert self._member is not None, "only local rank 0 holds the membership"
        return self._member

    def is_so(self, known: bool) -> bool:
        """Share a truth value of local rank 0 with all local ranks."""
        return bool(broadcast_json(known, self.local))

    @property
    def keeps_buffers(self) -> bool:
        """Whether a result buffer may be used again after PeerLost."""
        return self._plane.keeps_buffers

    @property
    def is_fenced(self) -> bool:
        """Whether the lease was refused: the run went on without this node."""
        return bool(on_first_rank(self.local, lambda: self.flags.is_fenced))

    def replace_member(self, member: Member | None) -> None:
        """Continue as a new member after a fence."""
        self._member = member
        self._plane.abandon()
        self.member_id = on_first_rank(self.local, lambda: self.member.member_id)

    # -- rounds -------------------------------------------------------------------------------------------------

    def newest_round(self, round: int) -> int:
        """Return the newest committed round; `round`: that of this node's state. Raises Fenced."""
        return int(on_first_rank(self.local, lambda: self.member.newest_round(round)))

    def is_newest(self, round: int) -> bool:
        """Whether this is the newest committed round and one of its members lives. Raises Fenced."""
        return bool(on_first_rank(self.local, lambda: self.member.is_newest(round)))

    def is_boundary_reached(self) -> bool:
        """Whether a member stands at the boundary of the next round. Any thread of local rank 0."""
        return self.member.is_boundary_reached()

    def claim_samples(self, samples: int) -> Claim:
        """Claim samples to train on before a round has dealt this node any."""
        return record_on_first_rank(self.local, (Claim,), lambda: self.member.claim_samples(samples))

    def announce_ready(self, ready: Ready) -> None:
        """Announce that this node stands at the boundary, with its measured link rates."""

        def announce() -> None:
            rates = self._plane.measured()
            measured = replace(ready, rate=rates.own, took_ms=rates.took_ms)
            self.member.announce_ready(measured, rates.links, start_nodes=self._rules.start_nodes)

        on_first_rank(self.local, announce)

    def await_turn(self, round: int, *, is_member: bool) -> RoundPlan | Verdict:
        """Wait until the round is open to this node (a plan) or was committed without it (a verdict: catch up, retry).

        `is_member`: it was in the last round, so a round without it means Fenced, unless it was only late.
        """

        def wait() -> RoundPlan | Verdict:
            return self.member.await_turn(
                round, self._rules, is_member=is_member, start_deadline_s=self._start_deadline_s
            )

        return record_on_first_rank(self.local, (RoundPlan, Verdict), wait)

    def reduce_mean(self, request: RoundRequest) -> Transfer:
        """Compute the weighted mean of the members' contributions, bit-identical on all of them.

        Raises PeerLost on all local ranks; then the request's `result` must be replaced unless `keeps_buffers`.
        """
        return self._transfer(request.plan, lambda: self._plane.reduce_mean(request))

    def gather(self, request: RoundRequest, gathering: Gathering) -> Transfer:
        """Gather the members' payloads in their order: the same bytes on all members that receive.

        Raises PeerLost like `reduce_mean`.
        """
        moved = self._transfer(request.plan, lambda: self._plane.gather(request, gathering))
        plan, own = request.plan, len(request.sent)
        is_sent = own > 0 and len(plan.members) > 1 and gathering.receiver != request.member_id
        return replace(moved, payload_bytes=own if is_sent else None)

    def _transfer(self, plan: RoundPlan, move: Callable[[], MovedBytes]) -> Transfer:
        """Move bytes between nodes while watching the plan. Raises PeerLost on all local ranks."""
        started_at_s = time.monotonic()
        reason, moved = "", MovedBytes(0, 0)
        if self.local.rank == 0:
            self.member.watch(plan)
        try:
            moved = move()
        except PeerLost as error:
            reason = str(error)
            self.flags.abort(plan.version)
            if isinstance(error, TransferStalled) and self.local.rank == 0:
                self.member.tell_stall(plan, error)
        if not all_ok(not reason, self.local):
            self._give_up(plan, reason or "the transfer failed on another local rank")
        took_s = time.monotonic() - started_at_s
        return Transfer(**vars(moved), took_s=took_s)

    def _give_up(self, plan: RoundPlan, reason: str) -> None:
        self._plane.abandon()

        def report() -> None:
            self.member.watch(None)
            self.member.report_failure(plan, reason)
            self.member.record_stall(plan.round, reason)

        on_first_rank(self.local, report)
        raise PeerLost(reason)

    def testify(self, plan: RoundPlan, testimony: Callable[[], Evidence]) -> None:
        """Report this node's evidence on a failed plan. `testimony`: see `Exchange.testimony`."""

        def testify() -> None:
            gaps = self._plane.gaps()
            told = replace(testimony(), lacks=gaps.lacks, lacks_mean=gaps.lacks_mean, refused=gaps.refused)
            self.member.testify(plan, told)

        on_first_rank(self.local, testify)

    def vote(self, plan: RoundPlan, digest: str, record: Mapping[str, Any]) -> None:
        """Vote for the result that this node holds; `await_verdict` follows, with the same `record`."""

        def vote() -> None:
            try:
                self.member.vote(plan, digest, record)
            except BaseException:
                self.member.watch(None)
                raise

        on_first_rank(self.local, vote)

    def await_verdict(self, plan: RoundPlan, record: Mapping[str, Any]) -> Verdict:
        """Wait until the round is committed. `record`: this node's record for the verdict; local rank 0 only.

        Raises PeerLost if the round must be reopened, and Fenced if it was committed without this node.
        """

        def wait() -> Verdict:
            try:
                return self.member.await_verdict(plan, record)
            except PeerLost as error:
                self.member.record_stall(plan.round, str(error))
                raise
            finally:
                self.member.watch(None)

        try:
            return record_on_first_rank(self.local, (Verdict,), wait)
        except PeerLost:
            self._plane.abandon()
            raise

    def refuse_rollback(self, plan: RoundPlan, reason: str) -> None:
        """Refuse a rollback whose checkpoint cannot be loaded here: the run continues from its current state."""
        on_first_rank(self.local, lambda: self.member.refuse_rollback(plan, reason))

    def close(self) -> None:
        """Leave the run."""
        self._plane.close()
        if self._member is not None:
            self._member.close()

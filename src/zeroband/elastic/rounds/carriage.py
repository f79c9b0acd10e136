"""Carrying: contributions of members with slow links travel ahead of the round that counts them.

A member whose link would stretch a round offers its encoded contribution and continues training. Its carrier, another
member, fetches the contribution at the link's pace, names it in its `Ready`, and adds it to its own contribution in the
round that counts it. A carrier keeps one contribution of each such member, and for a moment the next one.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroband.elastic.membership.records import Carried, Carry, RoundPlan
from zeroband.elastic.rounds.background import BackgroundRound
from zeroband.elastic.rounds.elastic_device_mesh import on_first_rank
from zeroband.errors import RecoveryFailed
from zeroband.node.mesh import LocalMesh, barrier
from zeroband.observe.log import get_logger
from zeroband.state.feedback import ErrorFeedback
from zeroband.state.flat import SharedBuffers
from zeroband.state.round_state import RoundUpdate

_SUM = "carried"
"""Shared buffer for the sum of a carrier's own contribution and the carried ones."""

_PAUSE_S = 0.5
"""Interval of asking a member for a new offer."""

Room = Callable[[int], Tensor]
"""Allocates (nbytes,) uint8, or raises RecoveryFailed."""

FetchOffer = Callable[[str, str, Room], RoundUpdate | None]
"""Fetches a member's current offer; None if it is still the one named by the second argument. Raises RecoveryFailed."""

_log = get_logger(__name__)


def offer_of(number: int, data: Tensor) -> RoundUpdate:
    """Make an offer as it is served. `number`: of the round that it was made for. Shape: data (nbytes,) uint8."""
    return RoundUpdate(number, data, {}, f"{number}-{hashlib.sha256(data.numpy().data).hexdigest()}")


def counts_of(plan: RoundPlan, member_id: str) -> tuple[float, float]:
    """A member's weight, without and with the contributions that it carries."""
    own = plan.counts[plan.members.index(member_id)]
    return own, own + sum(map(plan.count_of, plan.carried_by(member_id)))


@dataclass(frozen=True)
class _Held:
    """A contribution that was fetched completely."""

    offer: str
    data: Tensor
    """(nbytes,) uint8."""
    largest: float


class Carriage:
    """A node's offer to its carrier, and the contributions that it carries for others.

    `contribution`: (n,) float32, shared by the local ranks. Fetched data lie on local rank 0.
    """

    def __init__(
        self,
        local: LocalMesh,
        buffers: SharedBuffers,
        feedback: ErrorFeedback,
        fetch: FetchOffer,
    ) -> None:
        self._local = local
        self._buffers = buffers
        self._feedback = feedback
        self._codec = feedback.codec
        self._fetch = fetch
        self._offer: RoundUpdate | None = None
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        """By member."""
        self._told: dict[str, _Held] = {}
        """Contributions named in its newest `Ready`: kept until the next one, even if a newer offer arrives."""
        self._carried: set[str] = set()
        """Members that the newest plan lists as carried, by any carrier."""
        self._fetchers: dict[str, threading.Event] = {}
        """Stop events of the fetching threads, by member."""

    # -- this node's offer --------------------------------------------------------------------------------------------

    def offer(self, number: int, contribution: Tensor) -> str:
        """Encode a contribution and let others fetch it; returns its name. Called by all local ranks."""

        def encode() -> str:
            self._offer = offer_of(number, self._codec.encode(contribution))
            return self._offer.state_digest

        return str(on_first_rank(self._local, encode))

    @property
    def offered(self) -> RoundUpdate | None:
        """The current offer, on local rank 0. Any thread."""
        return self._offer

    def settle(self, contribution: Tensor) -> None:
        """Feed back the offer's encoding error after the offer counted. Called by all local ranks."""
        offer, residual = self._offer, self._feedback.residual
        if offer is not None and residual is not None:
            torch.sub(contribution, self._codec.decode(offer.update, contribution.numel()), out=residual)
        barrier(self._local)
        self.withdraw()

    def withdraw(self) -> None:
        """Withdraw the offer."""
        self._offer = None

    # -- carried contributions ----------------------------------------------------------------------------------------

    def look(self, plan: RoundPlan, member_id: str) -> None:
        """Start fetching from the members that a plan assigns to this carrier; forget members no longer carried.

        If a member moves to another carrier, the contribution that this one holds or is fetching may still count.
        """
        if self._local.rank != 0:
            return
        mine = {carried.member for carried in plan.carried if carried.carrier == member_id}
        with self._lock:
            self._carried = {carried.member for carried in plan.carried}
            for member in self._fetchers.keys() - mine:
                self._fetchers.pop(member).set()
            self._held = {member: held for member, held in self._held.items() if member in self._carried}
            for member in sorted(mine - self._fetchers.keys()):
                ended = self._fetchers[member] = threading.Event()
                threading.Thread(target=self._carry, args=(member, ended), name="carriage", daemon=True).start()

    def whole(self) -> tuple[Carry, ...]:
        """Complete contributions, to be named in the next `Ready`; empty on local ranks other than 0."""
        with self._lock:
            self._told = dict(self._held)
            return tuple(Carry(member, held.offer, held.largest) for member, held in sorted(self._told.items()))

    def with_carried(self, plan: RoundPlan, member_id: str, contribution: Tensor) -> Tensor:
        """The weighted mean of a member's own and carried contributions, which it brings to the exchange.

        In float32: its own contribution times its fraction, then each carried one times its fraction is added, in the
        order of the members. Without carried ones its own is returned unchanged. Called by all local ranks.
        """
        carried = plan.carried_by(member_id)
        if not carried:
            return contribution
        self._buffers.open(_SUM)
        total = self._buffers[_SUM][: contribution.numel()]
        if self._local.rank == 0:
            own, all_count = counts_of(plan, member_id)
            torch.mul(contribution, own / all_count, out=total) if own > 0 else total.zero_()
            for one in carried:
                self._codec.add(self._data_of(one), plan.count_of(one) / all_count, total)
        barrier(self._local)
        return total

    def _data_of(self, carried: Carried) -> Tensor:
        held = self._told[carried.member]
        assert held.offer == carried.offer, "the plan counts what this node's record names"
        return held.data

    def _carry(self, member: str, ended: threading.Event) -> None:
        """Fetch a member's offers one after another."""
        while not ended.wait(_PAUSE_S):
            try:
                self._take(member)
            except RecoveryFailed as error:  # it offers nothing yet, or its link breaks
                fields = {"member_id": member, "error": str(error)}
                _log.debug("cannot fetch what a member with a slow link offers", extra={"fields": fields})

    def _take(self, member: str) -> None:
        with self._lock:
            before = self._held.get(member)
        came = self._fetch(member, before.offer if before is not None else "", self._room)
        if came is None:
            return
        digest, said = offer_of(came.round, came.update).state_digest, came.state_digest
        if digest != said:
            raise RecoveryFailed(f"what {member} offers has digest {digest} here and {said} at its donor")
        largest = self._codec.largest(came.update, self._buffers.numel)
        with self._lock:
            if member in self._carried and math.isfinite(largest):
                self._held[member] = _Held(came.state_digest, came.update, largest)

    def _room(self, nbytes: int) -> Tensor:
        if nbytes != self._codec.encoded_size(self._buffers.numel):
            wanted = self._codec.encoded_size(self._buffers.numel)
            raise RecoveryFailed(f"a contribution of {self._buffers.numel} values takes {wanted} bytes, not {nbytes}")
        return torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Stop fetching."""
        with self._lock:
            for ended in self._fetchers.values():
                ended.set()
            self._fetchers.clear()


class FetchAhead:
    """Fetches committed rounds in the background of training, in order, until they are taken. Local rank 0.

    `fetch`: fetches a round; raises RecoveryFailed.
    """

    def __init__(self, fetch: Callable[[int], RoundUpdate]) -> None:
        self._fetch = fetch
        self._wanted: dict[int, BackgroundRound[RoundUpdate]] = {}
        self._newest: BackgroundRound[RoundUpdate] | None = None

    def want(self, round: int) -> None:
        """Fetch a round after all earlier requests."""
        before = self._newest

        def fetch() -> RoundUpdate:
            if before is not None:
                before.is_over(None)
            return self._fetch(round)

        if round not in self._wanted:
            self._newest = self._wanted[round] = BackgroundRound(fetch, name="fetch-ahead")

    def take(self, round: int, on_wait: Callable[[], object]) -> RoundUpdate | None:
        """Wait for a requested round; None if it was not requested or its fetch failed.

        `on_wait`: called repeatedly during the wait, which is bounded by the fetch's own time-outs.
        """
        wanted = self._wanted.pop(round, None)
        if wanted is None:
            return None
        while not wanted.is_over(_PAUSE_S):
            on_wait()
        try:
            return wanted.wait()
        except RecoveryFailed as error:
            _log.info("could not fetch a round ahead", extra={"fields": {"round": round, "error": str(error)}})
            return None

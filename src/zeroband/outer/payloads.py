"""A round of payloads: those of all members are gathered, and everybody decodes the same update from them.

A payload that is none, or that cannot be added up with the others, is left out by all nodes alike: they hold the same
bytes, and what is looked at does not depend on the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from zeroband.elastic.epoch import Opening
from zeroband.elastic.mesh import ElasticDeviceMesh, Gathering, Transfer
from zeroband.errors import MalformedPayload
from zeroband.observe.log import get_logger
from zeroband.outer.flat import SharedBuffers
from zeroband.outer.sparse.codec import Divisor, Payload, SparseCodec
from zeroband.outer.sparse.norms import norm_of
from zeroband.outer.transaction import RESULT
from zeroband.parallel import all_ok, barrier, each_ok

_PAYLOAD, _GATHERED = "payload", "gathered"

_log = get_logger(__name__)


class PayloadExchange:
    """Gathers the payloads of the members that have weight, and decodes them in the order of the members.

    `divisor`: as in `SparseCodec.decode`. `counts_tokens`: payloads count with their members' shares of the round,
    else each counts 1. Called by all local ranks.
    """

    def __init__(
        self,
        mesh: ElasticDeviceMesh,
        buffers: SharedBuffers,
        codec: SparseCodec,
        *,
        divisor: Divisor = "none",
        counts_tokens: bool = False,
    ) -> None:
        buffers.open(RESULT)
        buffers.open_bytes(_PAYLOAD, codec.nbytes)
        self.payload = buffers.bytes_of(_PAYLOAD)
        """(nbytes,) uint8 of this node, shared by the local ranks. It stays as it is until the round is committed."""
        self.refused: dict[str, str] = {}
        """Members whose payload the last round left out, and why."""
        self.payload_bytes: int | None = None
        """Of this node's payload in the last round, counted on its way to one other; None: nothing was sent."""
        self._mesh = mesh
        self._buffers = buffers
        self._codec = codec
        self._divisor: Divisor = divisor
        self._counts_tokens = counts_tokens
        self._gathered: Tensor | None = None

    @property
    def result(self) -> Tensor:
        return self._buffers[RESULT]

    def run(self, opening: Opening, on_progress: Callable[[float], None], stops: Sequence[float]) -> Transfer:
        moved, gathered = self.gather(opening, None, on_progress, stops)
        self._combine(opening, gathered)
        return moved

    def gather(
        self, opening: Opening, receiver: str | None, on_progress: Callable[[float], None], stops: Sequence[float]
    ) -> tuple[Transfer, dict[str, Tensor]]:
        """Bring the payloads to all members, or to one; they by their senders, where they are."""
        lengths = tuple(self._codec.nbytes if weight > 0 else 0 for weight in opening.weights)
        gathering, member_id = Gathering(lengths, receiver), self._mesh.member_id
        own, receives = self.payload[: lengths[opening.members.index(member_id)]], receiver in (None, member_id)
        room = self.room_for(gathering.total_bytes if receives else 0)
        moved = self._mesh.gather(own, room, gathering, opening, on_progress, stops)
        receivers = len(opening.members) - 1 if receiver is None else int(not receives)
        self.payload_bytes = moved.sent_bytes // receivers if receivers and len(own) else None
        senders = enumerate(opening.members) if receives else ()
        return moved, {member: room[gathering.part_of(i)] for i, member in senders if lengths[i]}

    def discard(self) -> None:
        if not self._mesh.keeps_buffers:
            self._gathered = None

    def room_for(self, size: int) -> Tensor:
        """(size,) uint8, shared by the local ranks."""
        if self._gathered is None or len(self._gathered) < size:
            self._gathered = self._buffers.renew_bytes(_GATHERED, max(size, 1))
        return self._gathered[:size]

    def _combine(self, opening: Opening, gathered: Mapping[str, Tensor]) -> None:
        """Write the update that these payloads make together; without any it is 0."""
        self.add_up(opening, self.checked(gathered), self._is_decoded)

    def add_up(
        self,
        opening: Opening,
        payloads: dict[str, Payload],
        is_done: Callable[[Opening, Mapping[str, Payload]], bool],
    ) -> None:
        """Have payloads added up, without the longest ones where the sum is not finite; say who is left out."""
        while not is_done(opening, payloads):
            norms = {member: norm_of(self._codec, payload) for member, payload in payloads.items()}
            longest = max(norms, key=norms.__getitem__)
            payloads.pop(longest)
            self.refused[longest] = f"its norm of {norms[longest]:.3g} makes the sum larger than float32 holds"
        for member, why in self.refused.items():
            fields = {"round": opening.round, "member_id": member, "why": why}
            _log.warning("what a member sent is left out", extra={"fields": fields})

    def checked(self, gathered: Mapping[str, Tensor]) -> dict[str, Payload]:
        """Those that are payloads; the local ranks divide the work."""
        local, problems = self._mesh.local, dict[str, str]()
        self.refused = {}
        if not gathered:
            return {}
        for number, (member, data) in enumerate(gathered.items()):
            if number % local.world_size == local.rank:
                try:
                    self._codec.check(data)
                except MalformedPayload as error:
                    problems[member] = str(error)
        flags = each_ok([member not in problems for member in gathered], local)
        bad = [member for member, is_good in zip(gathered, flags, strict=True) if not is_good]
        self.refused = {member: problems.get(member, "it is malformed") for member in bad}
        return {member: Payload(data) for member, data in gathered.items() if member not in self.refused}

    def _is_decoded(self, opening: Opening, payloads: Mapping[str, Payload]) -> bool:
        """Whether the update was written; False on all local ranks where a sum is not finite on one."""
        local, is_finite = self._mesh.local, True
        if payloads:
            try:
                self._codec.decode(
                    list(payloads.values()),
                    self.result,
                    weights=shares_of(opening, list(payloads)) if self._counts_tokens else None,
                    divisor=self._divisor,
                    rank=local.rank,
                    world_size=local.world_size,
                )
            except MalformedPayload:
                is_finite = False
        else:
            self.zero_result()
        return all_ok(is_finite, local)

    def zero_result(self) -> None:
        """Nobody sent anything."""
        if self._mesh.local.rank == 0:
            self.result.zero_()
        barrier(self._mesh.local)


def shares_of(opening: Opening, members: Sequence[str]) -> tuple[float, ...]:
    """Of some members, as if the others had no weight."""
    counted = sum(weight for member, weight in zip(opening.members, opening.weights, strict=True) if member in members)
    return tuple(opening.share(member) * (opening.total_weight / counted) for member in members)

"""A round of payloads: all members' payloads are gathered, and every member decodes the same update from them.

Values that a payload took from its node's memory return there if the payload never counts.

A malformed payload, or one whose sum with the others overflows, is dropped by all nodes alike: they hold the same bytes
and apply the same checks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from zeroband.elastic.membership.records import Evidence, RoundPlan
from zeroband.elastic.rounds.exchange import hash_of, largest_of, parts_of
from zeroband.elastic.rounds.interfaces import CONTRIBUTION, RESULT, OuterParts
from zeroband.elastic.rounds.journal import Allocator, Keep
from zeroband.elastic.transport.base import Gathering, RoundRequest, Transfer
from zeroband.errors import MalformedPayload, RecoveryFailed
from zeroband.kernels.robust import OwnerMeasurements
from zeroband.node.mesh import all_ok, barrier, broadcast_json, each_ok, sum_on_host
from zeroband.observe.log import get_logger
from zeroband.outer.local_memory import LocalMemory
from zeroband.outer.sparse.combine import MOST_SOURCES
from zeroband.outer.sparse.sparse_codec import Divisor, Payload

_PAYLOAD, _GATHERED = "payload", "gathered"


_log = get_logger(__name__)


class PayloadCodec(Protocol):
    """Format of a fragment's payloads. `SparseCodec` documents the arguments."""

    @property
    def numel(self) -> int:
        """Values of the fragment."""
        ...

    @property
    def nbytes(self) -> int:
        """Length of every payload."""
        ...

    def check(self, data: Tensor) -> Payload:
        """Accept bytes from elsewhere as one node's payload. Raises MalformedPayload."""
        ...

    def norm(self, payload: Payload) -> float:
        """Norm by which the payloads of a round are compared: the same number on every node."""
        ...

    def decode(
        self,
        payloads: Sequence[Payload],
        out: Tensor,
        *,
        weights: Sequence[float] | None = None,
        parts: Sequence[float] | None = None,
        divisor: Divisor = "none",
        clips: bool = False,
        measured: OwnerMeasurements | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Write the weighted sum of payloads, each rank its share. Raises MalformedPayload if it is not finite."""
        ...


_C = TypeVar("_C", bound=PayloadCodec)


class PayloadExchange(Generic[_C]):
    """Gathers the payloads of the members that have weight, and decodes them in the order of the members.

    `memory`: the source of this node's payloads. `codecs`: one for each fragment. `divisor`, `clips`: as in
    `SparseCodec.decode`. `counts_tokens`: payloads count by their members' shares of the round, and by their
    `divisor_parts` in the divisor; else each counts 1. `shows_own`: this node's decoded payload is written to the
    contribution buffer, for merges that count it at once. Called by all local ranks.
    """

    largest: float | None = None
    has_memory = True
    carriage = None
    """None: payloads are small, so slow links matter little."""

    def __init__(
        self,
        parts: OuterParts,
        memory: LocalMemory,
        codecs: Sequence[_C],
        *,
        divisor: Divisor = "none",
        counts_tokens: bool = False,
        clips: bool = False,
        shows_own: bool = False,
    ) -> None:
        parts.buffers.open(RESULT)
        self._payload = parts.buffers.open_bytes(_PAYLOAD, max(codec.nbytes for codec in codecs))
        self._mesh = parts.mesh
        self._buffers = parts.buffers
        self._wire_layout = parts.wire_layout
        self._memory = memory
        self._codecs = codecs
        self._bounds = list(pairwise(accumulate((codec.numel for codec in codecs), initial=0)))
        self._fragment_index = 0
        self._refused: dict[str, str] = {}
        """Members whose payload the last round dropped, and why."""
        self._divisor: Divisor = divisor
        self._counts_tokens = counts_tokens
        self._clips = clips
        self._shows_own = shows_own
        self._agreement: dict[str, float] = {}
        """Cosine of each member's payload with the last result, on local rank 0; empty unless `clips`."""
        self._gathered: Tensor | None = None
        self._parts: Sequence[Tensor] = ()
        """All members' payloads of the newest round; empty if they did not come directly from them."""
        self._decoded: tuple[Sequence[Payload], Counted] = (), ()
        """Payloads and weights of the last result."""
        self._senders: Sequence[str] = ()
        """Senders of these payloads, in the newest round that this node was in."""

    @property
    def is_robust(self) -> bool:
        return self._clips

    @property
    def _codec(self) -> _C:
        """Codec of the round's fragment."""
        return self._codecs[self._fragment_index]

    @property
    def _result(self) -> Tensor:
        return self.result_of(self._fragment_index)

    def payload(self, fragment_index: int) -> Tensor:
        """This node's payload, (nbytes,) uint8, shared by the local ranks; unchanged until the round is committed."""
        return self._payload[: self._codecs[fragment_index].nbytes]

    def load(
        self, round: int, fragment_index: int, names: Collection[str], sizes: Mapping[str, float | None] | None = None
    ) -> bool:
        written = dict(self._wire_layout.parts(self._buffers[CONTRIBUTION], names))
        if largest_of(written, self._mesh.local, round, sizes) is None or not self.take(fragment_index, written):
            return False
        if self._shows_own:
            sent, local = self._buffers[CONTRIBUTION][slice(*self._bounds[fragment_index])], self._mesh.local
            payload = Payload(self.payload(fragment_index))
            self._codecs[fragment_index].decode([payload], sent, rank=local.rank, world_size=local.world_size)
            barrier(local)
        return True

    def take(self, fragment_index: int, shards: Mapping[str, Tensor], *, scale: float = 1.0) -> bool:
        """Add this rank's finite shards to the memory, and make the payload from its largest values.

        False on all local ranks if a value became too large for float32.
        """
        if not self._memory.accumulate(shards, scale=scale):
            return False
        self._memory.pack(fragment_index, self.payload(fragment_index))
        return True

    def result_of(self, fragment_index: int) -> Tensor:
        return self._buffers[RESULT][slice(*self._bounds[fragment_index])]

    def run(self, plan: RoundPlan, fragment_index: int) -> Transfer:
        self._fragment_index, self._refused, self._parts = fragment_index, {}, ()
        moved = self._run(plan)
        agreement = {**self._agreement, **dict.fromkeys(self._refused, -1.0)} if self._clips else {}
        return replace(moved, refused=tuple(self._refused.items()), agreement=agreement)

    def _run(self, plan: RoundPlan) -> Transfer:
        moved, gathered = self.gather(plan)
        self._parts = parts_of(self.room_for(0 if not moved.borders else moved.borders[-1]), moved.borders)
        self.add_up(plan, self.checked(gathered), self._is_decoded)
        return moved

    def testimony(self) -> Evidence:
        return Evidence(held=tuple(map(hash_of, self._parts)))

    def conclude(self, *, counts: bool) -> None:
        if counts:
            self._memory.settle()
        else:
            self._memory.restore()

    def gather(self, plan: RoundPlan, receiver: str | None = None) -> tuple[Transfer, dict[str, Tensor]]:
        """Send the payloads to all members, or to `receiver`; returns them by sender, empty if not received."""
        lengths = tuple(self._codec.nbytes if count > 0 else 0 for count in plan.counts)
        gathering, member_id = Gathering(lengths, receiver), self._mesh.member_id
        own = self.payload(self._fragment_index)[: lengths[plan.members.index(member_id)]]
        receives = receiver in (None, member_id)
        room = self.room_for(gathering.total_bytes if receives else 0)
        moved = self._mesh.gather(RoundRequest(plan, member_id, own, room), gathering)
        senders = enumerate(plan.members) if receives else ()
        return moved, {member: room[gathering.part_of(i)] for i, member in senders if lengths[i]}

    def discard(self) -> None:
        if not self._mesh.keeps_buffers:
            self._gathered = None

    def room_for(self, size: int) -> Tensor:
        """(size,) uint8, shared by the local ranks."""
        if self._gathered is None or len(self._gathered) < size:
            self._gathered = self._buffers.renew_bytes(_GATHERED, max(size, 1))
        return self._gathered[:size]

    def add_up(
        self,
        plan: RoundPlan,
        payloads: dict[str, Payload],
        is_done: Callable[[RoundPlan, Mapping[str, Payload]], bool],
    ) -> None:
        """Sum payloads, dropping those of largest norm while the sum is not finite; logs the dropped members."""
        while not is_done(plan, payloads):
            norms = {member: self._codec.norm(payload) for member, payload in payloads.items()}
            longest = max(norms, key=norms.__getitem__)
            payloads.pop(longest)
            self._refused[longest] = f"its norm of {norms[longest]:.3g} makes the sum larger than float32 holds"
        for member, why in self._refused.items():
            fields = {"round": plan.round, "member_id": member, "why": why}
            _log.warning("invalid payload dropped", extra={"fields": fields})

    def checked(self, gathered: Mapping[str, Tensor]) -> dict[str, Payload]:
        """Keep the well-formed payloads; the local ranks divide the work."""
        local, problems = self._mesh.local, dict[str, str]()
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
        self._refused = {member: problems.get(member, "it is malformed") for member in bad}
        return {member: Payload(data) for member, data in gathered.items() if member not in self._refused}

    def _is_decoded(self, plan: RoundPlan, payloads: Mapping[str, Payload]) -> bool:
        """Write the update; False on all local ranks if a sum is not finite on one of them."""
        counted: Counted = ()
        if payloads and self._counts_tokens:
            of_values, of_divisor = counted_of(plan, list(payloads))
            counted = (of_values,) if self._divisor == "none" else (of_values, of_divisor)
        elif payloads and plan.trust:
            trust = dict(zip(plan.members, plan.trust, strict=True))
            counted = ([trust[member] for member in payloads],)
        measured = OwnerMeasurements.of(len(payloads)) if self._clips else None
        is_decoded, self._senders = self._decode(list(payloads.values()), counted, measured), list(payloads)
        if measured is not None:
            sum_on_host(measured.values, self._mesh.local)
            cosines = zip(payloads, measured.cosines(), strict=True)
            self._agreement = {member: cosine for member, cosine in cosines if cosine is not None}
        return is_decoded

    def write_alone(self, sender: str, out: Tensor) -> bool:
        """Write the newest round's result as if from one payload alone; False if that payload did not count.

        Shape: out like the result buffer, shared by the local ranks. With divisor "none" the payload keeps its weight
        in the full round. Call before the next `run`.
        """
        if sender not in self._senders:
            return False
        place, (payloads, counted) = self._senders.index(sender), self._decoded
        weights, parts, *_ = *([numbers[place]] for numbers in counted), None, None
        local, is_finite = self._mesh.local, True
        try:
            self._codec.decode(
                [payloads[place]],
                out[slice(*self._bounds[self._fragment_index])],
                weights=weights,
                parts=parts,
                divisor=self._divisor,
                rank=local.rank,
                world_size=local.world_size,
            )
        except MalformedPayload:
            is_finite = False
        return all_ok(is_finite, local)

    def _decode(self, payloads: Sequence[Payload], counted: Counted, measured: OwnerMeasurements | None = None) -> bool:
        """Write the payloads' update; returns as `_is_decoded`. `measured`: this rank's chunks are added to it."""
        local, is_finite = self._mesh.local, True
        self._decoded = payloads, counted
        if payloads:
            place = {"rank": local.rank, "world_size": local.world_size}
            try:
                weights, parts, *_ = *counted, None, None
                self._codec.decode(
                    payloads,
                    self._result,
                    weights=weights,
                    parts=parts,
                    divisor=self._divisor,
                    clips=self._clips,
                    measured=measured,
                    **place,
                )
            except MalformedPayload:
                is_finite = False
        else:
            self.zero_result()
        return all_ok(is_finite, local)

    # -- for the journal ----------------------------------------------------------------------------------------

    def pack(self, result: Tensor, keep: Keep) -> Tensor:
        payloads, counted = self._decoded
        return keep(pack_payloads([payload.data for payload in payloads], counted))

    def room(self, fragment_index: int, nbytes: int, room: Allocator) -> Tensor:
        self._fragment_index = fragment_index
        if nbytes > self._most_packed_bytes:
            raise RecoveryFailed(f"no round of payloads of {self._codec.nbytes} bytes takes {nbytes}")
        return room(nbytes)

    @property
    def _most_packed_bytes(self) -> int:
        return packed_bytes(MOST_SOURCES, self._codec.nbytes)

    def unpack(self, fragment_index: int, update: Tensor | None) -> None:
        self._fragment_index = fragment_index
        data, problem = self._shared_by_ranks(update), ""
        try:
            self._write_unpacked(data)
        except MalformedPayload as error:
            problem = str(error)
        if not all_ok(not problem, self._mesh.local):
            raise RecoveryFailed(f"what the journal keeps is no round of payloads: {problem or 'says another rank'}")

    def _write_unpacked(self, data: Tensor) -> None:
        """Write the result of a packed round. Raises MalformedPayload."""
        parts, counted = unpack_payloads(data, self._codec.nbytes)
        if not self._decode([self._codec.check(part) for part in parts], counted):
            raise MalformedPayload("payloads: a sum that is not finite")

    def _shared_by_ranks(self, update: Tensor | None) -> Tensor:
        """Share bytes of local rank 0 with all local ranks."""
        local = self._mesh.local
        room = self.room_for(broadcast_json(0 if update is None else len(update), local))
        if update is not None:
            room.copy_(update)
        barrier(local)
        return room

    def zero_result(self) -> None:
        """Set the result to zero, for a round without payloads."""
        if self._mesh.local.rank == 0:
            self._result.zero_()
        barrier(self._mesh.local)


Counted = tuple[Sequence[float], ...]
"""Weights of payloads, in 0, 1 or 2 lists: none: each counts 1; the weights of their values; these and their parts of
the divisor."""

_COUNTS = struct.Struct("<II")
"""Number of payloads, and of weights for each: 0, 1 or 2."""
_NUMBER = struct.Struct("<d")


def packed_bytes(payloads: int, nbytes: int) -> int:
    """Most bytes that this many packed payloads of `nbytes` take."""
    return _COUNTS.size + payloads * (2 * _NUMBER.size + nbytes)


def pack_payloads(payloads: Sequence[Tensor], counted: Counted) -> Tensor:
    """Pack payloads and their weights into a new tensor, (nbytes,) uint8."""
    numbers = [number for of_each in counted for number in of_each]
    head = _COUNTS.pack(len(payloads), len(numbers)) + b"".join(map(_NUMBER.pack, numbers))
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *payloads])


def unpack_payloads(data: Tensor, nbytes: int) -> tuple[Sequence[Tensor], Counted]:
    """Invert `pack_payloads`; returns views. `nbytes`: length of each payload. Raises MalformedPayload."""
    counts = bytes(data[: _COUNTS.size].tolist())
    count, length = _COUNTS.unpack(counts) if len(counts) == _COUNTS.size else (0, 1)
    begin = _COUNTS.size + length * _NUMBER.size
    if length not in (0, count, 2 * count) or len(data) != begin + count * nbytes:
        raise MalformedPayload(f"{len(data)} bytes are not {count} payloads of {nbytes} with {length} weights")
    numbers = [number for (number,) in _NUMBER.iter_unpack(bytes(data[_COUNTS.size : begin].tolist()))]
    counted = tuple(numbers[first : first + count] for first in range(0, length, count)) if count else ()
    return data[begin:].split(nbytes) if count else (), counted


def counted_of(plan: RoundPlan, members: Sequence[str]) -> tuple[Sequence[float], Sequence[float]]:
    """Weights of some members' values, and their parts of the divisor, as if the other members had no weight."""
    is_in = [member in members for member in plan.members]
    scale = sum(plan.counts) / sum(count for count, here in zip(plan.counts, is_in, strict=True) if here)
    shares, parts = (
        [n * scale for n, here in zip(of_all, is_in, strict=True) if here]
        for of_all in (plan.shares, plan.divisor_parts)
    )
    return shares, parts

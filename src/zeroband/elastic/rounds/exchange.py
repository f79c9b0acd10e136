"""Exchange: combines the members' contributions into a round's result, and packs the result for the journal.

A mean that was encoded for transfer is kept in these bytes; any other one in its codec's encoding, if decoding that
gives the same bits, else as float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_low
from typing import Protocol

import torch
from torch import Tensor

from zeroband.elastic.membership.records import Evidence, RoundPlan
from zeroband.elastic.rounds.audit import AuditFindings, Auditor, added, draw_lengths, new_draw
from zeroband.elastic.rounds.carriage import Carriage, counts_of
from zeroband.elastic.rounds.interfaces import CONTRIBUTION, RESULT, OuterParts
from zeroband.elastic.rounds.journal import Allocator, Keep
from zeroband.elastic.transport.base import Gathering, RoundRequest, Transfer
from zeroband.elastic.transport.engine import Encoded
from zeroband.errors import RecoveryFailed
from zeroband.kernels.codec import Codec
from zeroband.kernels.robust import Robustly, RobustRule, decode_cosines, encode_cosines
from zeroband.kernels.scan import largest
from zeroband.node.mesh import LocalMesh, all_ok, barrier, max_over_ranks
from zeroband.observe.log import get_logger
from zeroband.state.fragments import bounds_of

_ENCODED_MEAN = "encoded-mean"

_log = get_logger(__name__)


class Exchange(Protocol):
    """Combines the contributions of a round's members. Called by all local ranks.

    `fragment_index`: of the round's fragment.
    """

    @property
    def largest(self) -> float | None:
        """Largest absolute value in this node's contribution; None: not known, or the result is no mean."""
        ...

    @property
    def is_robust(self) -> bool:
        """Whether the influence of a lying member on the result is bounded."""
        ...

    @property
    def has_memory(self) -> bool:
        """Whether a contribution that does not count returns to a memory; else the inner parameters still hold it."""
        ...

    @property
    def carriage(self) -> Carriage | None:
        """Carries contributions of members with slow links; None: they cannot be carried."""
        ...

    def load(
        self, round: int, fragment_index: int, names: Collection[str], sizes: Mapping[str, float | None] | None = None
    ) -> bool:
        """Prepare this node's contribution from the contribution buffer that its ranks wrote.

        False on all local ranks, with a log line, if a value is not finite. `names`: parameters that this rank wrote.
        `sizes`: the largest absolute value of each, as in `scan.largest`, if known.
        """
        ...

    def result_of(self, fragment_index: int) -> Tensor:
        """(n,) float32 on CPU, shared by the local ranks; bit-identical on all members after `run`."""
        ...

    def run(self, plan: RoundPlan, fragment_index: int) -> Transfer:
        """Exchange the contributions and write the result; the contribution is unchanged, so this can be repeated.

        Raises PeerLost.
        """
        ...

    def testimony(self) -> Evidence:
        """Evidence on the newest result and its audit; empty if `run` failed, or if parts came through other members.

        On local rank 0, before the next `run`.
        """
        ...

    def discard(self) -> None:
        """Give the result new memory after PeerLost, if a transfer might still write into the old one."""
        ...

    def conclude(self, *, counts: bool) -> None:
        """Note that the round is over, and whether this node's contribution counts in it."""
        ...

    def pack(self, result: Tensor, keep: Keep) -> Tensor:
        """Keep the data from which the last round's result was made: (nbytes,) uint8, the same on all members.

        On local rank 0, in any thread, before the next `run`.
        """
        ...

    def room(self, fragment_index: int, nbytes: int, room: Allocator) -> Tensor:
        """Buffer (nbytes,) uint8 for a missed round's data: from `room`, or the result's memory.

        Local rank 0. Raises RecoveryFailed if no valid round has this many bytes.
        """
        ...

    def unpack(self, fragment_index: int, update: Tensor | None) -> None:
        """Write the result that another member packed. `update`: in `room`, on local rank 0.

        Raises RecoveryFailed on all local ranks if it is invalid.
        """
        ...


class MeanExchange:
    """The weighted mean of the members' contributions.

    The buffers are ordered by fragment. `encoded`: wire-format buffers for a contribution of the whole state and for
    the mean. `rule`: robust combination by the owner of each part, in place of the mean; None: the mean. `audits`:
    whether owners are audited, at the cost of two more round trips.
    """

    has_memory = False

    def __init__(
        self,
        parts: OuterParts,
        rule: RobustRule | None = None,
        *,
        encoded: Encoded | None = None,
        audits: bool = True,
    ) -> None:
        self._mesh = mesh = parts.mesh
        self._buffers = parts.buffers
        self._feedback = parts.feedback
        self._codec = codec = parts.codec
        self._bounds = bounds_of(parts.fragments)
        self._fragments = parts.fragments
        self._encoded = encoded
        self._encoded_mean = None if encoded is None else encoded.result
        if encoded is None and not codec.is_exact:
            self._encoded_mean = parts.buffers.open_bytes(_ENCODED_MEAN, codec.encoded_size(parts.buffers.numel))
        self._travelled: Tensor | None = None
        """The newest result in wire format, on local rank 0; None: it was not encoded."""
        self._rule = rule
        self._parts: Sequence[Tensor] = ()
        """The newest result split by the members that made it; empty if it did not come directly from them."""
        self._auditor = Auditor(mesh, codec, rule) if audits else None
        self._found = AuditFindings()
        """Findings of its audit."""
        self.largest: float | None = None
        may_carry = rule is None and encoded is None and len(self._bounds) == 1
        self.carriage = parts.carriage if may_carry else None

    @property
    def is_robust(self) -> bool:
        return self._rule is not None

    def load(
        self, round: int, fragment_index: int, names: Collection[str], sizes: Mapping[str, float | None] | None = None
    ) -> bool:
        contribution = self._buffers[CONTRIBUTION]
        self._buffers.collect(CONTRIBUTION, self._feedback.shards, self._fragments[fragment_index].names)
        self._feedback.add_to(contribution, names)
        if self._feedback.residual is not None:
            sizes = None  # adding the residual changed them
        written = self._feedback.shards.parts(contribution, names)
        self.largest = largest_of(dict(written), self._mesh.local, round, sizes)
        return self.largest is not None

    def result_of(self, fragment_index: int) -> Tensor:
        return self._buffers[RESULT][self._bounds[fragment_index]]

    def run(self, plan: RoundPlan, fragment_index: int) -> Transfer:
        part, self._parts, self._found, self._travelled = self._bounds[fragment_index], (), AuditFindings(), None
        contribution, residual = self._buffers[CONTRIBUTION][part], self._feedback.residual
        own, all_count = counts_of(plan, self._mesh.member_id)
        residual = None if residual is None or (all_count > own == 0) else residual[part]
        if self.carriage is not None:
            contribution = self.carriage.with_carried(plan, self._mesh.member_id, contribution)
        buffers, members = (contribution, self.result_of(fragment_index), residual), len(plan.members)
        robust = None if self._rule is None or members == 1 else Robustly(self._rule, members)
        key = None if self._auditor is None else self._auditor.key
        encoded_mean = self._encoded_mean
        if encoded_mean is not None:
            encoded_mean = encoded_mean[: self._codec.encoded_size(contribution.numel())]
        request = RoundRequest(plan, self._mesh.member_id, *buffers, robust, self._encoded, encoded_mean, key)
        moved = self._mesh.reduce_mean(request)
        self._travelled = encoded_mean if moved.has_encoded_mean else None
        if residual is not None and all_count > own and self._mesh.local.rank == 0:
            residual.mul_(all_count / own)  # scale from the sum that was sent to the node's own weight
        self._parts = parts_of(self.result_of(fragment_index), moved.borders)
        moved, drawn = (moved, None) if robust is None else self._compare(request, moved, robust)
        if self._auditor is not None and members > 1:
            moved, self._found = self._auditor.audit(request, moved, drawn)
        return moved

    def testimony(self) -> Evidence:
        return self._found.added_to(Evidence(held=tuple(map(hash_of, self._parts))))

    def _compare(self, request: RoundRequest, moved: Transfer, robust: Robustly) -> tuple[Transfer, Sequence[Tensor]]:
        """Exchange the cosines measured on each node's shard, and the draws for the audit.

        The median over all owners but the measured member is used, so a lying owner spoils only its own value. The
        draws travel along, since a member that has measured holds the whole result.
        """
        plan, members, world = request.plan, request.plan.members, len(request.plan.members)
        draws = (0,) * world if self._auditor is None else draw_lengths(plan, request.result.numel())
        lengths = tuple(world + length for length in draws)
        drawn = new_draw(draws[members.index(request.member_id)])
        own = torch.cat([encode_cosines(robust.measured.cosines()), drawn])
        gathering, room = Gathering(lengths, number=1, is_report=True), torch.empty(sum(lengths), dtype=torch.uint8)
        told = self._mesh.gather(RoundRequest(plan, request.member_id, own, room), gathering)
        said = room.split(list(lengths))
        agreement = cosines_of(members, [one[:world] for one in said]) if self._mesh.local.rank == 0 else {}
        return replace(added(moved, told), agreement=agreement), [one[world:] for one in said]

    def discard(self) -> None:
        if not self._mesh.keeps_buffers:
            self._buffers.renew(RESULT)

    def conclude(self, *, counts: bool) -> None:
        """Do nothing: the residual holds the committed attempt's encoding error."""

    def pack(self, result: Tensor, keep: Keep) -> Tensor:
        return keep(pack_mean(result, self._codec) if self._travelled is None else self._travelled)

    def room(self, fragment_index: int, nbytes: int, room: Allocator) -> Tensor:
        result = self.result_of(fragment_index)
        if nbytes not in packed_sizes(result.numel(), self._codec):
            raise RecoveryFailed(f"no mean of {result.numel()} values takes {nbytes} bytes")
        return result.view(torch.uint8) if nbytes == 4 * result.numel() else room(nbytes)

    def unpack(self, fragment_index: int, update: Tensor | None) -> None:
        result = self.result_of(fragment_index)
        if update is not None and update.data_ptr() != result.data_ptr():
            unpack_mean(update, self._codec, result)
        barrier(self._mesh.local)


def largest_of(
    written: Mapping[str, Tensor], local: LocalMesh, round: int, known: Mapping[str, float | None] | None = None
) -> float | None:
    """Largest absolute value of a contribution, on all local ranks; None, with a log line, if a value is not finite.

    `known`: the largest value by parameter, if already computed.
    """
    seen = known or {}
    sizes = {name: largest(part) if (size := seen.get(name)) is None else size for name, part in written.items()}
    if not are_finite([name for name, size in sizes.items() if not math.isfinite(size)], local, round):
        return None
    return max_over_ranks(max(sizes.values(), default=0.0), local)


def are_finite(spoilt: Sequence[str], local: LocalMesh, round: int) -> bool:
    """Whether all local ranks' parameters are finite; logs the `spoilt` ones of this rank."""
    if spoilt:
        fields = {"round": round, "parameters": len(spoilt), "first": spoilt[0]}
        _log.warning("non-finite update: weight 0 this round", extra={"fields": fields})
    return all_ok(not spoilt, local)


def parts_of(result: Tensor, borders: Sequence[int]) -> Sequence[Tensor]:
    """Split a result by the members that made its parts; empty without borders."""
    return [result[start:stop] for start, stop in pairwise(borders)]


def hash_of(part: Tensor) -> str:
    """SHA-256 of a tensor's bytes, (n,) on CPU, contiguous: collision-resistant against lying members."""
    return hashlib.sha256(part.numpy().data).hexdigest()


def cosines_of(members: Sequence[str], told: Sequence[Tensor]) -> dict[str, float]:
    """Median over the others' measurements of each member; members that none measured are missing.

    `told`: each owner's measurements of all members, (members,) uint8 as in `encode_cosines`.
    """
    by_owner = [decode_cosines(said) for said in told]
    found = dict[str, float]()
    for place, member in enumerate(members):
        said = [cosines[place] for owner, cosines in enumerate(by_owner) if owner != place]
        known = [cosine for cosine in said if cosine is not None]
        if known:
            found[member] = median_low(known)
    return found


_PIECE = 1 << 20
"""Values packed at a time, so that large states need little memory besides the packed bytes; a whole number of blocks
of every codec, so that all pieces together are as large as a single encoding."""


def packed_sizes(numel: int, codec: Codec) -> tuple[int, int]:
    """Bytes of a packed mean: encoded by its codec, and as float32."""
    return codec.encoded_size(numel), 4 * numel


def pack_mean(mean: Tensor, codec: Codec) -> Tensor:
    """Pack a mean into (nbytes,) uint8, perhaps its own memory. Shape: mean (n,) float32 on CPU, contiguous, finite."""
    if not codec.is_exact:
        update = torch.empty(codec.encoded_size(mean.numel()), dtype=torch.uint8)
        if all(_encode_exactly(part, codec, out) for part, out in _pieces(mean, update, codec)):
            return update
    return mean.view(torch.uint8)


def unpack_mean(update: Tensor, codec: Codec, mean: Tensor) -> None:
    """Unpack into `mean`. Shapes: update (nbytes,) uint8, of one of the `packed_sizes`; mean (n,) float32."""
    if update.numel() == 4 * mean.numel():
        mean.copy_(update.view(torch.float32))
        return
    for part, data in _pieces(mean, update, codec):
        part.copy_(codec.decode(data, part.numel()))


def _encode_exactly(part: Tensor, codec: Codec, out: Tensor) -> bool:
    out.copy_(codec.encode(part))
    return torch.equal(codec.decode(out, part.numel()).view(torch.int32), part.view(torch.int32))


def _pieces(mean: Tensor, update: Tensor, codec: Codec) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a mean, each with its packed bytes."""
    parts = mean.split(_PIECE)
    return zip(parts, update.split([codec.encoded_size(part.numel()) for part in parts]), strict=True)

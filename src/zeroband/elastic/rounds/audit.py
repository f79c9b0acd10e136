"""The audit of a mean: check on a few unpredictable ranges that each shard's owner summed the parts that it received.

A member draws a range once it holds the whole result, when every owner has already sent its sums. The draws also decide
whether the round is audited at all: an audit costs the same at any size, so short rounds are audited only now and then.
In an audit every member shows the others its parts of the drawn ranges, and each sums these parts again. An owner keeps
hashes of the parts that it received (`kernels.keyed_hash`), so it detects a member that shows another part than it
sent. `membership.blame` acts on the findings. Local rank 0 draws, shows and compares; the other ranks only wait. With a
robust combination, draws travel with the members' measurements.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import torch
from torch import Tensor

from zeroband.elastic.membership.records import Evidence, RoundPlan
from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh
from zeroband.elastic.transport.base import Gathering, RoundRequest, Transfer
from zeroband.kernels.codec import Codec
from zeroband.kernels.keyed_hash import HashKey, PartHashes
from zeroband.kernels.robust import PIECE, RobustRule, combine
from zeroband.observe.log import get_logger

_DRAWS, _SHOWS = 2, 3
"""Numbers of the two gatherings; 1 is the gathering of a robust combination's measurements."""

_DRAW_BYTES = 8
_MOST_DRAWERS, _FEWEST_DRAWERS = 8, 2
_PART, _FREE = 64, 1 << 24
"""In an audit all members together show at most numel / _PART values, where states below _FREE values count as _FREE:
summing that much takes a fraction of a millisecond (docs/benchmarks.md, audits)."""

_SHOW_S, _AFFORDED = 5e-4, 0.01
"""Processor seconds of an audit (docs/benchmarks.md), and the fraction of a round's time and traffic that audits take
on average."""

_ROUND_S, _STEP_S = 4e-3, 2e-3
"""Least processor seconds of a round and of an inner step, at any state size (docs/scale.md: 4.4 ms)."""

_VALUE_S, _VALUE_STEP_S = 4e-9, 20e-9
"""Additional seconds per value, in a round and in an inner step: a mean in int8, and a step on a few rows."""

_SLACK = 2.0
"""Rounding makes values larger, as in csrc/reduce.cpp."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class AuditedRange:
    """Values [start, stop) of a result, and the place of the member that owns them."""

    owner: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def drawers(plan: RoundPlan, numel: int) -> tuple[int, ...]:
    """Places of the members that draw a range of a result of `numel` values; each plan picks other members."""
    world, count = len(plan.members), _drawer_count(plan, numel)

    def lot(place: int) -> bytes:
        return hashlib.sha256(f"{plan.id} draws {plan.members[place]}".encode()).digest()

    return tuple(sorted(sorted(range(world), key=lot)[:count]))


def _drawer_count(plan: RoundPlan, numel: int) -> int:
    world = len(plan.members)
    afforded = max(numel, _FREE) // (_PART * PIECE * world)
    return min(world, _MOST_DRAWERS, max(_FEWEST_DRAWERS, afforded))


def draw_lengths(plan: RoundPlan, numel: int) -> tuple[int, ...]:
    """Bytes that each member draws, in the order of members."""
    drawing = drawers(plan, numel)
    return tuple(_DRAW_BYTES if place in drawing else 0 for place in range(len(plan.members)))


def new_draw(length: int) -> Tensor:
    """Unpredictable bytes, (length,) uint8."""
    return torch.frombuffer(bytearray(os.urandom(length)), dtype=torch.uint8) if length else torch.empty(0).byte()


def chance_of(plan: RoundPlan, numel: int) -> float:
    """Probability that a round of `numel` values is audited, so that audits are cheap in processor time and traffic."""
    steps, world = median_low([n for n in plan.steps if n > 0] or [0]), len(plan.members)
    round_s = _ROUND_S + steps * _STEP_S + numel * (_VALUE_S + steps * _VALUE_STEP_S)
    exchanged, shown = 2 * numel / world, _drawer_count(plan, numel) * min(PIECE, numel)  # values, per other member
    return min(1.0, _AFFORDED * round_s / _SHOW_S, _AFFORDED * exchanged / shown)


def hits(draw: Tensor, chance: float, drawers: int) -> bool:
    """Whether this draw triggers an audit; at least one of `drawers` draws does with probability `chance`.

    One draw is enough, so the member that draws last cannot prevent an audit.
    """
    lot = int.from_bytes(hashlib.sha256(bytes(draw.numpy())).digest()[:8], "little") / 2**64
    return lot < 1 - (1 - chance) ** (1 / drawers)


def stretch_at(position: int, borders: Sequence[int], chunk_numel: int) -> AuditedRange:
    """The range that holds this position: a piece of a chunk, which a reduction encodes separately."""
    owner = bisect_right(borders, position) - 1
    chunk = borders[owner] + (position - borders[owner]) // chunk_numel * chunk_numel
    start = chunk + (position - chunk) // PIECE * PIECE
    return AuditedRange(owner, start, min(start + PIECE, chunk + chunk_numel, borders[owner + 1]))


@dataclass(frozen=True)
class AuditFindings:
    """Outcome of an audit, on local rank 0; empty without one."""

    drawn: Sequence[Tensor] = ()
    """Each member's draw, (8,) uint8, or empty."""
    shown: Sequence[Tensor] = ()
    """Parts that each member showed, (nbytes,) uint8."""
    wrong: tuple[str, ...] = ()
    """Owners whose part of the result is not the sum of the shown parts."""
    denied: tuple[str, ...] = ()
    """Members that showed another part than they had sent to this node."""

    def added_to(self, evidence: Evidence) -> Evidence:
        """Return this member's evidence with the audit added."""
        both = zip(self.drawn, self.shown, strict=True)
        hashes = tuple(hashlib.sha256(bytes(drawn.numpy()) + bytes(shown.numpy())).hexdigest() for drawn, shown in both)
        return replace(evidence, shown=hashes, wrong=self.wrong, denied=self.denied)


class Auditor:
    """Audits the means of one node. Called by all local ranks.

    `rule`: how the owners combine; None: the mean. `chance`: probability of an audit by plan and number of values.
    """

    def __init__(
        self,
        mesh: ElasticDeviceMesh,
        codec: Codec,
        rule: RobustRule | None,
        chance: Callable[[RoundPlan, int], float] = chance_of,
    ) -> None:
        self._mesh = mesh
        self._codec = codec
        self._rule = rule
        self._chance = chance
        self.key = HashKey()

    def audit(
        self, request: RoundRequest, moved: Transfer, drawn: Sequence[Tensor] | None = None
    ) -> tuple[Transfer, AuditFindings]:
        """Audit a mean that this node has received and not yet voted for; skipped if parts came through other members.

        `drawn`: each member's draw (`draw_lengths`), made when it held the whole result; None: gather the draws now.
        Raises PeerLost, as a transfer does.
        """
        plan, hashes = request.plan, moved.hashes
        if not self._mesh.is_so(hashes is not None and any(plan.shares)):
            return moved, AuditFindings()
        own = plan.members.index(request.member_id)
        if drawn is None:
            lengths = draw_lengths(plan, request.result.numel())
            told, drawn = self._gather(request, new_draw(lengths[own]), lengths, _DRAWS)
            moved = added(moved, told)
        chance, draws = self._chance(plan, request.result.numel()), [one for one in drawn if one.numel()]
        if not self._mesh.is_so(any(hits(one, chance, len(draws)) for one in draws)):
            return moved, AuditFindings()
        stretches = [] if hashes is None else _stretches(drawn, moved.borders, hashes)
        size = len(draws) * self._size(request)
        payload = (
            self._parts_of(request, stretches, size) if plan.shares[own] > 0 else torch.empty(0, dtype=torch.uint8)
        )
        again, shown = self._gather(request, payload, [size if share > 0 else 0 for share in plan.shares], _SHOWS)
        found = AuditFindings() if hashes is None else self._compare(request, hashes, stretches, drawn, shown)
        return replace(added(moved, again), is_refused=bool(found.wrong or found.denied)), found

    def _gather(
        self, request: RoundRequest, payload: Tensor, lengths: Sequence[int], number: int
    ) -> tuple[Transfer, Sequence[Tensor]]:
        """Send `lengths` bytes of each member to all; this node sends the start of `payload`."""
        plan, room = request.plan, torch.empty(sum(lengths), dtype=torch.uint8)
        own = payload[: lengths[plan.members.index(request.member_id)]]
        gathering = Gathering(tuple(lengths), number=number, is_report=True)
        told = self._mesh.gather(RoundRequest(plan, request.member_id, own, room), gathering)
        return told, room.split(list(lengths))

    def _size(self, request: RoundRequest) -> int:
        """Bytes that a member shows of each range: short ranges are padded, so no draw changes the lengths."""
        return self._codec.encoded_size(min(PIECE, request.result.numel()))

    def _parts_of(self, request: RoundRequest, stretches: Sequence[AuditedRange], nbytes: int) -> Tensor:
        """This node's parts of the ranges, as it sent them: (nbytes,) uint8."""
        shown, size, encoded = torch.zeros(nbytes, dtype=torch.uint8), self._size(request), request.encoded
        for place, stretch in enumerate(stretches):
            if encoded is None:
                part = self._codec.encode(request.sent[stretch.start : stretch.stop])
            else:
                part = self._codec.part_of(encoded.contribution, request.result.numel(), stretch.start, stretch.numel)
            shown[place * size : place * size + part.numel()] = part
        return shown

    def _compare(
        self,
        request: RoundRequest,
        hashes: PartHashes,
        stretches: Sequence[AuditedRange],
        drawn: Sequence[Tensor],
        shown: Sequence[Tensor],
    ) -> AuditFindings:
        """Sum the shown parts and compare them with the result, and in the own shard with the parts received."""
        plan, wrong, denied = request.plan, set[int](), set[int]()
        own = plan.members.index(request.member_id)
        for stretch, parts in self._by_stretch(request, stretches, shown):
            if not self._is_sum(request, stretch, parts):
                wrong.add(stretch.owner)
            if stretch.owner == own:
                denied |= {p for p, part in parts.items() if p != own and not hashes.is_of(p, stretch.start, part)}
        names = plan.members
        found = AuditFindings(
            drawn, shown, tuple(names[p] for p in sorted(wrong)), tuple(names[p] for p in sorted(denied))
        )
        if wrong or denied:
            fields = {"round": plan.round, "wrong": list(found.wrong), "denied": list(found.denied)}
            _log.warning("the audit of a round contradicts its result; this node refuses it", extra={"fields": fields})
        return found

    def _by_stretch(
        self, request: RoundRequest, stretches: Sequence[AuditedRange], shown: Sequence[Tensor]
    ) -> Iterator[tuple[AuditedRange, dict[int, Tensor]]]:
        """The ranges, each with its shown parts by the contributing members' places."""
        size = self._size(request)
        for number, stretch in enumerate(stretches):
            part = slice(number * size, number * size + self._codec.encoded_size(stretch.numel))
            yield stretch, {place: data[part] for place, data in enumerate(shown) if data.numel()}

    def _is_sum(self, request: RoundRequest, stretch: AuditedRange, parts: Mapping[int, Tensor]) -> bool:
        """Whether the result of a range follows from these parts, given by their members' places."""
        plan, codec, n = request.plan, self._codec, stretch.numel
        if self._rule is None:
            total = torch.zeros(n)
            for place, part in parts.items():
                codec.add(part, plan.shares[place], total)
            own = parts.get(stretch.owner)  # unchecked so far: the owner has checked the size of the others' parts only
            most = _SLACK * plan.largest[stretch.owner] if plan.largest else math.inf
            if own is not None and not codec.largest(own, n) <= most:
                return False
        else:
            empty = torch.zeros(codec.encoded_size(n), dtype=torch.uint8)
            all_parts = [parts.get(place, empty) for place in range(len(plan.members))]
            total, _ = combine(self._rule, codec, all_parts, plan.shares, n)
        if not torch.isfinite(total).all():
            return False
        expected, got = codec.decode(codec.encode(total), n), request.result[stretch.start : stretch.stop]
        return torch.equal(expected.view(torch.int32), got.view(torch.int32))


def added(moved: Transfer, more: Transfer) -> Transfer:
    """A transfer with what another one of its round took and moved."""
    return replace(
        moved,
        took_s=moved.took_s + more.took_s,
        sent_bytes=moved.sent_bytes + more.sent_bytes,
        received_bytes=moved.received_bytes + more.received_bytes,
    )


def _stretches(drawn: Sequence[Tensor], borders: Sequence[int], hashes: PartHashes) -> list[AuditedRange]:
    """What the members drew, in their order. Any bytes draw a stretch."""
    positions = [int.from_bytes(bytes(draw.numpy()), "little") for draw in drawn if draw.numel()]
    return [stretch_at(position % borders[-1], borders, hashes.chunk_numel) for position in positions]

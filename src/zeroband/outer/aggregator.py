"""A round of payloads through an aggregator, for slow uplinks: each other node uploads once and downloads once.

One member receives all payloads and sends their combination to all, which decodes to the same bits as the separate
payloads. Its uplink carries the combination to each member, so the member with the fastest measured link is chosen. The
combination is checked: if it is malformed, the round changes nothing and logs that; if members receive different ones,
their results differ and the next member becomes the aggregator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from zeroband.elastic.membership.records import Evidence, RoundPlan
from zeroband.elastic.rounds.exchange import hash_of
from zeroband.elastic.rounds.journal import Keep
from zeroband.elastic.transport.base import Gathering, RoundRequest, Transfer, sum_known
from zeroband.errors import MalformedPayload
from zeroband.node.mesh import all_ok, broadcast_json
from zeroband.observe.log import get_logger
from zeroband.outer.payloads import PayloadExchange
from zeroband.outer.sparse.combine import MOST_SOURCES, check_combined, combine, combined_bytes, decode_combined
from zeroband.outer.sparse.sparse_codec import Payload, SparseCodec

_LENGTH_BYTES = 8

_log = get_logger(__name__)


def aggregator_of(plan: RoundPlan) -> str:
    """The member with the fastest known access link; after a failed attempt the next one."""
    rates = plan.network.rates or (0,) * len(plan.members)
    order = sorted(range(len(plan.members)), key=lambda member: (-rates[member], member))
    return plan.members[order[plan.retries % len(order)]]


class AggregatedExchange(PayloadExchange[SparseCodec]):
    """Sends payloads to one member, and their sum to all."""

    _told: Tensor
    """The combined payload of the last result; empty: the round changed nothing."""
    _plan: RoundPlan | None = None
    """Plan of the newest result; None: there is none, or parts came through other members."""

    def testimony(self) -> Evidence:
        """Evidence that attributes the whole result to the aggregator."""
        if self._plan is None:
            return Evidence()
        aggregator, told = aggregator_of(self._plan), hash_of(self._told)
        return Evidence(held=tuple(told if member == aggregator else "" for member in self._plan.members))

    def _run(self, plan: RoundPlan) -> Transfer:
        aggregator, self._plan = aggregator_of(plan), None
        moved, gathered = self.gather(plan, aggregator)
        self._told = torch.empty(0, dtype=torch.uint8)
        if not any(plan.weights):
            self.zero_result()
            self._plan = None if plan.sites else plan
            return moved
        combined = torch.empty(0, dtype=torch.uint8)
        if self._mesh.member_id == aggregator:
            combined = self._combined(plan, gathered)
        told = self._send(plan, aggregator, _length_of(combined), 1, _LENGTH_BYTES)
        length = broadcast_json(int.from_bytes(bytes(told[1].tolist()), "little"), self._mesh.local)
        parts = [moved, told[0]]
        if length > combined_bytes(self._codec, len(plan.members), divisor=self._divisor):
            self._give_up(aggregator, f"it announces {length} bytes")
        else:
            sent, data = self._send(plan, aggregator, combined, 2, length)
            parts.append(sent)
            self._take(plan, aggregator, data)
        self._plan = None if plan.sites else plan
        return replace(
            moved,
            took_s=sum(part.took_s for part in parts),
            sent_bytes=sum(part.sent_bytes for part in parts),
            received_bytes=sum(part.received_bytes for part in parts),
            wide_bytes=sum_known(part.wide_bytes for part in parts),
        )

    def _send(
        self, plan: RoundPlan, aggregator: str, content: Tensor, number: int, size: int
    ) -> tuple[Transfer, Tensor]:
        """Send `size` bytes from the aggregator to all members, into memory that the local ranks share."""
        lengths = tuple(size if member == aggregator else 0 for member in plan.members)
        room, own = self.room_for(size), content if self._mesh.member_id == aggregator else content[:0]
        request = RoundRequest(plan, self._mesh.member_id, own, room)
        return self._mesh.gather(request, Gathering(lengths, number=number)), room

    def _combined(self, plan: RoundPlan, gathered: Mapping[str, Tensor]) -> Tensor:
        """The payloads combined into one; on local rank 0, empty on the others."""
        found = [torch.empty(0, dtype=torch.uint8)]

        def is_combined(_plan: RoundPlan, payloads: Mapping[str, Payload]) -> bool:
            is_finite = True
            if self._mesh.local.rank == 0 and payloads:
                try:
                    found[0] = combine(self._codec, list(payloads.values()), divisor=self._divisor)
                except MalformedPayload:
                    is_finite = False
            return all_ok(is_finite, self._mesh.local)

        self.add_up(plan, self.checked(gathered), is_combined)
        return found[0]

    def _take(self, plan: RoundPlan, aggregator: str, data: Tensor) -> None:
        """Write the update; zero if no payload was valid, or if the combined one is malformed."""
        problem = "" if len(data) else "no payload was valid"
        if len(data):
            try:
                self._write_combined(data, most_sources=len(plan.contributors()))
            except MalformedPayload as error:
                problem = str(error)
        if all_ok(not problem, self._mesh.local):
            self._told = data
        else:
            self._give_up(aggregator, problem)

    def _write_combined(self, data: Tensor, *, most_sources: int = MOST_SOURCES) -> None:
        local, combined = self._mesh.local, check_combined(self._codec, data, most_sources=most_sources)
        decode_combined(self._codec, combined, self._result, rank=local.rank, world_size=local.world_size)

    def pack(self, result: Tensor, keep: Keep) -> Tensor:
        return keep(self._told)

    @property
    def _most_packed_bytes(self) -> int:
        return combined_bytes(self._codec, MOST_SOURCES, divisor=self._divisor)

    def _write_unpacked(self, data: Tensor) -> None:
        if len(data):
            self._write_combined(data)
        else:
            self.zero_result()

    def _give_up(self, aggregator: str, why: str) -> None:
        """Make the round change nothing, and log why."""
        fields = {"aggregator": aggregator, "why": why}
        _log.warning("invalid combination from the aggregator: this round changes nothing", extra={"fields": fields})
        self.zero_result()


def _length_of(content: Tensor) -> Tensor:
    return torch.tensor(list(len(content).to_bytes(_LENGTH_BYTES, "little")), dtype=torch.uint8)

"""The native data plane as the mesh uses it: links to an opening's members, and one reduction over them at a time.

Local rank 0 moves the whole node's state, which lies in shared memory; the other ranks wait for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroband.elastic.board import NodeBoard
from zeroband.elastic.epoch import Opening
from zeroband.errors import PeerLost
from zeroband.kernels.codec import Codec
from zeroband.plane.engine import Operation, Reduction, State
from zeroband.plane.links import Address, Links, Wanted
from zeroband.plane.shape import shape_of

_POLL_S = 0.0005


@dataclass(frozen=True)
class Reach:
    """How a node comes to the others of its run."""

    links: Links
    addresses: Callable[[Sequence[str]], Mapping[str, Address]]
    """Where these members listen, as far as the store knows. Raises StoreLost."""


class NativePlane:
    """Reductions by the engine. `reach`: on local rank 0 only."""

    keeps_buffers = True

    def __init__(
        self, run_id: str, board: NodeBoard, codec: Codec, reach: Reach | None, *, streams: int, connect_s: float
    ) -> None:
        self._run = int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8], "big")
        self._board = board
        self._codec = codec
        self._reach = reach
        self._streams = streams
        self._connect_s = connect_s

    def reduce_mean(
        self,
        contribution: Tensor,
        result: Tensor,
        opening: Opening,
        member_id: str,
        on_progress: Callable[[float], None],
    ) -> tuple[int, int]:
        if self._reach is None:
            return 0, 0
        if len(opening.members) == 1:
            result.copy_(contribution) if opening.share(member_id) > 0 else result.zero_()
            return 0, 0
        self._connect(self._reach, opening, member_id)
        shape = shape_of(result.numel(), self._codec, opening.weights)
        operation = Operation(self._run, opening.version, opening.epoch, opening.round)
        numbers = [self._reach.links.number(member) for member in opening.members]
        at = opening.members.index(member_id)
        reduction = self._reach.links.engine.start(operation, shape, at, numbers, contribution, result)
        try:
            self._await(reduction, opening, at, on_progress)
            traffic = [reduction.traffic(i) for i in range(len(numbers)) if i != at]
            return sum(t.sent_bytes for t in traffic), sum(t.received_bytes for t in traffic)
        finally:
            reduction.close()

    def _connect(self, reach: Reach, opening: Opening, member_id: str) -> None:
        """Have links to all other members. Raises PeerLost, naming those that are not reached."""
        others = [member for member in opening.members if member != member_id]
        if all(reach.links.state(member).is_up for member in others):
            return
        addresses = reach.addresses(others)
        unknown = tuple(member for member in others if member not in addresses)
        if unknown:
            raise PeerLost(f"round {opening.round}: {', '.join(unknown)} left before the transfer", unknown)
        wanted = {member: Wanted(addresses[member], self._streams) for member in others}
        deadline_s = time.monotonic() + self._connect_s
        is_over = lambda: self._is_aborted(opening) or time.monotonic() > deadline_s  # noqa: E731
        away = reach.links.connect(member_id, wanted, is_over)
        if away:
            raise PeerLost(f"round {opening.round}: no connection to {', '.join(away)}", away)

    def _is_aborted(self, opening: Opening) -> bool:
        return self._board.aborted_version >= opening.version

    def _await(self, reduction: Reduction, opening: Opening, at: int, on_progress: Callable[[float], None]) -> None:
        others = [i for i in range(len(opening.members)) if i != at]
        on_progress(0.0)
        done = 0.0
        while (state := reduction.wait(_POLL_S)) == State.RUNNING:
            if self._is_aborted(opening):
                suspect = self._slowest(reduction, opening, at)
                raise PeerLost(f"the transfer of round {opening.round} was aborted: {suspect}")
            traffic = [reduction.traffic(i) for i in others]
            expected = sum(t.to_send_bytes + t.to_receive_bytes for t in traffic)
            share = sum(t.sent_bytes + t.received_bytes for t in traffic) / max(expected, 1)
            if share > done:
                done = share
                on_progress(min(done, 0.999))
        if state == State.PEER_LOST or state == State.FOREIGN_FRAME:
            member = opening.members[reduction.detail]
            what = "the link broke" if state == State.PEER_LOST else "it sent the same part twice"
            raise PeerLost(f"the transfer of round {opening.round} with {member} failed: {what}", (member,))
        if state != State.DONE:
            raise PeerLost(f"the transfer of round {opening.round} ended as {state.name} ({reduction.detail})")
        on_progress(1.0)

    def _slowest(self, reduction: Reduction, opening: Opening, at: int) -> str:
        """Who is suspected: the member of whom most is missing, and where it stopped."""
        traffic = {m: reduction.traffic(i) for i, m in enumerate(opening.members) if i != at}
        member, last = max(traffic.items(), key=lambda item: item[1].to_receive_bytes - item[1].received_bytes)
        silent = "from the start" if last.silent_s is None else f"for {last.silent_s:.1f} s"
        return (
            f"{member} stopped at byte {last.received_bytes} of {last.to_receive_bytes} and was silent {silent}"
            if last.received_bytes < last.to_receive_bytes
            else "a member was lost"
        )

    def leave_behind(self) -> None:
        """Nothing: links outlive an opening, and what is left of it on the wire does not count any more."""

    def close(self) -> None:
        if self._reach is not None:
            self._reach.links.close()
            self._reach.links.engine.close()

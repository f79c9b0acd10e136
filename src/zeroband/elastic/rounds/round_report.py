"""What a committed round was for this node, and what it cost it. Plain values, for metrics and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.transport.base import Transfer, sum_known


@dataclass
class RoundCosts:
    """What a round cost this node, over all its attempts."""

    wait_s: float = 0.0
    transfer_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    wide_bytes: int | None = None
    """Part of those sent that went to other sites; None: there were no sites."""
    score_s: float | None = None
    """What measuring the worth of its payloads took; None: it was not measured."""
    failures: list[str] = field(default_factory=list[str])
    """Why the round was opened again, once for each time."""
    newest: Transfer | None = None
    """The transfer of the newest attempt."""

    def add(self, transfer: Transfer) -> None:
        self.newest = transfer
        self.transfer_s += transfer.took_s
        self.sent_bytes += transfer.sent_bytes
        self.received_bytes += transfer.received_bytes
        self.wide_bytes = sum_known((self.wide_bytes, transfer.wide_bytes))


@dataclass(frozen=True)
class RoundReport:
    """A committed round as this node saw it."""

    round: int
    epoch: int
    member_id: str
    """This node in the run."""
    members: tuple[str, ...]
    weights: tuple[int, ...]
    samples: tuple[int, ...]
    """For each member, how many its update was learned from, whether or not it had weight."""
    late: tuple[str, ...]
    """Members whose update goes into a later round."""
    state_digest: str
    """Digest of the outer state after the round; local rank 0 only."""
    progress: Progress
    """The run after the round."""
    wait_s: float
    transfer_s: float
    apply_s: float
    sent_bytes: int
    received_bytes: int
    failures: tuple[str, ...]
    """Why the round was opened again, once for each time."""
    is_left_out: bool
    """This node's update was not finite, so it had no weight."""
    carried: tuple[tuple[str, int, int], ...] = ()
    """Members that counted without being in the exchange: their weights, and their samples."""
    uncommitted_tokens: int = 0
    """That this node learned from since what it contributed to the round."""
    refused: tuple[tuple[str, str], ...] = ()
    """Members whose payload was left out, and why."""
    wide_bytes: int | None = None
    """Part of the bytes sent that went to other sites; None: there were no sites."""
    payload_bytes: int | None = None
    """Size of this node's payload, as it goes to each node or site; None: it sent none."""
    trust: float | None = None
    """What this node counts from the next round on for how it did; None: the run does not ask (`outer.robust`)."""
    gains: tuple[tuple[str, float], ...] = ()
    """Members whose payload of the round before was scored, and what the others found it to be worth (`Gain`)."""
    claims: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Claims of joiners that the round dealt to them, as records, by member."""
    score_s: float | None = None
    """What measuring this round's payloads took this node; None: it measured none."""

    leaving: tuple[str, ...] = ()
    """Members that leave after the round, as they were asked to."""

    @property
    def retries(self) -> int:
        return len(self.failures)

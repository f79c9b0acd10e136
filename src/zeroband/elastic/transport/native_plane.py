"""The native data plane: links to a plan's members, and one operation over them at a time.

Local rank 0 moves the whole node's state in shared memory; the other ranks wait for it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NoReturn

from zeroband.elastic.membership.reach import DialRoutes, dials
from zeroband.elastic.membership.records import Evidence, RoundPlan
from zeroband.elastic.transport.base import Gathering, MovedBytes, Rates, RoundRequest
from zeroband.elastic.transport.descriptors import shortage
from zeroband.elastic.transport.engine import Engine, LinkState, Operation, Running, State, Traffic
from zeroband.elastic.transport.links import Links, LinkTarget
from zeroband.elastic.transport.shape import piece_bytes, route_of, shape_of
from zeroband.elastic.transport.stalls import StallLimits, StallWatch, TransferBounds
from zeroband.elastic.transport.tuning import (
    CUBIC,
    WINDOW_S,
    Kind,
    LearnedRates,
    LinkTuning,
    Meter,
    MidTransfer,
    RateControl,
    Senders,
)
from zeroband.errors import PeerLost, TransferStalled
from zeroband.kernels.codec import Codec
from zeroband.kernels.keyed_hash import PartHashes
from zeroband.node.faults import FaultPoints, TransferPoints
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import noop
from zeroband.observe.log import get_logger

_POLL_S = 0.005
"""Interval at which an operation's progress is polled; its end is noticed at once."""
_CHECK_S = 1.0

_PEER_FAULTS = {
    State.PEER_LOST: "the link broke",
    State.FOREIGN_FRAME: "it sent the same part twice",
    State.OUT_OF_RANGE: "it sent a value that is not finite, or larger than any that the members announced",
}
"""Final states whose detail names the member at fault."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class PeerAccess:
    """How a node connects to other members."""

    links: Links
    routes: Callable[[str, Sequence[str]], Mapping[str, DialRoutes]]
    """Returns the routes from a member to others that the store knows. Raises StoreLost."""
    on_partners: Callable[[Iterable[str]], None] = noop
    """Called with the members that this node exchanges bytes with."""


class NativePlane:
    """Reductions and gatherings by the engine. `reach`: on local rank 0 only.

    `paced`: pace links that share a slow access link, unless the user set `streams`. `bounds`: of its waits.
    """

    keeps_buffers = True

    def __init__(
        self,
        run_id: str,
        flags: SharedFlags,
        codec: Codec,
        reach: PeerAccess | None,
        faults: FaultPoints,
        *,
        streams: int | None,
        paced: bool,
        bounds: TransferBounds,
    ) -> None:
        self._run = int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8], "big")
        self._flags = flags
        self._codec = codec
        self._reach = reach
        self._faults = faults
        self._first = LinkTuning() if streams is None else LinkTuning.fixed(streams)
        self._tunings: dict[str, LinkTuning] = {}
        """Tuning of each link, by member."""
        self._senders: dict[str, Senders] = {}
        """Number of sending streams of each link, by member."""
        self._rate_control = RateControl() if paced and streams is None else None
        self._paced: frozenset[str] = frozenset()
        """Members whose links are paced in the current transfer, or were in the last one."""
        self._took_ms = 0
        self._limits = StallLimits(bounds)
        self._gaps = Evidence()
        self._shortage: str | None = None
        """The last logged shortage of descriptors."""
        self._learned = LearnedRates()
        self._partners: tuple[int, frozenset[str]] = 0, frozenset()
        """Epoch, and the members with which bytes were exchanged in it."""
        if reach is not None:
            reach.on_partners(())

    def reduce_mean(self, request: RoundRequest) -> MovedBytes:
        plan, numel = request.plan, request.result.numel()
        if self._reach is None:
            return MovedBytes(0, 0)
        if len(plan.members) == 1:
            self._copy_own(request)
            return MovedBytes(0, 0)
        network, may_be_ring = plan.network, request.robust is None and not plan.is_flat
        shape = shape_of(numel, self._codec, plan.shares, network, plan.sites, may_be_ring=may_be_ring)
        shape = replace(shape, largest=plan.largest)
        borders, hashes = () if shape.is_ring or plan.sites else shape.bounds, None
        place = plan.members.index(request.member_id)
        if borders and request.hash_key is not None:
            start_at, stop_at = borders[place], borders[place + 1]
            hashes = PartHashes.of(request.hash_key, len(plan.members), start_at, stop_at, shape.chunk_numel)

        def start(engine: Engine, operation: Operation, links: Sequence[int], allowed: float) -> Running:
            return engine.start(
                operation,
                shape,
                place,
                links,
                request.sent,
                request.result,
                allowed=allowed,
                errors=request.residual,
                encoded=request.encoded,
                encoded_mean=request.encoded_mean,
                robust=request.robust,
                hashes=hashes,
            )

        kind = (self._codec.encoded_size(numel),)
        moved = self._operate(self._reach, start, request, kind, shape.partners(place), borders=borders)
        return replace(moved, hashes=hashes, has_encoded_mean=request.encoded_mean is not None)

    def gather(self, request: RoundRequest, gathering: Gathering) -> MovedBytes:
        plan = request.plan
        if self._reach is None:
            return MovedBytes(0, 0)
        if len(plan.members) == 1:
            request.result.copy_(request.sent)
            return MovedBytes(0, 0)
        place, world = plan.members.index(request.member_id), len(plan.members)
        route = route_of(
            place,
            plan.sites or range(world),
            receiver=None if gathering.receiver is None else plan.members.index(gathering.receiver),
            dial_out_only=plan.network.dial_out_only,
            turn=plan.retries,  # a retry avoids a relay that may have altered payloads
        )

        def start(engine: Engine, operation: Operation, links: Sequence[int], allowed: float) -> Running:
            return engine.gather(
                operation,
                gathering.lengths,
                place,
                links,
                route,
                request.sent,
                request.result,
                chunk_bytes=piece_bytes(max(gathering.lengths)),
                allowed=allowed,
            )

        kind = None if gathering.is_report else (gathering.total_bytes, gathering.number)
        partners = route.partners(place, gathering.lengths)
        borders = () if plan.sites else (0, *accumulate(gathering.lengths))
        return self._operate(self._reach, start, request, kind, partners, lane=gathering.number, borders=borders)

    def _operate(
        self,
        reach: PeerAccess,
        start: Callable[[Engine, Operation, Sequence[int], float], Running],
        request: RoundRequest,
        kind: Kind | None,
        partners: Iterable[int],
        *,
        lane: int = 0,
        borders: tuple[int, ...],
    ) -> MovedBytes:
        """Run an operation with the plan's members and return the bytes moved.

        `start`: begins it, given the number of the link to each member and the fraction of frames to send. `borders`:
        as in `MovedBytes`. `kind`: for rate control; None: neither measured nor paced.
        """
        self._gaps = Evidence()
        plan, member_id = request.plan, request.member_id
        others = {plan.members[place]: place for place in sorted(partners)}
        self._connect(reach, plan, member_id, tuple(others))
        for member in others:
            reach.links.set_congestion(member, self._tuning(member).congestion)
        links = tuple(reach.links.number(member) for member in plan.members)
        operation = Operation(self._run, _operation_number(plan), plan.epoch, plan.round, lane)
        points = self._faults.transfer(plan.round)
        running = start(reach.links.engine, operation, links, points.stops[0] if points.stops else 1.0)
        try:
            wide = frozenset(member for member in others if not plan.is_same_site(member_id, member))
            run = _Transfer(running, plan, others, wide, reach.links, self._limits, self._flags, points)
            meter, began_s = Meter(), time.monotonic()
            if kind is not None:
                self._took_ms = 0
                self._pace(run, kind)
            try:
                self._await(run, meter)
            except PeerLost:
                self._gaps = run.gaps() if borders else Evidence(refused=run.refused)
                raise
            traffic = run.traffic()
            sent = sum(t.sent_bytes for t in traffic.values())
            received = sum(t.received_bytes for t in traffic.values())
            if kind is None:
                return MovedBytes(sent, received)
            run.learn_pauses()
            took_s = time.monotonic() - began_s if self._paced or plan.sites else run.middle.whole_s
            self._learn(traffic, wide, meter, took_s)
            return MovedBytes(sent, received, sum(traffic[m].sent_bytes for m in wide) if plan.sites else None, borders)
        finally:
            running.close()

    def _learn(self, traffic: Mapping[str, Traffic], wide: frozenset[str], meter: Meter, took_s: float) -> None:
        """Adapt streams and rates to the measurements of an operation. `wide`: members of other sites."""
        self._tunings = {m: self._tuning(m) for m in traffic}
        if not self._paced:
            for m in wide:  # transfers inside a site run at the rate of the links to other sites and show nothing
                self._tunings[m] = self._tunings[m].after(traffic[m].sent_bytes, traffic[m].sending_s)
        self._senders = {m: senders for m, senders in self._senders.items() if m in traffic}
        self._learned = self._learned.after(meter.rate, _link_rates({m: traffic[m] for m in wide}))
        is_lossy = any(tuning.is_lossy for tuning in self._tunings.values())
        # Pacing uses one stream per link, which is too slow on lossy links: report 0, so that nobody sets a pace.
        self._took_ms = 0 if is_lossy else math.ceil(1e3 * took_s)

    def _copy_own(self, request: RoundRequest) -> None:
        """Set the mean of a single node: its contribution, or 0 if it has no share."""
        result, encoded = request.result, request.encoded
        if request.plan.share(request.member_id) == 0:
            result.zero_()
            return
        if encoded is None:
            result.copy_(request.sent)
        else:
            encoded.result.copy_(encoded.contribution)
            result.copy_(self._codec.decode(encoded.contribution, result.numel()))
        if request.residual is not None:
            request.residual.zero_()

    def _connect(self, reach: PeerAccess, plan: RoundPlan, member_id: str, others: Sequence[str]) -> None:
        """Ensure links to these members and keep those to the plan's others. Raises PeerLost with those missing."""
        if plan.epoch != self._partners[0]:
            self._partners = plan.epoch, frozenset()
        self._partners = plan.epoch, self._partners[1] | frozenset(others)
        reach.on_partners(self._partners[1])
        self._limits.forget_all_but(plan.members)
        dialled, is_ready = {member for member in others if dials(member_id, member, plan.dial_out_only)}, True
        for member in others:
            link = reach.links.state(member)
            is_silent = link.silent_s > self._limits.of_link(member).limit_s
            if is_silent:  # redial now, rather than find out in the middle of the round
                reach.links.drop(member)
            has_enough = link.streams >= self._tuning(member).streams or member not in dialled
            is_ready = is_ready and link.is_up and has_enough and not is_silent
        if is_ready:
            return
        self._require_descriptors(len(plan.members))
        routes = reach.routes(member_id, others)
        unknown = tuple(member for member in others if member not in routes)
        if unknown:
            raise PeerLost(f"round {plan.round}: {', '.join(unknown)} left before the transfer", unknown)
        wanted = {m: LinkTarget(routes[m], self._tuning(m).streams, is_dialled=m in dialled) for m in others}
        coming, bound_s = StallWatch(_CHECK_S, time.monotonic()), self._limits.bounds.connect_s

        def is_over() -> bool:
            streams = sum(reach.links.state(member).streams for member in others)
            return self._is_aborted(plan) or coming.see(streams, time.monotonic()) > bound_s

        away = reach.links.connect(
            member_id, wanted, is_over, keep=plan.members, current_routes=lambda: reach.routes(member_id, others)
        )
        if away and self._is_aborted(plan):
            raise PeerLost(f"round {plan.round} was aborted while {', '.join(away)} were dialled", away)
        if away:
            self._gaps = Evidence(lacks=away)
            reason = f"round {plan.round}: no connection to {', '.join(away)} within {bound_s:g} s"
            raise TransferStalled(reason, away, bound_s, 0, 0)

    def _require_descriptors(self, nodes: int) -> None:
        """Warn if the run has grown beyond this process's limit of descriptors."""
        problem = shortage(nodes, None if self._first.may_grow else self._first.streams)
        if problem not in (None, self._shortage):
            _log.warning(problem)
        self._shortage = problem

    def _tuning(self, member: str) -> LinkTuning:
        return self._tunings.get(member, self._first)

    def _sending(self, member: str) -> Senders:
        return self._senders.get(member, Senders())

    def _pace(self, run: _Transfer, kind: Kind) -> None:
        """Pace all links so that they finish together at the target time, with one stream each; or leave them to TCP.

        Competing TCP flows on a shared access link lose packets and finish at different times; pacing avoids both.
        """
        plan, paces = run.plan, dict[str, int]()
        if self._rate_control is not None and not plan.sites:  # with sites, nodes send different amounts
            last_took_s = plan.network.took_ms / 1e3
            target_s = self._rate_control.target_s(plan.epoch, plan.members, kind, plan.round, last_took_s)
            if target_s is not None:
                paces = {m: math.ceil(traffic.to_send_bytes / target_s) for m, traffic in run.traffic().items()}
        for member in self._paced - paces.keys():
            run.links.set_pace(member, 0)
            run.links.set_senders(member, self._sending(member).of(run.links.state(member).streams))
        for member, pace in paces.items():
            run.links.set_pace(member, pace)
            run.links.set_senders(member, 1)
            run.links.set_congestion(member, CUBIC)
        self._paced = frozenset(paces)

    def _choose_senders(self, links: Links, member: str, link: LinkState) -> None:
        """Choose the number of sending streams to a member; all of them if the user set `streams`."""
        if self._first.may_grow:
            senders = self._senders[member] = self._sending(member).after(link)
            links.set_senders(member, senders.of(link.streams))

    def _is_aborted(self, plan: RoundPlan) -> bool:
        return self._flags.aborted_version >= plan.version

    def _await(self, run: _Transfer, meter: Meter) -> None:
        plan, running = run.plan, run.running
        run.report(0.0)
        while (state := running.wait(_POLL_S)) == State.RUNNING:
            if self._is_aborted(plan):
                raise PeerLost(f"the transfer of round {plan.round} was aborted: {run.suspect()}")
            run.poll(meter)
            for member, link in run.check_links().items():
                if not self._paced:
                    self._choose_senders(run.links, member, link)
        if state in _PEER_FAULTS:
            member, what = plan.members[running.detail], _PEER_FAULTS[state]
            if state == State.PEER_LOST:
                run.broken = (member,)
            else:
                run.refused = (member,)
            raise PeerLost(f"the transfer of round {plan.round} with {member} failed: {what}", (member,))
        if state != State.DONE:
            raise PeerLost(f"the transfer of round {plan.round} ended as {state.name} ({running.detail})")
        run.report(1.0)

    @property
    def stall_limit_s(self) -> float:
        """Longest time without a byte moved before the next transfer fails."""
        return self._limits.transfer.limit_s

    def gaps(self) -> Evidence:
        return self._gaps

    def measured(self) -> Rates:
        return Rates(self._learned.own_rate, self._learned.link_rates(), self._took_ms)

    def abandon(self) -> None:
        """Do nothing: links outlive a plan, and its late frames are discarded by their operation number."""

    def close(self) -> None:
        if self._reach is not None:
            self._reach.links.close()
            self._reach.links.engine.close()


@dataclass
class _Transfer:
    """A running operation and the watches on its progress."""

    running: Running
    plan: RoundPlan
    partners: Mapping[str, int]
    """Members with which bytes are exchanged, and their places in the plan."""
    wide: frozenset[str]
    """Partners of other sites."""
    links: Links
    limits: StallLimits
    flags: SharedFlags
    points: TransferPoints
    checked_at_s: float = 0.0
    done: float = 0.0
    middle: MidTransfer = field(init=False)
    progress: StallWatch = field(init=False)
    silences_s: dict[str, float] = field(default_factory=dict[str, float])
    """Longest silence of each member's link."""
    refused: tuple[str, ...] = ()
    """Members that sent invalid data."""
    broken: tuple[str, ...] = ()
    """Members to which the link broke."""
    began_at_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.middle = MidTransfer(sum(t.to_receive_bytes for t in self.traffic().values()))
        self.progress = StallWatch(self.check_s, time.monotonic())

    @property
    def check_s(self) -> float:
        return min(_CHECK_S, self.limits.bounds.beat_s)

    def traffic(self) -> dict[str, Traffic]:
        return {member: self.running.traffic(place) for member, place in self.partners.items()}

    def poll(self, meter: Meter) -> None:
        """Record the progress, and continue past a fault point."""
        stops = self.points.stops
        if stops and self.running.is_held():
            self.report(stops.pop(0))
            self.running.allow(stops[0] if stops else 1.0)
        now_s, by_member = time.monotonic(), self.traffic()
        traffic, wide = by_member.values(), [by_member[m] for m in self.wide]
        expected = sum(t.to_send_bytes + t.to_receive_bytes for t in traffic)
        sent, received = sum(t.sent_bytes for t in traffic), sum(t.received_bytes for t in traffic)
        if wide:
            meter.see(sum(t.sent_bytes for t in wide), sum(t.received_bytes for t in wide), now_s)
        self.middle.see(received, now_s)
        if (sent + received) / max(expected, 1) > self.done:
            self.done = (sent + received) / max(expected, 1)
            self.report(min(self.done, (stops[0] if stops else 1.0) - 0.01))  # below the next stop until held there

    def report(self, done: float) -> None:
        """Report progress. Only moved bytes count: a stalled transfer must not look alive to the guardian."""
        self.flags.advance()
        self.points.reach(done)

    def check_links(self) -> Mapping[str, LinkState]:
        """Check the links at intervals and return their states; empty in between. Raises TransferStalled."""
        now_s = time.monotonic()
        if now_s - self.checked_at_s < self.check_s:
            return {}
        self.checked_at_s = now_s
        states = {member: self.links.state(member) for member in self.partners}
        self._require_live_links(states)
        self._require_progress(states, now_s)
        return states

    def _require_live_links(self, states: Mapping[str, LinkState]) -> None:
        """Drop dead links of members with which bytes are still to be exchanged.

        A middlebox may acknowledge packets without forwarding them, or a router may silently forget a connection. TCP
        notices nothing of the former and retransmits for 15 minutes in the latter, and guardians probe over other
        connections. A late or slow member is not silent, since its engine's threads send beats; a stopped one loses its
        lease sooner.
        """
        silent = list[str]()
        for member, traffic in self.traffic().items():
            link, limit = states[member], self.limits.of_link(member)
            self.silences_s[member] = max(self.silences_s.get(member, 0.0), link.silent_s)
            if traffic.is_over:
                continue
            if link.silent_s > limit.limit_s:
                limit.stalled()
                silent.append(member)
            elif max(link.stalest_s, link.unanswered_s) > self.limits.bounds.stream_s:
                silent.append(member)
        if silent:
            self._give_up(silent, states, "nothing was received from it, or nothing sent was acknowledged")

    def _require_progress(self, states: Mapping[str, LinkState], now_s: float) -> None:
        """Fail the transfer if no byte moves although the links look alive.

        A member may be stuck or late, or one of several streams lost data. These cannot be told apart here, so nobody
        is blamed: the round is retried with all members and twice the limit.
        """
        traffic = self.traffic()
        moved = sum(t.sent_bytes for t in traffic.values()) + sum(link.received_bytes for link in states.values())
        if self.progress.see(moved, now_s) <= self.limits.transfer.limit_s:
            return
        gaps = self.gaps()
        waiting_for = gaps.lacks or gaps.lacks_mean or tuple(m for m, t in traffic.items() if not t.is_over)
        if not waiting_for:
            return
        self.limits.transfer.stalled()
        self._give_up(
            [m for m in waiting_for if self._is_suspect(states[m])] or waiting_for, states, "no byte of it moved"
        )

    def _is_suspect(self, link: LinkState) -> bool:
        """Whether one of its streams has been silent for several beats."""
        return max(link.stalest_s, link.unanswered_s) > self.limits.bounds.stall_s / 2

    def _give_up(self, members: Sequence[str], states: Mapping[str, LinkState], why: str) -> NoReturn:
        """Drop the silent ones of these members' links, and raise TransferStalled."""
        traffic = self.traffic()
        for member in members:
            if self._is_suspect(states[member]):  # live links are kept for the retry
                self.links.drop(member)
        came, of = sum(traffic[m].received_bytes for m in members), sum(traffic[m].to_receive_bytes for m in members)
        since_s = max(self.progress.paused_s, *(max(states[m].stalest_s, states[m].unanswered_s) for m in members))
        names = ", ".join(members)
        raise TransferStalled(
            f"the transfer of round {self.plan.round} with {names} failed: {why} for {since_s:.1f} s, "
            f"at byte {came} of {of} from there",
            tuple(members),
            round(since_s, 3),
            came,
            of,
        )

    def gaps(self) -> Evidence:
        """Return what is missing from members silent for half of the stall limit, and from broken links."""
        now_s, least_s = time.monotonic(), self.limits.bounds.stall_s / 2

        def stopped(traffic: Traffic) -> bool:
            silent_s = now_s - self.began_at_s if traffic.silent_s is None else traffic.silent_s
            return traffic.received_bytes < traffic.to_receive_bytes and silent_s >= least_s

        missing = {member: t.missing_part_bytes > 0 for member, t in self.traffic().items() if stopped(t)}
        return Evidence(
            lacks=(*self.broken, *(member for member, lacks_part in missing.items() if lacks_part)),
            lacks_mean=tuple(member for member, lacks_part in missing.items() if not lacks_part),
            refused=self.refused,
        )

    def learn_pauses(self) -> None:
        """Adapt the stall limits to the pauses of a successful transfer."""
        self.limits.transfer.succeeded(self.progress.longest_s)
        for member, silence_s in self.silences_s.items():
            self.limits.of_link(member).succeeded(silence_s)

    def suspect(self) -> str:
        """Describe the member with the most missing bytes."""
        member, last = max(self.traffic().items(), key=lambda item: item[1].to_receive_bytes - item[1].received_bytes)
        if last.received_bytes == last.to_receive_bytes:
            return "a member was lost"
        silent = "from the start" if last.silent_s is None else f"for {last.silent_s:.1f} s"
        return f"{member} stopped at byte {last.received_bytes} of {last.to_receive_bytes} and was silent {silent}"


def _link_rates(traffic: Mapping[str, Traffic]) -> dict[str, int]:
    """Rate to each member in Mbit/s; 0 if the transfer was too short to measure."""
    return {m: round(t.sent_bytes / t.sending_s * 8e-6) if t.sending_s > WINDOW_S else 0 for m, t in traffic.items()}


def _operation_number(plan: RoundPlan) -> int:
    """Return a number that grows with the version; its low 16 bits tell plans of equal version apart."""
    return plan.version << 16 | int(plan.id.rpartition("-")[2], 16) & 0xFFFF

"""The phases of a soak: start-up, an undisturbed baseline, faults, recovery of all nodes, shutdown.

One thread, which owns the cluster. Times are in seconds since the soak began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from zeroband.elastic.membership.records import Verdict
from zeroband.errors import ZerobandError
from zeroband.tools.chaos.effects import EnvironmentFaults, FaultInjector, cpu_s, set_background
from zeroband.tools.chaos.options import ChaosOptions
from zeroband.tools.chaos.plan import (
    OF_ENVIRONMENT,
    OF_ONE_STORE,
    OF_PROCESSES,
    OF_STORE,
    InjectedFault,
    Kind,
    PlannedFault,
    leaves_enough,
)
from zeroband.tools.chaos.starvation import QueueTimes
from zeroband.tools.chaos.stores import Stores, StoresOfNodes
from zeroband.tools.chaos.watch import SoakWatch
from zeroband.tools.cluster.local import LocalCluster
from zeroband.tools.cluster.node_process import NodeProcess

_PENDING_PAUSE_S, _PAUSE_S = 0.02, 0.1
_SURVEY_EVERY_S = 0.5
_FOUNDING_S = 300.0
_PIDS_EVERY_S = 5.0
_MOST_WAIT = 3.0
"""CPU starvation extends a wait to at most this multiple of its length."""
_ENDING_S = 60.0
"""Time for failed processes to exit, and for all nodes to leave at the end."""
_BUSY = 0.2
"""Fraction of time waiting for a CPU above which a host is reported as busy."""
_BACK_S = 120.0
"""Time from the end of a node's fault until it contributes again, plus two rounds: starting Python, fetching state."""

_STORE, _OURS = "the store", "this command"

DIAL_OUT_ONLY = ("--node.dial_out_only=true",)
"""Arguments of a node that others cannot dial."""


class SoakFailed(ZerobandError):
    """The soak could not start."""


@dataclass
class SoakRecord:
    """The course of a soak."""

    calm: tuple[float, float] = (0.0, 0.0)
    end_s: float = 0.0
    """End of the phase with faults."""
    struck: list[InjectedFault] = field(default_factory=list[InjectedFault])
    calm_cpu_s: float = 0.0
    """CPU time of all nodes and the store in the baseline."""
    calm_rounds: int = 0
    """Whole rounds in the baseline."""
    later_rounds: int = 0
    """Rounds committed after the first fault."""

    @property
    def planned(self) -> list[InjectedFault]:
        """The injected faults, without unplanned exits of nodes."""
        return [one for one in self.struck if one.fault.kind is not Kind.ENDED]

    def has_struck(self, kind: Kind) -> bool:
        """Whether a fault of this kind happened."""
        return any(one.fault.kind is kind for one in self.struck)


class Soak:
    """Runs the phases. `detect_s`: the run's; `is_stopped`: polled, ends the current phase."""

    def __init__(
        self,
        cluster: LocalCluster,
        stores: Stores | StoresOfNodes,
        watch: SoakWatch,
        options: ChaosOptions,
        *,
        detect_s: float,
        env_faults: EnvironmentFaults,
        now: Callable[[], float],
        is_stopped: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._stores, self._watch, self._options = cluster, stores, watch, options
        self._bound_s = detect_s + options.slack_s
        """Maximum delay that a fault may cause the others."""
        self._now, self._is_stopped, self._say = now, is_stopped, say
        self._injector = FaultInjector(cluster, stores, env_faults)
        self._queue: list[PlannedFault] = []
        self._late_s = 0.0
        self._surveyed_s = 0.0
        self._starting: dict[str, InjectedFault] = {}
        self._ended: list[tuple[float, NodeProcess]] = []
        self._queue_times = QueueTimes()
        self._pids: dict[str, tuple[int, ...]] = {}
        self._pids_due_s = 0.0
        self._overslept_s = 0.0
        self.course = SoakRecord()

    # -- phases ---------------------------------------------------------------------------------------------------

    def found(self) -> None:
        """Start all nodes and wait until each has contributed. Raises SoakFailed.

        The last of three or more nodes has two ranks, so that a single rank can be lost.
        """
        names = self._options.names
        for node in names:
            arguments = DIAL_OUT_ONLY if node in self._options.dial_out_only_nodes else ()
            self._cluster.start(ranks=2 if len(names) >= 3 and node == names[-1] else 1, arguments=arguments)
        if not self._until(lambda: self._watch.round >= 2 and len(self._steady()) == len(names), _FOUNDING_S):
            lost = self._watch.starvation.share(0.0, self._now())
            busy = f" (they waited for a CPU {lost:.0%} of the time)" if lost > _BUSY else ""
            raise SoakFailed(f"the nodes do not train together{busy}\n{self._cluster.describe()}")

    def run_baseline(self, duration_s: float) -> float | None:
        """Run the baseline. Returns the seconds of its longest round, None without a whole round."""
        began_s, used_s = self._now(), self._cpu_s()
        committed: list[float] = []
        while self._now() < began_s + duration_s and not self._is_over:
            committed += [self._now() for _ in self._tick()]
        self.course.calm = (began_s, self._now())
        self.course.calm_cpu_s = self._cpu_s() - used_s
        gaps = [after - before for before, after in pairwise(committed)]
        self.course.calm_rounds = len(gaps)
        return max(gaps, default=None)

    def run_faults(self, faults: Sequence[PlannedFault], duration_s: float) -> None:
        """Run the phase with faults."""
        began_s = self._now()
        self._queue = list(faults)
        while self._now() < began_s + duration_s and not self._is_over:
            self._tick(began_s)
        self.course.end_s = self._now()

    @property
    def _is_over(self) -> bool:
        """Whether the user stopped the soak or the run is complete."""
        return self._is_stopped() or self._watch.complete_s is not None

    def await_recovery(self) -> None:
        """Wait until all faults are undone and all nodes contribute; nodes that do not return are violations."""
        self._queue.clear()
        lasting_s = max([0.0, *(one.at_s + one.fault.lasts_s - self._now() for one in self._lasting())])
        is_over = self._until(lambda: not self._open(), lasting_s + _ENDING_S + self._back_s)
        if not is_over and not self._is_over:
            for one in self._open():
                self._report_not_back(one)

    def end(self) -> None:
        """Ask all nodes to leave; they must exit with code 0."""
        running = self._cluster.running
        for node in running:
            node.terminate()
        from_s = self._now()
        while any(node.is_running for node in running) and not self._is_time_over(from_s, _ENDING_S):
            self._pause(_PAUSE_S)
            self._note_starvation()
        for node in running:
            what, names = f"{node.node_id} did not end", (node.node_id,)
            if node.is_running and not self._watch.is_too_late(what, from_s, _ENDING_S, self._now(), names):
                continue
            if node.exit_code != 0:
                how = "did not end" if node.is_running else f"ended with exit code {node.exit_code}"
                self._watch.violations.add(f"{node.node_id} {how} when it was asked to leave", node.console_tail(30))
        self._watch.read(self._now())

    def _until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        from_s = self._now()
        while not is_so() and not self._is_time_over(from_s, timeout_s) and not self._is_over:
            self._tick()
        return is_so()

    def _is_time_over(self, from_s: float, timeout_s: float) -> bool:
        """Return whether a timeout passed, not counting CPU starvation up to a limit."""
        took_s = self._now() - from_s
        lost_s = self._watch.starvation.lost_s(from_s, self._now(), self._cluster.nodes)
        return took_s - lost_s > timeout_s or took_s > _MOST_WAIT * timeout_s

    # -- polling --------------------------------------------------------------------------------------------------

    def _tick(self, faults_began_s: float | None = None) -> list[Verdict]:
        fresh = self._watch.look(self._now)
        for verdict in fresh:
            self._note_recoveries(verdict)
        self.course.later_rounds += len(fresh) if self.course.planned else 0
        for one in self._lasting():
            if self._now() >= one.at_s + one.fault.lasts_s:
                self._undo(one)
        if faults_began_s is not None:
            self._inject_if_due(faults_began_s)
        if self._now() - self._surveyed_s > _SURVEY_EVERY_S:
            self._surveyed_s = self._now()
            self._note_starvation()
            self._survey()
        self._pause(_PENDING_PAUSE_S if self._watch.awaits_detection else _PAUSE_S)
        return fresh

    def _pause(self, duration_s: float) -> None:
        """Sleep, and record how late this thread woke up, as other processes did."""
        from_s = self._now()
        time.sleep(duration_s)
        self._overslept_s += max(0.0, self._now() - from_s - duration_s)

    def _note_starvation(self) -> None:
        """Record how long processes waited for a CPU since the last call."""
        now_s = self._now()
        if now_s >= self._pids_due_s:  # finding all processes is slow
            self._pids_due_s = now_s + _PIDS_EVERY_S
            running = self._cluster.running
            self._pids = {node.node_id: tuple(pid for pid in node.pids if pid != node.pid) for node in running}
            self._pids[_STORE] = tuple(self._stores.pids)
        waited_s = {**self._queue_times.read(self._pids), _OURS: self._overslept_s}
        self._overslept_s = 0.0
        self._watch.starvation.note(now_s, waited_s, background=self._starting)

    def _lasting(self) -> list[InjectedFault]:
        return [one for one in self.course.struck if one.undone_s is None]

    def _open(self) -> list[InjectedFault]:
        return [one for one in self.course.struck if not one.is_over]

    def _healthy(self) -> list[str]:
        """Return the nodes without an ongoing fault."""
        disturbed = {name for one in self._open() for name in one.names if name not in one.over_s}
        return [node for node in self._cluster.nodes if node not in disturbed]

    def _steady(self) -> list[str]:
        """Return the healthy nodes that contributed to the newest round."""
        newest = self._watch.round
        return [node for node in self._healthy() if self._watch.contributed.get(node) == newest]

    def _note_recoveries(self, verdict: Verdict) -> None:
        for one in self._open():
            if one.undone_s is None or verdict.round <= one.undone_round:
                continue
            for name in one.names:
                is_back = name not in self._cluster.nodes or self._watch.contributed.get(name) == verdict.round
                if is_back and name not in one.over_s:
                    one.over_s[name] = self._now()
                    self._advanced(name)

    def _advanced(self, node: str) -> None:
        if self._watch.pulse is not None:
            self._watch.pulse.advanced(node, self._now())

    # -- faults ---------------------------------------------------------------------------------------------------

    def _inject_if_due(self, faults_began_s: float) -> None:
        if not self._queue:
            return
        fault, now_s = self._retargeted(self._queue[0]), self._now()
        due_s = faults_began_s + fault.at_s + self._late_s
        if now_s < due_s or not self._can_inject(fault):
            return
        self._late_s += now_s - due_s  # the later ones keep their gaps
        self._queue.pop(0)
        self._inject(fault)

    def _retargeted(self, fault: PlannedFault) -> PlannedFault:
        """Redirect a relay fault to a relay in use, and a holder fault to the holder of the store."""
        if fault.kind is Kind.HOLDER_KILLED:
            return replace(fault, nodes=(self._holder or fault.nodes[0],))
        if fault.kind is not Kind.RELAY_KILLED:
            return fault
        relays = self._watch.relays().intersection(self._steady())
        return fault if not relays or relays & {*fault.nodes} else replace(fault, nodes=(min(relays),))

    @property
    def _holder(self) -> str:
        """The node that holds the store in use; empty if none does."""
        return self._stores.holder(self._watch.store_address) if isinstance(self._stores, StoresOfNodes) else ""

    def _can_inject(self, fault: PlannedFault) -> bool:
        """Return whether enough nodes stay undisturbed and the last fault of these nodes or the store was undone."""
        lasting = {name for one in self._lasting() for name in one.names}
        undisturbed = [node for node in self._steady() if node not in fault.nodes]
        leaves_quorum = leaves_enough(undisturbed, self._options.min_undisturbed, self._options.dial_out_only_nodes)
        if lasting.intersection(fault.nodes) or not leaves_quorum:
            return False
        if fault.kind is Kind.DESCRIPTORS_GONE and fault.nodes[0] not in self._steady():
            return False  # without descriptors a node keeps the connections that it has; a rejoining one has none yet
        if fault.kind is Kind.RELAY_KILLED and not self._watch.relays() & {*fault.nodes}:
            return False
        is_store_busy = any(one.fault.kind in OF_STORE for one in self._open())
        return not (is_store_busy and fault.kind in OF_STORE) and self._injector.can_inject(fault)

    def _inject(self, fault: PlannedFault) -> None:
        self._watch.look(self._now)  # the view before the fault
        one = InjectedFault(fault, self._now())
        for earlier in self._open():
            for name in set(fault.nodes).intersection(earlier.names) - earlier.over_s.keys():
                earlier.over_s[name] = one.at_s
                earlier.superseded.add(name)
        self.course.struck.append(one)
        one.struck_members = all(self._watch.members_of(node) for node in fault.nodes)
        self._say(f"{one.at_s:7.1f} s  {fault}")
        if fault.kind in OF_STORE:
            self._watch.store_was_struck(one)
        elif fault.kind not in (Kind.LEAVES, Kind.ENDED, *OF_ENVIRONMENT) and self._holder not in fault.nodes:
            self._watch.expect_detection(one)
        if fault.kind in OF_PROCESSES:
            self._starting.pop(fault.nodes[0], None)
        self._injector.inject(fault, store=self._watch.store_address)
        if self._watch.pulse is not None:
            self._watch.pulse.struck()

    def _undo(self, one: InjectedFault) -> None:
        fault = one.fault
        if fault.kind in OF_PROCESSES and not self._has_ended(one):
            return
        self._injector.undo(fault)
        one.undone_s, one.undone_round = self._now(), self._watch.round
        if fault.kind in OF_STORE:
            self._watch.store_is_back(one)
            for node in self._cluster.nodes if fault.kind in OF_ONE_STORE else ():
                self._advanced(node)
        elif fault.kind in OF_PROCESSES:
            self._starting[fault.nodes[0]] = one
        else:
            self._watch.forget_detections(one)

    def _has_ended(self, one: InjectedFault) -> bool:
        """Return whether the faulty node has exited; report it if it exits badly or too late."""
        node = self._cluster.nodes[one.fault.nodes[0]]
        if node.is_running:
            what, due_s = f"{node.node_id} still ran after {one.fault}", one.at_s + one.fault.lasts_s
            if not self._watch.is_too_late(what, due_s, _ENDING_S, self._now(), one.names):
                return False
            what = f"{node.node_id} still runs {self._now() - one.at_s:.0f} s after {one.fault}"
            self._watch.violations.add(what, node.console_tail(30))
            node.kill()
        elif one.fault.kind is Kind.LEAVES and node.exit_code and one.struck_members:
            what = f"{node.node_id} was asked to leave and ended with exit code {node.exit_code} ({one.fault})"
            self._watch.violations.add(what, node.console_tail(30))
        self._ended.append((self._now(), node))
        return True

    # -- survey ---------------------------------------------------------------------------------------------------

    def _survey(self) -> None:
        now_s, watch = self._now(), self._watch
        watch.read(now_s)
        self._update_priorities()
        self._restart_exited()
        faults = self._open_faults()
        watch.check_pulse(self._healthy(), now_s, faults)
        bound_s = self._bound_s
        for one in watch.overdue(now_s, bound_s):
            watch.violations.add(f"the store does not show {one.fault} after {bound_s:g} s", watch.context(faults))
        if (lost := watch.stays_without_store(now_s, bound_s)) is not None:
            watch.violations.add(f"no other store is in use {bound_s:g} s after {lost.fault}", watch.context(faults))
        for one in self._open():
            what = f"{' and '.join(one.names)} did not come back after {one.fault}"
            if one.undone_s is not None and watch.is_too_late(what, one.undone_s, self._back_s, now_s, one.names):
                self._report_not_back(one)
        self._check_leftover_processes(now_s, bound_s)

    def _check_leftover_processes(self, now_s: float, bound_s: float) -> None:
        """Check that all processes of exited nodes are gone after some time."""
        for at_s, node in [ended for ended in self._ended if ended[0] + bound_s < now_s]:
            if not (pids := node.pids):
                self._ended.remove((at_s, node))
            elif self._watch.is_too_late(f"{node.node_id} left processes behind", at_s, bound_s, now_s):
                self._ended.remove((at_s, node))
                self._watch.violations.add(f"{node.node_id} left processes {pids} behind", node.console_tail(10))

    def _open_faults(self) -> list[str]:
        return [f"{one.fault} at {one.at_s:.1f} s" for one in self._open()]

    @property
    def _back_s(self) -> float:
        """Time that a node may take from the end of its fault until it contributes again."""
        pulse = self._watch.pulse
        return _BACK_S + (2 * pulse.bound_s("") if pulse is not None else 0.0)

    def _report_not_back(self, one: InjectedFault) -> None:
        what = f"not back {self._back_s:.0f} s after {one.fault}"
        self._watch.violations.add(what, self._watch.context(self._open_faults()))

    def _update_priorities(self) -> None:
        """Start nodes at background priority, as they would not slow down others on separate machines."""
        for node_id, one in list(self._starting.items()):
            node = self._cluster.nodes[node_id]
            assert one.undone_s is not None
            is_in = self._watch.joined_s.get(node_id, -1.0) > one.undone_s
            if not self._options.is_host_shared:
                set_background(node.pids, not is_in)
            if is_in:
                one.restart_cpu_s = cpu_s(node.pids)
                del self._starting[node_id]

    def _restart_exited(self) -> None:
        """Restart nodes that exited without a fault while the run is not complete, and report them."""
        explained = {name for one in self._lasting() if one.fault.kind in OF_PROCESSES for name in one.names}
        nodes = self._cluster.nodes.items()
        ended = [(node_id, node) for node_id, node in nodes if not node.is_running and node_id not in explained]
        if ended:
            self._watch.read(self._now())  # their last records
        for node_id, node in ended if self._watch.complete_s is None else ():
            start = self._starting.get(node_id)
            if start is None or not self._was_hit_since(start):
                tail = node.console_tail(40)
                self._watch.violations.add(f"{node_id} ended by itself with exit code {node.exit_code}", tail)
            self._inject(PlannedFault(0, self._now(), Kind.ENDED, (node_id,), 0.0))

    def _was_hit_since(self, start: InjectedFault) -> bool:
        """Return whether the node or the store had a fault during the node's start, so that it may give up."""
        began_s = start.undone_s or 0.0
        return any(
            (one.fault.kind in OF_STORE or start.fault.nodes[0] in one.names)
            and one is not start
            and (one.undone_s is None or one.undone_s > began_s)
            for one in self.course.struck
        )

    def _cpu_s(self) -> float:
        pids = [pid for node in self._cluster.running for pid in node.pids]
        return cpu_s([*pids, *self._stores.pids])

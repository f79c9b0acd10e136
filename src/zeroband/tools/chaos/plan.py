"""The plan of a soak: which fault hits which node when, drawn from a seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """A kind of fault. The value is its name in reports."""

    MACHINE_KILLED = "machine killed"
    """SIGKILL of all processes of the node; its memory is lost."""
    RANKS_KILLED = "ranks killed"
    """SIGKILL of the trainer's ranks; launcher and guardian survive."""
    OUT_OF_MEMORY = "out of memory"
    """SIGKILL of the last rank, as by the kernel's OOM killer."""
    MACHINE_FROZEN = "machine frozen"
    """SIGSTOP of all processes of the node, later SIGCONT."""
    RANKS_FROZEN = "ranks frozen"
    """SIGSTOP of the ranks only, later SIGCONT."""
    CUT_OFF = "cut off"
    """All packets from and to the node are dropped."""
    SENDS_NOTHING = "sends nothing"
    """All packets from the node are dropped; it still receives."""
    RECEIVES_NOTHING = "receives nothing"
    """All packets to the node are dropped; it still sends."""
    PAIR_CUT = "pair cut"
    """Two nodes cannot reach each other, but reach all others and the store."""
    LINK_DOWN = "link down"
    """The node's interface is down, later up."""
    STORE_PAUSED = "store paused"
    """SIGSTOP of Redis, later SIGCONT."""
    STORE_RESTARTED = "store restarted"
    """Redis is killed and restarted later with its data."""
    STORE_EMPTIED = "store emptied"
    """Redis is killed and restarted later without data."""
    STORE_LOST = "store lost"
    """Kill the store in use, of several; an empty one starts at its address later."""
    STORE_STOPPED = "store stopped"
    """SIGSTOP the store in use, of several; later SIGCONT."""
    HOLDER_KILLED = "holder killed"
    """SIGKILL of all processes of the node that holds the store in use."""
    DESCRIPTORS_GONE = "descriptors gone"
    """All file descriptors of each process of the node are in use, later released."""
    CLOCK_JUMPS = "clock jumps"
    """The node's wall clock is hours ahead, later correct."""
    RELAY_KILLED = "relay killed"
    """SIGKILL of all processes of a node that relays between two dial-out-only nodes."""
    LEAVES = "asked to leave"
    """SIGTERM to the ranks: the node leaves and exits."""
    ENDED = "ended by itself"
    """Not planned: the node exited without a fault that explains it."""


PLANNED = tuple(kind for kind in Kind if kind is not Kind.ENDED)
"""Kinds that a plan may contain."""

OF_PROCESSES = (
    *(Kind.MACHINE_KILLED, Kind.RANKS_KILLED, Kind.OUT_OF_MEMORY, Kind.RELAY_KILLED, Kind.HOLDER_KILLED),
    *(Kind.LEAVES, Kind.ENDED),
)
"""Faults that end the node's processes; the node is restarted afterwards."""

OF_RANKS = (Kind.RANKS_KILLED, Kind.OUT_OF_MEMORY, Kind.RANKS_FROZEN, Kind.LEAVES)
"""Faults that need running ranks."""

OF_NETWORK = (Kind.CUT_OFF, Kind.SENDS_NOTHING, Kind.RECEIVES_NOTHING, Kind.PAIR_CUT, Kind.LINK_DOWN)
"""Faults that need network namespaces."""

OF_ENVIRONMENT = (Kind.DESCRIPTORS_GONE, Kind.CLOCK_JUMPS)
"""Faults of a node's environment, which cost no node a round."""

OF_ONE_STORE = (Kind.STORE_PAUSED, Kind.STORE_RESTARTED, Kind.STORE_EMPTIED)
"""Faults of the only store: all nodes wait for it."""

OF_SEVERAL_STORES = (Kind.STORE_LOST, Kind.STORE_STOPPED)
"""Faults of the store in use in a run with several: the run moves to another one."""

OF_STORE = (*OF_ONE_STORE, *OF_SEVERAL_STORES)

_LEAST_DIAL_OUT_ONLY = 2
"""Number of dial-out-only nodes from which on they need a relay."""

_SHORTEST, _LONGEST = 0.3, 6.0
"""Duration of a fault in units of detect_s: from unnoticed by all to noticed by all."""


Span = tuple[float, float]
"""From, to, in seconds since the soak began."""
_RECOVERED_FRACTION = 0.75
"""Fraction of faults that hit recovered nodes if possible: only the loss of a member can be detected."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault of a plan."""

    number: int
    at_s: float
    """Seconds from the end of the undisturbed phase."""
    kind: Kind
    nodes: tuple[str, ...]
    """Affected nodes; none for faults of the store."""
    lasts_s: float
    """Seconds until the node is restarted, resumed or healed, or the store is back."""

    def __str__(self) -> str:
        struck = f" {' and '.join(self.nodes)}" if self.nodes else ""
        return f"#{self.number}{struck} {self.kind.value} for {self.lasts_s:.1f} s"


@dataclass
class InjectedFault:
    """A fault that was injected."""

    fault: PlannedFault
    at_s: float
    undone_s: float | None = None
    detected_s: float | None = None
    """When the store's view stopped counting the node, or showed it cut off."""
    over_s: dict[str, float] = field(default_factory=dict[str, float])
    """When each node contributed to a round again; for the store, when the next round was committed."""
    superseded: set[str] = field(default_factory=set[str])
    """Nodes that were hit by the next fault before they recovered."""
    restart_cpu_s: float | None = None
    """CPU time of the restarted processes until they were members."""
    struck_members: bool = False
    """Whether its nodes were members."""
    undone_round: int = -1
    """The newest committed round when it was undone."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.fault.nodes or ("store",)

    @property
    def is_over(self) -> bool:
        return all(name in self.over_s for name in self.names)

    def recovered_s(self) -> list[float]:
        """Return the seconds from the end of the fault until each node had recovered."""
        if self.undone_s is None:
            return []
        return [at_s - self.undone_s for name, at_s in self.over_s.items() if name not in self.superseded]

    def span(self, end_s: float) -> Span:
        """Return the time from the injection until all have recovered, at most until `end_s`."""
        return self.at_s, max(self.over_s.values()) if self.is_over else end_s


@dataclass(frozen=True)
class PlanRules:
    """Rules of a plan."""

    nodes: tuple[str, ...]
    duration_s: float
    mtbf_s: float
    """Mean of the exponential gaps between two faults of the run."""
    kinds: tuple[Kind, ...]
    detect_s: float
    keep_undisturbed: int = 2
    """Number of nodes that are undisturbed at any time."""
    dial_out_only: tuple[str, ...] = ()
    """Nodes that cannot be dialled; with two or more, a possible relay stays undisturbed."""
    recovery_s: float = 25.0
    """Assumed time from the end of a fault until its node contributes again."""

    def possible_kinds(self) -> tuple[Kind, ...]:
        """Return the kinds that leave enough nodes undisturbed."""
        calendar = _Calendar(self)
        return tuple(kind for kind in self.kinds if calendar.is_possible(0.0, kind))


def kinds_of(*, stores: int, dial_out_only: int) -> tuple[Kind, ...]:
    """Return the possible kinds. `stores`: their number, 0 if nodes hold them."""
    apart = OF_SEVERAL_STORES if stores == 1 else OF_ONE_STORE
    holder = (Kind.HOLDER_KILLED,) if stores else ()
    relay = () if dial_out_only >= _LEAST_DIAL_OUT_ONLY else (Kind.RELAY_KILLED,)
    return tuple(kind for kind in PLANNED if kind not in (*apart, *holder, *relay))


def leaves_enough(undisturbed: Collection[str], keep_undisturbed: int, dial_out_only: Collection[str]) -> bool:
    """Return whether enough nodes are undisturbed, including a relay if one is needed."""
    is_way = len(dial_out_only) < _LEAST_DIAL_OUT_ONLY or any(node not in dial_out_only for node in undisturbed)
    return len(undisturbed) >= keep_undisturbed and is_way


def targets_of(kind: Kind) -> int:
    """Return the number of nodes that a fault of this kind hits."""
    if kind in OF_STORE:
        return 0
    return 2 if kind is Kind.PAIR_CUT else 1


def plan(rules: PlanRules, seed: int) -> tuple[PlannedFault, ...]:
    """Return the faults of a soak by ascending time, determined by rules and seed.

    Every kind is used once before any repeats. Most faults hit recovered nodes, some hit recovering ones; a fault is
    delayed while it would leave too few nodes undisturbed.
    """
    chance = random.Random(seed)
    kinds, bag = rules.possible_kinds(), list[Kind]()
    calendar = _Calendar(rules)
    faults: list[PlannedFault] = []
    at_s = 0.0
    while kinds:
        at_s += chance.expovariate(1 / rules.mtbf_s)
        bag = bag or chance.sample(kinds, len(kinds))
        kind, lasts_s = bag.pop(), chance.uniform(_SHORTEST, _LONGEST) * rules.detect_s
        at_s = calendar.first_chance_s(at_s, kind)
        if at_s >= rules.duration_s:
            break
        prefers_recovered = chance.random() < _RECOVERED_FRACTION
        nodes = tuple(sorted(chance.sample(calendar.candidates(at_s, kind, prefers_recovered), targets_of(kind))))
        faults.append(PlannedFault(len(faults) + 1, at_s, kind, nodes, lasts_s))
        calendar.enter(faults[-1])
    return tuple(faults)


_STORE = ""


class _Calendar:
    """When each node and the store are disturbed and assumed to have recovered."""

    def __init__(self, rules: PlanRules) -> None:
        self._rules = rules
        self._undone_s = dict.fromkeys((*rules.nodes, _STORE), 0.0)

    def enter(self, fault: PlannedFault) -> None:
        for node in fault.nodes or (_STORE,):
            self._undone_s[node] = fault.at_s + fault.lasts_s

    def _calm_s(self, node: str) -> float:
        undone_s = self._undone_s[node]
        return undone_s + self._rules.recovery_s if undone_s else 0.0

    def candidates(self, at_s: float, kind: Kind, prefers_recovered: bool) -> Sequence[str]:
        """Return the nodes that may be hit; fewer than the kind needs if it must wait.

        `prefers_recovered`: prefer nodes that have recovered from their last fault.
        """
        rules, targets = self._rules, targets_of(kind)
        undone = [node for node in rules.nodes if self._undone_s[node] <= at_s]
        calm = [node for node in undone if self._calm_s(node) <= at_s]
        dialled = [node for node in calm if node not in rules.dial_out_only]
        spared = set(calm if len(calm) - rules.keep_undisturbed < targets else ())
        if not leaves_enough(dialled[targets:], 0, rules.dial_out_only):  # for any choice of targets
            spared |= {*dialled}
        free = [node for node in undone if node not in spared]
        rested = [node for node in free if node in calm]
        if kind in (Kind.RELAY_KILLED, Kind.HOLDER_KILLED):
            return [node for node in rested if node in dialled]
        return rested if prefers_recovered and len(rested) >= targets else free

    def first_chance_s(self, at_s: float, kind: Kind) -> float:
        """Return the first time from `at_s` on at which a fault of this kind is possible."""
        while not self.is_possible(at_s, kind):
            times = [time for node in self._undone_s for time in (self._undone_s[node], self._calm_s(node))]
            at_s = min(time for time in times if time > at_s)
        return at_s

    def is_possible(self, at_s: float, kind: Kind) -> bool:
        """Return whether a fault of this kind leaves enough nodes undisturbed at this time."""
        if kind in OF_STORE:
            return self._calm_s(_STORE) <= at_s
        return len(self.candidates(at_s, kind, False)) >= targets_of(kind)

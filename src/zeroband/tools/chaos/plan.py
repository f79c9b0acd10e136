"""The plan of a soak: which fault strikes which node when, drawn from a seed. Pure: time and chance are arguments."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What happens. The value is its name in reports."""

    MACHINE_KILLED = "machine killed"
    """SIGKILL of every process of the node at once; its memory is gone."""
    RANKS_KILLED = "ranks killed"
    """SIGKILL of the trainer's ranks; launcher and guardian live on."""
    OUT_OF_MEMORY = "out of memory"
    """SIGKILL of the last rank, as the kernel does when memory runs out."""
    MACHINE_FROZEN = "machine frozen"
    """SIGSTOP of every process of the node, later SIGCONT."""
    RANKS_FROZEN = "ranks frozen"
    """SIGSTOP of the ranks only, later SIGCONT."""
    CUT_OFF = "cut off"
    """All packets from and to the node are lost, silently."""
    SENDS_NOTHING = "sends nothing"
    """All packets from the node are lost; it still receives."""
    RECEIVES_NOTHING = "receives nothing"
    """All packets to the node are lost; it still sends."""
    PAIR_CUT = "pair cut"
    """Two nodes do not reach one another; both reach all others and the store."""
    LINK_DOWN = "link down"
    """The node's interface is taken down, later up."""
    STORE_PAUSED = "store paused"
    """SIGSTOP of Redis, later SIGCONT."""
    STORE_RESTARTED = "store restarted"
    """Redis is killed, and started later with its data."""
    STORE_EMPTIED = "store emptied"
    """Redis is killed, and started later without any data."""
    STORE_LOST = "store lost"
    """The one in use of several stores is killed for good; an empty one is started at its address later."""
    STORE_STOPPED = "store stopped"
    """SIGSTOP of the one in use of several stores, later SIGCONT."""
    HOLDER_KILLED = "holder killed"
    """SIGKILL of every process of the node that holds the store in use."""
    DESCRIPTORS_GONE = "descriptors gone"
    """Each process of the node has taken all of its descriptors, later it gives them back."""
    CLOCK_JUMPS = "clock jumps"
    """The wall clock of the node is hours ahead, later right again."""
    RELAY_KILLED = "relay killed"
    """SIGKILL of every process of the node through which two talk that cannot be dialled."""
    LEAVES = "asked to leave"
    """SIGTERM to the ranks: the node hands over its work and ends."""
    ENDED = "ended by itself"
    """Not a fault of the plan: a node ended, and nothing had been done to it that explains it."""


PLANNED = tuple(kind for kind in Kind if kind is not Kind.ENDED)
"""Kinds that a plan may hold."""

OF_PROCESSES = (
    *(Kind.MACHINE_KILLED, Kind.RANKS_KILLED, Kind.OUT_OF_MEMORY, Kind.RELAY_KILLED, Kind.HOLDER_KILLED),
    *(Kind.LEAVES, Kind.ENDED),
)
"""Faults after which the node's processes end, and it is started again."""

OF_RANKS = (Kind.RANKS_KILLED, Kind.OUT_OF_MEMORY, Kind.RANKS_FROZEN, Kind.LEAVES)
"""Faults that need ranks to strike, not only a launcher."""

OF_NETWORK = (Kind.CUT_OFF, Kind.SENDS_NOTHING, Kind.RECEIVES_NOTHING, Kind.PAIR_CUT, Kind.LINK_DOWN)
"""Faults that need a network that can be broken."""

OF_SURROUNDINGS = (Kind.DESCRIPTORS_GONE, Kind.CLOCK_JUMPS)
"""Faults of what a node's processes find around them, which cost no node a round."""

OF_ONE_STORE = (Kind.STORE_PAUSED, Kind.STORE_RESTARTED, Kind.STORE_EMPTIED)
"""Faults of a store that is the only one: all wait for it."""

OF_SEVERAL_STORES = (Kind.STORE_LOST, Kind.STORE_STOPPED)
"""Faults of the store in use while the run has others, to which it goes."""

OF_STORE = (*OF_ONE_STORE, *OF_SEVERAL_STORES)
"""Faults of the store, which strike no node, and all."""

_LEAST_DIAL_OUT_ONLY = 2
"""From this number on, nodes that cannot be dialled need another one to talk."""

_SHORTEST, _LONGEST = 0.3, 6.0
"""How long a fault lasts in units of detect_s: from what no node should notice to what all must."""


Span = tuple[float, float]
"""From, to, in seconds since the soak began."""
_AT_PEACE = 0.75
"""Share of faults that strike nodes which have recovered from their last one, where there are enough of them: only a
member can be seen to be lost."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault of a plan."""

    number: int
    at_s: float
    """Seconds from the end of the undisturbed phase."""
    kind: Kind
    nodes: tuple[str, ...]
    """Nodes that it strikes; none for the store's faults."""
    lasts_s: float
    """Seconds until it is undone: the node is started again, resumed, healed, or the store is back."""

    def __str__(self) -> str:
        struck = f" {' and '.join(self.nodes)}" if self.nodes else ""
        return f"#{self.number}{struck} {self.kind.value} for {self.lasts_s:.1f} s"


@dataclass
class InjectedFault:
    """A fault that happened."""

    fault: PlannedFault
    at_s: float
    undone_s: float | None = None
    detected_s: float | None = None
    """When the store's view stopped counting the node, or showed it cut off."""
    over_s: dict[str, float] = field(default_factory=dict[str, float])
    """When each of its nodes contributed to a round that ended after the fault; the store, under its own name: when
    the next round was committed."""
    superseded: set[str] = field(default_factory=set[str])
    """Nodes to which the next fault happened before; it was over for them then."""
    restart_cpu_s: float | None = None
    """What the new processes used of the CPU until they were members."""
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
        """Seconds from the end of the fault until each of its nodes had recovered."""
        if self.undone_s is None:
            return []
        return [at_s - self.undone_s for name, at_s in self.over_s.items() if name not in self.superseded]

    def span(self, end_s: float) -> Span:
        """Return the time from the strike until all have recovered, at most until the soak's end."""
        return self.at_s, max(self.over_s.values()) if self.is_over else end_s


@dataclass(frozen=True)
class PlanRules:
    """What a plan must obey."""

    nodes: tuple[str, ...]
    duration_s: float
    mtbf_s: float
    """Mean of the exponential gaps between two faults of the whole run."""
    kinds: tuple[Kind, ...]
    detect_s: float
    keep_undisturbed: int = 2
    """Number of nodes that are left in peace at any time."""
    dial_out_only: tuple[str, ...] = ()
    """Nodes that cannot be dialled; from two on, one of the others is left in peace, through which they talk."""
    recovery_s: float = 25.0
    """Assumed time from the end of a fault until its node contributes again."""

    def possible_kinds(self) -> tuple[Kind, ...]:
        """Kinds that leave enough nodes in peace, in the order of `kinds`."""
        calendar = _Calendar(self)
        return tuple(kind for kind in self.kinds if calendar.is_possible(0.0, kind))


def kinds_of(*, stores: int, dial_out_only: int) -> tuple[Kind, ...]:
    """Kinds that can happen to a run with these numbers of stores, 0 where nodes hold them, and undialable nodes."""
    apart = OF_SEVERAL_STORES if stores == 1 else OF_ONE_STORE
    holder = (Kind.HOLDER_KILLED,) if stores else ()
    relay = () if dial_out_only >= _LEAST_DIAL_OUT_ONLY else (Kind.RELAY_KILLED,)
    return tuple(kind for kind in PLANNED if kind not in (*apart, *holder, *relay))


def leaves_enough(in_peace: Collection[str], keep_undisturbed: int, dial_out_only: Collection[str]) -> bool:
    """Whether enough nodes are in peace, one of them one that can be dialled where others talk through such a one."""
    is_way = len(dial_out_only) < _LEAST_DIAL_OUT_ONLY or any(node not in dial_out_only for node in in_peace)
    return len(in_peace) >= keep_undisturbed and is_way


def targets_of(kind: Kind) -> int:
    """How many nodes a fault of this kind strikes."""
    if kind in OF_STORE:
        return 0
    return 2 if kind is Kind.PAIR_CUT else 1


def plan(rules: PlanRules, seed: int) -> tuple[PlannedFault, ...]:
    """The faults of a soak in the order of time; the same for the same rules and seed.

    Each kind comes once before any comes again. Mostly nodes in peace are struck, at times those that are recovering; a
    fault that would leave too few in peace waits until it does not.
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
        is_at_peace = chance.random() < _AT_PEACE
        nodes = tuple(sorted(chance.sample(calendar.candidates(at_s, kind, is_at_peace), targets_of(kind))))
        faults.append(PlannedFault(len(faults) + 1, at_s, kind, nodes, lasts_s))
        calendar.enter(faults[-1])
    return tuple(faults)


_STORE = ""


class _Calendar:
    """When each node, and the store, is struck, and when it is taken to have recovered."""

    def __init__(self, rules: PlanRules) -> None:
        self._rules = rules
        self._undone_s = dict.fromkeys((*rules.nodes, _STORE), 0.0)

    def enter(self, fault: PlannedFault) -> None:
        for node in fault.nodes or (_STORE,):
            self._undone_s[node] = fault.at_s + fault.lasts_s

    def _calm_s(self, node: str) -> float:
        undone_s = self._undone_s[node]
        return undone_s + self._rules.recovery_s if undone_s else 0.0

    def candidates(self, at_s: float, kind: Kind, is_at_peace: bool) -> Sequence[str]:
        """Nodes of which any may be struck; fewer than the kind needs where it must wait.

        `is_at_peace`: rather those that have recovered from their last fault, where they are enough.
        """
        rules, targets = self._rules, targets_of(kind)
        undone = [node for node in rules.nodes if self._undone_s[node] <= at_s]
        calm = [node for node in undone if self._calm_s(node) <= at_s]
        dialled = [node for node in calm if node not in rules.dial_out_only]
        spared = set(calm if len(calm) - rules.keep_undisturbed < targets else ())
        if not leaves_enough(dialled[targets:], 0, rules.dial_out_only):  # whichever of them are struck
            spared |= {*dialled}
        free = [node for node in undone if node not in spared]
        rested = [node for node in free if node in calm]
        if kind in (Kind.RELAY_KILLED, Kind.HOLDER_KILLED):
            return [node for node in rested if node in dialled]
        return rested if is_at_peace and len(rested) >= targets else free

    def first_chance_s(self, at_s: float, kind: Kind) -> float:
        """The first time from `at_s` on when a fault of this kind is possible."""
        while not self.is_possible(at_s, kind):
            times = [time for node in self._undone_s for time in (self._undone_s[node], self._calm_s(node))]
            at_s = min(time for time in times if time > at_s)
        return at_s

    def is_possible(self, at_s: float, kind: Kind) -> bool:
        """Whether a fault of this kind leaves enough in peace at this time."""
        if kind in OF_STORE:
            return self._calm_s(_STORE) <= at_s
        return len(self.candidates(at_s, kind, False)) >= targets_of(kind)

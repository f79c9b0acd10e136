"""How long things take in a run in virtual time, and when nodes are lost. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from zeroband.elastic.membership.topology import LinkTable, shard_shares
from zeroband.elastic.rounds.phase import PhaseLength
from zeroband.elastic.transport.shape import RING_GAIN, all_to_all_s, ring_s


@dataclass(frozen=True)
class NodeModel:
    """One node, whatever becomes of its processes."""

    step_s: float
    """Seconds of an inner step."""
    mbit_s: int
    """Rate of its access link in each direction."""


@dataclass(frozen=True)
class Chaos:
    """What else happens to a run. Times are means in virtual seconds; None: it does not happen."""

    store_every_s: float | None = None
    """Time until the store is away."""
    store_away_s: float = 60.0
    slow_link_every_s: float | None = None
    """Time until the link of a node is slow, for each node."""
    slow_link_s: float = 300.0
    slow_link_part: float = 0.05
    """Part of its rate that a slow link has."""
    cut_every_s: float | None = None
    """Time until some nodes do not reach the others; all reach the store."""
    cut_s: float = 120.0
    cut_part: float = 0.3
    """Part of the nodes that is cut from the others; below a half."""
    leave_every_s: float | None = None
    """Time until a node is asked to leave, for each node."""
    grace_s: float = 25.0
    """As `fault.grace_s`."""
    crowd_loss_every_s: float | None = None
    """Time until many nodes are lost at once."""
    crowd_loss_part: float = 0.3
    """Part of the nodes that is then lost."""
    crowd_join_every_s: float | None = None
    """Time until many new nodes join at once."""
    crowd_join_nodes: int = 50


@dataclass(frozen=True)
class RunModel:
    """What a run is made of."""

    nodes: tuple[NodeModel, ...]
    inner_steps: int
    """Inner steps of a round."""
    encoded_bytes: int
    """Size of the whole model as a round sends it."""
    state_bytes: int
    """Size of what a joiner fetches."""
    rtt_ms: int = 100
    agreement_s: float = 0.4
    """For the members to agree on the beginning and the end of a round, half of it each."""
    jitter: float = 0.05
    """Part by which the steps of a round are longer or shorter, at most."""
    inner_seconds: float | None = None
    """As `outer.inner_seconds`: a phase ends after so much time, or its steps if that is sooner. None: after these."""
    overlaps: bool = False
    """Nodes train on while a round is on its way."""
    detect_s: float = 10.0
    """After which a node that was lost counts as lost."""
    mtbf_s: float | None = None
    """Mean time to the loss of a node; None: none is lost."""
    away_s: float = 300.0
    """Mean time until a lost node is started again."""
    freeze_every_s: float | None = None
    """Mean time of training until a node stands still without being lost; None: none does."""
    freeze_s: float = 20.0
    """For how long it then does, on average."""
    straggler_s: float | None = None
    """As `outer.straggler_deadline_s`."""
    straggler_grace: float | None = None
    """As `outer.straggler_grace`."""
    min_nodes: int = 1
    sites: int | None = None
    """Sites at which the nodes are, in turn; None: each is for itself."""
    chaos: Chaos = Chaos()

    def phase_steps(self, step_s: float) -> int:
        """Steps of a phase in which each takes so long."""
        phase, steps = PhaseLength(self.inner_steps, self.inner_seconds), 1
        while steps < self.inner_steps and not phase.is_over(steps * step_s, steps):
            steps += 1
        return steps

    def wanted_steps(self, step_s: float) -> int:
        """Steps for which a node asks samples that takes so long for each."""
        phase = PhaseLength(self.inner_steps, self.inner_seconds)
        phase.learn(step_s, 1)
        return phase.wanted_steps()

    def node(self, number: int) -> NodeModel:
        """One of the nodes, or another one like them."""
        return self.nodes[number % len(self.nodes)]


class EvenTimes:
    """Exponential times whose mean is met soon: of so many in a row each falls into another part of equal chance."""

    _PARTS = 32

    def __init__(self, mean_s: float, chance: random.Random) -> None:
        self._mean_s = mean_s
        self._chance = chance
        self._parts = list[int]()

    def draw(self) -> float:
        """The next one."""
        if not self._parts:
            self._parts = self._chance.sample(range(self._PARTS), self._PARTS)
        return -self._mean_s * math.log(1.0 - (self._parts.pop() + self._chance.random()) / self._PARTS)


@dataclass
class Phase:
    """Inner steps that a node makes one after the other. Times are virtual seconds."""

    began_s: float
    step_s: float
    most: int
    """Steps after which it ends in any case."""
    clock_s: float = -1.0
    """From when its time is counted: when it began, or the round opened that was contributed to before it."""
    stands_at_s: float = math.inf
    """When the node stands still, and for how long."""
    stands_s: float = 0.0
    is_called: bool = False
    """It ends with the step that is made: the others wait at the boundary."""
    plan: int = 0
    """How often its end was planned."""

    def __post_init__(self) -> None:
        self.clock_s = self.began_s

    def stood_s(self, now_s: float) -> float:
        """For how long it has stood still by now."""
        return min(max(now_s - self.stands_at_s, 0.0), self.stands_s)

    def time_of(self, steps: int) -> float:
        """When a step ends."""
        end_s = self.began_s + steps * self.step_s
        return end_s + self.stands_s if end_s > self.stands_at_s else end_s

    def steps_at(self, now_s: float) -> int:
        """Steps that are made by now."""
        return min(self.most, int((now_s - self.began_s - self.stood_s(now_s)) / self.step_s + 1e-6))

    def steps_until(self, end_s: float) -> int:
        """Steps after which it is over, where another one would end further from this time (`PhaseLength.is_over`)."""
        steps = max(1, math.ceil((end_s - self.began_s) / self.step_s - 0.5 - 1e-9))
        while steps > 1 and self._is_over(steps - 1, end_s):
            steps -= 1
        return steps

    def _is_over(self, steps: int, end_s: float) -> bool:
        elapsed_s = self.time_of(steps) - self.began_s
        return self.began_s + elapsed_s + elapsed_s / steps / 2 >= end_s


def transfer_s(model: RunModel, rates: Sequence[int]) -> float:
    """Predicted seconds of a reduction between nodes with links of these Mbit/s, in the shape that they would choose.

    With sites that is between those that speak for them; what moves inside a site is not counted.
    """
    if len(rates) <= 1:
        return 0.0
    network, equal = LinkTable(tuple(rates), rtt_ms=model.rtt_ms), (1 / len(rates),) * len(rates)
    direct_s = min(all_to_all_s(owned, model.encoded_bytes, network) for owned in (equal, shard_shares(tuple(rates))))
    around_s = ring_s(len(rates), model.encoded_bytes, network)
    return around_s if RING_GAIN * around_s < direct_s else direct_s


def fetch_s(model: RunModel, mbit_s: float) -> float:
    """Predicted seconds until a node that joins at this rate has the state."""
    return model.state_bytes * 8e-6 / mbit_s + model.rtt_ms / 1e3

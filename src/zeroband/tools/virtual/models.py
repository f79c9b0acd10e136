"""How long things take in a run in virtual time, and when nodes are lost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroband.elastic.membership.topology import LinkTable, shard_shares
from zeroband.elastic.transport.shape import WORTH_A_RING
from zeroband.elastic.transport.times import all_to_all_s, ring_s


@dataclass(frozen=True)
class NodeModel:
    """One node, whatever becomes of its processes."""

    step_s: float
    """Seconds of an inner step."""
    mbit_s: int
    """Rate of its access link in each direction."""


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


def transfer_s(model: RunModel, nodes: Sequence[int]) -> float:
    """Predicted seconds of a reduction between these nodes, in the shape that they would choose."""
    if len(nodes) == 1:
        return 0.0
    rates = tuple(model.nodes[node].mbit_s for node in nodes)
    network, equal = LinkTable(rates, rtt_ms=model.rtt_ms), (1 / len(nodes),) * len(nodes)
    direct_s = min(all_to_all_s(owned, model.encoded_bytes, network) for owned in (equal, shard_shares(rates)))
    around_s = ring_s(len(nodes), model.encoded_bytes, network)
    return around_s if WORTH_A_RING * around_s < direct_s else direct_s


def fetch_s(model: RunModel, node: int) -> float:
    """Predicted seconds until a node that joins has the state."""
    return model.state_bytes * 8e-6 / model.nodes[node].mbit_s + model.rtt_ms / 1e3

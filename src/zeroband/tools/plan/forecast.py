"""Traffic and waiting time of each algorithm, by the formulas of docs/algorithms.md. Pure.

With N parameters, M nodes, E bytes of N encoded values, inner steps of t seconds and H of them in a round:

- all-reduce: each node sends and receives 2 (M - 1) / M E, in the time that `elastic/transport/shape.py` predicts
- all-gather: each node sends its payload to M - 1 others and receives theirs
- utilisation: H t / (H t + own + stragglers + max(0, agreement + transfer + unpacking - overlap))

`own` is a node's work for a round that blocks training, `agreement` the store round trips of the members, `stragglers`
the wait for the slowest node. With S sites, traffic is that of S instead of M nodes: means once per site, each payload
once to every other site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from zeroband.config.outer import DemoConfig, DilocoConfig, SparseLocoConfig
from zeroband.config.stability import Method
from zeroband.elastic.membership.topology import LinkTable
from zeroband.elastic.transport.shape import MESSAGE_S, all_to_all_s
from zeroband.errors import ConfigError
from zeroband.kernels.formats import FORMATS
from zeroband.outer.sparse.sizes import HEADER, combined_size, records_size

STORE_TRIPS = 4
"""Round trips to the store in an undisturbed round, for the last member: ready, plan, vote, verdict."""

Relay = Literal["none", "store", "aggregator"]
"""Route of sparse payloads. none: to every other node. store: up once, read by all others. aggregator: up once, down
one payload that combines all."""

Device = Literal["cpu", "gpu"]
"""Device of state and codec. gpu: on the GPU as far as this package supports it, the rest on the host. With infinite
cores nothing is left for the host, as in implementations with everything on the GPU."""

CODECS_OF: Mapping[Method, tuple[str, ...]] = {
    "ddp": ("fp32", "fp16", "bf16", "int8"),
    "diloco": ("fp32", "fp16", "int8", "int4"),
    "streaming": ("int8", "int4"),
    "eager": ("int8", "int4"),
    "sparseloco": ("two_bit",),
    "demo": ("sign",),
}
"""Codecs by method, in order of preference: the least known loss first. No loss by int8 or int4 pseudo-gradients is
known up to 15B."""

HEADERS = (1538 + 90 / 2) / 1448
"""Bytes on the wire per payload byte: IP and TCP with timestamps take 52 of a packet's 1500 bytes, Ethernet 38 more
with preamble and gap, and an acknowledgement is sent for every other packet of the opposite direction."""


@dataclass(frozen=True)
class Link:
    """The slowest node's internet access."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float
    """Round trip to another node."""
    store_rtt_s: float | None = None
    """Round trip to the store; None: `rtt_s`."""
    store_trips: float = STORE_TRIPS
    """Round trips to the store per synchronisation."""
    efficiency: float = 1.0
    """Fraction of the rates that transfers reach, headers included."""

    @property
    def agreement_s(self) -> float:
        """Time for the members to agree on the start and the end of a round."""
        return self.store_trips * (self.rtt_s if self.store_rtt_s is None else self.store_rtt_s)

    def network(self, nodes: int) -> LinkTable:
        """Return the links of an all-reduce, limited by the slower direction; whole Mbit/s and ms, as in a run."""
        mbit = max(1, round(self.efficiency * min(self.up_bytes_per_s, self.down_bytes_per_s) * 8 / 1e6))
        return LinkTable((mbit,) * nodes, rtt_ms=max(1, round(self.rtt_s * 1e3)))


@dataclass(frozen=True)
class Job:
    """The training job, and the settings that affect traffic or cautions."""

    params: float
    nodes: int
    step_s: float
    """Seconds of an inner step, without waiting."""
    inner_steps: int = 100
    """Inner steps per round of DiLoCo, streaming and eager."""
    sparse_steps: int = 30
    """Inner steps per round of SparseLoCo."""
    fragments: int = 5
    """Fragments of Streaming DiLoCo."""
    overlap: int = 5
    """Inner steps that a fragment may travel."""
    k: int = 4
    """Coefficients of 4096 that DeMo sends."""
    demo_overlap: int = 0
    """Steps that DeMo's payload may travel: 0 or 1."""
    relay: Relay = "none"
    cores: float = 4.0
    """Cores of a node for its own work in a round."""
    device: Device = "cpu"
    gpus: int = 1
    """GPUs of a node, which share its own work if `device` is "gpu"."""
    own_factor: float = 1.0
    """Own work on these machines over that by the constants."""
    sites: int | None = None
    """Sites with a fast network, whose inner traffic is not counted; None: one node per site."""
    slowest_step_s: float | None = None
    """Seconds of an inner step of the slowest node; None: `step_s`."""
    grace_s: float | None = None
    """Maximum wait for the slowest node once `quorum` is reached; None: unlimited."""
    quorum: float = 0.0
    """Fraction of the nodes that must be ready before the grace starts."""
    outer_lr: float | None = None
    """Outer learning rate, for cautions; None: a safe one for each method."""
    outer_momentum: float = 0.9
    """Outer momentum, for cautions."""
    total_steps: int | None = None
    """Inner steps of the run, for cautions about the number of rounds; None: unknown."""

    @property
    def senders(self) -> int:
        """Number of nodes or sites that exchange data over slow links."""
        return self.nodes if self.sites is None else self.sites

    def straggling_s(self, steps: int, times: int) -> float:
        """Return the seconds per round of `times` synchronisations in which all wait for the slowest node."""
        if self.slowest_step_s is None or self.nodes == 1:
            return 0.0
        late_s = steps * max(0.0, self.slowest_step_s - self.step_s)
        has_quorum = (self.nodes - 1) / self.nodes >= self.quorum
        return late_s if self.grace_s is None or not has_quorum else min(late_s, times * self.grace_s)


@dataclass(frozen=True)
class OwnWork:
    """CPU seconds of one core per value of the model; measured as docs/algorithms.md describes."""

    packing_s: float
    """Blocks training: contribution and encoding, outer step, digest and copies of the state."""
    round_s: float
    """Per synchronisation, independent of model size and number of cores."""
    unpacking_s: float = 0.0
    """Unpacking before a round can be applied."""
    payload_s: float = 0.0
    """Unpacking per node's payload."""


_DENSE = OwnWork(7e-9, 0.009)

OWN_WORK: Mapping[Method, OwnWork] = {
    "ddp": OwnWork(9e-9, 0.009),
    "diloco": _DENSE,
    "streaming": _DENSE,
    "eager": _DENSE,
    "demo": OwnWork(60e-9, 0.021, 22e-9, 2.5e-9),
    "sparseloco": OwnWork(27e-9, 0.02, 8e-9, 2e-9),
}
"""Own work by method on a CPU."""

_DENSE_ON_GPU = OwnWork(1.2e-10, 0.009)

OWN_WORK_ON_GPU: Mapping[Method, OwnWork] = {
    "ddp": OwnWork(4.2e-10, 0.009),
    "diloco": _DENSE_ON_GPU,
    "streaming": _DENSE_ON_GPU,
    "eager": _DENSE_ON_GPU,
    "demo": OwnWork(3e-11, 0.021, 1e-11, 2e-13),
    "sparseloco": OwnWork(2e-10, 0.02, 1e-11, 2e-12),
}
"""Own work by method with state and codec on a GPU, per value and GPU. Estimated, not measured (docs/algorithms.md):
bytes over PCIe at 20 GB/s and in GPU memory at 2 TB/s, instructions at half of an H100's peak."""

_NO_WORK, _BESIDE_CODEC = OwnWork(0.0, 0.0), OwnWork(7e-9, 0.0, 1.5e-9)

WORK_BESIDE_GPU: Mapping[Method, OwnWork] = {
    **dict.fromkeys(("diloco", "streaming", "eager"), _NO_WORK),
    "ddp": OwnWork(9e-9, 0.0),
    "demo": _BESIDE_CODEC,
    "sparseloco": _BESIDE_CODEC,
}
"""Additional work on the host, per value and core. On the GPU, this package has DiLoCo's outer state
(`outer.state_device`) and the codecs of DeMo and SparseLoCo; their error feedback and results, and all work of DDP, are
on the host."""


@dataclass(frozen=True)
class Forecast:
    """One method with one codec, for one node."""

    method: Method
    codec: str
    round_steps: int
    payload_bytes: int
    """Size of a node's encoded contribution to a round."""
    sent_bytes: float
    """Bytes sent per round, relayed ones included."""
    received_bytes: float
    peak_bytes: float
    """Bytes sent per synchronisation."""
    transfer_s: float
    """Transfer time per round."""
    beside_s: float
    """Agreement and unpacking per round."""
    overlap_s: float
    """Maximum part of both that overlaps training."""
    waits_s: float
    """Time per round for which training waits."""
    own_s: float
    """The node's own work per round, which blocks training."""
    step_s: float
    straggling_s: float = 0.0
    """Time per round spent waiting for the slowest node."""

    @property
    def round_s(self) -> float:
        """Seconds from one round to the next."""
        return self.round_steps * self.step_s + self.own_s + self.waits_s + self.straggling_s

    @property
    def compute_utilisation(self) -> float:
        """Fraction of the time in which the node computes."""
        return self.round_steps * self.step_s / self.round_s

    def payload_ratio(self, params: float) -> float:
        """Return the compression of a contribution against 2 bytes per parameter and step."""
        return 2 * params * self.round_steps / self.payload_bytes if self.payload_bytes else math.inf

    def faster_link(self, target: float) -> float:
        """Return the factor on the link's rates that reaches this utilisation, 1 if they suffice, ignoring latency.

        Infinite if no rate does.
        """
        idle_s = self.round_steps * self.step_s * (1 / target - 1) - self.own_s - self.straggling_s
        allowed_s = idle_s + self.overlap_s - self.beside_s
        return max(1.0, self.transfer_s / allowed_s) if min(idle_s, allowed_s) > 0 else math.inf


def forecasts(job: Job, link: Link) -> tuple[Forecast, ...]:
    """Forecast all methods with all their codecs. Raises ConfigError for contradicting settings."""
    return tuple(forecast_of(job, link, method, codec) for method, codecs in CODECS_OF.items() for codec in codecs)


def forecast_of(job: Job, link: Link, method: Method, codec: str) -> Forecast:
    """Forecast one method except "delayed"; the codec counts only for means. Raises as `forecasts` does."""
    match method:
        case "demo":
            config, overlap_s = DemoConfig(type="demo", k=job.k), job.demo_overlap * job.step_s
            return _gathered(job, link, config, steps=1, overlap_s=overlap_s)
        case "sparseloco":
            return _gathered(job, link, SparseLocoConfig(type="sparseloco"), steps=job.sparse_steps, overlap_s=0.0)
        case "ddp":
            return _averaged(job, link, method, codec, steps=1, overlap_s=0.0)
        case "streaming":
            _require_fragments(job)
            overlap_s = job.overlap * job.step_s
            return _averaged(job, link, method, codec, job.inner_steps, overlap_s=overlap_s, times=job.fragments)
        case _:
            overlap_s = job.inner_steps * job.step_s if method == "eager" else 0.0
            return _averaged(job, link, method, codec, job.inner_steps, overlap_s=overlap_s)


def _require_fragments(job: Job) -> None:
    """Hold the settings of fragments to the rules of the configuration. Raises ConfigError."""
    try:
        DilocoConfig(type="diloco", inner_steps=job.inner_steps, fragments=job.fragments, overlap=job.overlap)
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _averaged(
    job: Job, link: Link, method: Method, codec: str, steps: int, *, overlap_s: float, times: int = 1
) -> Forecast:
    """Forecast an all-reduce of all values per round, in `times` consecutive parts."""
    encoded, senders = FORMATS[codec].encoded_size(math.ceil(job.params / times)), job.senders
    sent = 2 * (senders - 1) / senders * encoded
    transfer_s = all_reduce_s(sent, senders, link)
    return _forecast(job, link, method, codec, steps, encoded, (sent, sent), transfer_s, overlap_s, times)


def _gathered(job: Job, link: Link, config: DemoConfig | SparseLocoConfig, *, steps: int, overlap_s: float) -> Forecast:
    """Forecast an all-gather of payloads per round, as if all parameters were one matrix of whole chunks."""
    chunk_numel, others = config.chunk**2, job.senders - 1
    chunks, kept = math.ceil(job.params / chunk_numel), min(config.k, chunk_numel)
    payload = HEADER.size + records_size(config.values, chunks, kept, chunk_numel)
    sent, received = payload * (others if job.relay == "none" else min(1, others)), payload * others
    if job.relay == "aggregator" and others:
        has_sums = config.values == "sign" and config.type == "demo"
        received = HEADER.size + combined_size(chunks, kept, chunk_numel, job.nodes, has_sums=has_sums)
    transfer_s = all_gather_s(sent, received, job.senders, link, ways=1 if job.relay == "none" else 2)
    moved = float(sent), float(received)
    return _forecast(job, link, config.type, config.values, steps, payload, moved, transfer_s, overlap_s)


def _forecast(
    job: Job,
    link: Link,
    method: Method,
    codec: str,
    steps: int,
    payload_bytes: int,
    moved: tuple[float, float],
    transfer_s: float,
    overlap_s: float,
    times: int = 1,
) -> Forecast:
    """Forecast rounds of `times` synchronisations. `moved`: bytes sent and received in each."""
    is_on_gpu, others = job.device == "gpu", job.nodes - 1
    on_gpu = OWN_WORK_ON_GPU[method] if is_on_gpu else _NO_WORK
    on_host = (WORK_BESIDE_GPU if is_on_gpu else OWN_WORK)[method]
    each_s = on_gpu.round_s + on_host.round_s / min(1.0, job.cores)
    packing_s = on_gpu.packing_s / job.gpus + on_host.packing_s / job.cores
    own_s = job.own_factor * (job.params * packing_s + times * each_s)
    unpacking_s = (
        job.own_factor
        * job.params
        * sum(
            (work.unpacking_s + work.payload_s * job.nodes) / workers
            for work, workers in ((on_gpu, job.gpus), (on_host, job.cores))
        )
    )
    beside_s = link.agreement_s + unpacking_s if others else 0.0
    sent, received = moved
    return Forecast(
        method,
        codec,
        steps,
        times * payload_bytes,
        times * sent,
        times * received,
        sent,
        transfer_s=times * transfer_s,
        beside_s=times * beside_s,
        overlap_s=min(times * overlap_s, steps * job.step_s),
        waits_s=times * max(0.0, transfer_s + beside_s - overlap_s),
        own_s=own_s if others else 0.0,
        step_s=job.step_s,
        straggling_s=job.straggling_s(steps, times),
    )


def all_reduce_s(sent_bytes: float, nodes: int, link: Link) -> float:
    """Predict the time of an all-reduce in which a node sends and receives `sent_bytes`."""
    if nodes == 1:
        return 0.0
    encoded = round(HEADERS * sent_bytes * nodes / (2 * (nodes - 1)))
    return all_to_all_s((1 / nodes,) * nodes, encoded, link.network(nodes))  # equal shards for equal links


def all_gather_s(sent_bytes: float, received_bytes: float, nodes: int, link: Link, *, ways: int = 1) -> float:
    """Predict the time of an all-gather of payloads. `ways`: consecutive hops."""
    if nodes == 1:
        return 0.0
    transfer_s = HEADERS * max(sent_bytes / link.up_bytes_per_s, received_bytes / link.down_bytes_per_s)
    return transfer_s / link.efficiency + ways * link.rtt_s + (nodes - 1) * MESSAGE_S

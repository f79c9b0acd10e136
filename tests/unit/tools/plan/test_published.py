"""Forecasts against runs and tables that others published: within twice, or the reason for what is not.

Sources are arXiv numbers. What a paper does not say is an assumption, named in the comment above its case; nothing of
these runs was repeated here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from zeroband.config.stability import Method
from zeroband.tools.plan.forecast import Forecast, Job, Link, forecast_of

GBIT = 1e9 / 8
TWICE = 2.0


def link(up_gbit: float, down_gbit: float | None = None, rtt_s: float = 0.1) -> Link:
    return Link(up_gbit * GBIT, (down_gbit or up_gbit) * GBIT, rtt_s)


def ratio(forecast: float, published: float) -> float:
    """How many times one is the other, whichever is larger."""
    return max(forecast / published, published / forecast)


# INTELLECT-1, arXiv:2412.01152, page 10: 10 B parameters, 14 nodes, H = 100 in 38 minutes, int8. Median all-reduce
# 103 s in the USA, 382 s with Europe, 469 s around the globe; computing 95.7, 85.6 and 83.0 % of the time; links of
# 0.5 to 4 Gbit/s. Assumed: the USA had 4 and the others 0.5 Gbit/s. Its quantiser makes 0.58 GB of float32 a second
# on 2 threads, measured on another machine, where ours takes 7 ns a value and core: 1.97 times as long. What it takes
# is in their times.
PRIME = Job(10e9, 14, 22.8, inner_steps=100, cores=2, own_factor=1.97)


@pytest.mark.parametrize(
    ("gbit", "rtt_s", "all_reduce_s", "computes"),
    [(4.0, 0.06, 103, 0.957), (0.5, 0.1, 382, 0.856), (0.5, 0.25, 469, 0.830)],
)
def test_intellect_1(gbit: float, rtt_s: float, all_reduce_s: float, computes: float) -> None:
    found = forecast_of(PRIME, link(gbit, rtt_s=rtt_s), "diloco", "int8")
    assert ratio(found.transfer_s + found.own_s, all_reduce_s) < TWICE
    assert ratio(1 - found.compute_utilisation, 1 - computes) < TWICE


# OpenDiLoCo, arXiv:2407.07852, abstract: 90 to 95 % of the time computes, on two continents, with float16. Assumed,
# from memory of its section on 1.1 B parameters and not looked up again: 4 nodes, H = 500 in 67.5 minutes, the
# slowest link at 127 Mbit/s. hivemind averages on the CPU; the constants of ours stand for it.
def test_open_diloco() -> None:
    found = forecast_of(Job(1.1e9, 4, 67.5 * 60 / 500, inner_steps=500), link(0.127), "diloco", "fp16")
    assert found.codec == "fp16"
    assert 0.05 / TWICE < 1 - found.compute_utilisation < TWICE * 0.10


# Streaming DiLoCo, arXiv:2501.18512, table of the Gbit/s that a part of the time for computing needs: 1 B parameters,
# 0.1 s a step, H = 100. Assumed: M = 2 and 16 bits, of which the table does not tell; 8 fragments, three blocks of 24
# each, which divide H = 104; no own work and no latency, for their simulation has none.
SIMULATED = Job(1e9, 2, 0.1, inner_steps=100, own_factor=1e-6)
STREAMED = replace(SIMULATED, inner_steps=104, fragments=8, overlap=1)


@dataclass(frozen=True)
class NeededLink:
    method: Method
    codec: str
    computes: float
    gbit: float

    def forecast_gbit(self) -> float:
        probe = Link(GBIT / 10, GBIT / 10, rtt_s=1e-4, store_rtt_s=1e-6)
        job = STREAMED if self.method == "streaming" else SIMULATED
        return forecast_of(job, probe, self.method, self.codec).faster_link(self.computes) / 10


@pytest.mark.parametrize(
    "case",
    [
        *(NeededLink("diloco", "bf16", c, g) for c, g in ((0.5, 1.4), (0.8, 6.2), (0.9, 13), (0.95, 23), (0.99, 87))),
        *(NeededLink("streaming", "int4", c, g) for c, g in ((0.5, 0.4), (0.8, 0.9), (0.9, 1.7), (0.95, 2), (0.99, 3))),
    ],
    ids=str,
)
def test_streaming_diloco_table(case: NeededLink) -> None:
    assert ratio(case.forecast_gbit(), case.gbit) < TWICE


@pytest.mark.parametrize(("computes", "gbit"), [(0.5, 87), (0.8, 153), (0.9, 184), (0.95, 222)])
def test_streaming_diloco_table_hides_gradients_behind_the_backward_pass(computes: float, gbit: float) -> None:
    """The forecast does not, and asks for 2 to 15 times the link; behind two thirds of a step it is within twice.

    That it hides them is said by the simulator of its first author, arthurdouillard.com/diloco.

    For 99 % the table has 569 Gbit/s, this 260, and nothing explains it.
    """
    idle_s, backward_s = 0.1 * (1 / computes - 1), 0.1 * 2 / 3
    alone = NeededLink("ddp", "bf16", computes, gbit).forecast_gbit()
    assert ratio(alone, gbit) > TWICE
    assert ratio(alone * idle_s / (idle_s + backward_s), gbit) < TWICE


# The same paper: 25 B tokens of Dolma take 441 TB with data parallel and 1.10 TB with FP4 and H = 100.
def test_streaming_diloco_bytes() -> None:
    ddp = forecast_of(SIMULATED, link(1), "ddp", "bf16")
    streaming = forecast_of(STREAMED, link(1), "streaming", "int4")
    assert ratio(ddp.sent_bytes / (streaming.sent_bytes / streaming.round_steps), 441 / 1.10) < TWICE


# DiLoCoX, arXiv:2506.21263, abstract: 107 B parameters over 1 Gbit/s train 357 times as fast as with AllReduce. Not
# known here: how long a step takes, the batch, H. Assumed: two clusters, as in its figure 1, float32, H = 125,
# delayed updates with int4. The factor is the step's duration over the all-reduce's, so the forecast cannot be held
# to it: it is checked for the steps for which it comes out, which take 5 to 21 s, and that the low rank, of which no
# formula is here, is not needed then.
@pytest.mark.parametrize(("step_s", "is_near"), [(5.5, True), (10.0, True), (20.0, True), (60.0, False)])
def test_dilocox(step_s: float, is_near: bool) -> None:
    job = Job(107e9, 2, step_s, inner_steps=125, device="gpu", cores=math.inf, gpus=80)
    plain, delayed = forecast_of(job, link(1), "ddp", "fp32"), forecast_of(job, link(1), "eager", "int4")
    faster = plain.round_s / (delayed.round_s / delayed.round_steps)
    assert (ratio(faster, 357) < TWICE) is is_near


# Covenant, arXiv:2603.08163 (72 B) and the SparseLoCo paper, arXiv:2508.15706, and its authors on it (8 B): k = 64 of
# 4096, two bits, H = 30, 20 payloads combined, object storage. 72 B: 70 s of communication, 20 minutes of computing,
# 94.5 %; 8 B: 12 s, 4.5 minutes; 110 Mbit/s up and 500 down. Assumed: 8 GPUs a node, codec there.
COVENANT = Job(72e9, 20, 1200 / 30, sparse_steps=30, relay="store", device="gpu", cores=math.inf, gpus=8)
STATED = link(0.110, 0.500)
OF_EIGHT_RANKS = link(8 * 0.110, 8 * 0.500)


def covenant(params: float, compute_s: float, on: Link) -> Forecast:
    return forecast_of(replace(COVENANT, params=params, step_s=compute_s / 30), on, "sparseloco", "two_bit")


@pytest.mark.parametrize(("params", "compute_s", "published_s"), [(72e9, 1200, 70), (8e9, 270, 12)])
def test_covenant(params: float, compute_s: float, published_s: float) -> None:
    """The stated rates cannot be a node's: 19 payloads of 1.97 GB at 500 Mbit/s take 10 minutes, not 70 s.

    Both runs took as long as if each of a node's 8 ranks had these rates for its own shard; that is a guess, and the
    forecast is within twice with it. Where downloads and computing overlapped it would be another reason.
    """
    least_s = 19 * params * 64 / 4096 * 14 / 8 / (0.5 * GBIT)
    assert least_s > TWICE * published_s
    stated, guessed = (covenant(params, compute_s, on) for on in (STATED, OF_EIGHT_RANKS))
    assert stated.transfer_s / least_s == pytest.approx(1.09, abs=0.03)
    assert ratio(guessed.waits_s, published_s) < TWICE


def test_covenant_computes_as_much_of_the_time_as_published() -> None:
    found = covenant(72e9, 1200, OF_EIGHT_RANKS)
    assert ratio(1 - found.compute_utilisation, 1 - 0.945) < TWICE


def test_covenant_with_the_work_of_a_processor_was_off_by_more() -> None:
    """What made sparse forecasts wrong: constants of 4 cores for what GPUs do, and a payload to each node."""
    on_cores = replace(COVENANT, device="cpu", relay="none", cores=4)
    found = forecast_of(on_cores, OF_EIGHT_RANKS, "sparseloco", "two_bit")
    assert (found.own_s + found.waits_s) / 70 > 4


# Psyche's Consilience 40 B, its public config/consilience/40b-devnet.toml: k = 4, chunks of 64, one bit, decay 0.995,
# 12288 to 32768 sequences of 2048 tokens in a batch, 16 clients at least, and at most 360 s for the training of a
# round. It is sized to train on one HGX; how long a step took is not published. Assumed: 16 nodes of 8 H100 (989
# TFLOP/s) at an MFU of 0.4, 100 Mbit/s.
@pytest.mark.parametrize("sequences", [12288, 32768])
def test_psyche_40b(sequences: int) -> None:
    step_s = 6 * 40e9 * sequences * 2048 / 16 / (8 * 989e12 * 0.4)
    job = Job(40e9, 16, step_s, k=4, demo_overlap=1, device="gpu", cores=math.inf, gpus=8)
    found = forecast_of(job, link(0.1), "demo", "sign")
    assert found.waits_s == 0
    assert found.round_s < 360
    if sequences == 32768:
        assert ratio(found.round_s, 360) < TWICE


# Its source sends 16 bits of place and one of sign for a coefficient: 964 times less than 2 bytes a parameter.
def test_psyche_payload() -> None:
    assert ratio(forecast_of(Job(40e9, 16, 1.0, k=4), link(0.1), "demo", "sign").payload_ratio(40e9), 964) < TWICE


# DisTrO's report as its readers give it: 1.2 B parameters on 32 GPUs, 86.8 MB a step where an all-gather of gradients
# takes 74.4 GB. k is not said; payloads are 857 times smaller, which is 4 or 5 of 4096 in its later format.
def test_distro_bytes() -> None:
    found = forecast_of(Job(1.2e9, 32, 1.0, k=4), link(1), "demo", "sign")
    assert ratio(found.sent_bytes, 86.8e6) < TWICE


# Unequal nodes, measured by bench/elastic.py slow (docs/benchmarks.md): four nodes, 0.1 s a step, one of them 0.3 s,
# H = 60. All wait: 0.403 of what their own speeds add up to; with a grace of 1 s: 0.918.
@pytest.mark.parametrize(("grace_s", "measured"), [(None, 0.403), (1.0, 0.918)])
def test_slow_node_of_four(grace_s: float | None, measured: float) -> None:
    job = Job(31e3, 4, 0.1, inner_steps=60, slowest_step_s=0.3, grace_s=grace_s)
    found = forecast_of(job, link(10, rtt_s=1e-3), "diloco", "int8")
    steps_of_slow = min(60.0, (60 * 0.1 + found.straggling_s) / 0.3)
    reached = (3 * 60 + steps_of_slow) / found.round_s / (3 / 0.1 + 1 / 0.3)
    assert reached == pytest.approx(measured, abs=0.06)

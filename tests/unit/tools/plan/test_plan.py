"""Predictions against numbers computed by hand, and what the command says."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from zeroband import cli
from zeroband.config.outer import DemoConfig, SparseLocoConfig
from zeroband.config.stability import Method
from zeroband.elastic.transport.shape import CONTENTION, MESSAGE_S
from zeroband.kernels.codec import CODECS
from zeroband.outer.demo import momentum_rule
from zeroband.outer.sparse.combine import combined_bytes
from zeroband.outer.sparseloco import error_rule
from zeroband.state.flat import FlatLayout, Slot
from zeroband.tools.arguments import parse_count, parse_rate, parse_size
from zeroband.tools.plan.advice import advise, cautions_of
from zeroband.tools.plan.command import human_time, main
from zeroband.tools.plan.forecast import (
    CODECS_OF,
    HEADERS,
    OWN_WORK,
    OWN_WORK_ON_GPU,
    STORE_TRIPS,
    WORK_BESIDE_GPU,
    Device,
    Forecast,
    Job,
    Link,
    Relay,
    forecasts,
)

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=2e6, rtt_s=0.05)
JOB = Job(params=4096e3, nodes=4, step_s=0.5, inner_steps=20, fragments=4, overlap=2)
MESSAGES_S = 6 * MESSAGE_S
"""Two to each of three others."""

SENDS_S = 24.576 * CONTENTION * HEADERS + 3 * 0.065536
"""One and a half times 16.384 MB at a MB/s, all-to-all, and the mean of the last chunk to three others."""


AGREES_S = STORE_TRIPS * 0.05
UNPACKS_S = (OWN_WORK["demo"].unpacking_s + 4 * OWN_WORK["demo"].payload_s) * 4096e3 / 4
"""DeMo's of four payloads, on four cores."""


def own_s(method: Method) -> float:
    return OWN_WORK[method].packing_s * JOB.params / JOB.cores + OWN_WORK[method].round_s


def of(method: str, values: str, job: Job = JOB, link: Link = LINK) -> Forecast:
    return next(f for f in forecasts(job, link) if (f.method, f.codec) == (method, values))


READ = {
    parse_count: {"1e9": 1e9, "1.5e9": 1.5e9, "7B": 7e9, "150M": 150e6, "2k": 2000, " 8 ": 8},
    parse_rate: {"20mbit": 2.5e6, "1gbit": 125e6, "2.5Gbit/s": 312.5e6, "800 kbit": 1e5},
    parse_size: {"80GB": 80e9, "79.6 GiB": int(79.6 * 2**30), "500mb": 5e8},
}
REFUSED = {
    parse_count: (
        r"is not a count of 1 or more; write it like 1\.5e9, 150M or 7B",
        ["", "0", "-1", "1e", "7 B", "7GB", "nan", "inf", "1e999", "0.5", "\u0661"],
    ),
    parse_rate: (
        "is not a rate above 0; write it in bits per second like 20mbit",
        ["20", "20MB", "0mbit", "-1mbit", "mbit", "20mbits", "20mbps", "1e999gbit"],
    ),
    parse_size: ("not a size of memory; write it like 80GB or", ["80", "80G", "-1GB", "GB", "0GB"]),
}


@pytest.mark.parametrize("parse", READ, ids=lambda parse: parse.__name__)
def test_number_with_its_unit_is_read(parse: Callable[[str], float]) -> None:
    assert {text: parse(text) for text in READ[parse]} == READ[parse]


@pytest.mark.parametrize("parse", REFUSED, ids=lambda parse: parse.__name__)
def test_what_is_no_such_number_is_refused_with_the_way_out(parse: Callable[[str], float]) -> None:
    way_out, texts = REFUSED[parse]
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=f"^{re.escape(repr(text))} .*{way_out}"):
            parse(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.0034, "3.4 ms"), (0.0995, "0.0995 s"), (7.421, "7.42 s"), (89.4, "89.4 s"), (89.6, "1.5 min"),
        (3210, "54 min"), (5399, "90 min"), (5400, "1.5 h"), (47.9 * 3600, "48 h"), (48 * 3600, "2 days"),
        (1e7, "116 days"), (math.inf, "forever"),
    ],
)  # fmt: skip
def test_times_are_told_in_units_that_people_take(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


def test_ddp_sends_all_values_every_step_and_waits_for_them() -> None:
    found = of("ddp", "fp32")
    assert found.sent_bytes == found.received_bytes == 2 * 3 / 4 * 4 * 4096e3
    assert found.transfer_s == pytest.approx(SENDS_S + 0.05 + MESSAGES_S)
    assert found.compute_utilisation == pytest.approx(0.5 / (0.5 + own_s("ddp") + AGREES_S + found.transfer_s))
    assert found.payload_ratio(JOB.params) == 0.5


def test_diloco_sends_as_much_once_a_round() -> None:
    found = of("diloco", "fp32")
    assert (found.sent_bytes, found.round_steps) == (of("ddp", "fp32").sent_bytes, 20)
    own, sends_s = own_s("diloco"), SENDS_S + 0.05 + MESSAGES_S
    assert found.compute_utilisation == pytest.approx(10 / (10 + own + AGREES_S + sends_s))
    assert found.faster_link(0.5) == pytest.approx(sends_s / (10 - own - AGREES_S))
    assert (found.faster_link(0.1), found.faster_link(0.999)) == (1.0, math.inf)


def test_encoded_sizes_are_those_of_the_codecs() -> None:
    for method in ("ddp", "diloco", "streaming", "eager"):
        for name in CODECS_OF[method]:
            parts = 4 if method == "streaming" else 1
            assert of(method, name).payload_bytes == parts * CODECS[name].encoded_size(4096_000 // parts)
    assert of("diloco", "int8").payload_bytes == 4096_000 + 4 * 16_000


def test_streaming_hides_what_fits_into_the_overlap_and_peaks_at_a_fragment() -> None:
    found = of("streaming", "int8")
    part = 1.5 * (1024_000 + 4 * 4000)
    assert found.peak_bytes == part
    assert found.sent_bytes == 4 * part
    last_s = 3 * HEADERS * 1040_000 / 4 / 16 / 1e6
    part_s = CONTENTION * HEADERS * part / 1e6 + last_s + 0.05 + MESSAGES_S
    assert found.waits_s == pytest.approx(4 * (part_s + AGREES_S - 1.0))
    assert of("streaming", "int8", Job(4096e3, 4, 2.0, 20, fragments=4, overlap=2)).waits_s == 0
    waiting = of("streaming", "int8", Job(4096e3, 4, 0.5, 20, fragments=4, overlap=0))
    assert waiting.waits_s == pytest.approx(4 * (part_s + AGREES_S))


def test_eager_waits_only_for_what_exceeds_its_round() -> None:
    transfer_s = CONTENTION * HEADERS * 1.5 * 4160 / 1e3 + 3 * 0.065536 + 0.05 + MESSAGES_S
    assert of("eager", "int8").transfer_s == pytest.approx(transfer_s)
    assert of("eager", "int8").waits_s == 0
    assert of("eager", "int8").compute_utilisation == pytest.approx(10 / (10 + own_s("eager")))
    short = of("eager", "int8", Job(4096e3, 4, 0.5, 10, fragments=5, overlap=2))
    assert short.compute_utilisation == pytest.approx(5 / (own_s("eager") + AGREES_S + transfer_s))


@pytest.mark.parametrize(("relay", "sent", "received", "ways"), [("none", 3, 3, 1), ("store", 1, 3, 2)])
def test_demo_and_sparseloco_send_their_payload_to_all_or_once(
    relay: Relay, sent: int, received: int, ways: int
) -> None:
    job = Job(4096e3, 4, 0.5, relay=relay, fragments=5)
    demo, sparse = of("demo", "sign", job), of("sparseloco", "two_bit", job)
    assert demo.payload_bytes == 32 + 1000 * 4 * (12 + 1) // 8
    assert sparse.payload_bytes == 32 + 1000 * 64 * (12 + 2) // 8 + 125 * 4
    for found in (demo, sparse):
        assert (found.sent_bytes, found.received_bytes) == (sent * found.payload_bytes, received * found.payload_bytes)
        took_s = HEADERS * max(found.sent_bytes / 1e6, found.received_bytes / 2e6)
        assert found.transfer_s == pytest.approx(took_s + ways * 0.05 + 3 * MESSAGE_S)
    assert demo.payload_ratio(job.params) == pytest.approx(1260, rel=0.01)
    assert sparse.payload_ratio(job.params) == pytest.approx(30 * 16 * 4096 / (64 * 14 + 4), rel=0.01)


def test_aggregator_bounds_what_comes_down_by_the_combined_payload() -> None:
    found = of("demo", "sign", Job(4096e3, 4, 0.5, relay="aggregator", fragments=5))
    assert found.sent_bytes == found.payload_bytes
    assert found.received_bytes == 32 + 1000 * 5 // 8 + 1000 * 16 * (12 + 4) // 8


@pytest.mark.parametrize(("params", "nodes"), [(4096, 2), (4096 * 1001, 5), (4096 * 12_345, 33)])
def test_payloads_of_the_forecast_are_those_of_the_codec(params: int, nodes: int) -> None:
    layout = FlatLayout((Slot("all", (params // 64, 64), 0),))
    job = Job(params, nodes, 0.5, relay="aggregator", fragments=5, k=3)
    demo = momentum_rule(DemoConfig(type="demo", k=3), layout).codec
    sparse = error_rule(SparseLocoConfig(type="sparseloco"), layout).codec
    for found, codec, weighted in (
        (of("demo", "sign", job), demo, False),
        (of("sparseloco", "two_bit", job), sparse, True),
    ):
        assert found.payload_bytes == codec.nbytes
        assert found.received_bytes == combined_bytes(codec, nodes, weighted=weighted)


def test_overlapped_step_hides_demos_payload() -> None:
    waiting, overlapped = (of("demo", "sign", Job(4096e3, 4, 2.0, fragments=5, demo_overlap=n)) for n in (0, 1))
    assert waiting.waits_s == pytest.approx(waiting.transfer_s + AGREES_S + UNPACKS_S)
    assert (overlapped.waits_s, overlapped.own_s) == (0, pytest.approx(own_s("demo")))


def test_more_cores_shorten_a_nodes_own_work_and_a_store_nearby_the_agreement() -> None:
    job = Job(4096e3, 4, 0.5, fragments=5, cores=2 * JOB.cores)
    found = of("demo", "sign", job, Link(1e6, 2e6, 0.05, store_rtt_s=0.001))
    assert found.own_s == pytest.approx((own_s("demo") + OWN_WORK["demo"].round_s) / 2)
    assert found.beside_s == pytest.approx(STORE_TRIPS * 0.001 + UNPACKS_S / 2)


@pytest.mark.parametrize("method", ["diloco", "sparseloco", "demo"])
def test_links_that_transfers_use_in_part_take_that_much_longer(method: str) -> None:
    values = {"diloco": "int8", "sparseloco": "two_bit", "demo": "sign"}[method]
    whole, half = (of(method, values, link=replace(LINK, rtt_s=1e-6, efficiency=e)) for e in (1.0, 0.5))
    assert half.transfer_s / whole.transfer_s == pytest.approx(2.0, rel=0.02)


def test_agreement_takes_the_trips_that_were_measured() -> None:
    found = of("diloco", "int8", link=replace(LINK, store_trips=6.5, store_rtt_s=0.02))
    assert found.beside_s == pytest.approx(6.5 * 0.02)


def test_float16_travels_at_half_the_bytes_of_float32() -> None:
    for method in ("ddp", "diloco"):
        assert of(method, "fp16").payload_bytes == CODECS["fp16"].encoded_size(4096_000)


OF_METHOD: Mapping[Method, str] = {"ddp": "fp32", "diloco": "int8", "sparseloco": "two_bit", "demo": "sign"}


@pytest.mark.parametrize("method", OF_METHOD)
def test_own_work_on_gpus_is_shared_by_them(method: Method) -> None:
    jobs = [replace(JOB, params=4096e5, device="gpu", gpus=gpus, cores=math.inf) for gpus in (1, 8)]
    one, eight = (of(method, OF_METHOD[method], job) for job in jobs)
    fixed_s, work = OWN_WORK_ON_GPU[method].round_s, OWN_WORK_ON_GPU[method]
    assert one.own_s == pytest.approx(work.packing_s * 4096e5 + fixed_s)
    assert eight.own_s == pytest.approx(work.packing_s * 4096e5 / 8 + fixed_s)
    assert one.own_s < of(method, OF_METHOD[method], replace(JOB, params=4096e5)).own_s


@pytest.mark.parametrize("method", OF_METHOD)
def test_what_stays_in_host_memory_on_a_node_of_gpus_is_work_of_its_cores(method: Method) -> None:
    machines: tuple[tuple[Device, float], ...] = (("gpu", math.inf), ("gpu", 16), ("cpu", 16))
    jobs = [replace(JOB, params=4096e5, device=device, gpus=8, cores=cores) for device, cores in machines]
    only, found, on_cpu = (of(method, OF_METHOD[method], job) for job in jobs)
    assert found.own_s - only.own_s == pytest.approx(WORK_BESIDE_GPU[method].packing_s * 4096e5 / 16)
    assert (found.own_s == only.own_s) is (method == "diloco")
    assert found.own_s + found.beside_s < 1.1 * (on_cpu.own_s + on_cpu.beside_s)


def test_machines_that_take_longer_than_the_constants_take_so_for_all_of_it() -> None:
    usual, slow = (of("demo", "sign", replace(JOB, own_factor=factor)) for factor in (1.0, 3.0))
    assert slow.own_s == pytest.approx(3 * usual.own_s)
    assert slow.beside_s - AGREES_S == pytest.approx(3 * (usual.beside_s - AGREES_S))


@pytest.mark.parametrize("relay", ["none", "store"])
def test_bytes_of_a_node_do_not_grow_with_the_nodes_of_a_site(relay: Relay) -> None:
    few, many = (replace(JOB, nodes=nodes, sites=4, relay=relay) for nodes in (8, 512))
    for here, there in zip(forecasts(few, LINK), forecasts(many, LINK), strict=True):
        assert (here.sent_bytes, here.received_bytes) == (there.sent_bytes, there.received_bytes)
        assert here.transfer_s == there.transfer_s
    alone = of("sparseloco", "two_bit", replace(JOB, nodes=512))
    assert alone.sent_bytes == 511 / 3 * of("sparseloco", "two_bit", many).sent_bytes or relay != "none"


def test_what_an_aggregator_sends_a_site_is_made_of_the_payloads_of_all_nodes() -> None:
    few, many, all_apart = (
        of("demo", "sign", replace(JOB, nodes=nodes, sites=sites, relay="aggregator"))
        for nodes, sites in ((8, 4), (64, 4), (64, None))
    )
    assert few.sent_bytes == many.sent_bytes
    assert few.received_bytes < many.received_bytes == all_apart.received_bytes


def test_demo_is_not_warned_of_payloads_that_sites_keep_off() -> None:
    for sites, warned in ((None, True), (8, False)):
        job = replace(JOB, params=2e9, nodes=64, sites=sites)
        said = [str(caution) for caution in cautions_of(of("demo", "sign", job), job)]
        assert any("every node downloads 63 payloads" in text for text in said) is warned


def test_nodes_at_one_site_agree_and_send_nothing_over_wide_links() -> None:
    for found in forecasts(replace(JOB, sites=1), LINK):
        assert (found.sent_bytes, found.received_bytes, found.transfer_s) == (0, 0, 0)
        assert found.own_s > 0 and found.beside_s >= AGREES_S


@pytest.mark.parametrize(
    ("grace_s", "quorum", "waits_s"),
    [(None, 0.0, 10.0), (2.0, 0.0, 2.0), (2.0, 0.75, 2.0), (2.0, 0.8, 10.0), (60, 0, 10)],
)
def test_slowest_node_is_waited_for_until_the_grace_of_a_quorum_is_over(
    grace_s: float | None, quorum: float, waits_s: float
) -> None:
    job = replace(JOB, slowest_step_s=1.0, grace_s=grace_s, quorum=quorum)
    found, usual = of("diloco", "int8", job), of("diloco", "int8")
    assert found.straggling_s == waits_s
    assert found.round_s == pytest.approx(usual.round_s + waits_s)
    assert found.compute_utilisation < usual.compute_utilisation


def test_fragments_have_a_grace_each_and_one_node_waits_for_nobody() -> None:
    job = replace(JOB, slowest_step_s=1.0, grace_s=1.5)
    assert of("streaming", "int8", job).straggling_s == 4 * 1.5
    assert of("diloco", "int8", replace(job, nodes=1)).straggling_s == 0.0


def test_no_link_is_fast_enough_where_a_slow_node_takes_more_than_the_idle_time() -> None:
    job = replace(JOB, slowest_step_s=1.0)
    assert of("diloco", "int8", job).faster_link(0.6) == math.inf
    assert of("diloco", "int8", job).faster_link(0.3) < math.inf


def test_one_node_sends_nothing() -> None:
    for found in forecasts(Job(1e6, 1, 0.5), LINK):
        assert (found.sent_bytes, found.received_bytes, found.transfer_s, found.compute_utilisation) == (0, 0, 0, 1.0)


def test_fast_link_gets_ddp_and_slow_links_get_what_hides_or_saves() -> None:
    def taken(up: float, params: float = 1e9, rtt_s: float = 0.05) -> str:
        job = Job(params, 2, step_s=2.0)
        found = forecasts(job, Link(up, up, rtt_s))
        return advise(found, job, 0.95)[0].method

    assert taken(125e9, params=1e6, rtt_s=0.001) == "ddp"
    assert [taken(up) for up in (1.25e9, 12.5e6, 3e6)] == ["diloco", "streaming", "eager"]


def test_advice_says_what_would_help_where_nothing_is_enough() -> None:
    job = Job(1e9, 8, step_s=2.0)
    link = Link(2.5e6, 2.5e6, 0.1)
    _, reasons = advise(forecasts(job, link), job, 0.95)
    assert "comes closest" in reasons[0]
    (way,) = [reason for reason in reasons if reason.startswith("eager with int4 would with")]
    longer = Job(1e9, 8, step_s=2.0, inner_steps=int(way.split()[-3]), fragments=1)
    assert of("eager", "int4", longer, link).compute_utilisation >= 0.95
    shorter = Job(1e9, 8, step_s=2.0, inner_steps=longer.inner_steps - 1, fragments=1)
    assert of("eager", "int4", shorter, link).compute_utilisation < 0.95


def test_unstable_method_is_not_recommended() -> None:
    job, link = Job(1e9, 8, step_s=2.0, inner_steps=500), Link(2.5e6, 2.5e6, 0.1)
    assert advise(forecasts(job, link), job, 0.95)[0].method == "eager"
    assert advise(forecasts(job, link), replace(job, outer_lr=0.7), 0.95)[0].method != "eager"


def test_command_prints_a_table_a_recommendation_and_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--params", "1e9", "--nodes", "8", "--up", "20mbit", "--step-s", "2", "--outer-lr", "0.7"]
    assert cli.main(["plan", *arguments]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:15]].count("diloco") == 4
    assert "diloco      int8     100    1.78 GB" in shown
    assert "ddp         fp32     1      7 GB     7 GB      7 GB       54 min    2.26 s  54 min" in shown
    for column in shown.splitlines()[0].split("  "):
        assert not column or column == "method" or f"\n  {column.strip()} " in shown, f"{column} is not explained"
    assert "\nrecommended: " in shown
    assert "UNSTABLE eager: outer.optimizer.lr: 0.7 with momentum 0.9 and 8 nodes is above 0.32" in shown


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--up", "20"], "--up: '20' is not a rate above 0; write it in bits per second like 20mbit or 1gbit"),
        (["--params", "7GB"], "--params: '7GB' is not a count of 1 or more; write it like 1.5e9, 150M or 7B"),
        (["--nodes", "0"], "--nodes: '0': input should be greater than or equal to 1"),
        (["--efficiency", "95"], "--efficiency: '95': input should be less than or equal to 1"),
        (["--target", "95"], "--target: '95': input should be less than 1"),
        (["--sites", "9"], "--sites: 9 sites need a node each, but there are 8"),
        (["--fragments", "3"], "outer.inner_steps=100 is not a multiple of outer.fragments=3; nearest: 99 or 102"),
    ],
)
def test_command_says_what_is_wrong(changed: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["--params", "1e9", "--nodes", "8", "--up", "20mbit", "--step-s", "2", *changed], message, capsys)


def refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with 2 and says so, whether its parser or the command itself finds it."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2 and capsys.readouterr().err.endswith(f"{message}\n")


TINY = ("--model.d-model=32", "--model.n-layers=1", "--model.n-heads=2", "--model.d-ff=64", "--data.seq-length=64")


@pytest.mark.slow
def test_command_says_what_a_run_takes_and_which_link_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ("--gpus", "2", "--gpu-memory", "2GB", "--gpu-tflops", "100", "--mfu", "0.5")
    assert main([*TINY, "--outer.type=diloco", *gpus, "--nodes", "4", "--up", "1gbit"]) == 0
    shown = capsys.readouterr().out
    for row in (
        "each GPU",
        "  parameters",
        "  context",
        "host memory",
        "  donor's copy",
        "shared memory",
        "  outer state",
    ):
        assert f"\n{row} " in shown
    assert "\nfits: 1." in shown
    assert "\nan inner step takes" in shown and "at an MFU of 50 %, predicted" in shown
    assert "\nrecommended: " in shown


@pytest.mark.slow
def test_command_ends_with_3_and_names_the_settings_where_memory_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--train.micro-bs=512", "--gpu-memory", "0.8GB"]) == 3
    shown = capsys.readouterr().out
    assert "\nDOES NOT FIT: " in shown and "fits  --train.micro_bs " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--params, --nodes, --up, --step-s: needed to choose a method for a link; --help shows an example"),
        ([*TINY], "--gpu-memory is missing: memory of one GPU, such as 80GB"),
        ([*TINY, "--gpu-memory", "80"], "--gpu-memory: '80' is not a size of memory; write it like 80GB or 79.6GiB"),
        (["--model.d_modl", "3"], "unknown key model.d_modl (from --model.d_modl): did you mean model.d_model?"),
    ],
)
def test_command_says_what_it_lacks(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(arguments, message, capsys)

"""/metrics, /healthz and /readyz: what Prometheus and probes are told of a node."""

from __future__ import annotations

import json
import logging
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from zeroband.errors import ConfigError
from zeroband.observe.events import EVENTS, EventLog
from zeroband.observe.log import get_logger
from zeroband.observe.metrics import METRICS, SERIES, MetricsLog, prometheus_name
from zeroband.observe.prometheus import Exporter, MetricsServer

prometheus_client = pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra prometheus")

STARTED_S = 1000.0
LABELS = {"run": "run-1", "node": "n0"}


class Node:
    """An exporter, what is wrong with its trainer, and what it says."""

    def __init__(self, tmp_path: Path) -> None:
        self._dir = tmp_path / "run-1" / "n0"
        self.ailing: list[str] = []
        self.asked = 0
        self.exporter = Exporter(
            run_id=LABELS["run"],
            node_id=LABELS["node"],
            build={"torch": "2.13", "git": "abc", "version": "1.2", "config_hash": "d1"},
            folders={"run.dir": tmp_path / "not" / "yet"},
            saves=True,
            problems=self._ask,
            now=lambda: STARTED_S,
        )

    def _ask(self) -> list[str]:
        self.asked += 1
        return list(self.ailing)

    def serve(self, port: int = 0) -> MetricsServer:
        return MetricsServer(self.exporter, host="127.0.0.1", port=port, node_dir=self._dir)

    def event(self, kind: str, at_s: float = 1.0, **fields: Any) -> None:
        self.exporter.write({"kind": kind, "at_s": at_s, **fields})

    def step(self, step: int, **values: Any) -> None:
        self.exporter.write({"step": step, "at_s": 2.0 * step, **{k.replace("__", "/"): v for k, v in values.items()}})

    def samples(self) -> dict[tuple[str, str], float]:
        """By name and the values of the labels beside run and node."""
        found: dict[tuple[str, str], float] = {}
        for family in parser.text_string_to_metric_families(self.exporter.exposition("")[1].decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert {name: labels.pop(name) for name in LABELS} == LABELS
                found[sample.name, ",".join(labels.values())] = sample.value
        return found

    def value(self, name: str, own: str = "") -> float:
        return self.samples()[f"zeroband_{name}", own]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("metric", METRICS)
def test_name_follows_the_conventions_of_prometheus(metric: str) -> None:
    name, row = prometheus_name(metric), METRICS[metric]
    assert re.fullmatch(r"zeroband_(train|outer|eval|data|ckpt|node|comm|membership)_[a-z_]+", name)
    assert name.endswith("_total") == row.adds_up and not (row.labels and name not in SERIES)
    units = {"s": "_seconds", "bytes/s": "_bytes_per_second", "bytes": "_bytes", "ratio": "_ratio"}
    assert units.get(row.unit.split(" ")[0], "") in name and not re.search("_(s|ms|mb|percent)(_|$)", name)


def test_no_two_metrics_have_one_name() -> None:
    names = [(prometheus_name(name), *row.labels.values()) for name, row in METRICS.items()]
    names += [(name,) for name in SERIES]
    assert len(names) > 50 and len(set(names)) == len(names)


NONE = set[str]()
EXPECTED = {
    "zeroband_step": ("gauge", NONE),
    "zeroband_tokens_total": ("counter", NONE),
    "zeroband_last_step_timestamp_seconds": ("gauge", NONE),
    "zeroband_comm_bytes_total": ("counter", {"dir", "kind"}),
    "zeroband_outer_step_seconds": ("histogram", {"le"}),
    "zeroband_node_up": ("gauge", NONE),
    "zeroband_membership_epoch": ("gauge", NONE),
    "zeroband_recovery_seconds": ("histogram", {"le"}),
    "zeroband_build_info": ("gauge", {"version", "git", "torch", "config_hash"}),
}


def test_names_that_hands_expect_are_there(node: Node) -> None:
    node.step(1, outer__round=1, outer__epoch=2, train__tokens_per_s=10.0, train__step_s=0.5)
    text = node.exporter.exposition("")[1].decode()
    found = {
        f"{family.name}{'_total' if family.type == 'counter' else ''}": (
            family.type,
            {label for sample in family.samples for label in sample.labels} - LABELS.keys(),
        )
        for family in parser.text_string_to_metric_families(text)
    }
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert node.value("build_info", "d1,abc,2.13,1.2") == 1  # by its labels in any order: sorted by name


def test_every_metric_of_the_table_is_exported(node: Node) -> None:
    values = {name.replace("<source>", "code"): "ab" * 16 if m.unit == "hex" else 1 for name, m in METRICS.items()}
    node.exporter.write({"step": 1, "at_s": 1.0, **values})
    node.event("round_committed", round=1, epoch=1, members=["n0#1"], digest="ab")
    exported = {re.sub("_seconds_(bucket|count|sum)$", "_seconds", name) for name, _ in node.samples()}
    assert exported == {*map(prometheus_name, METRICS), *SERIES}


def test_bytes_are_counted_by_direction_and_kind(node: Node) -> None:
    assert node.value("comm_bytes_total", "sent,round") == node.value("comm_bytes_total", "received,state") == 0
    for step in (1, 2):
        node.step(step, outer__sent_bytes=10, outer__received_bytes=30)
    for fetched in (0, 50, 100, 0, 7, 7, 20):  # the second state is fetched in two calls
        node.event("join_progress", bytes=fetched, of_bytes=100, bytes_per_s=None)
    assert node.value("comm_bytes_total", "sent,round") == 20
    assert node.value("comm_bytes_total", "received,round") == 60
    assert node.value("comm_bytes_total", "received,state") == 120


def test_epoch_of_the_membership_is_known_before_its_first_inner_step(node: Node) -> None:
    node.event("epoch_changed", epoch=3, members=["n0#1", "n1#1"])
    assert node.value("membership_epoch") == 3
    node.step(1, outer__round=7, outer__epoch=4)
    assert node.value("membership_epoch") == 4


def test_tokens_of_this_trainer_are_counted_and_those_of_the_run_shown(node: Node) -> None:
    node.step(1, train__tokens=900, train__tokens_per_s=300 / 0.7, train__step_s=0.7)
    node.step(2, train__tokens=600, train__tokens_per_s=300 / 1.3, train__step_s=1.3)  # the run went back
    assert (node.value("tokens_total"), node.value("train_tokens")) == (600, 600)


def test_durations_of_outer_steps_and_recoveries_are_counted_by_their_bounds(node: Node) -> None:
    node.step(1, train__loss=1.0)  # no outer step
    node.step(2, outer__round=1, outer__wait_s=0.25, outer__transfer_s=0.5, outer__apply_s=0.25)
    node.step(3, outer__round=2, outer__wait_s=5000.0, outer__transfer_s=0.5, outer__apply_s=0.25)
    node.event("recovered", round=2, digest="ab", took_s=12.5)
    samples = node.samples()
    counts = {bound: samples["zeroband_outer_step_seconds_bucket", bound] for bound in ("0.3", "1.0", "1000.0", "+Inf")}
    assert counts == {"0.3": 0, "1.0": 1, "1000.0": 1, "+Inf": 2}
    assert samples["zeroband_outer_step_seconds_sum", ""] == 5001.75
    assert (samples["zeroband_recovery_seconds_count", ""], samples["zeroband_recovery_seconds_sum", ""]) == (1, 12.5)


def test_gauges_show_the_newest_line_that_had_them_and_counters_add_up(node: Node) -> None:
    node.step(1, train__loss=3.0, train__step_s=0.5, data__tokens__code=10, train__mfu=0.25)
    node.step(2, train__loss=2.5, train__step_s=0.25, data__tokens__code=5, data__tokens__text=7)
    samples = node.samples()
    assert samples["zeroband_train_loss", ""] == 2.5
    assert samples["zeroband_train_mfu_ratio", ""] == 0.25
    assert samples["zeroband_train_step_seconds_total", ""] == 0.75
    assert (samples["zeroband_data_source_tokens_total", "code"], samples["zeroband_step", ""]) == (15, 2)
    assert samples["zeroband_data_source_tokens_total", "text"] == 7
    assert samples["zeroband_steps_total", ""] == 2
    assert samples["zeroband_last_step_timestamp_seconds", ""] == 4.0
    assert samples["zeroband_outer_ddp_bytes_total", ""] == 0  # from the start, so that the first is an increase
    assert ("zeroband_eval_loss", "") not in samples


def test_losses_that_are_no_numbers_are_said_as_prometheus_says_them(node: Node) -> None:
    node.step(1, train__loss=float("nan"), train__grad_norm=float("inf"))
    text = node.exporter.exposition("")[1].decode()
    assert re.search(r"^zeroband_train_loss\{.*\} NaN$", text, re.MULTILINE)
    assert node.value("train_grad_norm") == float("inf")


def test_digests_are_equal_as_numbers_where_they_are_as_text(node: Node) -> None:
    digests = ["0123456789abcdef" * 2, "0123456789ac0000" * 2]
    seen: list[float] = []
    for step, digest in enumerate([digests[0], digests[1], digests[0]], start=1):
        node.step(step, outer__digest=digest)
        seen.append(node.value("outer_digest"))
    assert seen == [0x0123456789AB, 0x0123456789AC, 0x0123456789AB]
    assert int(float(2**48 - 1)) == 2**48 - 1  # every one of them is a double


def test_events_are_counted_from_nought(node: Node) -> None:
    assert {(name, kind) for name, kind in node.samples() if name == "zeroband_events_total"} == {
        ("zeroband_events_total", kind) for kind in EVENTS
    }
    node.event("peer_lost", round=3, member_ids=["n1#1"])
    assert (node.value("events_total", "peer_lost"), node.value("events_total", "left")) == (1, 0)


def test_age_of_a_checkpoint_counts_from_the_start_until_there_is_one(node: Node) -> None:
    assert node.value("last_checkpoint_timestamp_seconds") == STARTED_S
    node.event("checkpoint_committed", at_s=2000.0, round=1, step=5, bytes=10, took_s=1.0)
    assert node.value("last_checkpoint_timestamp_seconds") == 2000.0


def test_warnings_of_the_log_are_counted_by_who_speaks(node: Node) -> None:
    store, level = get_logger("zeroband.elastic.store.redis_run"), logging.getLogger("zeroband").level
    assert node.value("log_warnings_total", "elastic.store.redis_run") == 0
    server = node.serve()
    store.warning("Redis is out of reach; trying again")
    store.info("Redis answers")
    server.close()
    store.warning("not heard any more")
    assert node.value("log_warnings_total", "elastic.store.redis_run") == 1
    assert logging.getLogger("zeroband").level == level


def test_node_is_ready_when_it_trains_as_a_member(node: Node) -> None:
    node.event("node_started", total_steps=10, local_world_size=1, parameters=5)
    assert node.exporter.unready_reason() == "starting"
    node.event("join_state", state="fetching", why="join", since="wait_old_lease")
    assert node.exporter.unready_reason() == "joining (fetching)"
    node.event("join_state", state="member", why="admitted", since="wait_old_lease")
    node.event("joined", member_id="n0#1", round=3)
    assert node.exporter.unready_reason() is None
    assert (node.value("node_ready"), node.value("node_state", "training")) == (1, 1)
    node.event("fenced", reason="its lease ran out")
    assert node.exporter.unready_reason() == "joining"
    assert (node.value("node_ready"), node.value("node_state", "training")) == (0, 0)


def test_free_space_is_that_of_the_first_folder_that_is_there(node: Node) -> None:
    assert 0 < node.value("disk_free_bytes", "run.dir") <= node.value("disk_size_bytes", "run.dir")


# -- the server -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(node: Node) -> Iterator[MetricsServer]:
    server = node.serve()
    yield server
    server.close()


def get(server: MetricsServer, path: str, **headers: str) -> tuple[int, str, Mapping[str, str]]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_server_answers_a_scraper_in_the_format_that_it_asks_for(node: Node, server: MetricsServer) -> None:
    node.step(1, train__loss=2.0)
    status, text, headers = get(server, "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=")
    assert "# TYPE zeroband_train_loss gauge" in text and "# TYPE zeroband_steps_total counter" in text
    _, text, headers = get(server, "/metrics?x=1", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text") and text.endswith("# EOF\n")
    assert get(server, "/nothing")[0] == 404


def test_probes_say_why_a_node_is_not_ready_and_what_ails_it(node: Node, server: MetricsServer) -> None:
    assert get(server, "/readyz")[:2] == (503, "starting\n")
    node.step(1, train__loss=2.0)
    assert get(server, "/readyz")[:2] == (200, "ready\n")
    assert get(server, "/healthz")[:2] == (200, "ok\n")


def test_ailing_trainer_is_not_healthy(node: Node, server: MetricsServer) -> None:
    node.ailing.append("n0: no progress for 65 s (fault.hung_s=60)")
    assert get(server, "/healthz")[:2] == (503, "n0: no progress for 65 s (fault.hung_s=60)\n")
    assert node.value("node_up") == 0


def test_many_probes_look_once(node: Node, server: MetricsServer) -> None:
    answers = [get(server, path)[0] for path in ("/healthz", "/metrics") * 5]
    assert answers == [200] * 10
    assert node.asked == 1


def test_clients_that_say_nothing_neither_hold_up_others_nor_the_end(node: Node) -> None:
    server = node.serve()
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(10)]
    assert get(server, "/healthz")[0] == 200
    threads = threading.active_count()
    more = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(30)]
    assert more[-1].recv(1) == b""  # hung up on
    assert threading.active_count() <= threads + 16
    server.close()
    for connection in (*silent, *more):
        connection.close()


def test_port_in_use_is_said_with_the_way_out_and_is_free_for_the_next_start(node: Node, server: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=rf"port {server.port}: Address already in use; .*observe.prometheus.port"):
        node.serve(server.port)
    assert get(server, "/healthz")[0] == 200  # leaves a connection behind that the kernel remembers
    server.close()
    again = node.serve(server.port)
    assert get(again, "/healthz")[0] == 200
    again.close()


def test_file_says_where_to_scrape_while_the_node_runs(server: MetricsServer, tmp_path: Path) -> None:
    (file,) = (tmp_path / ".prometheus").iterdir()
    assert file.name == "n0@run-1.json"
    assert json.loads(file.read_text()) == [{"targets": [f"127.0.0.1:{server.port}"]}]
    server.close()
    assert not file.exists()


def test_logs_hand_it_their_lines_and_close_it(node: Node, tmp_path: Path) -> None:
    server = node.serve()
    events, metrics = EventLog(tmp_path, [server]), MetricsLog(tmp_path, [server])
    events.emit("joined", member_id="n0#1", round=0)
    metrics.record(4, {"train/loss": 1.5})
    assert (node.value("events_total", "joined"), node.value("step")) == (1, 4)
    metrics.close()
    events.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=20)


def test_series_carry_no_times_of_making_and_those_of_a_training_loop_keep_theirs(node: Node) -> None:
    own = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("own", "Of a user's training loop.", registry=own)
    for accepted in ("", "application/openmetrics-text; version=1.0.0"):
        assert b"_created" not in node.exporter.exposition(accepted)[1]
    assert b"own_created" in prometheus_client.generate_latest(own)


def test_missing_extra_is_said_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"observe\.prometheus needs .*`uv sync --extra prometheus`"):
        Node(tmp_path)

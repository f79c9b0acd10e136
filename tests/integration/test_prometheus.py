"""A real Prometheus scrapes two real nodes, judges them by the alerts, and answers every panel of the dashboard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stores import free_port
from tests.tiny_runs import ForkedCluster

from zeroband.tools.cluster import LocalCluster, RedisServer

pytest.importorskip("prometheus_client", reason="needs the extra prometheus")

ROOT = Path(__file__).resolve().parents[2]
OBSERVE = ROOT / "deploy" / "observe"
ABSENT = {"mfu_ratio": "of GPUs", "gpu_peak_bytes": "of GPUs"}
"""What nodes on CPUs do not export."""

SETTINGS = {
    "model.d_model": 32,
    "model.n_layers": 2,
    "data.seq_length": 32,
    "data.source.type": "synthetic",
    "train.total_steps": 100_000,
    "train.batch_size": 8,
    "train.micro_bs": 8,
    "outer.inner_steps": 20,
    "eval.every_steps": 200,
    "ckpt.every_rounds": 10,
    "observe.prometheus.port": 0,
}


class Prometheus:
    """Debian's, with the repository's rules, following the nodes below a folder; asked each second."""

    def __init__(self, folder: Path, runs: Path) -> None:
        shutil.copy(OBSERVE / "alerts.yml", folder)
        config = (OBSERVE / "prometheus.yml").read_text().replace("/runs/", f"{runs}/").replace("15s", "1s")
        (folder / "prometheus.yml").write_text(config)
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = (folder / "log").open("w")
        address = self.url.removeprefix("http://")
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self.process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=self._log)

    def query(self, expression: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=20
        ) as answer:
            return json.load(answer)["data"]["result"]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._log.close()


def wait_for(what: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            if found := what():
                return found
        except OSError:  # it is not up yet
            pass
        assert time.monotonic() < end_s, what
        time.sleep(0.5)


@pytest.fixture(scope="module")
def cluster(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("scraped")
    flags = [f"--{key}={value}" for key, value in SETTINGS.items()]
    flags += [f"--data.cache_dir={folder / 'cache'}", f"--ckpt.path={folder / 'checkpoints'}"]
    preset = f"@{ROOT / 'configs' / 'debug' / 'diloco.toml'}"
    with ForkedCluster(folder / "runs", [preset, *flags], nodes=2, store_url=redis_server.url) as cluster:
        cluster.start()
        cluster.start()
        yield cluster


@pytest.fixture(scope="module")
def prometheus(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "--no-install-recommends", "prometheus"]
        subprocess.run(install, capture_output=True, check=False, timeout=120)
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus, Debian's package of that name")
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), cluster.run_dir.parent)
    yield server
    server.close()


@pytest.mark.soak
def test_nodes_are_found_scraped_and_well(prometheus: Prometheus) -> None:
    wait_for(lambda: len(prometheus.query("zeroband_outer_round > 20")) == 2, 300)
    assert {s["metric"]["node"]: s["value"][1] for s in prometheus.query("zeroband_node_ready")} == {
        "node0": "1",
        "node1": "1",
    }
    assert len(prometheus.query('up{job="zeroband"} == 1')) == 2
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
    with urllib.request.urlopen(f"{prometheus.url}/api/v1/rules", timeout=20) as answer:
        rules = [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
    assert len(rules) >= 14 and {rule["health"] for rule in rules} == {"ok"}


@pytest.mark.soak
def test_what_a_node_serves_passes_the_linter_of_prometheus(prometheus: Prometheus) -> None:
    (instance, *_) = (series["metric"]["instance"] for series in prometheus.query("zeroband_step"))
    with urllib.request.urlopen(f"http://{instance}/metrics", timeout=20) as answer:
        text = answer.read()
    linted = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    said = (linted.stdout + linted.stderr).decode().splitlines()
    assert [line for line in said if "_bits_per_byte" not in line] == []  # the field's own unit
    assert len(text.splitlines()) > 100


@pytest.mark.soak
def test_every_panel_is_answered(prometheus: Prometheus) -> None:
    wait_for(lambda: prometheus.query("zeroband_eval_loss"), 300)
    wait_for(lambda: prometheus.query("zeroband_ckpt_backlog_bytes"), 300)
    (run,) = {series["metric"]["run"] for series in prometheus.query("zeroband_build_info")}
    panels = json.loads((OBSERVE / "grafana" / "dashboards" / "zeroband.json").read_text())["panels"]
    empty: list[str] = []
    for expression in (target["expr"] for panel in panels for target in panel["targets"]):
        asked = expression.replace("$run", run).replace("$__rate_interval", "1m")
        if not prometheus.query(asked):
            empty.append(expression)
    assert [e for e in empty if not any(name in e for name in ABSENT) and not e.endswith("> 0")] == []
    assert len(panels) >= 20


@pytest.mark.soak
def test_a_node_that_is_killed_calls_somebody(cluster: LocalCluster, prometheus: Prometheus) -> None:
    cluster.nodes["node1"].kill()
    fired = wait_for(lambda: prometheus.query('ALERTS{alertname="ZerobandNodeLost", alertstate="firing"}'), 120)
    assert fired[0]["metric"]["severity"] == "warning"
    assert wait_for(lambda: prometheus.query('ALERTS{alertname="ZerobandNodeDown"}'), 60)
    assert prometheus.query('ALERTS{alertname="ZerobandDiverged"}') == []

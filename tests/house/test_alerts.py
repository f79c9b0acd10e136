"""What deploy/observe/ asks Prometheus is what nodes export, and every alert has its entry in the handbook."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from zeroband.elastic.store.redis_run import RedisRun
from zeroband.observe.events import EVENTS
from zeroband.observe.jsonl import JsonlWriter
from zeroband.observe.metrics import METRICS, SERIES, prometheus_name

HISTOGRAMS = [name for name, series in SERIES.items() if series.type == "histogram"]
EXPORTED = {
    *map(prometheus_name, METRICS),
    *(SERIES.keys() - {*HISTOGRAMS}),
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")),
}
LABELS = {"run", "node", "source", "le", *(label for series in SERIES.values() for label in series.labels)}


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return root / "deploy" / "observe"


@pytest.fixture(scope="module")
def alerts(folder: Path) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((folder / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return group["rules"]


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "grafana" / "dashboards" / "zeroband.json").read_text(encoding="utf-8"))


def dashboard_expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    yield from (annotation["expr"] for annotation in dashboard["annotations"]["list"])


def strangers(expression: str) -> set[str]:
    """Names, kinds of events and labels in an expression that no node exports."""
    names = set(re.findall(r"zeroband_\w+", expression))
    kinds = {kind for kinds in re.findall(r'kind=~?"([^"]*)"', expression) for kind in kinds.split("|")}
    grouped = ",".join(re.findall(r"(?:by|on|ignoring) \(([^)]*)\)", expression))
    labels = {*re.findall(r"(\w+)=~?\"", expression), *re.findall(r"\w+", grouped)}
    return (names - EXPORTED) | (kinds - EVENTS.keys()) | (labels - LABELS - {"job"})


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ('max by (run) (zeroband_train_loss{node="a"})', set[str]()),
        ("zeroband_train_los > 1", {"zeroband_train_los"}),
        ("rate(zeroband_recovery_seconds_sum[5m]) / zeroband_recovery_seconds", {"zeroband_recovery_seconds"}),
        ('zeroband_events_total{kind=~"left|lift"}', {"lift"}),
        ("sum by (nod) (zeroband_train_loss)", {"nod"}),
    ],
)
def test_what_no_node_exports_is_found(expression: str, found: set[str]) -> None:
    assert strangers(expression) == found


def test_alerts_ask_for_what_nodes_export(alerts: list[dict[str, Any]]) -> None:
    assert len(alerts) >= 14
    assert {alert["alert"]: found for alert in alerts if (found := strangers(alert["expr"]))} == {}


def test_alerts_name_parts_of_the_package_that_warn(alerts: list[dict[str, Any]]) -> None:
    named = {part for alert in alerts for part in re.findall(r'part="([^"]*)"', alert["expr"])}
    assert named == {cls.__module__.removeprefix("zeroband.") for cls in (RedisRun, JsonlWriter)}


def test_every_panel_asks_for_what_nodes_export(dashboard: dict[str, Any]) -> None:
    expressions = list(dashboard_expressions(dashboard))
    assert len(expressions) > 30
    assert [expression for expression in expressions if strangers(expression)] == []


def test_panels_have_places_and_titles_of_their_own(dashboard: dict[str, Any]) -> None:
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_every_alert_says_how_bad_it_is_and_has_its_entry_in_the_handbook(
    root: Path, alerts: list[dict[str, Any]]
) -> None:
    handbook = root / "docs" / "troubleshooting.md"
    headings = re.findall(r"^### (Zeroband\w+)$", handbook.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(headings) == sorted(alert["alert"] for alert in alerts)
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"{{{{ $externalLabels.handbook }}}}#{alert['alert'].lower()}"


def test_links_of_alerts_lead_to_an_address_that_an_operator_sets(folder: Path) -> None:
    settings = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
    address = urllib.parse.urlsplit(settings["global"]["external_labels"]["handbook"])
    assert address.scheme in ("http", "https") and address.netloc and not address.fragment
    assert address.path == "/docs/troubleshooting.html"  # where scripts/docs.sh makes it


def test_compose_starts_prometheus_and_grafana_where_they_are_asked_for(root: Path) -> None:
    compose = yaml.safe_load((root / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    watching = {name: service for name, service in services.items() if service.get("profiles") == ["observe"]}
    assert watching.keys() == {"prometheus", "grafana"}
    assert [name for name in ("redis", "node") if "profiles" in services[name]] == []
    assert services["node"]["environment"]["ZERO_BAND_OBSERVE__PROMETHEUS__HOST"] == "0.0.0.0"
    mounts = [mount for service in services.values() for mount in service.get("volumes", ())]
    paths = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(paths) == 4 and [path for path in paths if not (root / path).exists()] == []
    assert {mount.split(":")[0] for mount in mounts if not mount.startswith("./")} == {*compose["volumes"]}
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert len(ports) == 2 and all(port.startswith("127.0.0.1:") for port in ports)


def find_promtool() -> str:
    """Debian's, installed where this user may."""
    if shutil.which("promtool") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "--no-install-recommends", "prometheus"]
        subprocess.run(install, capture_output=True, check=False, timeout=120)
    return shutil.which("promtool") or pytest.skip("needs promtool, which Debian's package prometheus brings")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_promtool_finds_them_right(folder: Path, arguments: tuple[str, ...]) -> None:
    ended = subprocess.run([find_promtool(), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_every_alert_fires_in_a_test_of_its_rules(folder: Path, alerts: list[dict[str, Any]]) -> None:
    tests = yaml.safe_load((folder / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {
        name
        for test in tests
        for asked in test.get("promql_expr_test", ())
        for sample in asked["exp_samples"]
        if "pending" not in (labels := sample.get("labels", ""))
        for name in re.findall(r'alertname="(\w+)"', labels)
    }
    assert fired == {alert["alert"] for alert in alerts}

"""What a machine shows of itself, and what it is told to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_runs import TINY_MODEL

from zeroband.checks import machine
from zeroband.checks.checklist import all_checks
from zeroband.checks.finding import Finding
from zeroband.checks.machine import look_at_address
from zeroband.config import load_config
from zeroband.config.schema import RunConfig
from zeroband.kernels import native

STORE = ("--store.url", "redis://127.0.0.1:1")
DILOCO = (*STORE, "--outer.type", "diloco", "--outer.inner-steps", "10")


def config_with(*arguments: str) -> RunConfig:
    return load_config([*TINY_MODEL, *arguments], environ={})


def look(config: RunConfig) -> list[Finding]:
    return list(all_checks(config, {"PATH": "/usr/bin:/bin"}))


def seen(findings: list[Finding], what: str) -> Finding:
    return next(finding for finding in findings if finding.what == what)


def test_machine_that_runs_the_tests_is_fit_for_a_small_model(tmp_path: Path) -> None:
    findings = look(config_with("--node.shm-dir", str(tmp_path)))
    assert [finding.what for finding in findings if finding.is_fatal] == []
    assert "codecs for generic" in seen(findings, "native library").seen


def test_library_that_was_not_built_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "problem", lambda: "install a C++ compiler")
    found = seen(look(config_with(*DILOCO)), "native library")
    assert found.is_fatal and found.advice == "install a C++ compiler"


@pytest.mark.parametrize("arguments", [(), (*DILOCO, "--comm.backend", "gloo")])
def test_library_that_was_not_built_is_no_problem_where_nothing_is_averaged_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(native, "problem", lambda: "install a C++ compiler")
    findings = look(config_with(*arguments, "--node.shm-dir", str(tmp_path)))
    assert not any(finding.is_fatal for finding in findings)
    assert seen(findings, "native library").advice == "install a C++ compiler"
    assert "not applicable" in seen(findings, "encryption").seen


def test_machine_without_bbr_is_told_so_and_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("available", "reno cubic"), ("allowed", "reno")):
        (tmp_path / f"tcp_{name}_congestion_control").write_text(text)
    for name in ("tcp_rmem", "tcp_wmem"):
        (tmp_path / name).write_text("4096 131072 212992")
    monkeypatch.setattr(machine, "_IPV4", tmp_path)
    findings = look(config_with())
    assert "modprobe tcp_bbr" in seen(findings, "congestion control").advice
    assert "net.ipv4.tcp_rmem" in seen(findings, "largest tcp_rmem").advice
    assert not any(finding.is_fatal for finding in findings)


@pytest.mark.parametrize(
    ("host", "advice"), [("127.0.0.1", "only this machine reaches it"), ("192.0.2.7", "no interface has it")]
)
def test_address_that_others_cannot_use_comes_with_what_to_do(host: str, advice: str) -> None:
    assert advice in look_at_address(host, config_with()).advice

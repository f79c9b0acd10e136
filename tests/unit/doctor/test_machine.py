"""What a machine shows of itself, and what it is told to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.config import load_config
from zeroband.config.schema import RunConfig
from zeroband.doctor import machine
from zeroband.doctor.machine import Finding, look_at_address, look_at_machine

TINY = ["--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64"]
STORE = ("--store.url", "redis://127.0.0.1:1")
DILOCO = (*STORE, "--outer.type", "diloco", "--outer.inner-steps", "10")


def config_with(*arguments: str) -> RunConfig:
    return load_config([*TINY, *arguments], environ={})


def seen(findings: list[Finding], what: str) -> Finding:
    return next(finding for finding in findings if finding.what == what)


def test_machine_that_runs_the_tests_is_fit_for_a_small_model(tmp_path: Path) -> None:
    findings = list(look_at_machine(config_with("--node.shm-dir", str(tmp_path))))
    assert [finding.what for finding in findings if finding.is_fatal] == []
    assert "codecs for generic" in seen(findings, "native library").seen


def test_shared_memory_that_is_too_small_is_fatal_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = machine.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    found = seen(list(look_at_machine(config_with(*DILOCO, "--node.shm-dir", str(tmp_path)))), "shared memory")
    assert found.is_fatal and "1 KB free" in found.seen and "--shm-size" in found.advice


FED_ADAM = Path(__file__).resolve().parents[3] / "examples" / "fed_adam.py"
EAGER = ("--outer.overlap", "full", "--outer.merge", "eager", "--outer.optimizer.lr", "0.4")


@pytest.mark.parametrize(
    ("arguments", "bytes_each"),
    [
        ((), 0),
        (DILOCO, 16),
        ((*DILOCO, "--comm.codec", "int4"), 20),
        ((*DILOCO, *EAGER), 24),
        ((*STORE, "--outer.type", "ddp"), 20),
        ((*STORE, "--outer.type", "demo"), 12),
        ((*STORE, "--outer.type", "sparseloco", "--outer.inner-steps", "10"), 16),
        ((*STORE, "--outer.type", "custom", "--outer.algorithm", str(FED_ADAM), "--outer.inner-steps", "10"), 20),
    ],
)
def test_shared_memory_is_what_the_algorithm_and_checkpoints_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], bytes_each: int
) -> None:
    values, free = 1_000_000, 0
    monkeypatch.setattr(machine, "parameter_count", lambda model, vocab_size: values)
    usage = machine.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage._replace(free=free))

    def is_fatal(*more: str) -> bool:
        return seen(list(look_at_machine(config_with(*arguments, *more))), "shared memory").is_fatal

    free = bytes_each * values
    assert not is_fatal()
    assert is_fatal("--ckpt.path", str(tmp_path))
    free = max(bytes_each * values - 1, 0)
    assert is_fatal() == (bytes_each > 0)


def test_algorithm_whose_file_is_not_there_is_fatal(tmp_path: Path) -> None:
    outer = ("--outer.type", "custom", "--outer.algorithm", "absent.py", "--node.shm-dir", str(tmp_path))
    found = seen(list(look_at_machine(config_with(*STORE, *outer))), "outer algorithm")
    assert found.is_fatal and "outer.algorithm='absent.py' cannot be read" in found.advice


def test_folder_that_is_not_there_is_fatal(tmp_path: Path) -> None:
    found = seen(list(look_at_machine(config_with("--node.shm-dir", str(tmp_path / "none")))), "shared memory")
    assert found.is_fatal and "node.shm_dir" in found.advice


def test_library_that_was_not_built_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.native, "problem", lambda: "install a C++ compiler")
    found = seen(list(look_at_machine(config_with(*DILOCO))), "native library")
    assert found.is_fatal and found.advice == "install a C++ compiler"


@pytest.mark.parametrize("arguments", [(), (*DILOCO, "--comm.backend", "gloo")])
def test_library_that_was_not_built_is_no_problem_where_nothing_is_averaged_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(machine.native, "problem", lambda: "install a C++ compiler")
    findings = list(look_at_machine(config_with(*arguments, "--node.shm-dir", str(tmp_path))))
    assert not any(finding.is_fatal for finding in findings)
    assert seen(findings, "native library").advice == "install a C++ compiler"
    assert "not applicable" in seen(findings, "encryption").seen


def test_machine_without_bbr_is_told_so_and_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("available", "reno cubic"), ("allowed", "reno")):
        (tmp_path / f"tcp_{name}_congestion_control").write_text(text)
    for name in ("tcp_rmem", "tcp_wmem"):
        (tmp_path / name).write_text("4096 131072 212992")
    monkeypatch.setattr(machine, "_IPV4", tmp_path)
    findings = list(look_at_machine(config_with()))
    assert "modprobe tcp_bbr" in seen(findings, "congestion control").advice
    assert "net.ipv4.tcp_rmem" in seen(findings, "largest tcp_rmem").advice
    assert not any(finding.is_fatal for finding in findings)


@pytest.mark.parametrize(
    ("host", "advice"), [("127.0.0.1", "only this machine reaches it"), ("192.0.2.7", "no interface has it")]
)
def test_address_that_others_cannot_use_comes_with_what_to_do(host: str, advice: str) -> None:
    assert advice in look_at_address(host, config_with()).advice

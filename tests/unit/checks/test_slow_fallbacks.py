"""What is missing on a GPU is said in one line each, with its cost. The card is made up: the tests need none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from zeroband.checks.machine import slow_fallbacks
from zeroband.config import load_config
from zeroband.config.training import TrainConfig
from zeroband.kernels.dct_kernels import dct_kernels_on
from zeroband.kernels.fused import passes_on
from zeroband.model.parallel import compiles
from zeroband.node.mesh import LocalMesh

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 7)
ON_CUDA: Any = LocalMesh(0, 1, CUDA, *[None] * 2)  # type: ignore[arg-type]
STORE = ("--store.url", "redis://127.0.0.1:1")
DEMO = (*STORE, "--outer.type", "demo")
INT8 = ("--optim.state-dtype=int8",)
ON_GPU = (*STORE, "--outer.type", "diloco", "--outer.inner-steps", "10", "--outer.state-device", "cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A card that can do everything, with a compiler beside it; tests take away from that."""
    card = SimpleNamespace(capability=(9, 0), bin=tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "CARD")
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    varlen = ModuleType("varlen")  # torch's own takes seconds to load
    varlen.varlen_attn = lambda query: query
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "gcc").touch(0o755)
    return card


def said(*arguments: str, device: torch.device = CUDA) -> dict[str, str]:
    findings = list(slow_fallbacks(load_config(arguments, environ={}), device))
    assert not any(finding.is_fatal for finding in findings) and all(finding.advice for finding in findings)
    return {finding.what: finding.seen for finding in findings}


@pytest.mark.parametrize("arguments", [(), DEMO, ON_GPU, INT8, ("--train.float8=rowwise",)])
def test_card_that_has_everything_is_not_spoken_of(card: SimpleNamespace, arguments: tuple[str, ...]) -> None:
    assert said(*arguments) == {}
    assert compiles(TrainConfig(), ON_CUDA)


@pytest.mark.parametrize("arguments", [(), DEMO, ("--train.compile",)])
def test_machine_without_gpu_says_nothing(card: SimpleNamespace, arguments: tuple[str, ...]) -> None:
    (card.bin / "gcc").unlink()
    assert said(*arguments, device=CPU) == {}


@pytest.mark.parametrize(
    ("arguments", "also"),
    [((), []), (DEMO, ["outer kernels"]), (ON_GPU, ["outer kernels"]), (INT8, ["optim.state_dtype"])],
)
def test_without_a_compiler_the_model_is_eager_and_kernels_are_plain_torch(
    card: SimpleNamespace, arguments: tuple[str, ...], also: list[str]
) -> None:
    (card.bin / "gcc").unlink()
    found = said(*arguments)
    assert found.keys() == {"torch.compile", *also}
    assert found["torch.compile"] == "off, gcc or clang is not on the PATH"
    assert not compiles(TrainConfig(), ON_CUDA) and not compiles(TrainConfig(compile=True), ON_CUDA)
    assert passes_on(CUDA).__name__ == "zeroband.kernels.fused"
    assert dct_kernels_on(CUDA, longest=64).__name__ == "zeroband.kernels.dct_kernels"


def test_named_compiler_is_the_one_that_counts(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/absent/cc")
    assert said()["torch.compile"] == "off, /absent/cc is not on the PATH"


def test_without_triton_the_model_is_eager(card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton cannot be imported" in said()["torch.compile"]
    assert said("--train.compile=false") == {}


def test_what_a_card_is_too_old_for_is_named(card: SimpleNamespace) -> None:
    card.capability = (8, 0)
    assert said("--train.float8=rowwise") == {"train.float8": "off, CARD is older than compute capability 8.9"}
    card.capability = (6, 1)
    assert said().keys() == {"attention over packed documents", "torch.compile"}
    assert not compiles(TrainConfig(), ON_CUDA)


def test_float8_that_was_asked_for_on_a_cpu_is_said_to_be_off() -> None:
    assert said("--train.float8=tensorwise", device=CPU) == {"train.float8": "off, there is no GPU"}

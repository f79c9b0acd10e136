"""A mesh of one rank: all of it except what needs a second process (see tests/integration/test_parallel.py)."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroband.errors import ConfigError
from zeroband.node import mesh as mesh_module
from zeroband.node.gpus import Card
from zeroband.node.launched import RANKS_FILE
from zeroband.node.mesh import (
    LocalMesh,
    all_ok,
    barrier,
    broadcast_json,
    device_kind,
    init_local_mesh,
    join_local_mesh,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()


OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", RANKS_FILE: "a file"}


@pytest.mark.defect(10)
def test_mesh_without_torchrun_is_one_rank(mesh: LocalMesh) -> None:
    assert (mesh.rank, mesh.world_size, mesh.mesh.size()) == (0, 1, 1)
    assert dist.get_backend(mesh.control) == "gloo"


@pytest.mark.defect(12)
def test_mesh_refuses_torchrun_over_several_nodes() -> None:
    with pytest.raises(ConfigError, match="--nnodes 1"):
        init_local_mesh({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})


def test_mesh_in_a_program_with_groups_of_its_own_closes_only_what_it_made(mesh: LocalMesh) -> None:
    lent = join_local_mesh(torch.device("cpu"))
    twin = lent.twin()
    assert (lent.rank, lent.world_size, all_ok(True, lent), all_ok(True, twin)) == (0, 1, True, True)
    lent.close()
    lent.close()
    for closed in (lent, twin):
        with pytest.raises(KeyError):  # unknown to torch by now
            dist.get_process_group_ranks(closed.control)
    assert all_ok(True, mesh)


def test_one_process_keeps_the_gpu_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs by name: a machine of the tests has none."""
    current: list[torch.device] = []
    options: list[dict[str, object]] = []

    def ignore(*_: object, **given: object) -> None:
        options.append(given)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for replaced, name in (
        (dist, "init_process_group"),
        (mesh_module, "init_device_mesh"),
        (mesh_module, "_control_group"),
    ):
        monkeypatch.setattr(replaced, name, ignore)
    card = SimpleNamespace(name="CARD", total_memory=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    on_second = torch.device("cuda", 1)
    second = join_local_mesh(on_second)
    assert (second.device, second.gpu_bytes) == (on_second, 80)
    assert join_local_mesh(torch.device("cpu")).device == init_local_mesh({}).device == torch.device("cuda", 0)
    assert current == [on_second, torch.device("cuda", 0), torch.device("cuda", 0)]
    assert [given["device_id"] for given in options if "device_id" in given] == current


@pytest.fixture
def start_rank_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[LocalMesh, dict[str, Any]]]:
    """start(sees, other=...): rank 1 of 2 on a machine with these cards, beside a rank 0 that has told its own.

    Returns its mesh, and how the process groups were asked for.
    """
    asked: dict[str, Any] = {}

    def note(name: str, made: object = None) -> Callable[..., object]:
        def called(*positional: object, **given: object) -> object:
            asked[name] = {"positional": positional, **given}
            return made

        return called

    def start(sees: Sequence[Card], *, other: Card | None) -> tuple[LocalMesh, dict[str, Any]]:
        def properties_of(device: torch.device) -> SimpleNamespace:
            card = sees[device.index]
            place = {"pci_domain_id": 0, "pci_bus_id": card.bus, "pci_device_id": 0}
            return SimpleNamespace(name=card.name, uuid=card.uuid, total_memory=card.total_bytes, **place)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sees))
        monkeypatch.setattr(torch.cuda, "set_device", note("set"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)
        monkeypatch.setattr(dist, "init_process_group", note("default"))
        monkeypatch.setattr(dist, "new_group", note("control", dist.ProcessGroup(1, 2)))
        monkeypatch.setattr(mesh_module, "init_device_mesh", note("mesh"))
        first = dist.FileStore(str(tmp_path / "ranks"), 2)
        first.set("here0", "")
        first.set("card/0", json.dumps(other and asdict(replace(other, bus=f"0:{other.bus}:0"))))
        mesh = init_local_mesh(OF_TWO | {RANKS_FILE: str(tmp_path / "ranks")})
        return mesh, asked

    return start


A, B, SMALL = Card("CARD", "a", "1", 80), Card("CARD", "b", "2", 80), Card("SMALL", "s", "3", 24)
SLICES = Card("CARD MIG", "a1", "1", 40), Card("CARD MIG", "a2", "1", 40)


@pytest.mark.parametrize(
    ("sees", "other", "bound", "gpu_bytes"),
    [
        pytest.param([A, B], A, torch.device("cuda", 1), 80, id="one each"),
        pytest.param([B], A, torch.device("cuda", 0), 80, id="one each, and sees no other"),
        pytest.param([A], A, None, 40, id="one for both"),
        pytest.param([A], SMALL, torch.device("cuda", 0), 24, id="unequal"),
        pytest.param([SMALL], A, torch.device("cuda", 0), 24, id="unequal, the other way round"),
        pytest.param([SLICES[0]], SLICES[1], None, 40, id="two slices of one"),
        pytest.param([], None, None, None, id="none"),
    ],
)
def test_ranks_go_by_the_cards_of_all_and_by_the_least_of_them(
    start_rank_1: Callable[..., tuple[LocalMesh, dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
    sees: Sequence[Card],
    other: Card | None,
    bound: torch.device | None,
    gpu_bytes: int | None,
) -> None:
    """Those that share a GPU, or have none, talk through gloo, and the control group waits for days."""
    mesh, asked = start_rank_1(sees, other=other)
    assert asked["default"]["device_id"] == bound
    assert asked["default"]["positional"] == (("cpu:gloo,cuda:nccl",) if bound else ("gloo",))
    assert asked["default"]["timeout"] == timedelta(minutes=10)
    assert asked["control"]["timeout"] == timedelta(days=7)
    assert mesh.gpu_bytes == gpu_bytes


@pytest.mark.parametrize(("sees", "other"), [([A], None), ([], A)])
def test_node_of_which_one_rank_sees_no_gpu_is_refused(
    start_rank_1: Callable[..., tuple[LocalMesh, dict[str, Any]]], sees: Sequence[Card], other: Card | None
) -> None:
    without = 1 if other else 0
    with pytest.raises(
        ConfigError, match=f"rank {1 - without} of this node computes on a GPU, and rank {without} finds none"
    ):
        start_rank_1(sees, other=other)


def with_devices(monkeypatch: pytest.MonkeyPatch, *, gpus: int = 0, has_mps: bool = False) -> None:
    """Devices by name: a machine of the tests has none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)


@pytest.mark.parametrize(
    ("gpus", "has_mps", "wanted", "kind"),
    [
        *((2, False, None, "cuda"), (0, True, None, "mps"), (0, False, None, "cpu")),
        *((2, False, "cpu", "cpu"), (0, True, "cpu", "cpu"), (2, True, "mps", "mps"), (2, True, "cuda", "cuda")),
    ],
)
def test_node_computes_on_what_it_is_told_or_on_the_fastest_that_is_there(
    monkeypatch: pytest.MonkeyPatch, gpus: int, has_mps: bool, wanted: Any, kind: str
) -> None:
    with_devices(monkeypatch, gpus=gpus, has_mps=has_mps)
    assert device_kind(wanted) == kind


@pytest.mark.parametrize(("wanted", "gpus", "found"), [("cuda", 0, "cpu"), ("mps", 1, "cuda, cpu")])
def test_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, gpus: int, found: str
) -> None:
    with_devices(monkeypatch, gpus=gpus)
    with pytest.raises(ConfigError, match=f"train.device='{wanted}': torch .* none on this machine, but {found};"):
        init_local_mesh({}, kind=wanted)


@pytest.mark.parametrize(("wanted", "device"), [("cpu", "cpu"), ("mps", "mps")])
def test_rank_that_leaves_the_gpus_alone_talks_through_gloo(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, device: str
) -> None:
    asked: list[Any] = []
    with_devices(monkeypatch, gpus=2, has_mps=True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("it was to stay off"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: asked.append((backend, given)))
    monkeypatch.setattr(dist, "new_group", lambda **_: dist.ProcessGroup(0, 1))
    monkeypatch.setattr(mesh_module, "init_device_mesh", lambda over, *_, **__: asked.append(over))
    local = init_local_mesh({}, kind=wanted)
    assert (local.device, local.gpu_bytes) == (torch.device(device), None)
    assert asked[0][0] == "gloo" and asked[0][1]["device_id"] is None
    assert asked[1] == "cpu"


def test_mps_is_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, has_mps=True)
    with pytest.raises(ConfigError, match=r"train.device='mps': 2 ranks cannot share parameters on it"):
        init_local_mesh(OF_TWO)


def test_decisions_of_one_rank_are_its_own(mesh: LocalMesh) -> None:
    assert broadcast_json({"a": (1, 2), "ü": None}, mesh) == {"a": [1, 2], "ü": None}
    assert all_ok(True, mesh)
    assert not all_ok(False, mesh)
    barrier(mesh)

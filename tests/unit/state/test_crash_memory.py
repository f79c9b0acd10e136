"""What a crashed trainer leaves in shared memory: taken only where it is whole, its own, and what its stamp says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zeroband.state.crash_memory import NodeMemory
from zeroband.state.digest import digest_of
from zeroband.state.round_state import RoundState

SECTIONS = ("params", "momentum")
NUMEL = 5
PAYLOAD = {"progress": {"inner_step": 20}}


def a_memory(folder: Path, *, launcher: str = "7:100", layout: str = "model", is_restart: bool = False) -> NodeMemory:
    return NodeMemory(folder, launcher=launcher, layout=layout, is_restart=is_restart)


def write(folder: Path, memory: NodeMemory) -> str:
    """The buffers of a trainer that holds round 3."""
    sections = [torch.arange(NUMEL) + float(number) for number in range(2)]
    for name, section in zip(SECTIONS, sections, strict=True):
        (folder / f"{name}.f32").write_bytes(section.numpy().tobytes())
    memory.stamp(SECTIONS, 3, PAYLOAD, digest_of(*sections))
    return digest_of(*sections)


def restart(folder: Path, **other: str) -> RoundState | None:
    """The next trainer claims the folder: what it does not keep is removed."""
    memory = a_memory(folder, **other, is_restart=True)
    kept = memory.set_aside(folder)
    for file in folder.iterdir():
        if file.name not in kept:
            file.unlink()
    return memory.recall(NUMEL)


def test_state_of_a_crashed_trainer_is_taken_by_the_next_one(tmp_path: Path) -> None:
    state = write(tmp_path, a_memory(tmp_path))
    held = restart(tmp_path)
    assert held is not None
    assert (held.round, held.record, held.state_digest) == (3, PAYLOAD, state)
    assert held.sections["momentum"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_held_state_gives_its_memory_back_and_is_taken_once(tmp_path: Path) -> None:
    write(tmp_path, a_memory(tmp_path))
    assert restart(tmp_path) is not None
    assert restart(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, memory := a_memory(tmp_path))
    memory.set_aside(tmp_path)
    memory.drop_set_aside()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [{"launcher": "7:101"}, {"launcher": ""}, {"layout": "another model"}])
def test_memory_of_another_launcher_or_model_is_not_taken(tmp_path: Path, other: dict[str, str]) -> None:
    write(tmp_path, a_memory(tmp_path))
    assert restart(tmp_path, **other) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "stamp.json").unlink(),
        lambda folder: (folder / "params.f32").unlink(),
        lambda folder: (folder / "params.f32").write_bytes(b"short"),
        lambda folder: (folder / "params.f32").write_bytes(b"\x01" * 4 * NUMEL),
        lambda folder: (folder / "stamp.json").write_text("{"),
        lambda folder: (folder / "stamp.json").write_text("[]"),
    ],
)
def test_memory_that_is_not_what_its_stamp_says_is_not_taken(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    write(tmp_path, a_memory(tmp_path))
    damage(tmp_path)
    assert restart(tmp_path) is None


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: (folder / "stamp.json").unlink(), "the previous trainer left none"),
        (lambda folder: (folder / "momentum.f32").write_bytes(b"\x01" * 4 * NUMEL), "it was being changed when the"),
        (lambda folder: (folder / "momentum.f32").unlink(), "it cannot be set aside: "),
    ],
)
def test_restarted_trainer_says_why_it_takes_nothing(
    tmp_path: Path, damage: Callable[[Path], object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, a_memory(tmp_path))
    damage(tmp_path)
    assert restart(tmp_path) is None
    (said,) = (record.__dict__["fields"] for record in caplog.records)
    assert said["why"].startswith(why)


def test_first_start_of_a_trainer_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = a_memory(tmp_path)
    assert memory.set_aside(tmp_path) == () and memory.recall(NUMEL) is None
    assert caplog.records == []


def test_nothing_is_stamped_where_nobody_would_restart_the_trainer(tmp_path: Path) -> None:
    a_memory(tmp_path, launcher="").stamp(SECTIONS, 3, PAYLOAD, "s")
    assert list(tmp_path.iterdir()) == []

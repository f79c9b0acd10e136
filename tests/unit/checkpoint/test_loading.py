from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.checkpoint.saves import (
    RULES,
    SECTIONS,
    Around,
    buffers_of,
    files_of,
    layout,
    own,
    save_of,
    saved,
    stamp_of,
)
from torch.distributed.checkpoint import HuggingFaceStorageReader

from zeroband.checkpoint.loading import open_checkpoint, restore, steps_in_order
from zeroband.checkpoint.manifest import Manifest, StoredFile, parse_manifest
from zeroband.checkpoint.own_state import views_of
from zeroband.checkpoint.storage import LocalStorage
from zeroband.errors import CheckpointDamaged, ConfigError, RecoveryFailed


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint of two nodes, cut into files."""
    root = tmp_path_factory.mktemp("good") / "run"
    storage = LocalStorage(root, "a")
    own(storage)
    both = partial(save_of, storage, 10, members=("a", "b"), rules=replace(RULES, peer_wait_s=1.0), max_bytes=200)
    first = both(Around(), node_id="a")
    assert both(Around(on_sleep=lambda: first.run()), node_id="b").run()  # it waits for the first one to commit
    return root


def restore_everything(storage: LocalStorage) -> None:
    """What a node of this checkpoint reads, and the sizes of the rest."""
    moments = buffers_of(0, ("exp_avg", "exp_avg_sq"))
    checkpoint = open_checkpoint(storage, 10)
    checkpoint.require_sizes()
    checkpoint.read_outer(layout().slots, buffers_of(0))
    for node in ("a", "b"):
        checkpoint.node_state(node)
        checkpoint.read_inner(node, views_of(layout().slots, moments))


def damage(root: Path, seed: int, *, cuts: bool) -> str:
    """Flip one bit of one file of a checkpoint, or cut it off; the file's path."""
    folder = root / "step_00000010"
    files = files_of(folder)
    path = files[seed % len(files)]
    data = bytearray((folder / path).read_bytes())
    if cuts:
        data = data[: (seed // len(files)) % len(data)]
    else:
        bit = (seed // len(files)) % (8 * len(data))
        data[bit // 8] ^= 1 << (bit % 8)
    (folder / path).write_bytes(data)
    return path


def damaged_checkpoints_are_detected(good: Path, work: Path, seed: int, *, cuts: bool) -> None:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good, work)
    path = damage(work, seed, cuts=cuts)
    storage = LocalStorage(work, "a")
    for read in (restore_everything, lambda storage: open_checkpoint(storage, 10).verify()):
        with pytest.raises(CheckpointDamaged, match=path):
            read(storage)


seeds = st.integers(min_value=0, max_value=1 << 30)
unhurried = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


@unhurried
@given(seed=seeds, cuts=st.booleans())
def test_every_damage_to_any_file_is_found_and_the_file_named(
    good: Path, tmp_path: Path, seed: int, cuts: bool
) -> None:
    damaged_checkpoints_are_detected(good, tmp_path / "run", seed, cuts=cuts)


@pytest.mark.soak
@settings(unhurried, max_examples=1000)
@given(seed=seeds, cuts=st.booleans())
def test_every_damage_to_any_file_is_found_a_thousand_times(good: Path, tmp_path: Path, seed: int, cuts: bool) -> None:
    damaged_checkpoints_are_detected(good, tmp_path / "run", seed, cuts=cuts)


def test_undamaged_checkpoint_verifies(good: Path) -> None:
    storage = LocalStorage(good, "a")
    restore_everything(storage)
    open_checkpoint(storage, 10).verify()


def test_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run", "a")
    saved(storage, 10, 20)
    file = tmp_path / "run/step_00000020/outer/momentum.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    buffers = buffers_of(0)
    found = restore(storage, layout().slots, buffers)
    assert found is not None and found.manifest.stamp.inner_step == 10
    assert torch.equal(buffers["params"], buffers_of(10)["params"])
    assert list(found.rejected) == [20] and "momentum.safetensors: it has hash" in found.rejected[20]


def test_missing_file_is_named(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "run")
    (tmp_path / "run/step_00000010/nodes/b/state.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"nodes/b/state\.json is missing"):
        restore_everything(LocalStorage(tmp_path / "run", "a"))


def test_checkpoint_of_another_model_is_refused(good: Path) -> None:
    slots = layout().slots[:-1]
    with pytest.raises(RecoveryFailed, match=r"model\.norm\.weight \[4\] is not one of this model"):
        restore(LocalStorage(good, "a"), slots, {name: torch.zeros(60) for name in SECTIONS})


def test_checkpoint_of_another_algorithm_is_refused(good: Path) -> None:
    with pytest.raises(
        RecoveryFailed, match="another algorithm or inner optimizer: params, momentum; needed: params, exp_avg"
    ):
        restore(LocalStorage(good, "a"), layout().slots, buffers_of(0, ("params", "exp_avg")))


def test_node_finds_what_it_saved_and_a_new_one_nothing(good: Path) -> None:
    checkpoint = open_checkpoint(LocalStorage(good, "c"), 10)
    assert checkpoint.node_state("b") == {"node": "b", "step": 10}
    moments = {name: torch.zeros(layout().numel) for name in ("exp_avg", "exp_avg_sq")}
    assert checkpoint.read_inner("b", views_of(layout().slots, moments))
    assert all(torch.equal(moments[name], saved) for name, saved in buffers_of(1010, tuple(moments)).items())
    assert checkpoint.node_state("c") is None
    assert not checkpoint.read_inner("c", views_of(layout().slots, moments))


def test_latest_comes_first_then_older_then_newer(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run", "a")
    for step in (10, 20, 30, 40):
        (tmp_path / f"run/step_{step:08d}").mkdir(parents=True)
    (tmp_path / "run/step_00000050.tmp").mkdir()
    assert steps_in_order(storage) == [40, 30, 20, 10]
    storage.write("latest", (b"step_00000020\n",))
    assert steps_in_order(storage) == [20, 10, 30, 40]
    storage.write("latest", (b"\xff nonsense",))
    assert steps_in_order(storage) == [40, 30, 20, 10]


def test_storage_that_stumbles_while_reading_is_tried_again(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, tries = LocalStorage(good, "a"), {"left": 2}
    opened = storage.open

    def stumbling(path: str) -> object:
        if "momentum" in path and tries["left"]:
            tries["left"] -= 1
            raise OSError("connection reset")
        return opened(path)

    monkeypatch.setattr(storage, "open", stumbling)
    monkeypatch.setattr("zeroband.checkpoint.loading._RETRY_S", (0.0, 0.0))
    restore_everything(storage)
    assert tries["left"] == 0


def test_reading_is_counted_piece_by_piece(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroband.checkpoint.manifest.PIECE_BYTES", 16)
    pieces: list[None] = []
    checkpoint = open_checkpoint(LocalStorage(good, "a"), 10, lambda: pieces.append(None))
    checkpoint.read_outer(layout().slots, buffers_of(0))
    outer = len(pieces)
    assert checkpoint.read_inner("a", views_of(layout().slots, buffers_of(0, ("exp_avg", "exp_avg_sq"))))
    assert min(outer, len(pieces) - outer) >= 2 * layout().numel // 4


def test_manifest_survives_its_own_text() -> None:
    manifest = Manifest(stamp_of(10), {"outer/model.safetensors": StoredFile(3, "aa")})
    assert parse_manifest(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.replace(b'"run"', b'"nur"'), "does not match its hash"),
        (lambda data: data + b"\n", "changed after it was written"),
        (lambda data: b"[]", "cannot be read"),
        (lambda data: b"\x80", "cannot be read"),
    ],
)
def test_changed_manifest_is_refused(change: Callable[[bytes], bytes], why: str) -> None:
    data = Manifest(stamp_of(10), {}).to_json()
    with pytest.raises(CheckpointDamaged, match=why):
        parse_manifest(change(data))


# -- whose folder it is -----------------------------------------------------------------------------------------------


def test_two_runs_on_one_path_refuse_each_other(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run", "a")
    own(storage, "s1")
    own(storage, "s1")
    with pytest.raises(ConfigError, match=r"belongs to another run with run\.id='run'; resume .* with --resume"):
        own(storage, "s2")
    own(storage, "s2", takes_over=True)
    with pytest.raises(ConfigError, match="belongs to another run"):
        own(storage, "s1")


def test_folder_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"ckpt\.path: cannot write to .*run"):
        own(LocalStorage(tmp_path / "run", "a"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a folder that forbids it")
def test_folder_of_another_user_is_a_configuration_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="permission denied"):
        own(LocalStorage(tmp_path / "run", "a"))


# -- the inner optimizer ----------------------------------------------------------------------------------------------


def test_torchs_own_reader_loads_the_inner_optimizer(good: Path) -> None:
    moments = {name: torch.zeros(layout().numel) for name in ("exp_avg", "exp_avg_sq")}
    reader = HuggingFaceStorageReader(str(good / "step_00000010/nodes/a"))
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(views_of(layout().slots, moments), storage_reader=reader, no_dist=True)
    assert all(torch.equal(moments[name], saved) for name, saved in buffers_of(1010, tuple(moments)).items())


def test_inner_optimizer_of_another_shape_is_refused(good: Path) -> None:
    checkpoint = open_checkpoint(LocalStorage(good, "a"), 10)
    with pytest.raises(
        CheckpointDamaged, match=r"nodes/a/inner\.safetensors: it does not fit: .*exp_avg\.norm\.weight"
    ):
        checkpoint.read_inner("a", {"exp_avg.norm.weight": torch.zeros(5)})
    with pytest.raises(CheckpointDamaged, match=r"does not fit: .*exp_avg\.strange"):
        checkpoint.read_inner("a", {"exp_avg.strange": torch.zeros(4)})

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.checkpoint.saves import (
    SHAPES,
    Around,
    SaveRules,
    buffers_of,
    files_of,
    layout,
    own,
    restored_step,
    save_of,
    saved,
)

from zeroband.checkpoint.loading import open_checkpoint
from zeroband.checkpoint.peers import WriterStatus
from zeroband.checkpoint.saving import POINTS, Save
from zeroband.checkpoint.storage import Data, LocalStorage, Storage, open_storage
from zeroband.errors import ConfigError


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run", "a")


def test_checkpoint_consists_of_files_that_hugging_face_names(storage: LocalStorage, tmp_path: Path) -> None:
    saved(storage, 10)
    assert files_of(tmp_path / "run") == [
        "latest",
        "owner.json",
        "step_00000010/manifest.json",
        "step_00000010/nodes/a/inner.safetensors",
        "step_00000010/nodes/a/state.json",
        "step_00000010/outer/model.safetensors",
        "step_00000010/outer/momentum.safetensors",
    ]
    tensors = load_file(tmp_path / "run/step_00000010/outer/model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name if name == "lm_head.weight" else f"model.{name}": shape for name, shape in SHAPES.items()
    }
    flat = torch.cat([tensors[name].reshape(-1) for name in sorted(tensors, key=lambda n: n.removeprefix("model."))])
    assert torch.equal(flat, buffers_of(10)["params"])


def test_large_sections_are_cut_with_an_index(storage: LocalStorage, tmp_path: Path) -> None:
    saved(storage, 10, max_bytes=200)
    outer = tmp_path / "run/step_00000010/outer"
    index = json.loads((outer / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * layout().numel
    assert set(index["weight_map"].values()) == {f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
    for name, file in index["weight_map"].items():
        assert name in load_file(outer / file)
    assert restored_step(storage) == 10


def test_restore_without_any_checkpoint_gives_none(storage: LocalStorage) -> None:
    assert restored_step(storage) is None
    own(storage)
    assert restored_step(storage) is None


# -- killed at every named point --------------------------------------------------------------------------------------


def killed_at(point: str, save: Save) -> None:
    """Run a save in a process that SIGKILLs itself at the named point."""
    child = os.fork()
    if child == 0:
        Around.kills_at = point
        save.run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"{point} was never reached"


@pytest.mark.parametrize("point", POINTS)
def test_writer_killed_at_a_point_leaves_the_old_or_the_new_state(storage: LocalStorage, point: str) -> None:
    saved(storage, 10, 20)
    killed_at(point, save_of(storage, 30, Around()))
    assert restored_step(storage) == (30 if point in ("latest", "clean_up") else 20)
    saved(storage, 30)  # the run came back and trains on
    saved(storage, 40)
    assert restored_step(storage) == 40
    assert [name for name in storage.names() if name.startswith("step")] == ["step_00000030", "step_00000040"]


def test_first_save_killed_before_latest_is_found(storage: LocalStorage) -> None:
    own(storage)
    killed_at("renamed", save_of(storage, 10, Around()))
    assert restored_step(storage) == 10


def test_step_that_is_saved_anew_after_a_rollback_replaces_the_old_one(storage: LocalStorage) -> None:
    saved(storage, 10, 20)
    assert save_of(storage, 20, Around(), record={"other": 1}).run()
    assert open_checkpoint(storage, 20).manifest.stamp.record == {"other": 1}
    assert restored_step(storage) == 20


# -- kept and removed -------------------------------------------------------------------------------------------------


def test_clean_up_keeps_the_last_and_every_nth_round(storage: LocalStorage) -> None:
    rules = SaveRules(keep_last=2, keep_every=3, peer_wait_s=0, retry_s=0)
    saved(storage, *range(10, 90, 10), rules=rules)  # rounds 1 to 8
    kept = [name for name in storage.names() if name.startswith("step")]
    assert kept == [f"step_{step:08d}" for step in (30, 60, 70, 80)]


def test_clean_up_removes_what_dead_saves_left(storage: LocalStorage) -> None:
    saved(storage, 10)
    killed_at("before_manifest", save_of(storage, 20, Around()))
    assert "step_00000020.tmp" in storage.names()
    saved(storage, 30)
    assert [name for name in storage.names() if name.startswith("step")] == ["step_00000010", "step_00000030"]


# -- several nodes ----------------------------------------------------------------------------------------------------


AT = {"round": 1, "step": 10}
PATIENT = SaveRules(2, None, peer_wait_s=60.0, retry_s=0.0)


def test_members_share_the_work_and_the_first_one_commits(storage: LocalStorage) -> None:
    own(storage)
    first = Around()
    saves = iter([save_of(storage, 10, first, members=("a", "b"), rules=PATIENT)])

    def begin_the_first() -> None:
        assert restored_step(storage) is None
        assert next(saves).run()

    second = Around(on_sleep=begin_the_first)
    assert save_of(storage, 10, second, node_id="b", members=("a", "b"), rules=PATIENT).run()
    assert (first.kinds, second.kinds) == (["checkpoint_committed"], ["checkpoint_share_written"])
    manifest = open_checkpoint(storage, 10).manifest
    assert manifest.nodes == ("a", "b") and restored_step(storage) == 10


def test_first_member_waits_for_the_others(storage: LocalStorage) -> None:
    own(storage)
    waiting = Around()
    second = save_of(storage, 10, Around(), node_id="b", members=("a", "b"), rules=PATIENT)
    sleeps = iter([lambda: None, lambda: killed_at("published", second)])
    waiting.on_sleep = lambda: next(sleeps)()
    assert save_of(storage, 10, waiting, members=("a", "b"), rules=PATIENT).run()
    assert waiting.kinds == ["checkpoint_committed"]
    assert open_checkpoint(storage, 10).manifest.nodes == ("a", "b")


def test_first_member_writes_what_a_dead_one_left(storage: LocalStorage) -> None:
    own(storage)
    killed_at("share_written", save_of(storage, 10, Around(), node_id="b", members=("a", "b")))
    first = Around()
    assert save_of(storage, 10, first, members=("a", "b"), rules=PATIENT).run()
    why = {"b": "nothing was heard of its share for 60 s"}
    assert first.told[0] == ("checkpoint_incomplete", {"round": 1, "step": 10, "nodes": ["b"], "why": why})
    assert open_checkpoint(storage, 10).manifest.missing == why
    assert first.clock_s == pytest.approx(60.0, abs=1.0)
    assert open_checkpoint(storage, 10).manifest.nodes == ("a",) and restored_step(storage) == 10


@pytest.mark.parametrize("why", ["lost", "it did not take part", "the disk is full"])
def test_member_that_is_lost_or_says_that_it_does_not_save_is_not_awaited(storage: LocalStorage, why: str) -> None:
    own(storage)
    first = Around(on_sleep=lambda: pytest.fail("waited"), gone=("b",) if why == "lost" else ())
    if why == "it did not take part":
        save_of(storage, 10, Around(), node_id="b", members=("a", "b")).leave_out("busy")
    elif why == "the disk is full":
        first.words["b"] = WriterStatus(out=why)
    assert save_of(storage, 10, first, members=("a", "b"), rules=PATIENT).run()
    assert first.told[0] == ("checkpoint_incomplete", {**AT, "nodes": ["b"], "why": {"b": why}})
    manifest = open_checkpoint(storage, 10).manifest
    assert (manifest.nodes, manifest.missing) == (("a",), {"b": why}) and restored_step(storage) == 10


def test_member_that_is_at_work_is_awaited_for_as_long_as_that_takes(storage: LocalStorage) -> None:
    own(storage)
    first, sleeps = Around(), iter(range(1, 1000))
    second = save_of(storage, 10, Around(), node_id="b", members=("a", "b"), rules=PATIENT)

    def work() -> None:
        first.words["b"] = WriterStatus(beats=(number := next(sleeps)))
        if number == 300:
            killed_at("published", second)

    first.on_sleep = work
    assert save_of(storage, 10, first, members=("a", "b"), rules=PATIENT).run()
    assert first.clock_s > 4 * PATIENT.peer_wait_s and first.kinds == ["checkpoint_committed"]


def test_members_that_wait_for_one_another_in_vain_do_not_wait_for_ever(storage: LocalStorage, tmp_path: Path) -> None:
    """Each has another folder, against what ckpt.shared says."""
    own(storage)
    first, beats = Around(), iter(range(1, 10**6))
    first.on_sleep = lambda: first.words.update(b=WriterStatus(beats=next(beats), is_waiting=True))
    assert save_of(storage, 10, first, members=("a", "b"), rules=PATIENT).run()
    assert first.clock_s == pytest.approx(60.0, abs=2.0) and open_checkpoint(storage, 10).manifest.nodes == ("a",)


def test_member_whose_storage_fails_tries_no_longer_than_until_the_others_are_done(
    storage: LocalStorage, tmp_path: Path
) -> None:
    own(storage)
    second = Around()
    full = Failing(tmp_path / "run", OSError(errno.ENOSPC, "No space left on device"), 10**6, "nodes/b")
    first = [save_of(storage, 10, Around(gone=("b",)), members=("a", "b"), rules=PATIENT)]

    def go_on() -> None:
        assert second.excuses and "the disk is full" in str(second.excuses[0])
        assert not first or first.pop().run()

    second.on_sleep = go_on
    rules = SaveRules(2, None, peer_wait_s=60.0, retry_s=300.0)
    assert save_of(full, 10, second, node_id="b", members=("a", "b"), rules=rules).run()
    assert second.kinds == ["checkpoint_retrying", "checkpoint_left_out"] and second.clock_s < 2.0
    assert "the disk is full" in second.told[-1][1]["reason"]


def test_records_of_an_earlier_attempt_do_not_count(storage: LocalStorage) -> None:
    own(storage)
    killed_at("published", save_of(storage, 10, Around(), node_id="b", members=("a", "b"), record={"old": 1}))
    first = Around()
    assert save_of(storage, 10, first, members=("a", "b")).run()
    assert first.kinds == ["checkpoint_incomplete", "checkpoint_committed"]


# -- the first member is lost -----------------------------------------------------------------------------------------

THREE = ("a", "b", "c")
COMMITTING = POINTS[POINTS.index("published") :]
"""Points that the member reaches which commits; the others wait after the first of them."""


def member_of(storage: Storage, node_id: str, around: Around | None = None, rules: SaveRules = PATIENT) -> Save:
    """The third save of a run, of one of three nodes, so that old checkpoints are cleaned up after it."""
    return save_of(storage, 30, around or Around(), node_id=node_id, members=THREE, rules=rules, max_bytes=200)


@pytest.mark.parametrize("point", POINTS)
def test_checkpoint_whose_first_member_is_killed_is_committed_by_the_next(storage: LocalStorage, point: str) -> None:
    saved(storage, 10, 20)
    second = Around(gone=("c",))
    killed_at(point, member_of(storage, "a", Around(gone=("c",))))
    assert member_of(storage, "b", second).run()
    open_checkpoint(storage, 30).verify()
    assert restored_step(storage) == (20 if point == "renamed" else 30)  # `latest` follows with the next one
    had_published = POINTS.index(point) >= POINTS.index("published")
    assert set(open_checkpoint(storage, 30).manifest.nodes) >= ({"a"} if had_published else {"b"})
    is_by_the_first = point in ("renamed", "latest", "clean_up")
    assert ("checkpoint_committed" in second.kinds) != is_by_the_first
    saved(storage, 40)
    assert restored_step(storage) == 40 and storage.names() == [
        "latest",
        "owner.json",
        "step_00000030",
        "step_00000040",
    ]


@pytest.mark.parametrize("point", COMMITTING)
def test_checkpoint_whose_first_two_members_are_killed_is_committed_by_the_third(
    storage: LocalStorage, point: str
) -> None:
    saved(storage, 10, 20)
    killed_at("published", member_of(storage, "a"))
    killed_at(point, member_of(storage, "b"))
    third = Around()
    assert member_of(storage, "c", third).run()
    open_checkpoint(storage, 30).verify()
    assert "a" in open_checkpoint(storage, 30).manifest.nodes
    assert restored_step(storage) == (20 if point == "renamed" else 30)
    assert ("checkpoint_committed" in third.kinds) == (COMMITTING.index(point) < COMMITTING.index("renamed"))


@pytest.mark.parametrize(("gone", "expected_s"), [((), 240.0), (("a", "b"), 0.0)], ids=["silent", "lost"])
def test_members_take_their_turn_when_those_before_them_are_lost_or_waited_for(
    storage: LocalStorage, gone: tuple[str, ...], expected_s: float
) -> None:
    own(storage)
    third = Around(gone=gone)
    assert member_of(storage, "c", third).run()
    assert third.clock_s == pytest.approx(expected_s, abs=1.0)
    assert third.kinds == ["checkpoint_share_written", "checkpoint_incomplete", "checkpoint_committed"]
    assert restored_step(storage) == 30


def test_first_member_that_has_no_time_or_gives_up_leaves_the_commit_to_the_next(
    storage: LocalStorage, tmp_path: Path
) -> None:
    own(storage)
    member_of(storage, "a").leave_out("busy")
    failing = Failing(tmp_path / "run", OSError(errno.ESTALE, "Stale file handle"), 10**6, ".safetensors")
    stale = Around()
    assert not member_of(failing, "b", stale).run()
    assert stale.kinds == ["checkpoint_failed"]
    third = Around(on_sleep=lambda: pytest.fail("waited"))
    assert member_of(storage, "c", third).run()
    assert open_checkpoint(storage, 30).manifest.nodes == ("c",) and restored_step(storage) == 30


def test_last_member_that_gives_up_gives_back_the_space_of_all(storage: LocalStorage, tmp_path: Path) -> None:
    saved(storage, 10, 20)
    full = Failing(tmp_path / "run", OSError(errno.ENOSPC, "No space left on device"), 10**6, "manifest")
    for node_id in THREE:
        assert not member_of(full, node_id, rules=SaveRules(2, None, peer_wait_s=0.0, retry_s=0.0)).run()
    assert restored_step(storage) == 20 and "step_00000030.tmp" not in storage.names()


@pytest.mark.parametrize("url", ["local", "memory"])
@pytest.mark.parametrize("point", POINTS[:-1])
def test_slow_first_member_does_no_harm_to_what_the_next_one_committed(tmp_path: Path, url: str, point: str) -> None:
    """It stands still at a point for so long that another member takes its turn, and then goes on."""

    def storage_of(node_id: str) -> Storage:
        return open_storage(str(tmp_path) if url == "local" else f"memory://{tmp_path.name}", "run", node_id)

    storage = storage_of("a")
    saved(storage, 10, 20)
    waiting = [member_of(storage_of("b"), "b", Around(gone=("c",)))]

    def stand_still(reached: str) -> None:
        if reached == point and waiting:
            assert waiting.pop().run()
            open_checkpoint(storage, 30).verify()

    assert member_of(storage, "a", Around(on_point=stand_still, gone=("c",))).run() and not waiting
    open_checkpoint(storage, 30).verify()
    assert restored_step(storage) == 30
    saved(storage, 40)
    assert restored_step(storage) == 40
    assert [name for name in storage.names() if name.startswith("step")] == ["step_00000030", "step_00000040"]


def test_member_that_stood_still_until_its_checkpoint_was_cleaned_up_does_not_bring_half_of_it_back(
    storage: LocalStorage, tmp_path: Path
) -> None:
    def outlive(reached: str) -> None:
        if reached == "before_manifest":
            storage.remove("step_00000030.tmp")
            saved(LocalStorage(tmp_path / "run", "b"), 40, 50)

    saved(storage, 10, 20)
    around = Around(on_point=outlive)
    assert not save_of(storage, 30, around).run()
    assert around.kinds == ["checkpoint_failed"] and restored_step(storage) == 50
    assert [name for name in storage.names() if name.startswith("step")] == ["step_00000040", "step_00000050"]


# -- storage that fails -----------------------------------------------------------------------------------------------


class Failing(LocalStorage):
    """Refuses to write for a while."""

    def __init__(self, root: Path, error: OSError, times: int, match: str = "") -> None:
        super().__init__(root, "a")
        self.error, self.times, self.match = error, times, match

    def write(self, path: str, pieces: Iterable[Data]) -> None:
        if self.match in path and self.times > 0:
            self.times -= 1
            raise self.error
        super().write(path, pieces)


@pytest.mark.parametrize("match", ["model.safetensors", "inner", "manifest", "latest"])
def test_storage_that_fails_for_a_while_is_tried_again(storage: LocalStorage, tmp_path: Path, match: str) -> None:
    saved(storage, 10)
    failing = Failing(tmp_path / "run", OSError(errno.ESTALE, "Stale file handle"), 3, match)
    around = Around()
    assert save_of(failing, 20, around, rules=SaveRules(2, None, 0.0, retry_s=60.0)).run()
    assert around.kinds == ["checkpoint_retrying"] * 3 + ["checkpoint_committed"]
    assert "the network mount is stale" in around.told[0][1]["reason"]
    assert restored_step(storage) == 20


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the quota is used up"),
        (PermissionError("An error occurred (ExpiredToken) when calling"), "credentials are refused or expired"),
    ],
)
def test_storage_that_goes_on_failing_keeps_the_previous_checkpoint(
    storage: LocalStorage, tmp_path: Path, error: OSError, words: str
) -> None:
    saved(storage, 10)
    around = Around()
    failing = Failing(tmp_path / "run", error, 10**6, "step")
    assert not save_of(failing, 20, around, rules=SaveRules(2, None, 0.0, retry_s=60.0)).run()
    assert around.kinds[-1] == "checkpoint_failed" and words in around.told[-1][1]["reason"]
    assert restored_step(storage) == 10
    assert [name for name in storage.names() if name.startswith("step")] == ["step_00000010"]


def test_folder_that_was_removed_is_made_anew_and_said_once(storage: LocalStorage, tmp_path: Path) -> None:
    saved(storage, 10)
    shutil.rmtree(tmp_path / "run")
    first, second = Around(), Around()
    assert save_of(storage, 20, first).run() and save_of(storage, 30, second).run()
    assert first.told[0] == ("checkpoints_lost", {"folder": str(tmp_path / "run")})
    assert "checkpoints_lost" not in second.kinds
    assert restored_step(storage) == 30
    with pytest.raises(ConfigError, match="belongs to another run"):
        own(storage, "s2")


def test_folder_whose_mount_vanished_is_reported_and_not_made_anew(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other_device:
        assert Path(other_device).stat().st_dev != tmp_path.stat().st_dev
        (tmp_path / "mount").symlink_to(other_device)
        storage = LocalStorage(tmp_path / "mount/run", "a")
        saved(storage, 10)
        (tmp_path / "mount").unlink()
        (tmp_path / "mount").mkdir()
        around = Around()
        assert not save_of(storage, 20, around).run()
    assert "has vanished together with its mount" in around.told[-1][1]["reason"]
    assert list((tmp_path / "mount").iterdir()) == []


def test_run_that_was_taken_over_saves_no_more(storage: LocalStorage) -> None:
    saved(storage, 10)
    own(storage, "s2", takes_over=True)
    around = Around()
    assert not save_of(storage, 20, around).run()
    assert "taken over by another run" in around.told[-1][1]["reason"]
    assert save_of(storage, 20, Around(), session="s2").run()


# -- stores without renames -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["mid_write", "before_manifest", "renamed", "clean_up"])
def test_object_store_holds_the_old_or_the_new_state_when_a_save_dies(point: str, tmp_path: Path) -> None:
    class Died(BaseException):
        pass

    def strike(reached: str) -> None:
        if reached == point:
            raise Died

    storage = open_storage(f"memory://{tmp_path.name}", "run", "a")
    saved(storage, 10, 20)
    with pytest.raises(Died):
        save_of(storage, 30, Around(on_point=strike)).run()
    assert restored_step(storage) == (30 if point == "clean_up" else 20)
    saved(storage, 30, 40)
    assert restored_step(storage) == 40
    assert [name for name in storage.names() if name.startswith("step")] == ["step_00000030", "step_00000040"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount file systems")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_that_is_full_keeps_the_previous_checkpoint_and_takes_the_next(tiny_disk: Path) -> None:
    storage = LocalStorage(tiny_disk / "run", "a")
    saved(storage, 10)
    with contextlib.suppress(OSError), (tiny_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    around = Around()
    assert not save_of(storage, 20, around, rules=SaveRules(2, None, 0.0, retry_s=9.0)).run()
    assert around.kinds[-1] == "checkpoint_failed" and "the disk is full" in around.told[-1][1]["reason"]
    assert restored_step(storage) == 10 and "step_00000020.tmp" not in storage.names()
    (tiny_disk / "filler").unlink()
    assert save_of(storage, 30, Around()).run() and restored_step(storage) == 30

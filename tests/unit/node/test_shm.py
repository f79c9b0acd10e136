"""The node's folder: one holder, freed by the kernel when that dies, swept when nobody holds it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zeroband.errors import ConfigError
from zeroband.node.launched import restarting_launcher
from zeroband.node.shm import NodeFolder, remove, remove_abandoned, sweep

HOLDER = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""

RESTARTS = {"TORCHELASTIC_MAX_RESTARTS": "1"}
"""The environment of a trainer that its launcher restarts once."""


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """Have another process hold a lock."""
    holders: list[subprocess.Popen[bytes]] = []

    def start(lock: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", HOLDER, str(lock)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        holders.append(holder)
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def left_over(shm_dir: Path, node_id: str, *, age_s: float = 0.0, has_lock: bool = True) -> Path:
    folder = NodeFolder.path_of(shm_dir, "run", node_id)
    folder.mkdir(mode=0o700)
    (folder / "params").write_bytes(b"old")
    if has_lock:
        (folder / "lock").touch()
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


def test_folder_is_made_for_its_owner_only_and_removed_at_the_end(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path, "run", "a")
    assert folder.path == tmp_path / "zeroband-run@a" and folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "params").touch()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_second_node_of_the_same_name_is_refused(tmp_path: Path, hold: Callable[[Path], object]) -> None:
    held = left_over(tmp_path, "a")
    hold(held / "lock")
    with pytest.raises(ConfigError, match=r"node\.id='a' of run\.id='run' is already running"):
        NodeFolder(tmp_path, "run", "a")
    assert (held / "params").exists()


def test_folder_of_a_killed_node_is_claimed_empty(tmp_path: Path, hold: Callable[[Path], object]) -> None:
    holder = hold(left_over(tmp_path, "a") / "lock")
    assert isinstance(holder, subprocess.Popen)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    folder = NodeFolder(tmp_path, "run", "a")
    assert [path.name for path in folder.path.iterdir()] == ["lock"]
    folder.close()


def test_missing_shm_dir_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.shm_dir"):
        NodeFolder(tmp_path / "nowhere", "run", "a")


def test_claiming_sweeps_the_left_overs_of_others(tmp_path: Path) -> None:
    dead = left_over(tmp_path, "dead")
    folder = NodeFolder(tmp_path, "run", "a")
    assert not dead.exists() and folder.path.exists()
    folder.close()


def test_sweep_removes_dead_folders_only(tmp_path: Path, hold: Callable[[Path], object]) -> None:
    dead, held = left_over(tmp_path, "dead"), left_over(tmp_path, "held")
    stranger = tmp_path / "other-program"
    stranger.mkdir()
    a_file = tmp_path / "zeroband-run-file"
    a_file.touch()
    hold(held / "lock")
    assert sweep(tmp_path) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([held, stranger, a_file])


@pytest.mark.parametrize(("age_s", "is_removed"), [(10.0, False), (3600.0, True)])
def test_sweep_gives_a_folder_without_lock_time_to_get_one(tmp_path: Path, age_s: float, is_removed: bool) -> None:
    folder = left_over(tmp_path, "new", age_s=age_s, has_lock=False)
    assert sweep(tmp_path) == ([folder] if is_removed else [])
    assert folder.exists() != is_removed


def test_claim_survives_a_sweeper_that_removes_the_folder_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that start together after a crash sweep each other's left-overs while they are claimed."""
    flock, swept = fcntl.flock, []

    def flock_after_a_sweep(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        swept.extend(sweep(tmp_path))
        flock(descriptor, operation)

    def sweep_later(shm_dir: Path, *, spare: Path) -> None:
        monkeypatch.setattr(fcntl, "flock", flock_after_a_sweep)

    monkeypatch.setattr("zeroband.node.shm.sweep", sweep_later)
    left_over(tmp_path, "a")
    folder = NodeFolder(tmp_path, "run", "a")
    assert len(swept) == 1, "the sweeper came between"
    assert sweep(tmp_path) == [] and folder.path.exists()
    folder.close()


def test_sweep_holds_the_lock_while_it_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, rmtree = left_over(tmp_path, "dead"), shutil.rmtree

    def rmtree_beside_a_claim(folder: Path, **options: bool) -> None:
        with (folder / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree_beside_a_claim)
    assert sweep(tmp_path) == [dead]


def test_one_of_many_claims_of_a_left_over_wins(tmp_path: Path) -> None:
    left_over(tmp_path, "a")
    claimed: list[NodeFolder] = []
    start = threading.Barrier(8)

    def claim() -> None:
        start.wait()
        try:
            claimed.append(NodeFolder(tmp_path, "run", "a"))
        except ConfigError:
            return

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(claimed) == 1 and (claimed[0].path / "lock").exists()
    claimed[0].close()


def test_nodes_of_two_runs_whose_names_run_together_have_folders_of_their_own(tmp_path: Path) -> None:
    assert NodeFolder.path_of(tmp_path, "a", "b-c") != NodeFolder.path_of(tmp_path, "a-b", "c")


def test_folder_that_is_left_stays_for_the_next_trainer_with_what_that_keeps(tmp_path: Path) -> None:
    first = NodeFolder(tmp_path, "run", "a")
    for name in ("params", "result"):
        (first.path / name).touch()
    first.close(is_left=True)
    second = NodeFolder(tmp_path, "run", "a", keeps=lambda folder: [p.name for p in folder.glob("params")])
    assert sorted(p.name for p in second.path.iterdir()) == ["lock", "params"]
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_folder_is_left_alone_while_the_launcher_lives_that_starts_the_next_trainer(tmp_path: Path) -> None:
    """Another node of the machine that starts meanwhile swept it, and the memory of the crashed trainer was gone."""
    launcher = restarting_launcher(RESTARTS)
    left = NodeFolder(tmp_path, "run", "a", launcher=launcher)
    (left.path / "params").touch()
    left.close(is_left=True)
    NodeFolder(tmp_path, "run", "b").close()
    assert sweep(tmp_path) == [] and not remove_abandoned(left.path)
    again = NodeFolder(tmp_path, "run", "a", keeps=lambda folder: ["params"], launcher=launcher)
    assert (again.path / "params").exists()
    again.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("launcher", ["", "4194305:7", f"{os.getppid()}:7", "no launcher"])
def test_folder_of_a_launcher_that_does_not_live_is_swept(tmp_path: Path, launcher: str) -> None:
    """One that nobody restarts, one that is gone, one of which another process has the number, a damaged record."""
    NodeFolder(tmp_path, "run", "a", launcher=launcher).close(is_left=True)
    NodeFolder(tmp_path, "run", "b").close()
    assert list(tmp_path.iterdir()) == []


def test_claim_forgets_the_launcher_of_the_owner_before(tmp_path: Path) -> None:
    NodeFolder(tmp_path, "run", "a", launcher=restarting_launcher(RESTARTS)).close(is_left=True)
    NodeFolder(tmp_path, "run", "a").close(is_left=True)
    assert [folder.name for folder in sweep(tmp_path)] == ["zeroband-run@a"]


# -- prepared by somebody else --------------------------------------------------------------------------------------

STRANGER = 65534
"""Another user of the machine."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /dev/shm, and the user's own things beside it."""
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "work").write_text("of years")
    shm_dir = tmp_path / "shm"
    shm_dir.mkdir()
    shm_dir.chmod(0o1777)
    return shm_dir


def prepared(shm_dir: Path, how: str) -> Path:
    """What somebody else may have made in the place of a node's folder, long ago."""
    folder = NodeFolder.path_of(shm_dir, "run", "a")
    if how == "a link":
        folder.symlink_to(shm_dir.parent / "mine")
        return folder
    if how == "no folder":
        folder.touch()
        return folder
    folder.mkdir(mode=0o700)
    (folder / "lock").symlink_to(shm_dir.parent / "mine" / "work")
    if how == "belongs to":
        os.chown(folder, STRANGER, STRANGER)
    else:
        folder.chmod(0o777)
    os.utime(folder, (0.0, 0.0))
    return folder


@pytest.mark.parametrize(
    "how", ["a link", "no folder", "other users may use it", pytest.param("belongs to", marks=as_root)]
)
def test_folder_that_somebody_else_prepared_is_refused_and_left_alone(shared: Path, how: str) -> None:
    """Claiming it truncated the file that its `lock` led to, and the state lay where others read and write it."""
    folder = prepared(shared, how)
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    with pytest.raises(ConfigError, match=rf"zeroband-run@a is not safe for this node.*{how}.*set node\.shm_dir"):
        NodeFolder(shared, "run", "a")
    assert (shared.parent / "mine" / "work").read_text() == "of years"
    assert os.path.lexists(folder) and (sorted(folder.iterdir()) if folder.is_dir() else []) == inside


@pytest.mark.parametrize("how", ["a link", "no folder", pytest.param("belongs to", marks=as_root)])
def test_sweep_removes_nothing_that_is_not_this_users(shared: Path, how: str) -> None:
    folder = prepared(shared, how)
    if how == "belongs to":
        (folder / "lock").unlink()  # so it is abandoned
        os.utime(folder, (0.0, 0.0))
    os.utime(shared.parent / "mine", (0.0, 0.0))
    assert sweep(shared) == []
    remove(folder)
    assert os.path.lexists(folder) and (shared.parent / "mine" / "work").read_text() == "of years"


def test_folder_where_anybody_may_replace_the_nodes_is_refused(shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=r"lets every user replace .*mode 0777.*chmod \+t"):
        NodeFolder(shared, "run", "a")
    assert list(shared.iterdir()) == []

"""The lease of a real trainer process to which real signals happen."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from zeroband.elastic.guardian.process import process_state
from zeroband.elastic.membership.records import Peer, RoundPlan
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.node.shared_flags import SharedFlags
from zeroband.node.shm import NodeFolder

pytestmark = [pytest.mark.faults, pytest.mark.slow]

MEMBER, OTHER = "a#1", "other#1"
DETECT_S = 2.0
SLACK_S = 20.0
"""What a contended machine may need to run the next instruction of three processes."""

STALL_S = 3 * DETECT_S

TRAINER = """
import ctypes, json, os, sys, time
from pathlib import Path
from zeroband.node.shared_flags import SharedFlags
from zeroband.elastic.guardian.process import ListenAddress, Guardian, GuardianOrder
from zeroband.node.shm import NodeFolder

shm_dir, url, detect_s, hung_s, stall_s = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:6])
folder = NodeFolder(Path(shm_dir).parent, "run", "a")
flags = SharedFlags(folder.path / "flags", create=True)
guardian = Guardian(GuardianOrder(
    store_url=url, run_id="run", member_id="a#1", node_id="a", listen=ListenAddress("127.0.0.1"), flags=str(flags.path),
    shm_dir=shm_dir, rank_pids=(os.getpid(),),
    launcher_pid=os.getpid(), lease_s=detect_s, renew_s=detect_s / 5, hung_s=hung_s, is_first=True,
))
print(guardian.pid, flush=True)
for command in sys.stdin:
    if command == "stall\\n":
        ctypes.PyDLL(None).usleep(int(stall_s * 1e6))  # PyDLL keeps the interpreter lock
    elif command == "leave\\n":
        guardian.close()
    flags.advance()
    print("done", flush=True)
"""
"""Takes a lease, then does what it is told line by line."""


@dataclass
class Trainer:
    process: subprocess.Popen[str]
    guardian_pid: int
    shm_dir: Path
    store: RedisStore

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def has_lease(self) -> bool:
        """As another member sees it, which renews its own: the store's time stands still while nobody does."""
        self.store.renew_lease(OTHER, Peer("other", "127.0.0.1", 0, False), first=True)
        return MEMBER in self.store.view(0).alive

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def until(condition: Callable[[], bool], *, within_s: float) -> float:
    """Wait for a condition; the seconds that it took."""
    from_s = time.monotonic()
    while not condition():
        assert time.monotonic() - from_s < within_s, f"not within {within_s:g} s"
        time.sleep(0.01)
    return time.monotonic() - from_s


@pytest.fixture
def start_trainer(tmp_path: Path, redis_url: str) -> Iterator[Callable[..., Trainer]]:
    trainers: list[Trainer] = []
    store = RedisStore(redis_url, "run", lease_s=DETECT_S, retry_s=5.0)

    def start(*, hung_s: float = 1000.0) -> Trainer:
        shm_dir = NodeFolder.path_of(tmp_path, "run", "a")
        arguments = [shm_dir, redis_url, DETECT_S, hung_s, STALL_S]
        process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(sys.modules["zeroband"].__path__[0]).parent)},
        )
        assert process.stdout is not None
        trainers.append(Trainer(process, int(process.stdout.readline()), shm_dir, store))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.process.kill()
        trainer.process.communicate()
        until(lambda trainer=trainer: process_state(trainer.guardian_pid) in "ZX", within_s=SLACK_S)
    store.close()


@pytest.mark.defect(2)
def test_lease_and_guardian_and_shared_memory_end_with_a_killed_trainer(start_trainer: Callable[..., Trainer]) -> None:
    """A predecessor's orphan kept the heartbeat of a killed trainer going for ever."""
    trainer = start_trainer()
    assert trainer.has_lease()
    trainer.signal(signal.SIGKILL)
    trainer.process.wait()
    until(lambda: not trainer.has_lease(), within_s=SLACK_S)
    until(lambda: process_state(trainer.guardian_pid) in "ZX" and not trainer.shm_dir.exists(), within_s=SLACK_S)


def test_lease_of_a_stopped_trainer_runs_out(start_trainer: Callable[..., Trainer]) -> None:
    trainer = start_trainer()
    trainer.signal(signal.SIGSTOP)
    took_s = until(lambda: not trainer.has_lease(), within_s=DETECT_S + SLACK_S)
    assert took_s > DETECT_S / 2, "it had been renewed before"
    assert process_state(trainer.guardian_pid) not in "ZX"


def test_continued_trainer_learns_that_the_run_went_on(start_trainer: Callable[..., Trainer]) -> None:
    trainer = start_trainer()
    trainer.signal(signal.SIGSTOP)
    until(lambda: not trainer.has_lease(), within_s=DETECT_S + SLACK_S)
    assert trainer.store.propose_plan(RoundPlan(1, 1, 0, (OTHER,), (0,)), current=None)
    trainer.signal(signal.SIGCONT)
    flags = SharedFlags(trainer.shm_dir / "flags", create=False)
    until(lambda: flags.is_fenced, within_s=DETECT_S + SLACK_S)
    flags.close()
    assert not trainer.has_lease()


def test_continued_trainer_keeps_its_place_while_nothing_was_decided(start_trainer: Callable[..., Trainer]) -> None:
    trainer = start_trainer()
    trainer.signal(signal.SIGSTOP)
    until(lambda: not trainer.has_lease(), within_s=DETECT_S + SLACK_S)
    trainer.signal(signal.SIGCONT)
    until(trainer.has_lease, within_s=DETECT_S + SLACK_S)


def test_stall_of_the_interpreter_costs_no_lease(start_trainer: Callable[..., Trainer]) -> None:
    trainer = start_trainer()
    trainer.send("stall")
    end_s = time.monotonic() + 0.8 * STALL_S
    while time.monotonic() < end_s:
        assert trainer.has_lease()
        time.sleep(0.02)
    assert select.select([trainer.process.stdout], [], [], 0)[0] == [], "it stalls still"


def test_lease_of_a_hung_trainer_runs_out_until_it_moves_again(start_trainer: Callable[..., Trainer]) -> None:
    trainer = start_trainer(hung_s=0.5)
    until(lambda: not trainer.has_lease(), within_s=0.5 + DETECT_S + SLACK_S)
    trainer.send("go on")
    until(trainer.has_lease, within_s=SLACK_S)


def test_lease_of_a_hung_trainer_ends_though_all_others_hang_too(start_trainer: Callable[..., Trainer]) -> None:
    """Nobody renews any more then, which looks like a store that was away; its time stands still."""
    trainer = start_trainer(hung_s=1.5)
    assert MEMBER in trainer.store.view(0).alive
    until(lambda: MEMBER not in trainer.store.view(0).alive, within_s=SLACK_S)
    trainer.send("go on")
    until(lambda: MEMBER in trainer.store.view(0).alive, within_s=SLACK_S)


def test_leaving_ends_lease_and_guardian_and_leaves_the_folder_to_its_owner(
    start_trainer: Callable[..., Trainer],
) -> None:
    trainer = start_trainer()
    trainer.send("leave")
    assert trainer.process.stdout is not None and trainer.process.stdout.readline() == "done\n"
    assert not trainer.has_lease() and process_state(trainer.guardian_pid) in "ZX"
    assert trainer.shm_dir.exists() and process_state(trainer.process.pid) in "RS"


def test_guardian_ends_with_its_trainer_not_with_the_terminal(start_trainer: Callable[..., Trainer]) -> None:
    trainer = start_trainer()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(trainer.guardian_pid, number)
    time.sleep(DETECT_S + 0.1)
    assert trainer.has_lease() and process_state(trainer.guardian_pid) not in "ZX"

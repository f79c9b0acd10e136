from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.faults.clock import preload

SHIFTED = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
class Times(ctypes.Structure):
    _fields_ = [("s", ctypes.c_long), ("ns", ctypes.c_long)]
now, started_s, end_s = Times(), time.monotonic(), time.time() + 0.1
deadline = Times(int(end_s), int(end_s % 1 * 1e9))
libc.gettimeofday(ctypes.byref(now), None)
print(time.time(), now.s, libc.time(None), time.monotonic(), sep="\\n")
lock, condition, semaphore = bytes(64), bytes(64), bytes(64)
print(libc.pthread_mutex_lock(lock), libc.pthread_cond_timedwait(condition, lock, ctypes.byref(deadline)))
print(libc.sem_timedwait(semaphore, ctypes.byref(deadline)))
print(time.monotonic() - started_s)
"""
ETIMEDOUT = 110

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.mark.slow
@pytest.mark.parametrize("offset_s", [3600, -86400])
def test_preload_shifts_the_wall_clock_and_neither_the_monotonic_one_nor_waits(tmp_path: Path, offset_s: int) -> None:
    env = {**os.environ, **preload(tmp_path, offset_s)}
    before_s, monotonic_before_s = time.time(), time.monotonic()
    said = subprocess.run([sys.executable, "-c", SHIFTED], env=env, capture_output=True, text=True, timeout=10)
    after_s, monotonic_after_s = time.time(), time.monotonic()
    *walls, monotonic, condition, semaphore, waited = said.stdout.splitlines()
    assert len(walls) == 3
    assert all(int(before_s) <= float(wall) - offset_s <= after_s for wall in walls)
    assert monotonic_before_s <= float(monotonic) <= monotonic_after_s
    assert (condition, semaphore) == (f"0 {ETIMEDOUT}", "-1")
    assert 0.1 <= float(waited) < 5


@pytest.mark.slow
def test_preload_of_no_offset_leaves_the_clock_right(tmp_path: Path) -> None:
    env = {**os.environ, **preload(tmp_path, 0)}
    before_s = time.time()
    said = subprocess.run([sys.executable, "-c", "import time; print(time.time())"], env=env, capture_output=True)
    assert before_s <= float(said.stdout) <= time.time()

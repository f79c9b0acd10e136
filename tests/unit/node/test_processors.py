"""How many processors a process may use: its affinity, and the quotas of control groups of both versions."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zeroband.node import processors
from zeroband.node.processors import share_processors, usable_processors


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "granted"),
    [
        ("0::/job/step\n", {"job/step/cpu.max": "max 100000\n", "job/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/job/step\n", {"job/step/cpu.max": "400000 100000\n", "job/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/../outside\n", {"cpu.max": "150000 100000\n"}, 1.5),  # in a container the root alone is seen
        ("0::/\n", {}, math.inf),
        (
            "4:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "50000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("4:cpu:/a\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("4:cpu:/\n9:memory:/b\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("0::/a\n", {"a/cpu.max": "broken\n"}, math.inf),
    ],
)
def test_the_strictest_quota_of_all_groups_above_a_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], granted: float
) -> None:
    write(tmp_path / "groups", files)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(processors, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(processors, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert usable_processors() == min(64, max(1, granted)) // 1


def test_a_process_that_is_bound_to_one_processor_counts_one() -> None:
    probe = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from zeroband.node.launch import parse; print(parse(['--nproc-per-node=cpu', 's']).ranks)"
    )
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("affinity", "granted", "ranks", "threads"),
    [(64, math.inf, 8, "8"), (64, 16.0, 1, "16"), (64, 16.0, 32, "1"), (64, math.inf, 1, None)],
)
def test_ranks_share_the_processors_and_one_alone_leaves_them_to_torch(
    monkeypatch: pytest.MonkeyPatch, affinity: int, granted: float, ranks: int, threads: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    monkeypatch.setattr(processors, "_granted", lambda: granted)
    environ: dict[str, str] = {}
    share_processors(environ, ranks=ranks)
    assert environ.get("OMP_NUM_THREADS") == threads


def test_what_the_user_set_stays() -> None:
    environ = {"OMP_NUM_THREADS": "3"}
    share_processors(environ, ranks=4)
    assert environ == {"OMP_NUM_THREADS": "3"}

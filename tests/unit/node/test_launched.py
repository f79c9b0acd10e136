"""What a rank finds in its environment, and what it puts there before torch is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zeroband.errors import ConfigError
from zeroband.node.launched import (
    RANKS_FILE,
    is_restart,
    launch_of,
    rank_and_world_size,
    require_one_task,
    restarting_launcher,
    torch_variable_errors,
    use_expandable_segments,
)

GROWING = "expandable_segments:True"


def test_cudas_allocator_enlarges_its_segments() -> None:
    environ = {"PATH": "/bin"}
    use_expandable_segments(environ)
    assert environ == {"PATH": "/bin", "PYTORCH_ALLOC_CONF": GROWING}


@pytest.mark.slow
def test_trainer_sees_to_it_before_it_loads_torch() -> None:
    probe = (
        "import os, sys; from zeroband.train import main; "
        "print(main([]), os.environ['PYTORCH_ALLOC_CONF'], 'torch' in sys.modules)"
    )
    environ = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    done = subprocess.run([sys.executable, "-c", probe], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"2 {GROWING} False\n", done.stderr  # nothing to train


@pytest.mark.parametrize(
    ("says", "named"),
    [
        ("The value of TORCH_LOGS must be none", "TORCH_LOGS='bogus' of the environment: The value of TORCH_LOGS must"),
        ("\nInvalid log settings: bogus, must be\nmore", "TORCH_LOGS='bogus' of the environment: Invalid log settings"),
        ("invalid literal for int(): 'many'", "TORCHINDUCTOR_COMPILE_THREADS='many'"),
        ("bogusly, TORCH and somebody else's: loud", ""),
    ],
)
def test_variable_that_torch_refuses_is_named(monkeypatch: pytest.MonkeyPatch, says: str, named: str) -> None:
    for name, value in {"TORCH_LOGS": "bogus", "TORCHINDUCTOR_COMPILE_THREADS": "many", "OTHER": "loud"}.items():
        monkeypatch.setenv(name, value)
    kind, text = (ConfigError, f"torch refuses {named}") if named else (ValueError, says)
    with pytest.raises(kind, match=re.escape(text)), torch_variable_errors():
        raise ValueError(says)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("TORCH_DISTRIBUTED_DEBUG", "loud", "The value of"),
        ("TORCHINDUCTOR_CACHE_DIR", "/dev/null", "[Errno 17] File exists"),  # read where FSDP2 shards the model
    ],
)
def test_train_ends_with_a_sentence_where_torch_refuses_a_variable(
    tmp_path: Path, name: str, value: str, why: str
) -> None:
    command = [sys.executable, "-m", "zeroband.train", "@debug/normal", "--run.dir", str(tmp_path), "--run.id", "x"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "ZERO_BAND_DATA__CACHE_DIR": str(tmp_path), name: value}
    done = subprocess.run([*command, "--train.dtype", "bfloat16"], env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"zeroband: torch refuses {name}={value!r} of the environment: {why}" in done.stderr


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:128", ""])
def test_users_settings_of_the_allocator_stay(name: str, value: str) -> None:
    environ = {name: value}
    use_expandable_segments(environ)
    assert environ == {name: value}


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 1)),
        (dict.fromkeys(LAUNCHED, ""), (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"LOCAL_RANK": "0", "MASTER_ADDR": "elsewhere"}, (0, 1)),
        (LAUNCHED, (1, 3)),
        ({**LAUNCHED, "MASTER_ADDR": "", "MASTER_PORT": "", RANKS_FILE: "/proc/self/fd/3"}, (1, 3)),
    ],
)
def test_place_of_a_rank_in_its_node(environ: dict[str, str], place: tuple[int, int]) -> None:
    assert rank_and_world_size(environ) == place


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "RANK=0, which lacks WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: another launcher .* unset RANK"),
        (
            {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "lacks LOCAL_RANK, LOCAL_WORLD_SIZE",
        ),
        ({"WORLD_SIZE": "1"}, "WORLD_SIZE=1, which lacks RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1, which lacks RANK"),
        ({"LOCAL_WORLD_SIZE": "4"}, "unset LOCAL_WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x', which is not a whole number; unset RANK"),
        ({"TORCHELASTIC_RESTART_COUNT": "many"}, "TORCHELASTIC_RESTART_COUNT='many'"),
        ({**LAUNCHED, "RANK": "3", "LOCAL_RANK": "3"}, "is no valid rank"),
        ({**LAUNCHED, "LOCAL_RANK": "2"}, "gives one rank two numbers"),
        ({**LAUNCHED, "LOCAL_WORLD_SIZE": "2"}, "start one torchrun with --nnodes 1 on every machine"),
        ({**LAUNCHED, "MASTER_PORT": ""}, r"does not say where rank 0 is \(MASTER_ADDR, MASTER_PORT\)"),
    ],
)
def test_what_another_launcher_left_behind_is_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rank_and_world_size(environ)


def test_tasks_of_srun_that_would_each_be_the_same_node_are_refused() -> None:
    environ = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
    with pytest.raises(ConfigError, match=r"srun started 8 tasks on 2 machines .* start one on each"):
        require_one_task(environ, are_told_apart=False)
    require_one_task(environ, are_told_apart=True)
    require_one_task({**environ, **LAUNCHED}, are_told_apart=False)  # below a launcher of their own
    require_one_task({**environ, "SLURM_STEP_NUM_TASKS": "2"}, are_told_apart=False)
    require_one_task({}, are_told_apart=False)


@pytest.mark.parametrize(
    ("most", "done", "restarts", "restarts_again"), [(0, 0, False, False), (2, 1, True, True), (2, 2, True, False)]
)
def test_launcher_restarts_as_often_as_it_was_told_to(
    most: int, done: int, restarts: bool, restarts_again: bool
) -> None:
    environ = {"TORCHELASTIC_MAX_RESTARTS": str(most), "TORCHELASTIC_RESTART_COUNT": str(done)}
    assert bool(restarting_launcher(environ)) == bool(launch_of(environ)) == restarts
    assert bool(restarting_launcher(environ, left=True)) == restarts_again
    assert is_restart(environ) == (done > 0)

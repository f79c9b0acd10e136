"""`zeroband launch`'s command line: torchrun's arguments for one machine, and nothing that opens a port."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from zeroband.errors import ConfigError
from zeroband.node import launch
from zeroband.node.launch import main, parse
from zeroband.node.launched import MACHINES, RANKS_FILE, rank_and_world_size
from zeroband.node.machines import Place


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, in an environment that asks for nothing."""
    monkeypatch.setattr(launch, "visible_gpus", lambda environ: ())
    for name in ("PET_NPROC_PER_NODE", "PET_MAX_RESTARTS", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("options", [("--nproc_per_node=3",), ("--nproc-per-node", "3"), ("--standalone",)])
def test_arguments_of_the_script_are_its_own(options: Sequence[str]) -> None:
    asked = parse([*options, "train.py", "@a.toml", "--max-restarts", "5"])
    assert asked.command == (sys.executable, "-u", "train.py", "@a.toml", "--max-restarts", "5")
    assert (asked.ranks, asked.max_restarts) == (1 if options == ("--standalone",) else 3, 0)


def test_module_and_program_are_started_as_torchrun_does() -> None:
    assert parse(["-m", "a.b", "x"]).command == (sys.executable, "-u", "-m", "a.b", "x")
    assert parse(["--no-python", "/bin/prog", "x"]).command == ("/bin/prog", "x")


def test_torchruns_environment_gives_what_the_command_line_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    assert [(a.ranks, a.max_restarts) for a in (parse(["s"]), parse(["--max-restarts=1", "s"]))] == [(2, 3), (2, 1)]


def test_ranks_are_counted_by_gpus_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "usable_processors", lambda: 3)
    assert parse(["--nproc-per-node=cpu", "s"]).ranks == parse(["--nproc-per-node=auto", "s"]).ranks == 3
    monkeypatch.setattr(launch, "visible_gpus", lambda environ: ("0", "1", "2", "3"))
    assert parse(["--nproc-per-node=gpu", "s"]).ranks == parse(["--nproc-per-node=auto", "s"]).ranks == 4


def test_each_gpu_has_a_rank_where_nobody_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["@150M"]).ranks == 1
    monkeypatch.setattr(launch, "visible_gpus", lambda environ: ("0", "1", "2", "3"))
    assert parse(["@150M"]).ranks == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc-per-node=gpu", "s"], "no GPU is visible"),
        (["--nproc-per-node=two", "s"], "--nproc-per-node two is not a number of ranks"),
        (["--nproc-per-node=0", "s"], "--nproc-per-node 0 is not a number of ranks"),
        (["--max-restarts=-1", "s"], "--max-restarts -1 is not a number of restarts"),
        (["--exit-code-left=256", "s"], "--exit-code-left 256 is no exit code"),
        (["--nnodes=2", "s"], "does not take --nnodes 2 alone: start it on every machine"),
        (["--rdzv-backend=c10d", "s"], "does not take --rdzv-backend=c10d: .*starts the ranks of one machine"),
        (["--nnodes=2", "--node-rank=0", "s"], "does not take --nnodes 2 alone: .* --node-rank and --master-addr"),
        (["--nnodes=2", "--node-rank=2", "--master-addr=h", "s"], "--node-rank 2 is no machine of --nnodes 2: 0 to 1"),
        (
            ["--nnodes=2", "--node-rank=1", "--master-addr=h", "--max-restarts=1", "s"],
            "--max-restarts 1 does not go with --nnodes 2: .*service manager",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_way_out(arguments: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(arguments)
    assert main(arguments) == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "PET_NNODES",
            "4",
            r"does not take PET_NNODES=4 .* alone: .*; unset PET_NNODES for it \(`env -u ",
        ),
        ("PET_NPROC_PER_NODE", "all", "PET_NPROC_PER_NODE=all of the environment is not a number of ranks"),
        ("PET_MAX_RESTARTS", "x", "PET_MAX_RESTARTS=x of the environment is not a number of restarts"),
    ],
)
def test_a_variable_that_gave_an_option_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    """Kubeflow sets them on every machine of a job, as torchrun reads them."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        parse(["s"])


def test_ranks_of_a_machine_are_numbered_after_those_of_the_machines_before_it() -> None:
    launched = parse(["--nproc-per-node=4", "--nnodes=3", "--node-rank=2", "--master-addr=h", "s"])
    assert launched.place == Place(2, 3, "h", 29500)
    env = launched.environment(1, restarts=0, meeting=7, port=8)
    assert rank_and_world_size(env) == (9, 12)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [env[name] for name in names] == ["1", "4", "2", "3", "h", "8"]
    assert RANKS_FILE not in env
    del env[MACHINES]
    with pytest.raises(ConfigError, match="over several nodes"):
        rank_and_world_size(env)


def test_ranks_get_nothing_of_a_launcher_above(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.setenv(name, "x")
    env = parse(["--nproc-per-node=2", "--max-restarts=4", "s"]).environment(1, restarts=3, meeting=7, port=8)
    assert "x" not in env.values()
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "8")
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("1", "1", "2", "2")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("3", "4")
    assert env["ZEROBAND_RANKS_FILE"] == "/proc/self/fd/7"

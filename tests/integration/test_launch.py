"""The launch commands that people know, as they type them, and what they are told when something is wrong."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroband.runtime.loop
import zeroband.runtime.node_membership
import zeroband.runtime.transport_setup
import zeroband.train
from zeroband.checks.finding import Finding
from zeroband.config import load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import Leaving, StoreLost
from zeroband.observe.facts import FolderFacts
from zeroband.observe.status import RunReader
from zeroband.tools.cluster.forked import ForkedNode
from zeroband.tools.cluster.node_process import NodeSpec

ROOT = Path(__file__).resolve().parents[2]
TRAINER = "src/zeroband/train.py"
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int
    output: str
    errors: str
    runs: Path
    """What it had as run.dir."""

    def records(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """The lines of a file of each node, by `run/node`."""
        return {
            path.parent.relative_to(self.runs).as_posix(): [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(self.runs.rglob(name))
        }


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Run a command in the root of the clone, in a user's environment but for the places that it writes to."""
    cache = tmp_path_factory.mktemp("cache")

    def run(*command: str, **variables: str) -> Ended:
        runs = tmp_path_factory.mktemp("runs")
        env = {key: value for key, value in os.environ.items() if not key.upper().startswith("ZERO_BAND_")}
        env |= {"ZERO_BAND_RUN__DIR": str(runs), "ZERO_BAND_DATA__CACHE_DIR": str(cache), **variables}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        return Ended(done.returncode, done.stdout, done.stderr, runs)

    return run


def torchrun(ranks: int, *arguments: str) -> list[str]:
    return [str(Path(sysconfig.get_path("scripts")) / "torchrun"), f"--nproc_per_node={ranks}", TRAINER, *arguments]


# -- as people type them --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.defect(10)
def test_torchrun_trains_one_node_without_an_outer_algorithm(launch: Callable[..., Ended]) -> None:
    done = launch(*torchrun(2, "@configs/debug/normal.toml", "--train.micro_bs", "4", "--train.total_steps", "2"))
    assert done.code == 0, done.errors
    (records,) = done.records("metrics.jsonl").values()
    assert [record["step"] for record in records] == [1, 2]
    assert records[-1]["train/tokens"] == 2 * 16 * 128
    (events,) = done.records("events.jsonl").values()
    assert [event["kind"] for event in events] == ["node_started", "run_finished", "left"]
    assert events[0]["local_world_size"] == 2
    (resolved,) = done.runs.rglob("config.toml")
    assert load_config([f"@{resolved}"], {}).train.micro_bs == 4


@pytest.mark.slow
@pytest.mark.defect(10)
def test_simulate_diloco_trains_two_nodes_to_one_state(launch: Callable[..., Ended]) -> None:
    """Of one rank, which loads no FSDP2; tests/integration/test_observed.py has a node of two in a cluster."""
    script = "./scripts/simulate_multi_node_diloco.sh"
    fewer = (
        *("--train.total_steps", "8", "--outer.inner_steps", "4", "--data.seq_length", "64"),
        *("--train.batch_size", "8", "--train.micro_bs", "4"),
    )
    done = launch(script, "2", "1", TRAINER, "@configs/debug/diloco.toml", *fewer, ZERO_BAND_LOG_LEVEL="DEBUG")
    assert done.code == 0, done.output + done.errors
    nodes = done.records("metrics.jsonl")
    assert len(nodes) == 2
    digests = [[r["outer/digest"] for r in records if "outer/round" in r] for records in nodes.values()]
    assert digests[0] == digests[1] and len(set(digests[0])) == 2
    for records in nodes.values():
        assert records[0]["train/loss"] == pytest.approx(5.8, abs=0.3)  # log 320: it knows nothing
        assert records[-1]["train/loss"] < records[0]["train/loss"] - 0.5
    assert 'log_level = "DEBUG"' in next(done.runs.rglob("config.toml")).read_text()
    assert {line.split()[0] for line in done.output.splitlines()} == {"zeroband:", "[node0]", "[node1]"}


@pytest.mark.soak
def test_simulate_trains_two_nodes_with_ddp(launch: Callable[..., Ended]) -> None:
    script = "./scripts/simulate_multi_node.sh"
    done = launch(script, "2", "1", TRAINER, "@configs/debug/ddp.toml", "--train.total_steps", "3")
    assert done.code == 0, done.output + done.errors
    digests = [[record["outer/digest"] for record in records] for records in done.records("metrics.jsonl").values()]
    assert len(digests) == 2 and digests[0] == digests[1] and len(set(digests[0])) == 3


@pytest.mark.slow
@pytest.mark.defect(12)
def test_simulate_refuses_nodes_that_would_train_alone(launch: Callable[..., Ended]) -> None:
    done = launch("./scripts/simulate_multi_node.sh", "2", "1", TRAINER, "@configs/debug/normal.toml")
    assert done.code == 2
    assert done.errors.count("\n") == 1 and "there is no [outer] section" in done.errors
    assert not any(done.runs.iterdir())


WRONG_KEY = "zeroband: unknown key train.mikro_bs (from --train.mikro_bs): did you mean train.micro_bs?"


@pytest.mark.slow
def test_torchrun_with_an_unknown_key_says_it_once_below_its_own_traceback(launch: Callable[..., Ended]) -> None:
    done = launch(*torchrun(2, "@configs/debug/normal.toml", "--train.mikro_bs", "4"))
    assert done.code != 0
    lines = done.errors.splitlines()
    ours = [number for number, line in enumerate(lines) if WRONG_KEY in line]
    assert len(ours) == 1
    assert set("".join(lines[ours[0] + 1 :])) == {"="}, "torchrun draws a line, and that is all"
    assert f"{ROOT}/src" not in done.errors  # no frame of this package in a traceback
    assert not any(done.runs.iterdir())


@pytest.mark.slow
def test_launch_with_an_unknown_key_says_it_and_nothing_else(launch: Callable[..., Ended]) -> None:
    zeroband = str(Path(sysconfig.get_path("scripts")) / "zeroband")
    done = launch(
        *(zeroband, "launch", "--nproc_per_node=2", "--max-restarts=3", TRAINER),
        *("@configs/debug/normal.toml", "--train.mikro_bs", "4"),
    )
    assert (done.code, done.errors, done.output) == (2, f"{WRONG_KEY}\n", "")
    assert not any(done.runs.iterdir())


@pytest.mark.slow
def test_demo_names_a_wrong_setting_before_it_starts_anything(launch: Callable[..., Ended]) -> None:
    done = launch(str(Path(sysconfig.get_path("scripts")) / "zeroband"), "demo", "--train.total_stepz", "3")
    assert (done.code, done.output) == (2, "")
    assert "did you mean train.total_steps?" in done.errors
    assert not any(done.runs.iterdir())


# -- what a rank says when something is wrong -----------------------------------------------------------------------

TINY = (
    *("--model.d_model=8", "--model.n_layers=1", "--model.n_heads=2", "--data.seq_length=8"),
    *("--data.source.type=synthetic", "--train.batch_size=2", "--train.total_steps=1", "--node.id=n0"),
)


@pytest.mark.slow
def test_script_that_calls_init_process_group_itself_finds_its_ranks(tmp_path: Path) -> None:
    (script := tmp_path / "own.py").write_text(
        "import torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nfound = torch.ones(1)\ndist.all_reduce(found)\n"
        # One write: an unbuffered `print` writes the end of its line apart, and two ranks share the pipe.
        "print(f'{found.item()}\\n', end='')\n"
        "dist.destroy_process_group()\n"  # else a thread of gloo may abort the process at its end
    )
    node = ForkedNode(NodeSpec("own", 2, script, (), dict(os.environ), tmp_path / "own", tmp_path / "memory"))
    assert (node.wait(DEADLINE_S), node.console_tail().split()) == (0, ["2.0", "2.0"]), node.console_tail()


@dataclass
class Rank:
    """The trainer's `main` in this process, as torchrun's only rank."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def node_dir(self) -> Path:
        return self.folder / "runs" / "first" / "n0"

    def main(self, *arguments: str) -> tuple[int, str]:
        """Exit code and what stands on standard error, log lines apart."""
        places = ("--run.id=first", f"--run.dir={self.folder / 'runs'}", f"--data.cache_dir={self.folder / 'cache'}")
        code = zeroband.train.main([*TINY, *places, *arguments])
        lines = self.capsys.readouterr().err.splitlines()
        return code, "\n".join(line for line in lines if not re.match(r"\d{4}-\d\d-\d\dT", line))

    def outer(self, url: str, *arguments: str) -> tuple[int, str]:
        return self.main("--outer.type=ddp", f"--store.url={url}", "--fault.detect_s=0.5", *arguments)


@pytest.fixture
def rank(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """What `main` sets up for its whole process is put back afterwards."""
    for key in [key for key in os.environ if key.upper().startswith("ZERO_BAND_")]:
        monkeypatch.delenv(key)
    monkeypatch.setattr(zeroband.train, "die_with_launcher", lambda: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    logger = logging.getLogger("zeroband")
    level, propagate = logger.level, logger.propagate
    yield Rank(tmp_path, capsys)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    logger.propagate = propagate


def test_variable_that_torch_refuses_while_memory_is_predicted_is_named(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the prediction is what loads torch's compiler first."""

    def load_compiler(*_: object, **__: object) -> list[Finding]:
        raise FileExistsError(17, "File exists", "/dev/null")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null")
    monkeypatch.setattr(zeroband.train, "gpu_memory", load_compiler)
    code, said = rank.main()
    assert (code, said) == (
        2,
        "zeroband: torch refuses TORCHINDUCTOR_CACHE_DIR='/dev/null' of the environment: [Errno 17] File exists: "
        "'/dev/null'; unset or correct it",
    )


@pytest.mark.slow
def test_full_gpu_ends_the_trainer_with_3_and_what_to_turn(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_gpu(*_: object) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 24_000_000_000))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 23_000_000_000)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(zeroband.runtime.loop, "run", fill_gpu)
    code, said = rank.main("--train.micro_bs=2", "--train.batch_size=4")
    assert code == 3
    assert re.fullmatch(
        r"zeroband: out of memory on NVIDIA GeForce RTX 4090, of which a rank has 24 GB: its tensors took 23 GB at the "
        r"peak, [\d.]+ MB were predicted in all; even --train\.micro_bs 1 .*",
        said,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--train.mikro_bs=4",), "did you mean train.micro_bs?"),
        (("--outer.type=ddp",), "needs store.url"),
        (("--store.url=redis://localhost",), "there is no [outer] section: every node would train alone"),
        (("--fault.inject=lunch@3=SIGKILL",), "lunch@3=SIGKILL"),
    ],
)
@pytest.mark.defect(12)
def test_wrong_configuration_is_exit_code_2_and_one_line(rank: Rank, arguments: Sequence[str], said: str) -> None:
    code, line = rank.main(*arguments)
    assert code == 2
    assert line.startswith("zeroband: ") and "\n" not in line
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data.source.type=text", "--data.source.paths=/nowhere/*.txt"), "/nowhere/*.txt"),
        (("--node.shm_dir=/nowhere", "--outer.type=ddp", "--store.url=redis://localhost"), "node.shm_dir='/nowhere'"),
    ],
)
@pytest.mark.defect(12)
def test_what_this_machine_lacks_is_exit_code_3_and_one_line(rank: Rank, arguments: Sequence[str], said: str) -> None:
    code, line = rank.main(*arguments)
    assert code == 3
    assert line.startswith("zeroband: ") and "\n" not in line
    assert said in line


@pytest.mark.parametrize(
    "url",
    [
        *("http://:s3cret@host", "host:6379", "redis://", "redis://:s3cret@host:port", "redis://:s3cret@host:70000"),
        *("redis://:s3cret@[::1", "rediss://host/database", "unix://", "unix:///"),
    ],
)
def test_malformed_store_url_is_refused_without_showing_it(rank: Rank, url: str) -> None:
    code, line = rank.main("--outer.type=ddp", f"--store.url={url}")
    assert code == 2
    assert "store.url is no address of a Redis" in line and "s3cret" not in line


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://:p@h:1/3", "redis://u:p@[::1]:6379/", "unix://u:p@/run/redis.sock"]
)
def test_store_url_of_each_form_is_accepted(url: str) -> None:
    config = load_config(["--outer.type=ddp", f"--store.url={url}"], {})
    assert config.store.url is not None and config.store.url.get_secret_value() == url


@pytest.mark.slow
def test_unreachable_redis_is_named_without_its_password(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeroband.runtime.node_membership, "_FIRST_CONTACT_S", 0.1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        code, line = rank.outer(f"redis://:s3cret@127.0.0.1:{port}")
    assert code == 1
    assert line.startswith("zeroband: Redis did not answer") and "\n" not in line
    assert f"127.0.0.1:{port}" in line and "store.url" in line and "s3cret" not in line
    last = (rank.node_dir / "events.jsonl").read_text().splitlines()[-2:]
    assert [json.loads(event)["kind"] for event in last] == ["run_failed", "left"]


@pytest.mark.slow
def test_store_that_refuses_for_good_ends_the_trainer_with_2_and_why(rank: Rank, url_without_scripts: str) -> None:
    code, line = rank.outer(url_without_scripts)
    assert code == 2
    assert line.startswith("zeroband: store.url: what answers there is no Redis that a run can use (unknown command")
    assert "EVALSHA" in line and "\n" not in line


@pytest.mark.slow
def test_port_that_is_taken_is_named_with_its_key(rank: Rank, redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = rank.outer(redis_url, f"--node.port={port}")
    assert code == 2
    assert line == (
        f"zeroband: node.port={port} is taken: another process of this machine listens (address 127.0.0.1); "
        "end that one, or set another node.port"
    )


def test_host_of_the_store_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_arguments: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(StoreLost, match=r"^no route to nowhere: Name or service not known; check store\.url$"):
        zeroband.runtime.transport_setup.address_towards("redis://:s3cret@nowhere:6379")


HOLDS = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"


def test_folder_of_a_running_node_is_left_alone(rank: Rank) -> None:
    rank.node_dir.mkdir(parents=True)
    command = [sys.executable, "-c", HOLDS, str(rank.node_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        code, line = rank.main()
        other.kill()
    assert code == 2
    assert "node.id='n0' of run.id='first' is already running" in line
    assert sorted(path.name for path in rank.node_dir.iterdir()) == ["rank0.log"]


def test_stack_dumps_of_a_running_node_are_left_alone(rank: Rank) -> None:
    rank.node_dir.mkdir(parents=True)
    stacks = rank.node_dir / "rank0.stacks"
    stacks.write_text("the first line says whose they are\n")
    held = os.open(rank.node_dir, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert rank.main()[0] == 2
    finally:
        os.close(held)
    assert stacks.read_text() == "the first line says whose they are\n"


def test_run_directory_that_cannot_be_written_is_named(rank: Rank) -> None:
    (rank.folder / "runs").write_text("a file")
    code, line = rank.main()
    assert code == 3
    assert line.startswith(f"zeroband: disk: run.dir='{rank.node_dir}': nothing can be written to ")
    assert line.endswith("may write to")


@pytest.mark.defect(12)
def test_torchrun_over_several_nodes_is_refused(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    code, line = rank.main()
    assert code == 2
    assert "start one torchrun with --nnodes 1 on every machine" in line


@pytest.mark.parametrize(
    ("numbers", "holds_work", "together_s", "code"),
    [
        ([signal.SIGINT], True, 0.0, 130),
        ([signal.SIGTERM], False, 0.0, 0),
        ([signal.SIGUSR1], False, 0.0, 0),
        ([signal.SIGTERM, signal.SIGTERM], True, 0.0, 143),
        ([signal.SIGUSR1, signal.SIGTERM], True, 0.0, 143),
        ([signal.SIGTERM, signal.SIGINT], True, 3600.0, 130),
    ],
)
def test_signal_ends_the_run_through_its_clean_up(
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    numbers: Sequence[signal.Signals],
    holds_work: bool,
    together_s: float,
    code: int,
) -> None:
    monkeypatch.setattr("zeroband.node.launched.REQUEST_WINDOW_S", together_s)
    given_back: list[str] = []

    def interrupted(_config: object, _local: object, departure: Departure, stack: ExitStack, _port: object) -> None:
        stack.callback(given_back.append, "all")
        departure.holds_work = holds_work
        for number in numbers:
            signal.raise_signal(number)

    monkeypatch.setattr(zeroband.runtime.loop, "train", interrupted)
    with pytest.raises(SystemExit) as ended:
        rank.main()
    assert (ended.value.code, given_back) == (code, ["all"])


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM], [signal.SIGUSR1], [signal.SIGTERM, signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM]]
)
def test_first_signal_only_asks_a_node_with_work_to_leave(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, numbers: Sequence[signal.Signals]
) -> None:
    """One that comes twice, from who signals every process of a job, and from the launcher, asks once."""
    monkeypatch.setattr("zeroband.node.launched.REQUEST_WINDOW_S", 3600.0)
    asked: list[bool] = []

    def asked_to_leave(_config: object, _local: object, departure: Departure, *_rest: object) -> None:
        departure.holds_work = True
        for number in numbers:
            signal.raise_signal(number)
        asked.append(departure.is_asked)
        raise Leaving("left as asked")

    monkeypatch.setattr(zeroband.runtime.loop, "train", asked_to_leave)
    code, said = rank.main()
    assert (code, said.splitlines()[-1]) == (0, "zeroband: left as asked")
    assert "events.jsonl" in said  # and where everything lies
    assert asked == [True]


def test_other_ranks_leave_the_word_to_the_first(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(zeroband.train.time, "sleep", pauses.append)
    numbers = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert rank.main("--train.mikro_bs=4")[0] == 2
    assert pauses == [10.0]


@pytest.mark.slow
def test_node_of_another_run_is_refused_at_join(rank: Rank, redis_url: str) -> None:
    assert rank.outer(redis_url, "--run.token=first")[0] == 0
    assert "no run.token" not in (rank.node_dir / "rank0.log").read_text()
    elsewhere = f"--run.dir={rank.folder / 'elsewhere'}"
    for arguments, key in [
        (["--run.token=second", elsewhere], "run.token"),
        (["--run.token=first", "--run.seed=7"], "run.seed"),
    ]:
        code, line = rank.outer(redis_url, *arguments)
        assert code == 2
        assert line.startswith(f"zeroband: refused at join: {key} is ") and "\n" not in line
        assert "first" not in line and "second" not in line
    code, line = rank.outer(redis_url, "--run.token=second")  # in the folder of that run
    assert code == 2 and line.startswith("zeroband: run.token: the nodes of this run have another one")


@pytest.mark.slow
def test_node_that_comes_to_a_complete_run_is_told_so_and_is_no_failure(rank: Rank, redis_url: str) -> None:
    assert rank.outer(redis_url)[0] == 0
    warning = "no run.token: anyone who reaches the store or a node's port can join this run and fetch the model"
    assert (rank.node_dir / "rank0.log").read_text().count(warning) == 1
    code, line = rank.outer(redis_url)
    assert code == 0
    assert re.fullmatch(r"zeroband: the run is complete since round 1; start another with a new run\.id", line)
    (node,) = RunReader(FolderFacts(rank.node_dir.parent)).read().nodes
    assert node.state == "left"

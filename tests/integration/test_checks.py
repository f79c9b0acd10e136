"""What this machine lacks: `doctor` finds it and `train` refuses it, by the same checks, under the real condition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import zeroband
from zeroband.config import load_config
from zeroband.data.tokens import prepare

pytestmark = pytest.mark.slow

SOURCE = Path(zeroband.__file__).parents[1]

PROBE = """
import contextlib, importlib.machinery, io, json, os, resource, signal, sys, tempfile
import zeroband.checks.machine, zeroband.tools.doctor.outside, zeroband.train
from zeroband.cli import main
from zeroband.kernels import native

zeroband.tools.doctor.outside._STORE_RETRY_S = 0.1

class Uninstalled(importlib.machinery.PathFinder):
    names = ()

    @classmethod
    def find_spec(cls, name, *more):
        return None if name.partition(".")[0] in cls.names else super().find_spec(name, *more)

def answer(command, condition):
    Uninstalled.names = tuple(condition.get("uninstalled", ()))
    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Uninstalled
    os.environ.update(condition.get("environ", {}))
    if "descriptors" in condition:
        resource.setrlimit(resource.RLIMIT_NOFILE, (condition["descriptors"],) * 2)
    if condition.get("no_library"):
        native.library_path = lambda: zeroband.checks.machine.Path("absent.so")
    try:
        return main(command)
    except SystemExit as end:
        return end.code

for line in sys.stdin:
    command, condition = json.loads(line)
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            signal.alarm(60)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = answer(command, condition)
            sys.stdout.flush()
            os._exit(code or 0)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), said.read()]), flush=True)
"""
"""Has loaded what both commands load; answers each line in a child of its own, under the condition that it names."""

TINY = (
    *("--model.d-model=32", "--model.n-layers=1", "--model.n-heads=2", "--data.seq-length=32"),
    *("--data.source.type=synthetic", "--train.total-steps=2", "--train.batch-size=4", "--train.micro-bs=4"),
    *("--train.dtype=float32", "--optim.warmup-steps=1"),
)
DILOCO = ("--outer.type=diloco", "--outer.inner-steps=1", "--store.url=redis://127.0.0.1:1")
HUGE = ("--model.d-model=65536", "--model.n-heads=512", "--model.n-layers=500")


class Prober:
    """The process of PROBE."""

    def __init__(self, folder: Path) -> None:
        self._places = (f"--run.dir={folder / 'runs'}", f"--data.cache-dir={folder / 'cache'}")
        environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(SOURCE)}
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", PROBE]
        self.process = subprocess.Popen(command, env=environ, cwd=folder, stdin=pipe, stdout=pipe, text=True)

    def ask(self, command: str, arguments: Sequence[str], condition: dict[str, Any]) -> tuple[int, str]:
        """Exit code, and what was said."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([[command, *TINY, *self._places, *arguments], condition]) + "\n")
        self.process.stdin.flush()
        code, said = json.loads(self.process.stdout.readline())
        return code, said


@pytest.fixture(scope="module")
def prober(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prober]:
    prober = Prober(tmp_path_factory.mktemp("probed"))
    yield prober
    prober.process.kill()
    prober.process.wait()


@pytest.fixture(scope="module")
def tiny_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 64 kB."""
    place = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount file systems")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@dataclass(frozen=True)
class Lack:
    """Something that is missing on this machine, and what both commands say of it."""

    arguments: tuple[str, ...]
    says: str
    condition: dict[str, Any] = field(default_factory=dict[str, Any])


OF_THREE = {
    "RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
"""What torchrun tells the first of three ranks."""

LACKS = {
    "tokenizers": Lack(
        ("--data.tokenizer=gpt2",), "pip install 'zeroband-elastic[hf]'", {"uninstalled": ["transformers"]}
    ),
    "data sets": Lack(
        ("--data.source.type=huggingface", "--data.source.name=x"), "needs datasets", {"uninstalled": ["datasets"]}
    ),
    "s3": Lack(("--ckpt.path=s3://bucket/x",), "zeroband-elastic[s3]", {"uninstalled": ["s3fs"]}),
    "gcs": Lack(
        ("--data.source.type=text", "--data.source.paths=gs://bucket/*.txt"),
        "zeroband-elastic[gcs]",
        {"uninstalled": ["gcsfs"]},
    ),
    "wandb": Lack(("--observe.wandb",), "zeroband-elastic[wandb]", {"uninstalled": ["wandb"]}),
    "tensorboard": Lack(("--observe.tensorboard",), "zeroband-elastic[tensorboard]", {"uninstalled": ["tensorboard"]}),
    "prometheus": Lack(("--observe.prometheus",), "uv sync --extra prometheus", {"uninstalled": ["prometheus_client"]}),
    "trackio": Lack(("--observe.trackio",), "zeroband-elastic[trackio]", {"uninstalled": ["trackio"]}),
    "protocol": Lack(
        (
            "--data.source.type=text",
            "--data.source.paths=s4://bucket/x.txt",
        ),
        "nothing opens s4://",
    ),
    "data": Lack(("--data.source.type=text", "--data.source.paths=absent.txt"), "no file matches 'absent.txt'"),
    "readable data": Lack(
        ("--data.source.type=text", "--data.source.paths=/proc/self/mem"), "/proc/self/mem cannot be read"
    ),
    "text": Lack(("--data.source.type=text", f"--data.source.paths={sys.executable}"), "data.source.binary = true"),
    "weights": Lack(("--train.init-from=absent",), "train.init_from='absent' has no config.json"),
    "algorithm": Lack(
        ("--outer.type=custom", "--outer.algorithm=absent.py", "--outer.inner-steps=1", DILOCO[-1]),
        "outer.algorithm='absent.py' cannot be read",
    ),
    "shared memory": Lack((*DILOCO, *HUGE), "shared memory"),
    "folder for it": Lack(("--node.shm-dir=absent",), "node.shm_dir='absent' is no folder"),
    "memory": Lack(HUGE, "use a smaller model"),
    "compiler": Lack(("--train.compile",), "g++ is not on the PATH", {"environ": {"PATH": "/absent"}}),
    "descriptors": Lack((*DILOCO, "--elastic.start-nodes=9"), "ulimit -Hn", {"descriptors": 200}),
    "ranks": Lack((), "not a multiple of the 3 ranks", {"environ": OF_THREE}),
    "library": Lack(DILOCO, "the native library was not built", {"no_library": True}),
    "run folder": Lack((f"--run.dir={sys.executable}/runs",), f"nothing can be written to {sys.executable}: "),
    "cache folder": Lack(("--data.cache-dir=/proc/self",), "data.cache_dir='/proc/self': nothing can be written to "),
}


@pytest.mark.parametrize("lack", LACKS.values(), ids=LACKS)
def test_doctor_and_train_refuse_what_this_machine_lacks(lack: Lack, prober: Prober) -> None:
    for command in ("doctor", "train"):
        code, said = prober.ask(command, lack.arguments, lack.condition)
        assert code == 3 and lack.says in said, (command, code, said)
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--train.micro-bs=four", "train.micro_bs='four'"),
        ("--fault.inject=lunch@3=SIGKILL", "lunch@3=SIGKILL"),
        ("--outer.type=diloco", "needs store.url"),
        ("@absent.toml", "@absent.toml: No such file"),
    ],
)
def test_doctor_and_train_refuse_a_wrong_configuration_alike(argument: str, says: str, prober: Prober) -> None:
    for command in ("doctor", "train"):
        code, said = prober.ask(command, (argument,), {})
        assert code == 2 and says in said, (command, code, said)


@pytest.mark.parametrize("key", ["run.dir", "data.cache_dir"])
def test_doctor_and_train_refuse_a_full_disk(key: str, tiny_disk: Path, prober: Prober) -> None:
    for command in ("doctor", "train"):
        code, said = prober.ask(command, (f"--{key}={tiny_disk}",), {})
        assert code == 3 and f"needed: {key} 16 MB" in said and "make room there" in said, (command, code, said)


def test_shared_memory_that_is_too_small_is_refused_with_the_way_out(tiny_disk: Path, prober: Prober) -> None:
    for command in ("doctor", "train"):
        code, said = prober.ask(command, (*DILOCO, f"--node.shm-dir={tiny_disk}"), {})
        assert code == 3 and "65.5 kB free" in said and "--shm-size" in said, (command, code, said)


def test_disk_without_room_for_the_checkpoints_of_a_run_is_found_before_it_starts(
    tiny_disk: Path, prober: Prober
) -> None:
    code, said = prober.ask("doctor", (f"--ckpt.path={tiny_disk}",), {})
    assert code == 3 and "FAIL  disk" in said and "ckpt.path" in said, said
    code, said = prober.ask("doctor", (), {})
    assert (code, "FAIL" in said) == (0, False), said


def test_filled_cache_may_be_read_only(prober: Prober, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to learn from " * 100)
    cache = tmp_path / "cache"
    data = ("--data.source.type=text", f"--data.source.paths={tmp_path}/a.txt", f"--data.cache-dir={cache}")
    prepare(load_config([*TINY, *data], {}).data, seed=0)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(cache)]
    filled = {file.name: file.read_bytes() for file in cache.iterdir()}
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount file systems")
    try:
        for name, content in filled.items():
            (cache / name).write_bytes(content)
        subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        code, said = prober.ask("doctor", data, {})
        assert (code, "FAIL" in said) == (0, False), said
        code, said = prober.ask("doctor", (*data, "--run.seed=1", f"--data.source.paths={sys.prefix}/pyvenv.cfg"), {})
        assert code == 3 and "nothing can be written to" in said, said
    finally:
        subprocess.run(["umount", str(cache)], check=True)


class _Gated(BaseHTTPRequestHandler):
    """Answers as the hub does for a model whose terms were not accepted."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to this model is restricted")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def gated_hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gated)
    thread = threading.Thread(target=server.serve_forever, name="hub")
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_gated_tokenizer_is_refused_with_the_way_out(gated_hub: str, prober: Prober) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    condition = {"environ": {"HF_ENDPOINT": gated_hub}}
    code, said = prober.ask("doctor", ("--data.tokenizer=meta-llama/Gated",), condition)
    assert code == 3 and "HF_TOKEN" in said and "FAIL  tokenizer" in said, said

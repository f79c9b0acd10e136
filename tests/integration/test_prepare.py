"""`zeroband data prepare` as users start it: real workers, real kills, and a bucket."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.buckets import reach_s3, s3_server
from tests.unit.tools.data.preparations import bytes_of, manifest_of, prepare

from zeroband.node.processes import pids_with
from zeroband.tools.data.inspect import main as inspect

FLAGS = ("--dedup", "--pack", "best-fit", "--seq-length", "128", "--unit-mb", "0.05")
LIMIT_S = 120
BUCKET = "prepared"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """600 kB of lines, each third a copy of an earlier one."""
    chance = random.Random(0)
    texts: list[str] = []
    for number in range(3000):
        words = [chance.choice(("alpha", "beta", "ünï", "gamma")) for _ in range(chance.randrange(80))]
        texts.append(chance.choice(texts) if number % 3 == 2 else " ".join(words))
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tiny byte-level BPE."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["alpha beta ünï gamma"], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(tmp_path / "bpe")
    return tmp_path / "bpe"


def start(*arguments: object, mark: str = "", **options: Any) -> subprocess.Popen[str]:
    code = "import sys; from zeroband.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "data", "prepare", *map(str, arguments)]
    env = os.environ | {"PREPARATION": mark}
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(*arguments: object, mark: str = "") -> tuple[int, str, str]:
    process = start(*arguments, mark=mark)
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def work_of(out: Path) -> int:
    """Files of a preparation that is under way: grows as it goes on."""
    return sum(1 for path in out.rglob("*") if path.is_file())


def has_files(out: Path, number: int) -> bool:
    return work_of(out) >= number


def signal_when(
    process: subprocess.Popen[str], is_due: Callable[[], bool], number: signal.Signals, pause_s: float = 0.0
) -> None:
    """Send a signal some time after something begins to hold, or the process has ended."""
    end_s = time.monotonic() + LIMIT_S
    while process.poll() is None and not is_due() and time.monotonic() < end_s:
        time.sleep(0.002)
    time.sleep(pause_s)
    process.send_signal(number)


def kills_on_the_way(arguments: Sequence[object], out: Path, kills: int, seed: int) -> None:
    """Kill a preparation at random moments of its work, going on each time; the last one comes to its end."""
    chance = random.Random(seed)
    mark = f"{out}-{os.getpid()}"
    for _ in range(kills):
        process = start(*arguments, out, "--workers", chance.choice((1, 2, 3)), mark=mark)
        due = work_of(out) + chance.randrange(1, 6)
        signal_when(process, partial(has_files, out, due), signal.SIGKILL, pause_s=chance.random() * 0.05)
        process.communicate()
    code, _, err = finish(*arguments, out, "--workers", 3, mark=mark)
    assert (code, err) == (0, ""), err
    assert pids_with("PREPARATION", mark) == []


@pytest.mark.faults
def test_killed_preparation_goes_on_to_the_bytes_of_one_that_was_not(corpus: Path, tmp_path: Path) -> None:
    arguments = (corpus, "--tokenizer", "byte", *FLAGS)
    assert prepare(*arguments, tmp_path / "whole") == 0
    kills_on_the_way(arguments, tmp_path / "killed", kills=3, seed=0)
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "whole")
    found = manifest_of(tmp_path / "whole")
    assert len(found.shards) > 8 and found.duplicate_documents > 900


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_preparation_that_is_killed_again_and_again_gives_the_same_bytes(
    corpus: Path, tokenizer: Path, tmp_path: Path, seed: int
) -> None:
    arguments = (corpus, "--tokenizer", tokenizer, *FLAGS)
    assert prepare(*arguments, tmp_path / "whole") == 0
    kills_on_the_way(arguments, tmp_path / "killed", kills=5, seed=seed)
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "whole")


@pytest.mark.faults
def test_interrupt_ends_all_workers_and_says_how_to_go_on(corpus: Path, tmp_path: Path) -> None:
    out, mark = tmp_path / "out", f"{tmp_path}-{os.getpid()}"
    arguments = (corpus, out, "--tokenizer", "byte", "--unit-mb", "0.02")
    process = start(*arguments, "--workers", 2, mark=mark)
    signal_when(process, lambda: any((out / "_prepare/units").glob("*.json")), signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and "the same command goes on from there" in err, err
    assert pids_with("PREPARATION", mark) == []
    code, said, _ = finish(*arguments, "--workers", 1)
    assert code == 0 and "going on: " in said
    assert prepare(corpus, tmp_path / "whole", "--unit-mb", "0.02") == 0
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


@pytest.mark.faults
def test_full_disk_and_a_killed_worker_are_told(corpus: Path, tmp_path: Path) -> None:
    """A limit of the size of files stands for a disk without room: the system refuses to write in either case."""
    out = tmp_path / "out"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    process = start(corpus, out, "--tokenizer", "byte", "--workers", 1, preexec_fn=limit)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2 and f"cannot write to {out}: no file may grow so large here" in err, err
    out, mark = tmp_path / "killed", f"{tmp_path}-{os.getpid()}"
    corpus.write_text(corpus.read_text() * 20)  # units enough for seconds: the worker is at work when it is killed
    process = start(corpus, out, "--tokenizer", "byte", "--workers", 1, "--unit-mb", "0.02", mark=mark)
    signal_when(process, lambda: any((out / "_prepare/units").glob("*.json")), signal.SIGCONT)
    for pid in set(pids_with("PREPARATION", mark)) - {process.pid}:
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2 and re.search(r"a worker ended with -9 while it made unit \d+;", err), err


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of a server that speaks S3, and what a user has in the environment to reach it."""
    with s3_server() as endpoint:
        reach_s3(endpoint, BUCKET, monkeypatch)
        yield f"s3://{BUCKET}/a/set"


@pytest.mark.slow
def test_bucket_gets_the_bytes_that_a_folder_gets(
    corpus: Path, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import boto3

    flags = ("--tokenizer", "byte", "--dedup", "--unit-mb", "0.3")
    assert prepare(corpus, tmp_path / "whole", *flags) == 0
    code, said, err = finish(corpus, bucket, *flags, "--workers", 2)
    assert code == 0 and f'path = "{bucket}"' in said, err
    client = boto3.client("s3")
    names = [found["Key"] for found in client.list_objects_v2(Bucket=BUCKET)["Contents"]]
    stored = {n.removeprefix("a/set/"): client.get_object(Bucket=BUCKET, Key=n)["Body"].read() for n in names}
    assert stored == bytes_of(tmp_path / "whole")
    assert inspect([bucket, "--verify"]) == 0
    assert "files are whole" in capsys.readouterr().out
    assert finish(corpus, bucket, *flags)[0] == 0
    client.put_object(Bucket=BUCKET, Key=f"a/set/{sorted(stored)[0]}", Body=b"damage")
    assert inspect([bucket, "--verify", "--samples", "0"]) == 3

"""`zeroband data prepare` as users start it: real workers, real kills, and a bucket."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.buckets import reach_s3, s3_server
from tests.text_server import text_server
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


def files_in(out: str) -> dict[str, bytes]:
    """What `bytes_of` gives, of a folder in which files come and go."""
    found = dict[str, bytes]()
    for path in (Path(at, name) for at, _, names in os.walk(out) for name in names):
        with contextlib.suppress(FileNotFoundError):
            found[str(path.relative_to(out))] = path.read_bytes()
    return found


Files = Callable[[str], Mapping[str, bytes]]
"""All files below an OUT."""


def await_in(process: subprocess.Popen[str], is_due: Callable[[], bool]) -> None:
    """Wait until something holds, or the process has ended."""
    end_s = time.monotonic() + LIMIT_S
    while process.poll() is None and not is_due() and time.monotonic() < end_s:
        time.sleep(0.005)


def units_of(files: Mapping[str, bytes], kind: str) -> int:
    """How many units of a preparation are hashed, or are made (`units`)."""
    return sum(name.startswith(f"_prepare/{kind}/") and "/." not in name for name in files)


def phase_of(files: Mapping[str, bytes]) -> str:
    """What a preparation with --dedup was about when it was killed, by what it left."""
    if "_prepare/plan.json" not in files:
        return "at its end" if "manifest.json" in files else "before the plan"
    units = len(json.loads(files["_prepare/plan.json"])["units"])
    hashed, made = units_of(files, "hashes"), units_of(files, "units")
    steps = {"hashing": hashed < units, "at the first units": not made, "making units": made < units}
    return next((step for step, is_it in steps.items() if is_it), "at its end")


def steps_done(files: Mapping[str, bytes]) -> int:
    return units_of(files, "hashes") + units_of(files, "units")


def kill_again_and_again(
    arguments: Sequence[object], folder: object, expected: Path, files_of: Files, kills: int, seed: int
) -> Counter[str]:
    """Kill preparations at moments that are drawn over all of their work, and go on, until so many were killed.

    Each of ten kills is at a number of units that are hashed or made, or while the process starts. Then it comes to its
    end with the files that are `expected`, and the next one is begun. Returns how many were killed in each phase.
    """
    chance, mark = random.Random(seed), f"{folder}-{os.getpid()}"
    whole, steps = bytes_of(expected), 2 * len(manifest_of(expected).shards)
    phases, starts_s = Counter[str](), 1.0
    for number in itertools.count():
        out = f"{folder}/{number}"
        goals = sorted(chance.randrange(-steps // 5, steps) for _ in range(min(10, kills - phases.total())))
        is_finished = False
        while not is_finished:
            process = start(*arguments, out, "--workers", chance.choice((1, 2, 3)), mark=mark)
            if goals:
                goal, began_s = goals.pop(0), time.monotonic()
                if goal > 0:
                    due = max(goal, steps_done(files_of(out)) + 1)
                    await_in(process, partial(lambda out, due: steps_done(files_of(out)) >= due, out, due))
                    starts_s = time.monotonic() - began_s
                time.sleep(chance.random() * (0.05 if goal > 0 else starts_s))
                process.kill()
            _, err = process.communicate(timeout=LIMIT_S)
            assert pids_with("PREPARATION", mark) == []
            is_finished = process.returncode != -signal.SIGKILL
            if is_finished:
                assert (process.returncode, err) == (0, ""), err
            else:
                phases[phase_of(files_of(out))] += 1
        assert files_of(out) == whole
        if phases.total() == kills:
            print(f"\nseed {seed}: {kills} kills, {dict(phases)}; {number + 1} sets of {len(whole)} files finished")
            return phases
    raise AssertionError("unreachable")


@pytest.mark.faults
def test_killed_preparation_goes_on_to_the_bytes_of_one_that_was_not(corpus: Path, tmp_path: Path) -> None:
    arguments = (corpus, "--tokenizer", "byte", *FLAGS)
    assert prepare(*arguments, tmp_path / "whole") == 0
    kill_again_and_again(arguments, tmp_path / "killed", tmp_path / "whole", files_in, kills=3, seed=0)
    found = manifest_of(tmp_path / "whole")
    assert len(found.shards) > 8 and found.duplicate_documents > 900


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_preparation_that_is_killed_fifty_times_gives_the_same_bytes(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """`-s` shows figures; `KILL_SEED` draws other moments."""
    arguments = (corpus, "--tokenizer", tokenizer, *FLAGS)
    assert prepare(*arguments, tmp_path / "whole") == 0
    seed = int(os.environ.get("KILL_SEED", "1"))
    phases = kill_again_and_again(arguments, tmp_path / "killed", tmp_path / "whole", files_in, kills=50, seed=seed)
    assert phases.total() == 50
    assert min(phases[phase] for phase in ("before the plan", "hashing", "making units")) >= 5, phases


@pytest.mark.faults
def test_interrupt_ends_all_workers_and_says_how_to_go_on(corpus: Path, tmp_path: Path) -> None:
    out, mark = tmp_path / "out", f"{tmp_path}-{os.getpid()}"
    arguments = (corpus, out, "--tokenizer", "byte", "--unit-mb", "0.02")
    process = start(*arguments, "--workers", 2, mark=mark)
    await_in(process, lambda: any((out / "_prepare/units").glob("*.json")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and "the same command resumes" in err, err
    assert pids_with("PREPARATION", mark) == []
    code, said, _ = finish(*arguments, "--workers", 1)
    assert code == 0 and "resuming: " in said
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
    await_in(process, lambda: any((out / "_prepare/units").glob("*.json")))
    for pid in set(pids_with("PREPARATION", mark)) - {process.pid}:
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2 and re.search(r"a worker exited with -9 at unit \d+;", err), err


@pytest.mark.slow
@pytest.mark.faults
def test_workers_read_through_failures_of_a_server_and_tell_the_one_that_lasts(corpus: Path, tmp_path: Path) -> None:
    flags = ("--tokenizer", "byte", "--dedup", "--unit-mb", "0.1", "--workers", 2)
    assert prepare(corpus, tmp_path / "whole", *flags) == 0
    (tmp_path / "served").mkdir()
    shutil.copy(corpus, tmp_path / "served")
    with text_server(tmp_path / "served") as server:
        url, turn = f"{server.url}/{corpus.name}", itertools.count()
        server.fault = lambda request: next(turn) % 5 == 0 and request.refuse(503)
        code, _, err = finish(url, tmp_path / "out", *flags)
        assert code == 0 and "prepare: data storage is failing; retrying file=" in err, err
        made, whole = (bytes_of(tmp_path / name) for name in ("out", "whole"))
        assert {**made, "manifest.json": b""} == {**whole, "manifest.json": b""}
        is_for_ranges = "bytes=1-"  # whether parts can be had
        server.fault = lambda request: (
            request.command == "GET" and not request.asked_range().startswith(is_for_ranges) and request.refuse(503)
        )
        code, _, err = finish(url, tmp_path / "lost", *flags, "--retry-s", 1)
    says = rf"zeroband data prepare: {url}: the storage failed for 1 s, last with 503: .*; run the same command"
    assert code == 2 and re.match(says, err.splitlines()[-1]), err
    assert "Traceback" not in err


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of a server that speaks S3, and what a user has in the environment to reach it."""
    with s3_server() as endpoint:
        reach_s3(endpoint, BUCKET, monkeypatch)
        yield f"s3://{BUCKET}/a/set"


def objects_of(url: str) -> dict[str, bytes]:
    """Every object below an URL of S3."""
    import boto3

    client, folder = boto3.client("s3"), url.removeprefix(f"s3://{BUCKET}/") + "/"
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=folder).get("Contents", [])
    read = {one["Key"]: client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read() for one in found}
    return {key.removeprefix(folder): content for key, content in read.items()}


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.faults
def test_preparation_to_a_bucket_that_is_killed_goes_on_to_the_same_bytes(
    corpus: Path, bucket: str, tmp_path: Path
) -> None:
    arguments = (corpus, "--tokenizer", "byte", "--dedup", "--unit-mb", "0.2")
    assert prepare(*arguments, tmp_path / "whole") == 0
    kill_again_and_again(arguments, bucket, tmp_path / "whole", objects_of, kills=1, seed=0)


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
    stored = objects_of(bucket)
    assert stored == bytes_of(tmp_path / "whole")
    assert inspect([bucket, "--verify"]) == 0
    assert "files are whole" in capsys.readouterr().out
    assert finish(corpus, bucket, *flags)[0] == 0
    client.put_object(Bucket=BUCKET, Key=f"a/set/{sorted(stored)[0]}", Body=b"damage")
    assert inspect([bucket, "--verify", "--samples", "0"]) == 3

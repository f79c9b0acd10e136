"""What `zeroband join` asks of a real Redis, and what it makes of the answer; nothing is launched."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from zeroband.config import load_config
from zeroband.config.shared import shared_digest, shared_items
from zeroband.elastic.store.interface import PROTOCOL
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.tools.join import main

pytestmark = pytest.mark.slow

FOUNDER = ["@debug/diloco", "--run.id", "first", "--train.total_steps", "77", "--train.micro_bs", "2"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ZERO_BAND_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("the secret\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def founded(open_store: Callable[..., RedisStore], redis_url: str) -> dict[str, str]:
    """The record of a run with a token, as its first node writes it."""
    config = load_config(FOUNDER, {"ZERO_BAND_STORE__URL": redis_url})
    shared = {key: str(value) for key, value in shared_items(config).items()}
    return open_store("first", token="the secret").found_or_match({**shared, "data.tokenizer (ids)": "bytes"})


@pytest.mark.usefixtures("founded")
def test_join_makes_the_configuration_of_the_record_and_prints_the_command(
    redis_url: str, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--node.id", "late", "--run.dir", "mine", "--train.micro_bs", "4"]
    before = _tree(Path())
    assert main([redis_url, "--run-id", "first", "--token-file", "token", "--dry-run", *own]) == 0
    said = capsys.readouterr().out
    assert _tree(Path()) == before
    words = shlex.split(said.splitlines()[-1])
    assert words[-5:] == ["zeroband", "launch", "--nproc-per-node", words[-2], "@mine/first/join-late.toml"]
    environ = dict(word.split("=", 1) for word in words if "=" in word)
    Path("shown.toml").write_text(said[said.index("[run]") : said.index("would be written to mine/first")])
    config = load_config(["@shown.toml"], environ)
    assert shared_digest(config) == shared_digest(load_config(FOUNDER, environ))
    assert (config.train.micro_bs, config.node.id, config.run.id) == (4, "late", "first")
    assert config.run.token is not None and config.run.token.get_secret_value() == "the secret"
    assert "the token is correct" in said and "not founded yet" in said and "data.tokenizer (ids): bytes" in said
    assert "the secret" not in said
    assert environ["ZERO_BAND_RUN__TOKEN_FILE"] == str(token_file)


def _tree(folder: Path) -> dict[str, bytes | None]:
    """All files and folders below one, with what is in the files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.usefixtures("founded")
def test_join_takes_store_run_and_token_of_the_environment_and_shows_no_password(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZERO_BAND_STORE__URL", redis_url)
    monkeypatch.setenv("ZERO_BAND_RUN__ID", "first")
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "the secret")
    assert main(["--dry-run", "--train.micro_bs", "8"]) == 0
    said = capsys.readouterr().out
    assert "the secret" not in said and "ZERO_BAND_RUN__TOKEN=" not in said


@pytest.mark.usefixtures("founded")
@pytest.mark.parametrize(
    ("arguments", "token", "words"),
    [
        (["--run-id", "second"], "the secret", "no run.id='second'"),
        (["--run-id", "first"], "another", "the nodes of this run have another one"),
        (["--run-id", "first"], "", "is empty"),
        (["--run-id", "first", "--train.micro_bz", "4"], "the secret", "micro_bs"),
    ],
)
def test_join_says_what_is_wrong_and_leaves_nothing_behind(
    redis_url: str,
    token_file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    token: str,
    words: str,
) -> None:
    token_file.write_text(token)
    assert main([redis_url, *arguments, "--token-file", "token", "--dry-run"]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


def test_join_writes_the_configuration_that_it_starts(
    founded: dict[str, str],
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert founded

    def unfit(*_args: object, **_options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 3, stdout="")

    monkeypatch.setattr(subprocess, "run", unfit)  # the doctor, which loads torch
    environ = {"ZERO_BAND_STORE__URL": redis_url, "ZERO_BAND_RUN__TOKEN": "the secret"}
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "the secret")
    assert main([redis_url, "--run-id", "first", "--run.dir", "mine", "--node.id", "late"]) == 3
    written = Path("mine/first/join-late.toml")
    assert "the secret" not in written.read_text() and str(written) in capsys.readouterr().out
    assert shared_digest(load_config([f"@{written}"], environ)) == shared_digest(load_config(FOUNDER, environ))


def test_join_refuses_the_record_of_another_run(
    open_store: Callable[..., RedisStore], redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(FOUNDER, {"ZERO_BAND_STORE__URL": redis_url})
    shared = {key: str(value) for key, value in shared_items(config).items()}
    open_store("first").found_or_match({**shared, "run.id": "../../elsewhere"})
    assert main([redis_url, "--run-id", "first", "--dry-run"]) == 2
    assert "belongs to run.id='../../elsewhere'" in capsys.readouterr().err


def test_join_refuses_a_run_of_another_version(
    open_store: Callable[..., RedisStore],
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    open_store("first").found_or_match({"run.id": "first"})
    monkeypatch.setattr("zeroband.tools.join.PROTOCOL", PROTOCOL + 1)
    assert main([redis_url, "--run-id", "first", "--dry-run"]) == 2
    assert f"protocol is '{PROTOCOL}'" in capsys.readouterr().err


def test_join_refuses_a_record_without_a_version(
    store: RedisStore, redis_url: str, redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    redis_client.set(store.keys.run, store.verifier.seal_run({"train.lr": "0.1"}))
    assert main([redis_url, "--run-id", "run", "--dry-run"]) == 2
    assert "protocol is 'absent'" in capsys.readouterr().err


@pytest.mark.parametrize("url", [[], ["@debug/diloco"], ["http://somewhere"]])
def test_join_needs_the_address_of_a_redis(url: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*url, "--run-id", "first", "--dry-run"]) == 2
    assert "redis://" in capsys.readouterr().err

"""What a command is asked to start: secrets leave the command line on the way to the nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from zeroband.errors import ConfigError
from zeroband.tools.cluster.local import asked_run, without_secrets


@pytest.mark.parametrize(
    "token", [("--run.token", "s3cret"), ("--run.token=s3cret",), ("--run.token=s3cret", "--train.compile")]
)
def test_secrets_of_a_node_go_into_its_environment(token: Sequence[str]) -> None:
    kept, secrets = without_secrets(("@a.toml", *token, "--store.url=redis://:p@h", "--run.id", "x"))
    assert kept == ("@a.toml", *token[2 if token[0] == "--run.token" else 1 :], "--run.id", "x")
    assert secrets == {"ZERO_BAND_RUN__TOKEN": "s3cret", "ZERO_BAND_STORE__URL": "redis://:p@h"}


def test_arguments_without_secrets_stay_as_they_are() -> None:
    arguments = ("@a.toml", "--run.token-file", "t", "--run.token_file=t", "--data.source.paths", "--run.token")
    assert without_secrets(arguments) == (arguments, {})


def test_each_start_without_a_run_id_is_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZERO_BAND_RUN__ID", raising=False)
    names = {asked_run([])[1] for _ in range(20)}
    assert len(names) > 15
    assert asked_run([], "chaos")[1].startswith("chaos-2")
    assert asked_run(["--run.id", "mine"], "chaos")[1] == "mine"


def test_auto_is_refused_where_the_command_names_its_run() -> None:
    with pytest.raises(ConfigError, match="names its run by itself"):
        asked_run(["--run.id", "auto"])

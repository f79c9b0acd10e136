"""A hub that is away is found out at once, and its client is not left to try for a minute."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from zeroband.data.hub import hub_hint, hub_options, hub_problem
from zeroband.data.tokenizer import open_tokenizer
from zeroband.errors import ConfigError

AWAY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", AWAY)
    hub_problem.cache_clear()
    yield
    hub_problem.cache_clear()


def test_tokenizer_of_a_hub_that_is_away_is_one_sentence() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=rf"data.tokenizer='nobody/none': .*{AWAY} does not answer .*only what is in"):
        open_tokenizer("nobody/none")


def test_what_lies_here_is_not_asked_of_the_hub(tmp_path: object) -> None:
    assert hub_options(str(tmp_path)) == {}
    assert hub_problem.cache_info().currsize == 0


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", "1"), ("HTTP_PROXY", "http://127.0.0.1:2")])
def test_hub_behind_a_proxy_or_switched_off_is_left_to_its_client(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert hub_options("nobody/none") == {} and hub_hint() == ""


def test_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub_options("nobody/none") == {}

"""A hub that is away is found out at once, its client is not left to try for a minute, and it is asked for no path."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NoReturn

import pytest

from zeroband.config.data import HuggingFaceSource, JsonlSource
from zeroband.data.hub import hub_hint, hub_options, hub_problem
from zeroband.data.sources import documents
from zeroband.data.token_storage import TokenStorage
from zeroband.data.tokenizer import open_tokenizer
from zeroband.errors import ConfigError

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")

AWAY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", AWAY)


def test_tokenizer_and_files_of_a_hub_that_is_away_are_one_sentence() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(
        ConfigError, match=rf"data.tokenizer='nobody/none': .*{AWAY} does not answer .*only the cache was searched"
    ):
        open_tokenizer("nobody/none")
    url = "hf://datasets/nobody/none/*.jsonl"
    says = rf": 'hf://datasets/nobody/none/.*' is on the Hugging Face Hub, and {AWAY} does not answer .*a local copy"
    with pytest.raises(ConfigError, match=f"^data.source.paths{says}"):
        next(documents(JsonlSource(type="jsonl", paths=(url,)), seed=0, retry_s=600.0))
    with pytest.raises(ConfigError, match=f"^data.source.path{says}"):
        TokenStorage(url, retry_s=600.0)


@pytest.mark.slow
def test_data_set_of_a_hub_that_is_away_is_taken_from_the_cache_or_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    source = HuggingFaceSource(type="huggingface", name="nobody/none")
    with pytest.raises(
        ConfigError, match=rf"the data set name='nobody/none', .* is not cached here, and {AWAY} does not answer"
    ):
        next(documents(source, seed=0, retry_s=600.0))
    rows = datasets.Dataset.from_dict({"text": ["cached"]})
    asked: list[str] = []

    def load(name: str, *_: Any, **__: Any) -> Any:
        asked.append(name)
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [document.text for document in documents(source, seed=0)] == ["cached"]
    assert asked == ["nobody/none"] and datasets.config.HF_HUB_OFFLINE


def test_what_lies_here_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:2")  # of which nothing is known yet
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert hub_options(str(tmp_path), "model.name") == {}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/nosuch/folder", "no such folder; correct it"),
        ("./folder", "no such folder; correct it"),
        ("../folder", "no such folder; correct it"),
        ("~/folder", "no such folder; correct it"),
        ("of/a/folder", "no such folder; correct it"),
        ("tokenizer.json", "this is a file; name its folder"),
    ],
)
def test_path_without_a_folder_is_told_so(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").touch()
    with pytest.raises(
        ConfigError, match=rf"^data\.tokenizer='{name}': {says}, or give a name on the Hugging Face Hub"
    ):
        open_tokenizer(name)
    with pytest.raises(ConfigError, match=rf"^model\.name='{name}': {says}"):
        hub_options(name, "model.name")


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_OFFLINE", "1"), ("HTTP_PROXY", "http://127.0.0.1:2")])
def test_hub_behind_a_proxy_or_switched_off_is_left_to_its_client(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert hub_options("nobody/none", "model.name") == {} and hub_hint() == ""


class _Refusing(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.send_error(503)


def test_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert hub_options("nobody/none", "model.name") == {}


def test_hub_that_accepts_and_says_nothing_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        assert hub_problem(timeout_s=0.05) == f"{endpoint} does not answer (timed out)"

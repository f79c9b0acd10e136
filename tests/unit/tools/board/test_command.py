"""`zeroband board`: which run it shows, what it says when it cannot, and the page over a real socket."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.made_runs import committed, event, run_of, write

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store import facts
from zeroband.elastic.store.fact_publisher import FactPublisher
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.facts import Fact
from zeroband.tools.board import command
from zeroband.tools.board.orders import OrderDesk, OrderRefused
from zeroband.tools.board.state import RunWatch, find_run


def publish(run_dir: Path, redis_url: str) -> None:
    """Tell the store what the nodes recorded, sealed with a token."""
    key = RunKey.of("s3cret", run_dir.name)
    for node_dir in sorted(run_dir.iterdir()):
        FactPublisher(
            node_dir, node_dir.name, lambda: RedisStore(redis_url, run_dir.name, key=key, retry_s=5.0)
        ).close()


def facts_of(rounds: int, *nodes: str) -> list[Fact]:
    return [fact for facts in run_of(("a", "b"), rounds) for fact in facts if not nodes or fact.node_id in nodes]


def state_of(watch: RunWatch, at_s: float | None = None) -> Any:
    while watch.look():
        pass
    return json.loads(watch.state(at_s).body)


def watched(*arguments: str) -> tuple[RunWatch, OrderDesk, str]:
    """What the command shows, where it takes orders, and where the run lies."""
    find, desk, place = command.watched(command.parser().parse_args(arguments))
    return RunWatch(find), desk, place


def test_newest_run_in_a_folder_is_shown(tmp_path: Path) -> None:
    assert find_run(tmp_path / "none") is None and find_run(tmp_path) is None
    write(tmp_path / "old", facts_of(1))
    for path in (tmp_path / "old").glob("*/*"):
        os.utime(path, (1.0, 1.0))
    write(tmp_path / "new", facts_of(1))
    found = [find_run(tmp_path), find_run(tmp_path / "old")]
    assert [one and one.run_id for one in found] == ["new", "old"]


def test_run_that_appears_later_is_shown(tmp_path: Path) -> None:
    watch = RunWatch(lambda: find_run(tmp_path / "runs"))
    assert state_of(watch)["run_id"] is None
    write(tmp_path / "runs" / "first", facts_of(3))
    state = state_of(watch, 2e9)
    assert (state["run_id"], state["run"]["round"]) == ("first", 3)


def test_broken_lines_are_said(tmp_path: Path) -> None:
    write(tmp_path / "run", facts_of(3))
    with (tmp_path / "run" / "a" / "events.jsonl").open("a") as file:
        file.write('not json\n{"kind": "left"}\n{"half')
    state = state_of(RunWatch(lambda: find_run(tmp_path)))
    assert state["problem"] == "2 lines of this run's files could not be read"
    assert state["run"]["round"] == 3


def test_setting_is_read_beside_the_facts(tmp_path: Path) -> None:
    write(tmp_path / "run", facts_of(1))
    (tmp_path / "run" / "a" / "config.toml").write_text('[outer]\ntype = "diloco"\ninner_steps = 15\n')
    run = state_of(RunWatch(lambda: find_run(tmp_path)))["run"]
    assert run["config_words"] == "1k parameters, diloco, a round every 15 steps"


def test_port_that_is_taken_is_said_with_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command.main([str(tmp_path), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port}" in said
    assert f"--port {port % 65535 + 1}" in said


def test_missing_extra_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main([]) == 2
    assert "uv sync --extra board" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--port=70000", "--port=x", "--price-per-hour=-1"])
def test_wrong_arguments_are_refused(argument: str) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main([argument])
    assert refused.value.code == 2


def test_run_is_shown_from_its_store_and_orders_are_taken_with_its_token(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "far", facts_of(3))
    publish(tmp_path / "far", redis_url)
    asked = ["--store", redis_url, "--run-id", "far"]
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "s3cret")
    shown, desk, place = watched(*asked)
    ours, theirs = (state_of(watch, 2e9) for watch in (shown, RunWatch(lambda: find_run(tmp_path))))
    assert ours["run"]["round"] == 3 and len(ours["nodes"]) == 2 and "far" in place
    for key in ("nodes", "rounds", "membership"):
        assert ours[key] == theirs[key]
    with pytest.raises(OrderRefused, match="not the run's token"):
        desk.take("Bearer other", {"order": "pause"}, client="")
    with pytest.raises(OrderRefused, match="has no run"):  # facts alone are none
        desk.take("Bearer s3cret", {"order": "pause"}, client="")
    monkeypatch.delenv("ZERO_BAND_RUN__TOKEN")
    assert not watched(*asked)[1].is_open


def test_page_of_a_folder_and_a_store_shows_the_nodes_of_both(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "elsewhere" / "run"
    write(far, facts_of(3))
    FactPublisher(
        far / "b", "b", lambda: RedisStore(redis_url, "run", key=RunKey.of("s3cret", "run"), retry_s=5.0)
    ).close()
    write(tmp_path / "run", facts_of(4, "a"))
    (tmp_path / "run" / "a" / "config.toml").write_text('[outer]\ntype = "diloco"\n[ckpt]\npath = "checkpoints"\n')
    monkeypatch.setenv("ZERO_BAND_STORE__URL", redis_url)
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "s3cret")
    watch, desk, _ = watched(str(tmp_path / "run"), "--run-id", "run")
    state = state_of(watch, 2e9)
    assert ({node["id"]: node["round"] for node in state["nodes"]}, state["problem"]) == ({"a": 4, "b": 3}, None)
    with pytest.raises(OrderRefused, match="this store has no run"):  # asked with the nodes' configuration
        desk.take("Bearer s3cret", {"order": "pause"}, client="")


def test_page_of_one_machine_says_what_it_lacks_and_what_shows_it(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "elsewhere" / "pair", facts_of(3))
    publish(tmp_path / "elsewhere" / "pair", redis_url)
    write(tmp_path / "pair", facts_of(3, "a"))
    monkeypatch.setenv("ZERO_BAND_STORE__URL", redis_url)
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "s3cret")
    said: list[str] = []
    for arguments in ([], ["--store"]):
        state = state_of(watched(str(tmp_path / "pair"), *arguments)[0], 2e9)
        said.append(f"{len(state['nodes'])} {state['run']['words']}")
    assert said[0] == "1 2 nodes are in; files of 1 are here; --store shows all."
    assert said[1].startswith("2 ") and "files of" not in said[1]


def test_folder_and_store_of_different_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", facts_of(1))
    assert command.main([str(tmp_path / "run"), "--store", "unix:///nowhere", "--run-id", "other", "--port", "0"]) == 2
    assert "name one run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "token", "warned", "warned_of_token"),
    [("127.0.0.1", "s3cret", False, False), ("0.0.0.0", None, True, False), ("0.0.0.0", "s3cret", True, True)],
)
def test_what_crosses_a_network_in_the_clear_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    host: str, token: str | None, warned: bool, warned_of_token: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    monkeypatch.setattr("os.nice", lambda by: None)
    if token is not None:
        monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", token)
    store = ["--store", f"unix://{tmp_path}/nowhere", "--run-id", "run"]
    monkeypatch.setattr(facts, "RETRY_S", 0.05)
    assert command.main([*store, "--host", host, "--port", "0"]) == 0
    said = capsys.readouterr().err
    assert ("everybody who reaches this address can read the run" in said) == warned
    assert ("in the clear: use an ssh tunnel, or put TLS in front" in said) == warned_of_token


def test_page_of_a_store_has_the_light_of_detection_and_the_sample(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The harbour was quiet.\n" * 40
    more = [
        event("a", 7, "peer_lost", round=4, member_ids=["b#1"]),
        committed("a", 7.5, 4, ("a",)),
        event("a", 8, "sample_written", path="sample.txt", text=text),
    ]
    write(tmp_path / "lit", [*facts_of(3), *more])
    publish(tmp_path / "lit", redis_url)
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "s3cret")
    state = state_of(watched("--store", redis_url, "--run-id", "lit")[0])
    detection = state["guarantees"][3]
    assert (detection["key"], detection["state"]) == ("detection", "good")
    assert "fault.detect_s (5 s)" in detection["evidence"][1]
    assert (state["sample"]["node_id"], state["sample"]["text"]) == ("a", text)


@pytest.mark.parametrize("is_over", [False, True], ids=["there is a run", "facts are left of it"])
def test_wrong_token_is_said_in_words(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    run_id = f"secret-{is_over}"
    write(tmp_path / run_id, facts_of(1))
    publish(tmp_path / run_id, redis_url)
    if not is_over:
        with closing(RedisStore(redis_url, run_id, key=RunKey.of("s3cret", run_id), retry_s=5.0)) as store:
            store.found_or_match({"run.id": run_id})
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "guess")
    state = state_of(watched("--store", redis_url, "--run-id", run_id)[0])
    assert "run.token" in state["problem"]
    assert (state["run_id"], state["nodes"]) == (run_id, [])
    assert state["run"]["words"] == "Nothing of this run could be read yet."
    assert "s3cret" not in str(state) and "guess" not in str(state)

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import pytest
from tests.made_runs import MadeFacts

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.fact_publisher import FactPublisher
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import StoreLost
from zeroband.observe.events import EventLog
from zeroband.observe.facts import Fact
from zeroband.observe.metrics import MetricsLog
from zeroband.observe.view import NodeView, RunView
from zeroband.tools.top.command import TopWatch, folder_words, is_over, main, process_words
from zeroband.tools.top.screen import PlainScreen

STARTED = {"kind": "node_started", "total_steps": 9, "local_world_size": 1, "parameters": 7}


def _watch(*answers: list[Fact]) -> TopWatch:
    return TopWatch(MadeFacts(*answers), lambda known: {}, now=lambda: 100.0)


def test_watch_shows_any_source_of_facts_and_says_when_it_cannot_be_read() -> None:
    facts = MadeFacts([], [Fact("a", {"at_s": 1.0, **STARTED}), Fact("a", {"at_s": 2.0, "step": 4})], StoreLost("away"))
    facts.skipped = {"a": 2}
    watch = TopWatch(facts, lambda known: {} if known else {"b": ("begins", 1.0)}, now=lambda: 100.0)
    assert watch.scene().node_ids == ("b",)
    seen = watch.scene()
    assert (seen.node_ids, seen.run.step, seen.run.total_steps, seen.title) == (("a",), 4, 9, "zeroband top: run")
    assert "2 lines could not be read" in seen.footer
    lost = watch.scene()
    assert lost.run == seen.run
    assert "cannot read made up: away" in lost.footer


def test_whatever_a_source_cannot_read_ends_nothing() -> None:
    facts = MadeFacts([Fact("a", {"at_s": 2.0, "step": 4})])
    watch = TopWatch(facts, lambda known: {})
    watch.scene()
    facts.problem = PermissionError(13, "Permission denied")
    assert "Permission denied" in watch.scene().footer
    assert watch.scene().run.step == 4


def test_clock_of_a_node_a_day_off_makes_nobody_wait() -> None:
    """How long nothing came is measured here, whatever the lines say of when they were written."""
    now_s = [0.0]
    day = 86_400.0
    begun = [Fact(n, {"at_s": 1.0, "kind": "joined", "member_id": f"{n}#1", "round": 0}) for n in "ab"]
    epoch = {"kind": "epoch_changed", "epoch": 1, "members": ["a#1", "b#1"]}
    steps = [Fact("a", {"at_s": at_s, "step": 9}) for at_s in (2.0, -day, day)]
    facts = MadeFacts([*begun, Fact("a", {"at_s": 1.0, **epoch}), Fact("b", {"at_s": 1.0, "step": 8}), steps[0]])
    watch = TopWatch(facts, lambda known: {}, now=lambda: 5 * day, clock=lambda: now_s[0])
    assert watch.scene().waits == ""
    now_s[0] = 10.0
    assert watch.scene().waits == "b, for 10 s"
    for line in steps[1:]:
        facts.facts = [line]
        assert watch.scene().waits == ""


@pytest.mark.parametrize(("states", "over"), [((), False), (("training", "lost"), False), (("finished", "lost"), True)])
def test_a_run_is_over_when_every_node_has_ended(states: tuple[str, ...], over: bool) -> None:
    nodes = tuple(NodeView(str(i), state=state) for i, state in enumerate(states))  # pyright: ignore[reportArgumentType]
    assert is_over(RunView("first", nodes)) == over


def test_play_ends_with_the_run_where_it_should_or_when_the_user_has_seen_enough() -> None:
    end = [Fact("a", {"at_s": 1.0, **STARTED}), Fact("a", {"at_s": 2.0, "kind": "run_finished", "step": 9})]
    looks: list[bool] = []

    def count() -> bool:
        looks.append(True)
        return len(looks) == 5

    _watch([], end).play(PlainScreen(io.StringIO()), count, ends_with_run=True)
    assert len(looks) == 1
    _watch([], end).play(PlainScreen(io.StringIO()), count, ends_with_run=False)
    assert len(looks) == 5


def test_main_refuses_a_folder_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_main_shows_a_run_from_its_store_to_who_has_the_token(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_store() -> RedisStore:
        return RedisStore(redis_url, "first", key=RunKey.of("the secret", "first"), lease_s=5.0, retry_s=5.0)

    with closing(open_store()) as store:
        store.found_or_match({"run.id": "first"})
    events, metrics = EventLog(tmp_path / "n0"), MetricsLog(tmp_path / "n0")
    events.emit("node_started", total_steps=9, local_world_size=1, parameters=7)
    metrics.record(9, {"train/loss": 2.5})
    events.emit("run_finished", step=9)
    FactPublisher(tmp_path / "n0", "n0", open_store).close()
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "the secret")
    assert main(["--store", redis_url, "--run-id", "first"]) == 0
    said = capsys.readouterr().out
    assert "n0 finished all 9 steps." in said and "q: end" not in said
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "another")
    assert main(["--store", redis_url, "--run-id", "first"]) == 2
    assert "run.token" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--run-id", "first"], ["runs/first", "--run-id", "second"]])
def test_main_wants_one_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("zeroband top: ")


def test_folder_words_tell_of_nodes_that_have_written_no_event(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "rank0.log").touch()
    assert set(folder_words(tmp_path, ["a"])) == {"b"}
    assert folder_words(tmp_path / "none", []) == {}


def test_process_words_tell_only_what_is_seen() -> None:
    assert "launcher" in process_words([])
    assert "exited" in process_words([2**22 + 1])
    assert "configuration" in process_words([1]) or "exited" in process_words([1])

"""`zeroband ctl` on a real Redis: what is ordered, what is refused, what status shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from zeroband.elastic.membership.keys import NodeKey, RunKey
from zeroband.elastic.membership.orders import OperatorKey, Orders
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import Peer, Ready, RoundPlan, Verdict
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import short_key
from zeroband.tools import ctl

A, B = "a#1", "b#1"


def give(redis_url: str, *order: str) -> int:
    return ctl.main([*order, "--outer.type", "ddp", "--run.id", "run", "--store.url", redis_url])


@pytest.fixture
def run(store: RedisStore) -> RedisStore:
    """A run of two nodes that has committed round 0; one of them stands before round 1."""
    store.found_or_match({})
    for member in (A, B):
        node = member.partition("#")[0]
        assert store.renew_lease(member, Peer(node, f"host-{node}", 7, True), first=True) is not None
    plan = RoundPlan(1, 1, 0, (A, B), (0, 0), (0, 0), (1, 1))
    progress = replace(Progress.at_start(), inner_step=120)
    assert store.propose_plan(plan, current=None)
    assert store.propose_verdict(Verdict(plan, "d", {"progress": progress.to_record()}))
    store.announce_ready(A, Ready(1, 5, "s"))
    return store


def test_pause_and_resume_go_to_the_run_that_the_configuration_names(run: RedisStore, redis_url: str) -> None:
    assert give(redis_url, "pause") == 0
    assert run.view(1).orders == Orders(1, is_paused=True)
    assert give(redis_url, "resume") == 0
    assert run.view(1).orders == Orders(2)


def test_drain_orders_the_members_of_a_node_to_leave(run: RedisStore, redis_url: str) -> None:
    assert give(redis_url, "drain", "b") == 0
    assert run.view(1).orders.leaving == (B,)


@pytest.mark.parametrize(
    ("order", "said"),
    [(("drain", "c"), "no living member of this run is on node 'c'; there are a, b"), (("stop",), "invalid choice")],
)
def test_order_that_makes_no_sense_gives_2(
    run: RedisStore, redis_url: str, order: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = give(redis_url, *order)
    except SystemExit as end:
        code = end.code
    assert code == 2 and said in capsys.readouterr().err
    assert run.view(1).orders == Orders()


def test_run_that_the_store_does_not_know_gives_2(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert give(redis_url, "pause") == 2
    assert "no run.id='run'" in capsys.readouterr().err


def test_order_to_no_run_gives_2_and_says_how_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["pause"]) == 2
    assert "--store URL --run-id ID --token-file FILE" in capsys.readouterr().err


def test_order_needs_store_name_and_token_alone(
    open_store: Callable[..., RedisStore], redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_store(token="sesame")
    run.found_or_match({})
    (tmp_path / "token").write_text("sesame\n")
    (tmp_path / "token").chmod(0o600)
    assert ctl.main(["pause", "--store", redis_url, "--run-id", "run", "--token-file", str(tmp_path / "token")]) == 0
    assert run.view(0).orders == Orders(1, is_paused=True)
    monkeypatch.setenv("ZERO_BAND_STORE__URL", redis_url)  # as `zeroband store` prints them
    monkeypatch.setenv("ZERO_BAND_RUN__ID", "run")
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "sesame")
    assert ctl.main(["resume"]) == 0
    assert ctl.main(["pause", "@debug/diloco"]) == 0  # a node's configuration is taken as well
    assert run.view(0).orders == Orders(3, is_paused=True)


def test_store_that_does_not_answer_gives_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctl, "_STORE_RETRY_S", 0.01)
    assert give("redis://127.0.0.1:1", "pause") == 1


def test_status_shows_who_waits_where_and_for_what(
    run: RedisStore, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    give(redis_url, "pause")
    give(redis_url, "drain", "b")
    capsys.readouterr()
    assert give(redis_url, "status") == 0
    assert capsys.readouterr().out.splitlines() == [
        "run run: paused, 1 of 2 members wait before round 1",
        "round 0, epoch 1, inner step 120",
        "a#1  -  host-a:7  at the boundary",
        "b#1  -  host-b:7  in its round, leaves after its round",
    ]


def test_order_without_the_token_of_the_run_says_so(
    open_store: Callable[..., RedisStore],
    redis_url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = open_store(token="sesame")
    run.found_or_match({})
    assert give(redis_url, "pause") == 2
    assert "run.token: the nodes of this run have another one" in capsys.readouterr().err
    assert run.view(0).orders == Orders()
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", "sesame")
    assert give(redis_url, "pause") == 0
    assert run.view(0).orders == Orders(1, is_paused=True)


def test_run_with_an_operator_takes_orders_of_that_one_alone(
    store: RedisStore, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZERO_BAND_RUN__OPERATOR_TOKEN", "of the operator")
    assert give(redis_url, "operator") == 0
    operator = capsys.readouterr().out.strip()
    assert operator == OperatorKey("of the operator", "run").public
    store.found_or_match({"run.operator": operator})
    store.take_orders_of(operator, "run", None)
    assert give(redis_url, "pause") == 0 and store.view(0).orders.is_paused
    monkeypatch.setenv("ZERO_BAND_RUN__OPERATOR_TOKEN", "of another")
    assert give(redis_url, "resume") == 2 and f"the run's operator is {operator}" in capsys.readouterr().err
    monkeypatch.delenv("ZERO_BAND_RUN__OPERATOR_TOKEN")
    assert give(redis_url, "resume") == 2 and "give its run.operator_token" in capsys.readouterr().err
    assert give(redis_url, "status") == 0 and store.view(0).orders.is_paused


def test_ban_keeps_a_nodes_key_out_until_it_ends_and_status_shows_keys(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = NodeKey(b"b" * 32)
    member = own.new_member_id("b")
    with closing(RedisStore(redis_url, "run", key=RunKey.of(None, "run", node=own), retry_s=5.0)) as run:
        run.found_or_match({})
        assert run.renew_lease(member, Peer("b", "host-b", 7, True), first=True) is not None
        assert give(redis_url, "status") == 0
        start = member.rpartition(".")[0]
        assert capsys.readouterr().out.splitlines()[1] == f"{start}  {short_key(member)}  host-b:7  joining"
        assert give(redis_url, "ban", "b") == 0
        assert run.view(0).orders.bans(member) and run.view(0).alive == frozenset()
        capsys.readouterr()
        assert give(redis_url, "status") == 0
        assert capsys.readouterr().out.splitlines()[1] == f"banned: b (key {short_key(member)})"
        assert give(redis_url, "ban", "c") == 2
        assert give(redis_url, "unban", short_key(member) or "") == 0
        assert run.view(0).alive == {member}

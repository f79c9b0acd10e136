"""The page's server: documents, and what strangers' pages and wrong requests get."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.made_runs import BEGIN_S, MadeFacts, event, joined, run_of

from zeroband.errors import ConfigError
from zeroband.observe.facts import Fact
from zeroband.tools.board.app import HEADERS, build_app, names_of
from zeroband.tools.board.document import RunContext
from zeroband.tools.board.orders import ADDRESSES, WRONG_TOKENS, OrderDesk, OrderRefused
from zeroband.tools.board.state import RunWatch
from zeroband.tools.ctl import Order

NODES = ("a", "b", "c")
TOKEN = "a-long-secret"
STATE_KEYS = {
    *("run_id", "place", "version", "now_s", "at_s", "from_s", "to_s", "age_s", "problem", "run", "nodes", "links"),
    *("waiting_for", "guarantees", "rounds", "membership", "events", "checkpoints", "sample", "orders"),
}
RUN_KEYS = {
    *("state", "words", "step", "total_steps", "round", "epoch", "store", "tokens", "tokens_per_s", "mfu"),
    *("left_s", "loss", "parameters", "held_out", "config_words", "cost", "sent_bytes", "ddp_bytes"),
}
NODE_KEYS = {
    *("id", "state", "why", "join", "step", "loss", "tokens_per_s", "mfu", "round", "digest", "sent_bytes", "starts"),
    *("received_bytes", "memory_bytes", "last_at_s", "key"),
}


def watch_of(facts: Sequence[Fact], **setting: Any) -> RunWatch:
    source = MadeFacts(facts)
    watch = RunWatch(lambda: source, setting=RunContext(**setting), now=lambda: BEGIN_S + 100)
    watch.look()
    return watch


@pytest.fixture
def static(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("<!doctype html><p>page")
    (tmp_path / "board.js").write_text("1")
    return tmp_path


@pytest.fixture
def given() -> list[Order]:
    return []


@pytest.fixture
def page(static: Path, given: list[Order]) -> Iterator[TestClient]:
    """The page of a run of three nodes and twenty rounds."""

    def give(order: Order) -> str:
        if order.action == "rollback":
            raise ConfigError("there is no good checkpoint of step 7")
        given.append(order)
        return "done"

    watch = watch_of([fact for facts in run_of(NODES, 20) for fact in facts], price_per_hour=36.0)
    return client(watch, static, OrderDesk(TOKEN, give))


def client(watch: RunWatch, static: Path, desk: OrderDesk | None = None, host: str = "testclient") -> TestClient:
    """A page that takes no orders, or those of a desk; `host`: who asks it."""
    app = build_app(watch, desk or OrderDesk(None, None), static=static)
    return TestClient(app, base_url="http://localhost:8420", client=(host, 50000))


def state_of(watch: RunWatch, static: Path) -> Any:
    return client(watch, static).get("/api/state").json()


def ask(page: TestClient, body: str = '{"order": "pause"}', **headers: str) -> Any:
    usual = {"origin": "http://localhost:8420", "authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    return page.post("/api/orders", content=body, headers=usual | headers)


def test_state_has_every_key_of_the_page(page: TestClient) -> None:
    state = page.get("/api/state").json()
    assert set(state) == STATE_KEYS
    assert set(state["run"]) == RUN_KEYS
    assert [set(node) for node in state["nodes"]] == [NODE_KEYS] * 3
    assert [one["key"] for one in state["guarantees"]] == ["divergence", "ledger", "checkpoint", "detection"]
    assert set(state["rounds"][0]) == {"round", "epoch", "committed_at_s", "members", "retries", "nodes"}
    assert set(state["rounds"][0]["nodes"]["a"]) == {"end_s", "compute_s", "wait_s", "transfer_s", "apply_s"}
    assert state["membership"][0] == {
        "id": "a", "spans": [[BEGIN_S, BEGIN_S + 0.1, "starting"], [BEGIN_S + 0.1, None, "training"]],
    }  # fmt: skip
    assert state["events"][0]["words"] == "a has started."


def test_state_without_a_run_has_the_same_keys(static: Path) -> None:
    watch = RunWatch(lambda: None, setting=RunContext(place="runs"))
    watch.look()
    state = state_of(watch, static)
    assert (set(state), set(state["run"])) == (STATE_KEYS, RUN_KEYS)
    assert (state["run_id"], state["run"]["state"]) == (None, "waiting")


def test_state_says_how_the_run_goes(page: TestClient) -> None:
    state = page.get("/api/state").json()
    run = state["run"]
    assert (run["step"], run["total_steps"], run["round"], run["tokens_per_s"]) == (20, 100, 20, 300.0)
    assert run["left_s"] == pytest.approx(160, rel=0.1)
    assert run["cost"]["per_hour"] == 108.0
    assert run["cost"]["so_far"] == pytest.approx(3 * 40 / 3600 * 36)
    assert (state["age_s"], state["run"]["state"]) == (60.0, "training")


def test_run_that_has_ended_shows_the_mean_rate_of_the_whole_run(static: Path) -> None:
    ends = [event(node, 50, kind) for node in NODES for kind in ("run_finished", "left")]
    watch = watch_of([*(fact for facts in run_of(NODES, 20) for fact in facts), *ends])
    run = state_of(watch, static)["run"]
    assert (run["state"], run["tokens"], run["left_s"]) == ("finished", 2000, None)
    assert run["tokens_per_s"] == pytest.approx(2000 / 50)


def test_earlier_moment_is_shown(page: TestClient) -> None:
    state = page.get("/api/state", params={"at": BEGIN_S + 20.5}).json()
    assert (state["at_s"], state["run"]["step"], state["rounds"][-1]["round"]) == (BEGIN_S + 20.5, 10, 10)
    assert state["to_s"] == BEGIN_S + 40


@pytest.mark.parametrize("query", ["at=x", "at=nan", "at=-1", "at=1e99"])
def test_moment_that_is_none_is_refused(page: TestClient, query: str) -> None:
    assert page.get(f"/api/state?{query}").status_code == HTTPStatus.BAD_REQUEST


def test_series_has_curves(page: TestClient) -> None:
    series = page.get("/api/series?by=step&points=400").json()
    assert [one["key"] for one in series["series"]][:4] == ["loss", "tokens_per_s", "mfu", "nodes"]
    assert series["series"][0]["x"][-1] == 20
    for query in ("by=weight", "points=1", "points=9999", "points=x", "points=-3"):
        assert page.get(f"/api/series?{query}").status_code == HTTPStatus.BAD_REQUEST


def test_numbers_that_json_lacks_are_null(static: Path) -> None:
    facts = [*joined("a", 0), Fact("a", {"step": 1, "at_s": BEGIN_S, "train/loss": "nan", "train/mfu": math.inf})]
    page = client(watch_of(facts), static)
    assert json.loads(page.get("/api/state").text, parse_constant=pytest.fail)["nodes"][0]["loss"] is None


def test_same_document_is_not_sent_twice(page: TestClient) -> None:
    first = page.get("/api/state")
    assert first.headers["content-encoding"] == "gzip"
    again = page.get("/api/state", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (HTTPStatus.NOT_MODIFIED, b"")


@pytest.mark.parametrize("path", ["/", "/static/board.js", "/api/state", "/healthz", "/nothing", "/api/orders"])
def test_every_answer_carries_the_headers(page: TestClient, path: str) -> None:
    answer = page.get(path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_files_are_those_of_the_page_only(page: TestClient) -> None:
    assert page.get("/").text.startswith("<!doctype html>")
    assert page.get("/static/board.js").headers["content-type"].startswith("text/javascript")
    assert "uPlot" in page.get("/static/uplot.js").text
    assert page.get("/static/uplot.css").headers["content-type"].startswith("text/css")
    for path in ("/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/..%2fcommand.py", "/static/none.js"):
        assert page.get(path).status_code == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8420", "10.0.0.1:8420", ""])
def test_names_of_others_are_refused(page: TestClient, host: str) -> None:
    assert page.get("/api/state", headers={"host": host}).status_code == HTTPStatus.MISDIRECTED_REQUEST


def test_wider_address_takes_addresses_and_no_strange_names() -> None:
    is_ours = names_of("0.0.0.0")
    assert is_ours("10.0.0.1")
    assert is_ours("localhost")
    assert not is_ours("evil.example")


def test_order_with_the_token_is_given(page: TestClient, given: list[Order]) -> None:
    assert ask(page).json() == {"words": "done"}
    assert ask(page, '{"order": "drain", "node": "b"}', authorization=f"bearer {TOKEN}").status_code == HTTPStatus.OK
    assert given == [Order("pause"), Order("drain", "b")]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, HTTPStatus.FORBIDDEN),
        ({"origin": "null"}, HTTPStatus.FORBIDDEN),
        ({"origin": ""}, HTTPStatus.FORBIDDEN),
        ({"authorization": "Bearer wrong"}, HTTPStatus.FORBIDDEN),
        ({"authorization": ""}, HTTPStatus.FORBIDDEN),
        ({"authorization": f"Basic {TOKEN}"}, HTTPStatus.FORBIDDEN),
        ({"content-type": "text/plain"}, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    ],
)
def test_order_of_a_stranger_is_refused(
    page: TestClient, given: list[Order], headers: dict[str, str], status: HTTPStatus
) -> None:
    answer = ask(page, **headers)
    assert (answer.status_code, given) == (status, [])
    assert set(answer.json()) == {"error"}
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    "body", ["", "[]", "{", '{"order":"stop"}', '{"order":"drain"}', '{"order":"rollback","step":"1"}', "[" * 9000]
)
def test_order_that_is_none_is_refused(page: TestClient, given: list[Order], body: str) -> None:
    assert ask(page, body).status_code == HTTPStatus.BAD_REQUEST
    assert given == []


def test_order_that_makes_no_sense_says_why(page: TestClient) -> None:
    answer = ask(page, '{"order": "rollback", "step": 7}')
    assert answer.status_code == HTTPStatus.CONFLICT
    assert answer.json() == {"error": "there is no good checkpoint of step 7"}


class Desk:
    """A desk, asked for a pause at a time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._desk = OrderDesk(TOKEN, lambda order: order.action, now=lambda: self.now_s)

    def asked(self, token: str, client: str) -> int:
        try:
            self._desk.take(f"Bearer {token}", {"order": "pause"}, client=client)
        except OrderRefused as refused:
            return refused.status
        return HTTPStatus.OK


def test_few_wrong_tokens_of_an_address_or_of_a_network_are_heard_in_a_minute() -> None:
    for addresses in (["10.0.0.1"] * (WRONG_TOKENS + 1), [f"2001:db8::{n}%eth0" for n in range(WRONG_TOKENS + 1)]):
        desk = Desk()
        wrong = [desk.asked("guess", address) for address in addresses]
        assert wrong == [HTTPStatus.FORBIDDEN] * WRONG_TOKENS + [HTTPStatus.TOO_MANY_REQUESTS]
        assert desk.asked(TOKEN, addresses[0]) == HTTPStatus.TOO_MANY_REQUESTS
        desk.now_s = 61.0
        assert desk.asked(TOKEN, addresses[0]) == HTTPStatus.OK


@pytest.mark.parametrize(
    ("guesser", "operator"),
    [("10.0.0.1", "10.0.0.2"), ("2001:db8:0:1::1", "2001:db8:0:2::1"), ("10.0.0.1", "testclient"), ("", "::1")],
)
def test_wrong_tokens_lock_out_no_other_address(guesser: str, operator: str) -> None:
    desk = Desk()
    while desk.asked("guess", guesser) != HTTPStatus.TOO_MANY_REQUESTS:
        pass
    assert desk.asked(TOKEN, operator) == HTTPStatus.OK


def test_guesser_with_many_addresses_has_a_bounded_number_of_tries() -> None:
    desk = Desk()
    answers = [desk.asked("guess", f"10.0.{n // 256}.{n % 256}") for n in range(2 * ADDRESSES) for _ in range(6)]
    assert answers.count(HTTPStatus.FORBIDDEN) == ADDRESSES * WRONG_TOKENS
    assert desk.asked(TOKEN, "192.168.0.1") == HTTPStatus.TOO_MANY_REQUESTS  # the price of the bound
    desk.now_s = 61.0
    assert desk.asked(TOKEN, "192.168.0.1") == HTTPStatus.OK


def test_page_tells_clients_apart_by_their_addresses(static: Path) -> None:
    desk = OrderDesk(TOKEN, lambda order: "done")
    guesser, operator = (client(watch_of([]), static, desk, host) for host in ("10.0.0.1", "10.0.0.2"))
    wrong = [ask(guesser, authorization="Bearer guess").status_code for _ in range(WRONG_TOKENS + 1)]
    assert wrong[-1] == HTTPStatus.TOO_MANY_REQUESTS
    assert ask(operator).status_code == HTTPStatus.OK


def test_page_without_token_takes_no_orders(static: Path) -> None:
    answer = ask(client(watch_of([]), static), authorization="Bearer ")
    assert answer.status_code == HTTPStatus.FORBIDDEN
    assert "run.token" in answer.json()["error"]


def test_failure_inside_gives_no_traceback(static: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of([])
    monkeypatch.setattr(watch, "state", lambda at_s: 1 / 0)
    answer = client(watch, static).get("/api/state")
    assert answer.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert answer.json() == {"error": "internal error; see the page's console"}
    assert "x-content-type-options" in answer.headers

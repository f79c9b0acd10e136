"""What somebody is told of by a webhook, and what the other side may do meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from zeroband.observe import sinks, webhook
from zeroband.observe.sinks import BackgroundSink, Sink
from zeroband.observe.webhook import Alert, AlertRules, Webhook

STALLED_S = 100.0
KINDS = ("node_lost", "run_stalled", "loss_spike", "disk")


def rules(node_id: str = "n0", members: tuple[str, ...] = ("n0#1", "n1#1", "n2#1")) -> AlertRules:
    """Those of a member of that epoch, which got on at 0."""
    made = AlertRules(node_id, stalled_s=STALLED_S)
    assert list(made.add({"kind": "epoch_changed", "at_s": 0.0, "epoch": 1, "members": members}, 0.0)) == []
    assert list(made.add({"step": 1, "at_s": 0.0}, 0.0)) == []
    return made


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "at_s": 7.0, **fields}


def told(alerts: Iterator[Alert]) -> list[tuple[str, str]]:
    return [(alert.kind, alert.words) for alert in alerts]


@pytest.mark.parametrize(
    ("node_id", "lost", "speaks"),
    [("n0", ["n1#1"], True), ("n2", ["n1#1"], False), ("n1", ["n0#1"], True), ("n2", ["n0#1"], False)],
)
def test_a_loss_is_told_by_the_first_of_those_who_are_left(node_id: str, lost: list[str], speaks: bool) -> None:
    alerts = told(rules(node_id).add(event("peer_lost", round=3, member_ids=lost), 1.0))
    assert alerts == ([("node_lost", f"lost {lost[0][:2]}")] if speaks else [])


def test_stall_is_told_once_until_the_node_gets_on() -> None:
    made = rules()
    assert told(made.pass_time(STALLED_S - 1, None)) == []
    assert told(made.pass_time(STALLED_S + 1, None)) == [("run_stalled", "no step for 101 s")]
    assert told(made.pass_time(5 * STALLED_S, None)) == []
    list(made.add({"step": 2, "at_s": 1.0}, 6 * STALLED_S))
    assert told(made.pass_time(7 * STALLED_S + 1, None)) == [("run_stalled", "no step for 101 s")]


@pytest.mark.parametrize("kind", ["paused", "left", "fenced"])
def test_who_is_paused_or_out_does_not_stall(kind: str) -> None:
    made = rules()
    list(made.add(event(kind, round=3, reason="done"), 1.0))
    assert told(made.pass_time(9 * STALLED_S, None)) == []


def test_spike_and_loss_that_is_no_number_are_told_once() -> None:
    made = rules()
    losses = [3.0, 2.9, 2.8, 2.7, 2.6, 5.4, 7.0, 6.9, 2.5, float("nan"), float("nan"), 2.5, float("inf")]
    spoken = [told(made.add({"step": s, "at_s": 1.0, "train/loss": loss}, 1.0)) for s, loss in enumerate(losses)]
    assert [s for s, alerts in enumerate(spoken) if alerts] == [6, 9, 12]
    assert spoken[6][0][0] == "loss_spike" and spoken[6][0][1].startswith("the loss is 7, ")


def test_other_members_leave_a_spike_to_the_first() -> None:
    made = rules("n1")
    assert told(made.add({"step": 1, "at_s": 1.0, "train/loss": float("nan")}, 1.0)) == []
    alerts = told(made.add(event("update_refused", round=1, reason="it is not finite"), 1.0))
    assert alerts == [("loss_spike", "update not finite and dropped: it is not finite")]


def test_full_disk_is_told_once_until_there_is_room() -> None:
    made = rules()
    free = [0.5, 0.04, 0.03, None, 0.5, 0.01]
    assert [len(told(made.pass_time(1.0, ratio))) for ratio in free] == [0, 1, 0, 0, 0, 1]


# -- sending --------------------------------------------------------------------------------------------------------


class Receiver(ThreadingHTTPServer):
    """Takes what is posted; answers with the statuses in turn, the last one for ever; None hangs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int | None] = [200]
        self.got: list[dict[str, Any]] = []
        self.arrived = threading.Condition()
        self.release = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/s3cret"

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.got) >= count, 20), self.got
        return self.got


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        statuses = self.server.statuses
        with self.server.arrived:
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            self.server.got.append(body)
            self.server.arrived.notify_all()
        if status is None:
            self.server.release.wait(20)
            return
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook.random, "uniform", lambda low, high: 0.001)


def open_webhook(url: str) -> Webhook:
    made = rules(members=("n0#1", "n1#1"))
    return Webhook(url, kinds=KINDS, run_id="r", node_id="n0", rules=made, free_ratio=lambda: 0.01)


def lose(sink: Sink, name: str = "n1") -> None:
    sink.write(event("peer_lost", round=3, member_ids=[f"{name}#1"]))


def test_message_has_what_happened_for_people_and_for_programs(receiver: Receiver) -> None:
    hook = open_webhook(receiver.url)
    lose(hook)
    hook.write(event("checkpoint_failed", round=3, step=5, reason="full"))  # not asked for
    (message,) = receiver.got
    assert message == {
        "text": "zeroband run r, node n0: node_lost: lost n1",
        "run": "r",
        "node": "n0",
        "kind": "node_lost",
        "words": "lost n1",
        "at_s": 7.0,
        "fields": {"round": 3, "member_ids": ["n1#1"]},
    }


def test_server_that_fails_for_a_while_gets_the_message(receiver: Receiver, reasons: Callable[[], list[str]]) -> None:
    receiver.statuses = [503, 429, 200]
    lose(open_webhook(receiver.url))
    assert len(receiver.got) == 3 and reasons() == []


@pytest.mark.parametrize("status", [404, 302, None])
def test_refusal_redirect_and_an_absent_server_are_said_once_without_the_url(
    receiver: Receiver, reasons: Callable[[], list[str]], caplog: pytest.LogCaptureFixture, status: int | None
) -> None:
    receiver.statuses = [status]
    absent = Receiver()
    absent.server_close()
    hook = open_webhook(absent.url if status is None else receiver.url)
    for _ in range(3):
        lose(hook)
    assert len(receiver.got) == (0 if status is None else 3), "no second attempt"
    (reason,) = reasons()
    assert reason == f"HTTP status {status}" if status is not None else "Connection refused" in reason
    assert "s3cret" not in caplog.text + str([record.__dict__ for record in caplog.records])


def test_server_that_hangs_holds_up_neither_the_trainer_nor_its_end(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_CLOSE_DEADLINE_S", 0.02)
    receiver.statuses = [None]
    sink = BackgroundSink("webhook", lambda: open_webhook(receiver.url))
    for _ in range(500):
        lose(sink)
    receiver.wait_for(1)
    before_s = time.thread_time()
    sink.close()
    sink.close()
    assert len(receiver.got) == 1 and time.thread_time() - before_s < 1


def test_rate_is_bounded_and_what_was_left_out_is_counted(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = open_webhook(receiver.url)
    for _ in range(50):
        lose(hook)
    assert len(receiver.got) == 20
    monkeypatch.setattr(webhook, "_MOST_IN_S", 0.0)  # as if the time were over
    lose(hook)
    lose(hook)
    assert "(30 messages dropped before)" in receiver.got[20]["text"] and "dropped" not in receiver.got[21]["text"]


def test_time_passes_while_lines_come(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Webhook, "every_s", 0.0)
    sink = BackgroundSink("webhook", lambda: open_webhook(receiver.url))
    assert {message["kind"] for message in receiver.wait_for(2)} == {"disk", "run_stalled"}
    sink.close()

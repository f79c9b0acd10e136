"""Nodes' facts in the store: complete, once, in order, capped, and only from the run's nodes."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from tests.servers import SERVERS, until

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store import fact_publisher, facts, redis_run
from zeroband.elastic.store.connection import StoreClient
from zeroband.elastic.store.fact_publisher import FactPublisher, NodeFacts
from zeroband.elastic.store.fact_records import SHORT_LINE_BYTES, FactBatch, FactLine
from zeroband.elastic.store.facts import StoreFacts
from zeroband.elastic.store.keys import ACL_RULES, FACTS_TTL_S, Keys
from zeroband.elastic.store.redis_run import FACTS_BYTES
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.events import EventLog
from zeroband.observe.facts import Fact, FolderFacts
from zeroband.observe.jsonl import FilePlace, LineTail
from zeroband.observe.metrics import METRICS_FILE, MetricsLog
from zeroband.observe.status import RunReader
from zeroband.tools import status
from zeroband.tools.cluster import RedisServer

RUN_ID, TOKEN = "demo", "s3cret"
KEYS = Keys(RUN_ID)
STREAM = KEYS.facts("n0")
AT_ONCE_S, NEVER_S = 0.01, 600.0
RETRY_S = 20.0
"""Deadline on a busy machine."""

Open = Callable[..., StoreFacts]


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with RedisServer(program=request.param.program, persistent=True) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


class Node:
    """Writes a trainer's files with a clock that ticks with every line."""

    def __init__(self, run_dir: Path, url: str, node_id: str = "n0") -> None:
        clock = itertools.count(1_000_000.0)
        self.folder, self.node_id, self.url = run_dir / node_id, node_id, url
        self.metrics = MetricsLog(self.folder, now=lambda: next(clock))
        self.events = EventLog(self.folder, now=lambda: next(clock))
        self._steps = itertools.count(1)

    def start(self) -> None:
        self.events.emit("node_started", total_steps=100, local_world_size=1, parameters=1000)
        self.events.emit("joined", member_id=f"{self.node_id}#1", round=0)

    def train(self, steps: int) -> None:
        for step in itertools.islice(self._steps, steps):
            self.metrics.record(step, {"train/loss": 1 / step, "train/tokens": 64 * step, "train/tokens_per_s": 6.4})
            if step % 3 == 0:
                fields = {"members": [f"{self.node_id}#1"], "digest": f"d{step}", "progress": {"founding": "line"}}
                self.events.emit("round_committed", round=step // 3, epoch=1, **fields)

    def publish(self, *, every_s: float = AT_ONCE_S) -> FactPublisher:
        return FactPublisher(self.folder, self.node_id, self.open_store, every_s=every_s)

    def open_store(self) -> RedisStore:
        key = RunKey.of(TOKEN, RUN_ID)
        return RedisStore(self.url, RUN_ID, key=key, lease_s=RETRY_S, retry_s=RETRY_S)

    def tell(self) -> None:
        """Publish all lines so far with a new publisher, as after a restart."""
        self.publish(every_s=NEVER_S).close()


@pytest.fixture(autouse=True)
def _last_words_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fact_publisher, "LAST_WORDS_S", RETRY_S)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / RUN_ID


@pytest.fixture
def node(run_dir: Path, server: RedisServer, client: redis.Redis) -> Node:
    node = Node(run_dir, server.url)
    node.start()
    return node


@pytest.fixture
def opened(server: RedisServer) -> Iterator[Open]:
    with ExitStack() as stack:

        def one(token: str | None = TOKEN, *, retry_s: float = RETRY_S) -> StoreFacts:
            facts = StoreFacts(server.url, RUN_ID, token, retry_s=retry_s)
            stack.callback(facts.close)
            return facts

        yield one


def in_files(run_dir: Path) -> list[Fact]:
    facts = FolderFacts(run_dir).read()
    assert facts
    return facts


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_store_has_the_facts_of_all_nodes_files(node: Node, run_dir: Path, opened: Open) -> None:
    other = Node(run_dir, node.url, "n1")
    node.train(7)
    other.train(2)
    node.tell()
    other.tell()
    shown = opened()
    assert (shown.node_ids(), shown.run_id) == (["n0", "n1"], RUN_ID)
    assert shown.read() == in_files(run_dir)
    assert (shown.read(), shown.skipped_lines()) == ([], {"n0": 0, "n1": 0})
    assert RunReader(opened()).read() == RunReader(FolderFacts(run_dir)).read()
    assert shown.ages_s().keys() == {"n0", "n1"} and all(0.0 <= age_s < 100.0 for age_s in shown.ages_s().values())


def test_folder_is_shown_while_the_store_is_away_and_the_others_when_it_is_back(tmp_path: Path, run_dir: Path) -> None:
    class Away:
        place = "nowhere"
        asked = 0
        found: Sequence[Fact] | None = None

        def read(self, *, but_of: Collection[str]) -> list[Fact]:
            self.asked += 1
            if self.found is None:
                raise StoreLost("away")
            return [fact for fact in self.found if fact.node_id not in but_of]

        def unread(self, *, but_of: Collection[str]) -> list[str]:
            return []

        def ages_s(self) -> dict[str, float]:
            return {"n0": 7.0, "n1": 7.0}

    node, far, now_s = Node(run_dir, "none"), Away(), [0.0]
    with pytest.raises(StoreLost, match="away"):
        facts.FolderAndStoreFacts(FolderFacts(tmp_path / "none"), cast("StoreFacts", Away())).read()
    folder = FolderFacts(run_dir, most_bytes=100)
    both = facts.FolderAndStoreFacts(folder, cast("StoreFacts", far), now=lambda: now_s[0])
    node.start()
    node.train(3)
    assert {fact.node_id for fact in both.read()} == {"n0"}
    assert both.has_more
    while both.has_more:
        both.read()
    assert both.unread() == ["the other nodes: away"]
    assert far.asked == 1  # a page does not wait for it at each look
    far.found, now_s[0] = [Fact("n0", {"at_s": 1.0, "step": 1}), Fact("n1", {"at_s": 1.0, "step": 1})], 60.0
    assert (both.read(), both.node_ids(), both.unread()) == ([Fact("n1", {"at_s": 1.0, "step": 1})], ["n0"], [])
    assert both.ages_s()["n1"] == 7.0 > both.ages_s()["n0"]


def test_each_line_is_returned_once_across_restarts_of_the_node(node: Node, run_dir: Path, opened: Open) -> None:
    shown, given = opened(), list[Fact]()
    for steps in (3, 0, 2, 4):
        node.train(steps)
        node.tell()
        given += shown.read()
    assert given == opened().read() == in_files(run_dir)


def test_lines_of_both_files_come_in_the_order_of_the_nodes_clock(node: Node, opened: Open) -> None:
    node.train(400)  # more than one batch, and than is read of a file at once
    node.tell()
    times = [fact.record["at_s"] for fact in opened().read()]
    assert times == sorted(times) and len(times) > 500


def test_lines_that_are_no_records_are_counted_as_in_the_files(node: Node, run_dir: Path, opened: Open) -> None:
    with (node.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": \n\n[1]\n{"at_s": 1000002.5, "step": 9}\n{"half')
    node.tell()
    shown, files = opened(), FolderFacts(run_dir)
    assert shown.read() == files.read() and shown.skipped_lines() == files.skipped_lines() == {"n0": 2}


def test_partial_line_is_published_when_complete(node: Node, run_dir: Path, opened: Open) -> None:
    path, shown = node.folder / "metrics.jsonl", opened()
    line = json.dumps({"step": 1, "at_s": 1e6, "text": "ä" * 5}, ensure_ascii=False).encode()
    path.write_bytes(line[: line.index("ä".encode()) + 1])
    node.tell()
    assert [fact.record["kind"] for fact in shown.read()] == ["node_started", "joined"]
    path.write_bytes(line + b"\n")
    node.tell()
    assert [fact.record for fact in shown.read()] == [json.loads(line)]


def test_long_line_is_published_without_its_long_values(node: Node, opened: Open) -> None:
    members = [f"n{i}#00000000" for i in range(64)]
    progress = {"founding": "line", "tokens": 5, "ledger": {"returned": [[i, i + 1] for i in range(500)]}}
    fields = {"weights": [1] * 64, "samples": [4096] * 64, "late": [], "progress": progress}
    node.events.emit("round_committed", round=1, epoch=1, members=members, digest="d", **fields)
    node.tell()
    record = opened().read()[-1].record
    assert (record["members"], record["digest"], record["progress"]) == (
        members,
        "d",
        {"founding": "line", "tokens": 5},
    )
    assert record["left_out"] == ["weights", "samples", "late", "progress"]
    assert len(json.dumps(record)) < SHORT_LINE_BYTES


def test_oversized_line_is_counted_and_skipped(node: Node, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    node.events.emit("left", reason="x" * 300_000)
    node.train(1)
    node.tell()
    shown = opened()
    assert [fact.record.get("kind", "step") for fact in shown.read()] == ["node_started", "joined", "step"]
    assert shown.skipped_lines() == {"n0": 1}


def test_line_that_comes_while_the_other_file_is_read_keeps_its_place(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, lines, meanwhile = NodeFacts(node.folder), LineTail.lines, [True]
    assert told.next_batch() is not None  # there is nothing more for now

    def train_meanwhile(tail: LineTail, *args: Any, **options: Any) -> Any:
        if tail.path.name == METRICS_FILE and meanwhile:
            meanwhile.clear()
            node.events.emit("joined", member_id="n0#2", round=0)
            node.train(1)
        return lines(tail, *args, **options)

    monkeypatch.setattr(LineTail, "lines", train_meanwhile)
    batch = told.next_batch()
    assert batch is not None
    assert [(line.record or {}).get("kind", "step") for line in batch.lines] == ["joined", "step"]


# -- the store away, and back -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stream_catches_up_after_the_store_was_away(
    node: Node, run_dir: Path, server: RedisServer, opened: Open
) -> None:
    shown, publisher = opened(), node.publish()
    node.train(4)
    given = list[Fact]()
    until(lambda: bool(given.extend(shown.read()) or len(given) >= 7), "the first lines")
    server.stop()
    node.train(300)
    with pytest.raises(StoreLost):
        opened(retry_s=0.2).read()
    server.start()
    publisher.close()
    given += shown.read()
    assert given == opened().read() == in_files(run_dir)


def test_emptied_store_gets_the_whole_run_again(node: Node, run_dir: Path, client: redis.Redis, opened: Open) -> None:
    """A reader gets nothing twice."""
    shown, publisher = opened(), node.publish()
    node.train(4)
    given = list[Fact]()
    until(lambda: bool(given.extend(shown.read()) or len(given) >= 7), "the first lines")
    client.flushall()
    node.train(3)
    until(lambda: bool(client.exists(STREAM)), "a new stream")
    publisher.close()
    given += shown.read()
    assert given == opened().read() == in_files(run_dir)


def test_store_restored_from_older_data_gets_the_rest_again(
    node: Node, run_dir: Path, client: redis.Redis, opened: Open
) -> None:
    node.train(3)
    node.tell()
    older = client.dump(STREAM)
    node.train(3)
    node.tell()
    shown = opened()
    given = shown.read()
    client.restore(STREAM, 0, older, replace=True)
    node.train(1)
    node.tell()
    given += shown.read()
    assert given == opened().read() == in_files(run_dir)


def test_entry_whose_answer_was_lost_is_not_added_twice(
    node: Node, client: redis.Redis, run_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, lost = StoreClient.execute_command, list[Any]()

    def lose_each_first_answer(*command: Any, **options: Any) -> Any:
        answer = execute(*command, **options)
        if command[1] == "EVALSHA" and command not in lost and threading.current_thread().name == "facts":
            lost.append(command)
            raise redis.ConnectionError("the answer was lost")
        return answer

    monkeypatch.setattr(StoreClient, "execute_command", lose_each_first_answer)
    for _ in range(2):
        node.train(2)
        node.tell()
    assert len(lost) >= 3 and client.xlen(STREAM) == 2
    assert opened().read() == in_files(run_dir)


def test_reader_keeps_its_position_while_the_store_is_away(
    node: Node, run_dir: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, read_facts = Node(run_dir, node.url, "n1"), RedisStore.read_facts
    for one in (node, other):
        one.train(2)
        one.tell()

    def be_away(store: RedisStore, node_id: str, behind: str) -> Any:
        if node_id == "n1":
            raise StoreLost("away")
        return read_facts(store, node_id, behind)

    shown = opened()
    with monkeypatch.context() as patched:
        patched.setattr(RedisStore, "read_facts", be_away)
        with pytest.raises(StoreLost):
            shown.read()
    assert shown.read() == in_files(run_dir)


def test_new_files_of_the_same_name_are_published_from_their_start(
    node: Node, run_dir: Path, server: RedisServer, opened: Open
) -> None:
    node.train(3)
    node.tell()
    shown = opened()
    given = shown.read()
    for path in node.folder.iterdir():
        path.unlink()
    anew = Node(run_dir, server.url)
    anew.events.emit("node_started", total_steps=7, local_world_size=1, parameters=1)
    anew.train(8)
    anew.tell()
    assert shown.read() == in_files(run_dir) and len(given) == 6


# -- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stream_keeps_the_newest_of_so_many_bytes(
    node: Node, run_dir: Path, client: redis.Redis, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late reader gets the snapshot since the start of the node."""
    monkeypatch.setattr(redis_run, "FACTS_BYTES", most := 20_000)
    early, given = opened(), list[Fact]()
    for _ in range(40):
        node.train(10)
        node.tell()
        given += early.read()
    kept = [len(fields[b"facts"]) for _, fields in client.xrange(STREAM)]
    assert most - 2 * max(kept) < sum(kept) <= most
    assert given == in_files(run_dir)
    late = opened().read()
    assert [fact.record["kind"] for fact in late[:2]] == ["node_started", "joined"]
    assert late[2:] == given[-len(late[2:]) :] and 50 < len(late) < 400


@pytest.mark.slow
def test_stream_keeps_the_newest_of_so_many_entries(
    node: Node, client: redis.Redis, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_run, "FACTS_ENTRIES", 10)
    with closing(node.open_store()) as store:
        newest = ""
        for end in range(1, 301):
            place = FilePlace("f", end)
            added = store.append_facts("n0", newest, FactBatch((FactLine("m", place, {"n": end}),), {"m": place}), None)
            assert isinstance(added, redis_run.Appended)
            newest = added.id
    assert 10 <= client.xlen(STREAM) <= 110  # whole nodes of its tree go


def test_reader_of_a_stream_trimmed_past_its_position_gets_the_rest(
    node: Node, client: redis.Redis, opened: Open
) -> None:
    shown, given = opened(), list[Fact]()
    for _ in range(4):
        node.train(1)
        node.tell()
        if not given:
            given = shown.read()
    ids = [id for id, _ in client.xrange(STREAM)]
    client.xdel(STREAM, *ids[:2])
    assert len(ids) == 4 and len(given) == 3
    assert [fact.record.get("step") for fact in shown.read()] == [3, None, 4]


def test_files_longer_than_the_cap_are_published_from_there(
    node: Node, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fact_publisher, "FACTS_BYTES", 5000)
    node.train(200)
    node.tell()
    steps = [fact.record["step"] for fact in opened().read() if "step" in fact.record]
    assert 10 < len(steps) < 100 and steps == list(range(steps[0], 201))


def test_keys_have_a_ttl(node: Node, client: redis.Redis) -> None:
    node.tell()
    assert {key.decode() for key in client.scan_iter()} == {STREAM, KEYS.recorders}
    assert all(0 < client.ttl(key) <= FACTS_TTL_S for key in (STREAM, KEYS.recorders))
    assert FACTS_BYTES == 2 << 20  # as docs/operations.md says


# -- who may write and read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["another", None])
def test_reader_with_another_token_sees_nothing_and_is_told(node: Node, opened: Open, token: str | None) -> None:
    with closing(node.open_store()) as store:
        store.found_or_match({"model.d_model": "256"})
    node.tell()
    shown = opened(token)
    for look in (shown.node_ids, shown.read):
        with pytest.raises(ConfigError, match=r"run\.token"):
            look()
    assert shown.skipped_lines() == {}


def test_facts_of_a_run_with_another_token_are_reported(node: Node, opened: Open) -> None:
    """The store has no other record that shows it."""
    node.tell()
    shown = opened("another")
    assert (shown.node_ids(), shown.read()) == ([], [])
    assert shown.unread() == ["n0: sealed with another run.token"]


def test_forged_entries_are_skipped_and_counted(node: Node, run_dir: Path, client: redis.Redis, opened: Open) -> None:
    """A stranger can write to the store, but is not shown and hides no node."""
    node.tell()
    _, genuine = client.xrange(STREAM)[-1]
    forged = {**genuine, b"facts": genuine[b"facts"].replace(b":1000}", b":9999}")}
    assert forged != genuine
    client.xadd(STREAM, forged)
    client.xadd(STREAM, {"before": "inf", "facts": b"\xff\x00"})
    client.xadd(STREAM, {"x": "y"})
    client.hset(KEYS.recorders, "ghost", "word")
    client.xadd(KEYS.facts("ghost"), genuine)
    node.train(3)
    node.tell()
    shown = opened()
    assert shown.read() == in_files(run_dir)
    assert shown.skipped_lines() == {"n0": 3}


def test_entry_of_one_node_is_invalid_for_another_and_counts_once(
    node: Node, run_dir: Path, client: redis.Redis, opened: Open
) -> None:
    other = Node(run_dir, node.url, "n1")
    other.train(1)
    other.tell()
    node.tell()
    _, ours = client.xrange(STREAM)[-1]
    client.xadd(STREAM, ours)
    client.xadd(KEYS.facts("n1"), ours)
    shown = opened()
    assert shown.read() == in_files(run_dir)
    assert shown.skipped_lines() == {"n0": 0, "n1": 1}


def test_stream_of_forged_entries_does_not_hide_a_node(
    node: Node, run_dir: Path, client: redis.Redis, opened: Open
) -> None:
    for _ in range(20):
        client.xadd(STREAM, {"before": "1e300", "facts": "f"})
    node.tell()
    assert opened().read() == in_files(run_dir)


def test_keys_of_the_wrong_type_are_deleted_by_the_node_and_skipped_by_readers(
    node: Node, run_dir: Path, client: redis.Redis, opened: Open
) -> None:
    client.set(STREAM, "x")
    client.lpush(KEYS.recorders, "x")
    assert opened().read() == []
    node.tell()
    assert opened().read() == in_files(run_dir)
    client.set(STREAM, "x")
    shown = opened()
    assert shown.read() == [] and client.get(STREAM) == b"x"


@pytest.mark.parametrize("damage", ["forged", "deleted", "of a wrong kind"])
def test_node_is_listed_again_while_it_goes_on(
    node: Node, run_dir: Path, client: redis.Redis, opened: Open, damage: str
) -> None:
    shown, publisher = opened(), node.publish()
    until(lambda: shown.node_ids() == ["n0"], "the node")
    match damage:
        case "forged":
            client.hset(KEYS.recorders, "n0", "word")
        case "deleted":
            client.delete(KEYS.recorders)
        case _:
            client.set(KEYS.recorders, "word")
    assert opened().node_ids() == []
    for entries in (2, 3):
        node.train(1)
        until(lambda entries=entries: client.xlen(STREAM) == entries, "another entry")
    publisher.close()
    assert opened().read() == in_files(run_dir)


def test_stream_with_exhausted_ids_is_restarted(node: Node, run_dir: Path, client: redis.Redis, opened: Open) -> None:
    client.xadd(STREAM, {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}")
    node.train(1)
    node.tell()
    assert opened().read() == in_files(run_dir)


# -- nothing reaches the training -------------------------------------------------------------------------------------


def test_hanging_store_delays_the_end_of_a_run_by_seconds_at_most(
    node: Node, server: RedisServer, monkeypatch: pytest.MonkeyPatch, run_dir: Path, opened: Open
) -> None:
    waited: list[float | None] = []
    join = threading.Thread.join
    monkeypatch.setattr(fact_publisher, "LAST_WORDS_S", 0.05)

    def note(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "facts":
            waited.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", note)
    node.tell()
    server.pause()
    try:
        publisher = node.publish()
        node.train(20)  # returns: nobody waits for the store
        publisher.close()
    finally:
        server.resume()
        for thread in threading.enumerate():
            if thread.name == "facts":
                join(thread)  # what it still had to say would reach the store of the next test
    assert waited == [0.05, 0.05]
    node.tell()
    assert opened().read() == in_files(run_dir)


@pytest.mark.parametrize("missing", ["xadd", "xrevrange"])
def test_missing_rights_are_logged_once_and_retried(
    node: Node, client: redis.Redis, run_dir: Path, opened: Open, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    rules = ACL_RULES.replace(f" +{missing} ", " ")
    client.execute_command("ACL", "SETUSER", "run", "reset", "on", ">pw", *rules.split())
    node.url = node.url.replace("unix://", "unix://run:pw@")
    for every_s in (AT_ONCE_S, NEVER_S):
        node.train(2)
        node.publish(every_s=every_s).close()
    (first, second) = [record for record in caplog.records if "cannot publish" in record.message]
    assert missing in str(first.__dict__["fields"]) and first.__dict__["fields"] == second.__dict__["fields"]
    client.execute_command("ACL", "SETUSER", "run", f"+{missing}")
    node.tell()
    assert opened().read() == in_files(run_dir)


def test_invalid_address_is_logged_and_harmless(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.url = "rediss://localhost?ssl_ca_certs=/nowhere.pem"
    node.tell()
    assert [r.__dict__["fields"]["why"] for r in caplog.records] == [
        "store.url: ssl_ca_certs=/nowhere.pem cannot be read: No such file or directory"
    ]


# -- zeroband status --------------------------------------------------------------------------------------------------


def test_status_shows_a_run_without_its_files(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node.train(7)
    node.tell()
    source = ["--store", node.url, "--run-id", RUN_ID]
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", TOKEN)
    assert status.main(source) == 0
    shown = capsys.readouterr().out
    assert status.main([str(node.folder.parent)]) == 0
    assert shown == capsys.readouterr().out and "7/100" in shown
    monkeypatch.delenv("ZERO_BAND_RUN__TOKEN")
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    assert status.main([*source, "--token-file", str(path)]) == 0
    assert shown == capsys.readouterr().out


@pytest.mark.slow
def test_status_follows_a_store_that_goes_away_and_comes_back(
    node: Node, server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN", TOKEN)
    monkeypatch.setattr(facts, "RETRY_S", 0.2)
    node.tell()
    looks = iter([server.stop, server.start, lambda: (node.train(3), node.tell())])

    def pause(seconds: float) -> None:
        act = next(looks, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    monkeypatch.setattr(status, "time", SimpleNamespace(sleep=pause))
    assert status.main(["--store", node.url, "--run-id", RUN_ID, "--follow"]) == 0
    out = capsys.readouterr().out
    assert (out.count("node  state"), out.count("Redis did not answer"), "3/100" in out) == (3, 1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--store", "URL", "--run-id", RUN_ID], 2, "run.token"),
        (["--store", "URL", "--run-id", "other"], 2, "no node of run.id='other'"),
        (["--store", "unix:///nowhere", "--run-id", RUN_ID], 1, "did not answer"),
        (["--store", "nonsense", "--run-id", RUN_ID], 2, "no address of a Redis"),
        (["--store", "URL"], 2, "--store needs --run-id"),
        (["somewhere", "--store", "URL", "--run-id", RUN_ID], 2, "name one run"),
        (["somewhere", "--run-id", RUN_ID], 2, "name one run"),
        (["--run-id", RUN_ID], 2, "give --store URL, or set ZERO_BAND_STORE__URL"),
        (["--store"], 2, "--store needs --run-id, or ZERO_BAND_RUN__ID"),
        ([], 2, "name one run"),
    ],
)
def test_status_says_why_it_shows_nothing(
    node: Node,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(facts, "RETRY_S", 0.2)
    with closing(node.open_store()) as store:
        store.found_or_match({"model.d_model": "256"})
    assert status.main([argument.replace("URL", node.url) for argument in arguments]) == code
    assert words in capsys.readouterr().err

"""Three nodes with documents of their own train one model: one is killed and comes back, one joins later.

Real processes; each writes down what it reads.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from zeroband.data.ledger import take
from zeroband.elastic.membership.progress import Progress, deal_claims
from zeroband.elastic.membership.records import Claim, from_record
from zeroband.observe.jsonl import JsonlTail
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.data import command

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(300)]

DEADLINE_S = 120.0
BATCH = 4
LETTERS = {"node0": "aA", "node1": "bB", "node2": "cC"}
"""What the documents of each node are made of."""
ARGUMENTS = (
    *("--model.d-model=32", "--model.n-layers=1", "--model.n-heads=2", "--model.d-ff=64", "--data.seq-length=32"),
    *("--data.private", "--data.hold-out=0.1", "--eval.every-steps=4", "--eval.batches=1", "--optim.warmup-steps=2"),
    *("--train.total-steps=100000", f"--train.batch-size={BATCH}", "--train.micro-bs=4", "--train.dtype=float32"),
    *("--train.threads=1", "--fault.detect-s=2", "--fault.inject=inner@+0=TAKES0.05", "--ckpt.every-rounds=2"),
)
OUTERS = {
    "diloco": ("--outer.type=diloco", "--outer.inner-steps=2", "--outer.weights=equal"),
    "streaming": ("--outer.type=diloco", "--outer.inner-steps=4", "--outer.overlap=full"),
    "ddp": ("--outer.type=ddp", "--ckpt.every-rounds=10"),
    "demo": ("--outer.type=demo", "--ckpt.every-rounds=10"),
}


@dataclass(frozen=True)
class Recorded:
    """What a run left behind."""

    folder: Path
    run_dir: Path
    events: Mapping[str, list[dict[str, Any]]]
    read: Mapping[str, list[tuple[int, str]]]
    """Index and text of the samples that each node read."""
    in_store: str
    """All that the store held while the nodes lived."""

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The rounds that node0 recorded, which was there all the time."""
        return [event for event in self.events["node0"] if event["kind"] == "round_committed"]

    def trained(self) -> Mapping[str, Counter[int]]:
        """The samples behind each node's updates that counted."""
        trained = {node: Counter[int]() for node in LETTERS}
        before: Progress | None = None
        for event in self.rounds:
            claims = {member: from_record(Claim, claim) for member, claim in event.get("claims", {}).items()}
            ledgers = deal_claims(claims, before.ledgers) if before is not None else {}
            held = {member: spans for ledger in ledgers.values() for member, spans in ledger.assigned.items()}
            for member, weight, samples in zip(event["members"], event["weights"], event["samples"], strict=True):
                if weight and before is not None:
                    for start, stop in take(held[member], samples)[0]:
                        trained[node_id_of_member(member)].update(range(start, stop))
            before = Progress.from_record(event["progress"])
        return trained


def write_documents(folder: Path, node: str) -> Path:
    """100 kB in letters that no other node has; the way there is a secret, too."""
    path = folder / f"the-cellar-of-{node}" / "notes.txt"
    path.parent.mkdir()
    random_one = random.Random(node)
    path.write_text("".join(random_one.choice(LETTERS[node]) for _ in range(100_000)))
    return path


def contributors(event: Mapping[str, Any]) -> set[str]:
    pairs = zip(event["members"], event["weights"], strict=True)
    return {node_id_of_member(member) for member, weight in pairs if weight}


@pytest.fixture(
    scope="module",
    params=["diloco", *(pytest.param(kind, marks=pytest.mark.soak) for kind in OUTERS if kind != "diloco")],
)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("private")
    documents = {node: write_documents(folder, node) for node in LETTERS}
    (read := folder / "read").mkdir()
    arguments = (*ARGUMENTS, *OUTERS[request.param], f"--ckpt.path={folder / 'checkpoints'}")
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "READ_FOLDER": str(read), "ZERO_BAND_RUN__TOKEN": "sesame"}
    script = Path(__file__).with_name("reading_worker.py")
    with LocalCluster(folder / "runs", arguments, nodes=2, env=env, script=script) as cluster:

        def start(node: str) -> None:
            own = (f"--data.source.paths={json.dumps([str(documents[node])])}", f"--data.cache-dir={folder / node}")
            cluster.restart(node) if node in cluster.nodes else cluster.start(node, arguments=own)

        def until(is_so: Callable[[Mapping[str, Any]], bool], what: str) -> None:
            end_s = time.monotonic() + DEADLINE_S
            while not any(is_so(event) for event in cluster.nodes["node0"].events("round_committed")[-1:]):
                assert time.monotonic() < end_s, f"{what}\n{cluster.describe()}"
                time.sleep(0.1)

        start("node0")
        start("node1")
        until(lambda event: event["round"] >= 4, "two nodes train")
        cluster.nodes["node1"].kill()
        until(lambda event: contributors(event) == {"node0"}, "one goes on alone")
        start("node1")
        until(lambda event: contributors(event) == {"node0", "node1"}, "the other one is back")
        start("node2")
        until(lambda event: contributors(event) == set(LETTERS), "a third one joined")
        newest = cluster.nodes["node0"].events("round_committed")[-1]["round"]
        until(lambda event: event["round"] >= newest + 4, "all of them train")
        assert cluster.redis is not None
        with redis.Redis.from_url(cluster.redis.url) as client:
            in_store = "\n".join(repr(part) for part in dump(client))
        for node in cluster.nodes.values():
            node.terminate()
        cluster.wait(timeout_s=DEADLINE_S)
        assert {node.exit_code for node in cluster.nodes.values()} == {0}, cluster.describe()
        events = {name: node.events() for name, node in cluster.nodes.items()}
    lines = {node: JsonlTail(read / f"{node}.jsonl").read() for node in LETTERS}
    samples = {node: [(line["index"], text_of(line["ids"])) for line in of_node] for node, of_node in lines.items()}
    return Recorded(folder, cluster.run_dir, events, samples, in_store)


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(i) if i < 256 else "|" for i in ids)


def dump(client: Any) -> Iterator[object]:
    """Every key of the store, with its value."""
    for key in client.scan_iter():
        match client.type(key):
            case b"string":
                yield key, client.get(key)
            case b"hash":
                yield key, client.hgetall(key)
            case b"set":
                yield key, client.smembers(key)
            case b"zset":
                yield key, client.zrange(key, 0, -1)
            case b"stream":
                yield key, client.xrange(key)
            case _:
                yield key, client.lrange(key, 0, -1)


def test_each_node_reads_documents_of_its_own_alone(recorded: Recorded) -> None:
    for node, letters in LETTERS.items():
        texts = [text for _, text in recorded.read[node]]
        assert len(texts) >= 4 * BATCH
        assert set("".join(texts)) <= {*letters, "|"}


def test_index_of_a_sample_means_the_same_text_after_a_node_came_back(recorded: Recorded) -> None:
    for node in LETTERS:
        texts = dict[int, str]()
        for index, text in recorded.read[node]:
            assert texts.setdefault(index, text) == text
        assert len(set(texts.values())) == len(texts) > 4 * BATCH


def test_every_sample_is_trained_once_by_the_node_that_has_it(recorded: Recorded) -> None:
    ledgers = Progress.from_record(recorded.rounds[-1]["progress"]).ledgers
    assert {corpus.partition("/")[0] for corpus in ledgers} == set(LETTERS) and len(ledgers) == len(LETTERS)
    trained = recorded.trained()
    for corpus, ledger in ledgers.items():
        node = corpus.partition("/")[0]
        assert set(trained[node].values()) == {1}
        owed = {index for start, stop in ledger.owed for index in range(start, stop)}
        assert set(trained[node]) | owed == set(range(ledger.next)) and not owed & set(trained[node])
        assert set(trained[node]) <= {index for index, _ in recorded.read[node]}


def test_killed_node_got_what_it_had_not_contributed_with_its_first_round(recorded: Recorded) -> None:
    """Before that it trains on samples that it claims behind those; they were in the pool while it was away."""
    lives = [event["member_id"] for event in recorded.events["node1"] if event["kind"] == "joined"]
    assert len(lives) == 2
    rounds = [(event, Progress.from_record(event["progress"])) for event in recorded.rounds]
    owed = next(p.ledgers for e, p in rounds if contributors(e) == {"node0"})
    (returned,) = (ledger.returned for corpus, ledger in owed.items() if corpus.startswith("node1/"))
    dealt = next(p.assigned[lives[1]] for _, p in rounds if lives[1] in p.assigned)
    assert returned and returned[0][0] in [start for start, _ in dealt]


def test_audit_is_exact_and_shows_each_node(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["audit", str(recorded.run_dir)]) == 0
    said = capsys.readouterr().out
    assert [said.count(f"documents of {node}/") for node in LETTERS] == [1, 1, 1]


def test_audit_finds_a_range_that_a_node_trained_twice(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for node in LETTERS:
        (tmp_path / node).mkdir()
        records = JsonlTail(recorded.run_dir / node / "events.jsonl").read()
        for record in (r for r in records if r["kind"] == "round_committed" and r["round"] == 2):
            ledger = next(v for k, v in record["progress"]["ledgers"].items() if k.startswith("node1/"))
            (member,) = ledger["assigned"]
            start, stop = ledger["assigned"][member][0]
            ledger["assigned"][member] = [[0, stop - start]]
        (tmp_path / node / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert command.main(["audit", str(tmp_path)]) == 3
    of_nodes = capsys.readouterr().out.split("documents of ")
    assert ["(0.." in part for part in of_nodes] == [False, False, True, False]


def test_nothing_of_the_documents_is_in_store_or_checkpoints(recorded: Recorded) -> None:
    kept = [path for path in (recorded.folder / "checkpoints").rglob("*") if path.is_file()]
    said = [recorded.in_store, *(path.read_bytes().decode("latin-1") for path in kept)]
    assert "corpora" in recorded.in_store and any('"private": true' in text for text in said)
    cached = [path for node in LETTERS for path in (recorded.folder / node).rglob("*.json")]
    fingerprints = {json.loads(path.read_text())["fingerprint"] for path in cached}
    assert len(cached) == len(fingerprints) == len(LETTERS)
    for secret in ("the-cellar-of", "notes.txt", *fingerprints, *(path.stem for path in cached)):
        assert not any(secret in text for text in said), secret
    for node in LETTERS:
        text = (recorded.folder / f"the-cellar-of-{node}" / "notes.txt").read_text()
        assert not any(text[start : start + 20] in one for one in said for start in range(0, len(text), 2000))

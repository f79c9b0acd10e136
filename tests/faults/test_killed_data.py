"""Runs on streamed ids are killed at random moments: what is read and learned is what it would have been otherwise.

One set lies on the disk, the other behind a server that fails one request in five, with a cache that is too small for
it. `-s` shows figures; `KILL_SEED` draws other moments.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import PACE, Recorded, Setup, Story, contributors, record
from tests.faults.corpora import FAR, SEQ_LENGTH, WEIGHTS, Reference, arguments_of, failing_server, write_corpora
from tests.tiny_runs import TINY_MODEL, ForkedCluster

from zeroband.observe.jsonl import JsonlTail
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster, NodeProcess
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(3600)]

DEADLINE_S = 180.0
SEED = int(os.environ.get("KILL_SEED", "1"))
BATCH, INNER_STEPS = 4, 4
READER = Path(__file__).parent.parent / "integration" / "reading_worker.py"

SINGLE = (
    *TINY_MODEL,
    *(f"--data.seq-length={SEQ_LENGTH}", "--data.hold-out=0.1", "--train.dtype=float32", "--train.threads=1"),
    *(f"--train.batch-size={BATCH}", "--train.micro-bs=4", "--optim.warmup-steps=10", "--fault.detect-s=1", "--resume"),
)
ALONE = ("--ckpt.every-rounds=4",)
DILOCO = ("--outer.type=diloco", f"--outer.inner-steps={INNER_STEPS}", "--ckpt.every-rounds=2")


# -- one node, which is killed again and again, and goes on from its checkpoints --------------------------------------


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    losses: Mapping[int, float]
    """By step; of a step that was made several times, the last."""
    state: Mapping[str, object]
    """Files of the last checkpoint: parameters, inner and outer optimizer, counters."""
    steps_made: int
    resumed: tuple[int, ...]
    """Steps of the checkpoints that it went on from."""


def train_single(
    folder: Path,
    arguments: Sequence[str],
    steps: int,
    disturb: Callable[[LocalCluster], None] | None = None,
    *,
    first_life: Sequence[str] = (),
) -> Trained:
    """Have one node train to the end. `disturb`: what is done to it meanwhile; `first_life`: arguments of that."""
    (shm := folder / "shm").mkdir(parents=True)
    paths = (f"--ckpt.path={folder / 'ckpt'}", f"--data.cache-dir={folder / 'cache'}")
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "ZERO_BAND_NODE__SHM_DIR": str(shm)}
    is_alone = "--outer.type=diloco" not in arguments
    whole = (*SINGLE, *arguments, *paths, f"--train.total-steps={steps}")
    with ForkedCluster(folder / "runs", whole, nodes=1, alone=is_alone, env=env) as cluster:
        cluster.start(arguments=first_life)
        if disturb is not None:
            disturb(cluster)
        cluster.wait(timeout_s=DEADLINE_S)
        (node,) = cluster.nodes.values()
        assert node.exit_code == 0, cluster.describe()
        made = node.metrics()
        saved = folder / "ckpt" / cluster.run_id / f"step_{steps:08d}"
        files = sorted(path for part in ("outer", "nodes") for path in (saved / part).rglob("*") if path.is_file())
        return Trained(
            losses={one["step"]: one["train/loss"] for one in made},
            state={str(path.relative_to(saved)): content_of(path) for path in files},
            steps_made=len(made),
            resumed=tuple(event["step"] for event in node.events("resumed_from")),
        )


def content_of(path: Path) -> object:
    """What a file holds; but for the number of the round, since going on from a checkpoint is a round, too."""
    return path.read_bytes() if path.suffix != ".json" else {**json.loads(path.read_bytes()), "round": None}


def until(node: NodeProcess, is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert node.is_running and time.monotonic() < end_s, node.console_tail()
        time.sleep(0.01)


def kill_at_random(cluster: LocalCluster, chance: random.Random) -> None:
    """Let the node live for a time that is drawn: some seconds of its start, or some steps of its training."""
    (node,) = cluster.nodes.values()
    made = len(node.metrics())
    if not made:  # the first kill: there is something to go on from
        until(node, lambda: bool(node.events("checkpoint_committed")))
    if made and chance.random() < 0.3:
        time.sleep(chance.uniform(0.0, 3.0))
    else:
        steps = made + chance.randint(1, 60)
        until(node, lambda: len(node.metrics()) >= steps)
        time.sleep(chance.uniform(0.0, 0.1))
    assert node.is_running, f"the run is over\n{node.console_tail()}"
    node.kill()
    cluster.restart(node.node_id)


def restart_once(cluster: LocalCluster) -> None:
    """Start the node again when the fault of its first life has struck."""
    (node,) = cluster.nodes.values()
    end_s = time.monotonic() + DEADLINE_S
    while node.is_running:
        assert time.monotonic() < end_s, node.console_tail()
        time.sleep(0.01)
    assert node.exit_code == -signal.SIGKILL, node.console_tail()
    cluster.restart(node.node_id, arguments=())


def compared(folder: Path, outer: Sequence[str], steps: int, **killed: Any) -> Trained:
    """Train twice, once with kills and with a server that fails; the same must come of it. Gives that with kills.

    The sources take their turns by other weights in the second half.
    """
    write_corpora(folder / "sets")
    near, far = (str(folder / "sets" / name) for name in ("near", "far"))
    phases = [(steps * BATCH * SEQ_LENGTH // 2, {"far": 0.6, "near": 0.4})]
    expected = train_single(folder / "whole", (*outer, *arguments_of(near, far, phases=phases)), steps)
    with failing_server(folder / "sets", SEED) as (url, answered):
        arguments = (*outer, *arguments_of(near, f"{url}/far", phases=phases), f"--fault.inject={PACE}")
        found = train_single(folder / "killed", arguments, steps, **killed)
    print(f"\nseed {SEED}: {steps} steps of {BATCH} samples and {found.steps_made - steps} more; {dict(answered)}")
    assert sum(answered.values()) > answered[""] > 0
    assert set(expected.losses) == set(range(1, steps + 1))
    unsaid = expected.losses.keys() - found.losses.keys()
    assert unsaid <= set(found.resumed), "of steps that a checkpoint holds alone, the loss may never have been written"
    assert found.losses.items() <= expected.losses.items()
    assert {Path(name).name for name in expected.state} >= {"model.safetensors", "inner.safetensors", "state.json"}
    assert ("outer/momentum.safetensors" in expected.state) == (outer == DILOCO)
    assert found.state.keys() == expected.state.keys()
    assert [name for name, held in expected.state.items() if found.state[name] != held] == []
    return found


def test_node_that_is_killed_between_two_phases_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    struck = (f"--fault.inject={PACE},inner@+11=SIGKILL",)
    found = compared(tmp_path, ALONE, 16, disturb=restart_once, first_life=struck)
    assert found.resumed in [(4,), (8,)], "the newest checkpoint that was whole; the other phase begins with step 9"


@pytest.mark.parametrize(
    ("outer", "kills", "steps"),
    [
        pytest.param(ALONE, 1, 80, id="alone-1"),
        pytest.param(ALONE, 50, 1400, id="alone-50"),
        pytest.param(DILOCO, 50, 1400, id="diloco-50"),
    ],
)
def test_node_that_is_killed_at_any_moment_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, outer: tuple[str, ...], kills: int, steps: int
) -> None:
    chance = random.Random(SEED)

    def disturb(cluster: LocalCluster) -> None:
        for _ in range(kills):
            kill_at_random(cluster, chance)

    found = compared(tmp_path, outer, steps, disturb=disturb)
    print(f"{kills} kills, went on from checkpoints {len(found.resumed)} times")
    assert found.resumed


# -- several nodes, of which some are killed and started again ---------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """What nodes trained and read."""

    recorded: Recorded
    read: Mapping[str, Sequence[Mapping[str, Any]]]
    """Index, source and ids of each sample that a node read, in all its lives."""
    kills: int
    answered: Mapping[str, int]

    @property
    def rounds(self) -> list[int]:
        """Rounds that trained something."""
        return [number for number in self.recorded.history if number - 1 in self.recorded.history]

    def trained(self, round: int) -> dict[str, set[int]]:
        """Samples that counted in a round, by node id."""
        return {node_id_of_member(member): samples for member, samples in self.recorded.trained(round).items()}


def kill_once(story: Story, _chance: random.Random) -> int:
    """One that has read all of a round: what it read goes to the others."""
    story.until_struck("node1")
    story.until_contributing("node0")
    story.cluster.restart("node1", arguments=[])
    story.until_contributing("node0", "node1")
    rounds = max(story.history)
    story.until(lambda: max(story.history) >= rounds + 5, "both train")
    return 1


@dataclass
class Killer:
    """Kills nodes of a run so that another one goes on, and starts them again."""

    story: Story
    chance: random.Random
    joined: dict[str, int] = field(default_factory=dict[str, int])
    """How often a node had joined when it was started for the last time."""

    def at_work(self) -> set[str]:
        """Nodes that contributed to the newest round, in the life that they lead."""
        committed = self.story.store.view(0).committed
        members = [] if committed is None else contributors(committed)
        joined = {node.node_id: node.events("joined") for node in self.story.cluster.running}
        return {
            node_id
            for node_id, events in joined.items()
            if len(events) > self.joined.get(node_id, 0) and events[-1]["member_id"] in members
        }

    def kill(self) -> None:
        """Kill one at a moment that is drawn: most often one at work, else any."""
        is_at_work, end_s = self.chance.random() < 0.75, time.monotonic() + self.chance.uniform(0.0, 3.0)
        self.story.until(lambda: time.monotonic() > end_s, "a moment that was drawn")
        while not (victims := self._spared(is_at_work)):
            self.story.until(lambda: len(self.at_work()) >= 2, "two are at work")
            time.sleep(self.chance.uniform(0.0, 0.5))
        self.story.node(self.chance.choice(victims)).kill()

    def _spared(self, is_at_work: bool) -> list[str]:
        at_work = self.at_work()
        among = at_work if is_at_work else {node.node_id for node in self.story.cluster.running}
        return sorted(node_id for node_id in among if at_work - {node_id})

    def start(self, share: float) -> None:
        """Start so many of those that are down; at least one where just one is left."""
        for node_id, node in tuple(self.story.cluster.nodes.items()):
            if not node.is_running and (len(self.story.cluster.running) < 2 or self.chance.random() < share):
                self.joined[node_id] = len(node.events("joined"))
                self.story.cluster.restart(node_id)


def kill_often(story: Story, chance: random.Random) -> int:
    story.until_contributing(*story.cluster.nodes)
    killer, kills = Killer(story, chance), 50
    for _ in range(kills):
        killer.kill()
        killer.start(0.8)
    killer.start(1.0)
    story.until_contributing(*story.cluster.nodes)
    return kills


STRUCK = ("--fault.inject", f"{PACE},reduced@+3=SIGKILL")
STORIES = {"once": (2, {"node1": STRUCK}, kill_once), "often": (3, {}, kill_often)}
"""Nodes of a run, faults of their own, and what happens to it."""


@pytest.fixture(scope="module", params=["once", "often"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Read:
    folder = tmp_path_factory.mktemp("streamed")
    write_corpora(folder / "sets")
    (reads := folder / "read").mkdir()
    nodes, faults, tell = STORIES[request.param]
    kills = list[int]()
    with failing_server(folder / "sets", SEED) as (url, answered):
        setup = Setup(
            outer=("diloco", "--outer.inner-steps", str(INNER_STEPS)),
            ranks=(1,) * nodes,
            faults=faults,
            steps_per_round=INNER_STEPS,
            batch_size=BATCH,
            seq_length=SEQ_LENGTH,
            detect_s=2.0,
            data=arguments_of(str(folder / "sets" / "near"), f"{url}/far"),
            script=READER,
            env={"READ_FOLDER": str(reads)},
        )
        recorded = record(folder, setup, lambda story: kills.append(tell(story, random.Random(SEED))))
    node_ids = [f"node{number}" for number in range(nodes)]
    read = {node_id: JsonlTail(reads / f"{node_id}.jsonl").read() for node_id in node_ids}
    return Read(recorded, read, kills[0], answered)


def test_every_sample_is_trained_once_whoever_was_killed(run: Read) -> None:
    found = audit(read_rounds(run.recorded.run_dir))
    counted = Counter[int]()
    for round in run.rounds:
        for samples in run.trained(round).values():
            counted.update(samples)
    print(f"\nseed {SEED}: {run.kills} kills, {found.rounds} rounds, {found.trained} samples, {dict(run.answered)}")
    assert found.is_exact and not found.missing_rounds, found
    assert set(counted.values()) == {1} and len(counted) == found.trained > 100
    lives = Counter(event["kind"] for events in run.recorded.events.values() for event in events)["joined"]
    assert lives > len(run.read), "nobody came back"
    assert sum(run.answered.values()) > run.answered[""] > 0


def test_nodes_read_what_the_global_order_says(run: Read) -> None:
    reference = Reference()
    expected: dict[int, tuple[int, list[int]]] = {}
    reads = dict[str, set[int]]()
    for node_id, lines in run.read.items():
        reads[node_id] = {line["index"] for line in lines}
        for line in lines:
            index = line["index"]
            if index not in expected:
                expected[index] = reference.sample(index)
            assert (line["source"], line["ids"]) == expected[index], (node_id, index)
    in_first_pass = [tuple(expected[index][1]) for index in range(1000) if index in expected]
    assert len(set(in_first_pass)) == len(in_first_pass) > 100, "samples that are alike prove little"
    contributed = 0
    for round in run.rounds:
        for node_id, samples in run.trained(round).items():
            assert samples <= reads[node_id], (round, node_id)
            contributed += len(samples)
    read = sum(map(len, run.read.values()))
    print(f"\n{contributed} samples contributed, {read} read")
    assert read > contributed > 100, "nobody was killed with samples that it had read"


def test_sources_have_their_shares_on_any_number_of_nodes(run: Read) -> None:
    source_of = {line["index"]: line["source"] for lines in run.read.values() for line in lines}
    found: dict[int, Counter[int]] = {}
    for round in run.rounds:
        trained = run.trained(round)
        for samples in trained.values():
            found.setdefault(len(trained), Counter()).update(source_of[index] for index in samples)
    found[0] = sum(found.values(), Counter[int]())
    for nodes, counts in sorted(found.items()):
        share = counts[FAR] / counts.total()
        print(f"\n{nodes or 'all'} nodes: {counts.total()} samples, {share:.4f} from the far set", end="")
        if counts.total() >= 300:
            within = {"rel": 0.01} if counts.total() >= 3000 else {"abs": 0.01}  # a range may lack a sample of either
            assert share == pytest.approx(WEIGHTS["far"], **within)
    assert found[0].total() >= 300

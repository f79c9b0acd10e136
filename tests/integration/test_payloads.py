"""DeMo and SparseLoCo in the trainer: checkpoints hold what a node keeps to itself; nodes differ, die and join.

An algorithm from a file of its own goes on from its checkpoints, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import SLOW_PACE, Recorded, Setup, Story, record

from zeroband.config import load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.store.local_server import RedisServer
from zeroband.node.mesh import init_local_mesh
from zeroband.observe.view import node_id_of_member
from zeroband.outer.aggregator import aggregator_of
from zeroband.runtime.loop import train

pytestmark = [pytest.mark.faults, pytest.mark.slow]

TINY = {
    "model.d_model": 32,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "model.d_ff": 64,
    "data.seq_length": 16,
    "data.source.type": "synthetic",
    "data.source.documents": 50,
    "train.batch_size": 4,
    "train.micro_bs": 4,
    "train.dtype": "float32",
    "optim.warmup_steps": 2,
    "elastic.start_nodes": 1,
    "node.id": "n0",
}
FED_ADAM = Path(__file__).resolve().parents[2] / "examples" / "fed_adam.py"
ALGORITHMS = {
    "demo": ("--outer.type=demo", "--outer.decay=0.9"),
    "demo-overlapped": ("--outer.type=demo", "--outer.decay=0.9", "--outer.overlap=1"),
    "sparseloco": ("--outer.type=sparseloco", "--outer.inner_steps=2"),
    "custom": ("--outer.type=custom", f"--outer.algorithm={FED_ADAM}", "--outer.inner_steps=2"),
}


@pytest.fixture(scope="module")
def train_alone(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """train_alone(name, *arguments): one node of a run of several; its records by step, and its checkpoints."""
    folder = tmp_path_factory.mktemp("payloads")

    def run(name: str, *arguments: str) -> tuple[dict[int, dict[str, Any]], Path]:
        places = {"run.dir": folder, "run.id": name, "data.cache_dir": folder / "cache", "ckpt.path": folder / "ckpt"}
        flags = [f"--{key}={value}" for key, value in {**TINY, **places}.items()]
        config = load_config([*flags, *arguments], {"ZERO_BAND_STORE__URL": redis_server.url})
        with ExitStack() as stack:
            local = init_local_mesh({})
            stack.callback(local.close)
            train(config, local, Departure(grace_s=1.0), stack)
        lines = (folder / name / "n0" / "metrics.jsonl").read_text().splitlines()
        return {made["step"]: made for made in map(json.loads, lines)}, folder / "ckpt" / name

    return run


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak) if name in ("demo", "custom") else name for name in ALGORITHMS],
)
def test_run_that_goes_on_from_a_checkpoint_makes_the_same_steps(train_alone: Callable[..., Any], name: str) -> None:
    """It would not with another momentum, error buffer or outer state."""
    steps, every = "--train.total_steps=8", 2 if "--outer.inner_steps=2" in ALGORITHMS[name] else 4
    first, checkpoints = train_alone(name, *ALGORITHMS[name], steps, f"--ckpt.every_rounds={every}")
    resumed = f"--resume.path={checkpoints}/step_00000004"
    again, _ = train_alone(f"{name}-again", *ALGORITHMS[name], steps, resumed)
    assert again.keys() == {5, 6, 7, 8}
    for step, made in again.items():
        assert made["train/loss"] == first[step]["train/loss"]
        assert made.get("outer/digest") == first[step].get("outer/digest")
    assert len({made["outer/digest"] for made in first.values() if "outer/digest" in made}) > 2


# -- several nodes --------------------------------------------------------------------------------------------------


OVERLAPPED = pytest.param(("--outer.overlap", "1"), id="overlapped", marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=[pytest.param((), id="waiting"), OVERLAPPED])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Of a node of two ranks and one of one, the smaller one is killed before a transfer, and comes back."""

    def tell(story: Story) -> None:
        story.until_struck("node1")
        story.until_contributing("node0")
        story.cluster.restart("node1", arguments=[])
        story.until_contributing("node0", "node1")

    faults = {"node1": ("--fault.inject", "opened@+5=SIGKILL")}
    setup = Setup(
        outer=("demo", "--outer.decay", "0.9", *request.param),
        ranks=(2, 1),
        faults=faults,
        detect_s=2.0,
        pace=SLOW_PACE,
    )
    return record(tmp_path_factory.mktemp("demo"), setup, tell)


def test_nodes_of_other_sizes_hold_one_state_through_a_kill_and_a_join(recorded: Recorded) -> None:
    assert list(recorded.history) == list(range(len(recorded.history)))
    for number in list(recorded.history)[:-1]:  # the nodes may have been ended before they reported the newest
        reported = recorded.of_round("round_committed", number)
        assert reported and len({event["digest"] for event in reported.values()}) == 1, number
    both = [n for n, verdict in recorded.history.items() if len(verdict.members) == 2]
    assert [life.first == 0 for life in recorded.lives("node1")] == [True, False]
    assert both[-1] > recorded.lives("node1")[0].last > 3
    assert recorded.left_behind == []


def test_bytes_of_a_round_are_those_of_its_payloads(recorded: Recorded) -> None:
    rounds = [r for records in recorded.metrics.values() for r in records if r.get("outer/nodes") == 2]
    (payload_bytes,) = {r["outer/payload_bytes"] for r in rounds if r["outer/weight"] and not r["outer/retries"]}
    for records in recorded.metrics.values():
        for before, r in pairwise(r for r in records if "outer/round" in r):
            joins = 0 in recorded.history[r["outer/round"]].plan.weights
            if joins or r["outer/nodes"] != 2 or r["step"] != before["step"] + 1:
                continue
            bytes_of_rounds = (r["outer/round"] - before["outer/round"]) * payload_bytes  # a node that leaves makes two
            assert (r["outer/sent_bytes"], r["outer/received_bytes"]) == (bytes_of_rounds, bytes_of_rounds)
    parameters = next(e["parameters"] for e in recorded.events["node0"] if e["kind"] == "node_started")
    assert rounds[0]["outer/payload_ratio"] == pytest.approx(2 * parameters / payload_bytes)


@pytest.mark.soak
def test_node_of_two_ranks_scores_payloads_as_nodes_of_one_do(tmp_path: Path) -> None:
    """Its ranks hold the parameters in shards (FSDP), and measure each payload together."""

    def tell(story: Story) -> None:
        story.until_contributing("node0", "node1", "node2")
        begun = max(story.history)
        story.until(lambda: max(story.history) >= begun + 8, "eight rounds more")

    outer = ("sparseloco", "--outer.inner-steps", "2", "--outer.robust.type", "clip")
    score = ("--outer.score.rounds", "1", "--outer.score.members", "3", "--data.hold-out", "0.1")
    setup = Setup(outer=(*outer, *score), ranks=(2, 1, 1), faults={}, steps_per_round=2, detect_s=2.0)
    recorded = record(tmp_path, setup, tell)
    for records in recorded.metrics.values():
        measured = [r for r in records if r.get("outer/score_s")]
        assert len(measured) > 3 and all(-1 <= r["outer/gain"] <= 1 for r in records if "outer/gain" in r)
    for number in list(recorded.history)[:-1]:
        assert len({event["digest"] for event in recorded.of_round("round_committed", number).values()}) == 1
    scored = {gain.member for verdict in recorded.history.values() for gain in verdict.plan.gains}
    assert {node_id_of_member(member) for member in scored} == {"node0", "node1", "node2"}


# -- through an aggregator ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Of three nodes, the one that adds the payloads up is killed before a transfer; one of two ranks does it then."""

    def tell(story: Story) -> None:
        story.until_struck("node0")
        story.until_contributing("node1", "node2")

    faults = {"node0": ("--fault.inject", "opened@+5=SIGKILL")}
    outer = ("demo", "--outer.decay", "0.9", "--outer.aggregator")
    setup = Setup(outer=outer, ranks=(1, 2, 1), faults=faults, detect_s=2.0, pace=SLOW_PACE)
    return record(tmp_path_factory.mktemp("aggregator"), setup, tell)


@pytest.mark.soak
def test_node_uploads_once_a_step_and_the_aggregator_is_replaced(aggregated: Recorded) -> None:
    """Without an aggregator it would be to each of the others, so twice where there are three."""
    seen = dict[int, set[str]]()
    for number, verdict in aggregated.history.items():
        made = {n: r for n, records in aggregated.metrics.items() for r in records if r.get("outer/round") == number}
        members = {node_id_of_member(member) for member in verdict.members}
        counts = [r["outer/weight"] > 0 and not r["outer/retries"] for r in made.values()]
        if len(members) == 1 or made.keys() != members or not all(counts):
            continue  # the founding, the round of the kill, and those that a node did not live to record
        aggregator = made.pop(node_id_of_member(aggregator_of(verdict.plan)))
        (uploaded,) = {r["outer/sent_bytes"] for r in made.values()}
        assert {r["outer/payload_bytes"] for r in made.values()} == {uploaded}
        assert aggregator["outer/received_bytes"] == len(made) * uploaded
        assert aggregator["outer/sent_bytes"] == sum(r["outer/received_bytes"] for r in made.values())
        seen.setdefault(len(members), set()).add(node_id_of_member(aggregator_of(verdict.plan)))
    assert seen.keys() == {3, 2} and "node0" in seen[3] and "node0" not in seen[2]
    for number in list(aggregated.history)[:-1]:
        reported = aggregated.of_round("round_committed", number)
        assert len({event["digest"] for event in reported.values()}) == 1, number
    assert aggregated.left_behind == []

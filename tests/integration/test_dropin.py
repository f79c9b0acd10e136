"""The examples as real processes: peers that come late, have several ranks, are killed, and leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.peers import DEADLINE_S, Peers

import zeroband
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.faults]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
INNER_STEPS, BATCH = 4, 8
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@pytest.fixture(scope="module")
def peers(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """A begins; b, with two ranks and another batch size, comes late; a is killed, b goes on and leaves."""
    arguments = ("--inner-steps", str(INNER_STEPS), "--pause-s", "0.2")  # sleep: b needs the cores to start
    story = Peers(tmp_path_factory.mktemp("peers"), redis_server.url, EXAMPLES / "plain_torch.py", arguments)
    try:
        story.start("a", "--batch-size", str(BATCH))
        story.until_contributing("a", "a")
        story.start("b", "--batch-size", str(2 * BATCH), launcher=TORCHRUN)
        story.until(lambda: len(story.rounds("b")) >= 4, "b takes part")
        story.running.pop("a").kill()
        story.until_contributing("b", "b")
        yield story
    finally:
        story.kill()


def test_peers_hold_one_outer_state_in_all_rounds_that_they_share(peers: Peers) -> None:
    told = [{event["round"]: event["digest"] for event in peers.rounds(name)} for name in ("a", "b")]
    common = sorted(told[0].keys() & told[1].keys())
    assert len(common) >= 3
    assert [told[0][round] for round in common] == [told[1][round] for round in common]
    assert len({told[0][round] for round in common}) == len(common)  # they do train


def test_peer_that_joins_late_has_the_others_state_and_place_in_the_schedule(peers: Peers) -> None:
    fetched = next(event for event in peers.read("b", "events.jsonl") if event["kind"] == "recovered")
    given = {event["round"]: event["digest"] for event in peers.rounds("a")}
    assert fetched["digest"] == given[fetched["round"]]
    first, joiner = ({m["step"]: m["train/lr"] for m in peers.read(name, "metrics.jsonl")} for name in ("a", "b"))
    common = sorted(first.keys() & joiner.keys())
    assert len(common) >= INNER_STEPS and common[0] > INNER_STEPS
    assert [joiner[step] for step in common] == [first[step] for step in common]
    assert len({first[step] for step in common}) == len(common)


def test_peers_count_by_the_samples_that_they_learned_from(peers: Peers) -> None:
    """The joiner's first contribution holds more phases, where rounds went without it before."""
    both = [weights for event in peers.rounds("a") if len(weights := peers.weights(event)) == 2]
    once = {"a": INNER_STEPS * BATCH, "b": 2 * INNER_STEPS * BATCH}
    assert once in both and all(weights[name] % once[name] == 0 for weights in both for name in once), both


def test_peer_that_is_killed_is_missed_once_and_leaves_nothing(peers: Peers) -> None:
    lost = [event for event in peers.read("b", "events.jsonl") if event["kind"] == "peer_lost"]
    assert [[node_id_of_member(member) for member in event["member_ids"]] for event in lost] == [["a"]]
    peers.until(lambda: peers.memory("a") == [], "the guardian of a cleans up")


def test_peer_of_which_one_rank_is_asked_to_leave_hands_over_and_leaves_nothing(peers: Peers) -> None:
    before = peers.rounds("b")[-1]["round"]
    assert peers.leave("b") == 0, (peers.folder / "b.log").read_text()[-3000:]
    last = peers.rounds("b")[-1]
    assert last["round"] > before and "b" in peers.weights(last)
    assert peers.read("b", "events.jsonl")[-1]["kind"] == "left"
    assert peers.memory("b") == []


@pytest.mark.soak
def test_llama_of_transformers_is_trained_by_two_peers(redis_server: RedisServer, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    arguments = ("--inner-steps", "4", "--batch-size", "2", "--total-steps", "100000")
    story = Peers(tmp_path, redis_server.url, EXAMPLES / "hugging_face.py", arguments)
    try:
        story.start("a")
        story.until_contributing("a", "a")
        story.start("b")
        story.until(lambda: len(story.rounds("b")) >= 3, "b takes part")
        assert story.leave("a") == 0, (tmp_path / "a.log").read_text()[-3000:]
        assert story.leave("b") == 0, (tmp_path / "b.log").read_text()[-3000:]
    finally:
        story.kill()
    told = [{event["round"]: event["digest"] for event in story.rounds(name)} for name in ("a", "b")]
    common = sorted(told[0].keys() & told[1].keys())
    assert len(common) >= 3
    assert [told[0][round] for round in common] == [told[1][round] for round in common]


@pytest.mark.soak
def test_ranks_with_shards_learn_what_ranks_with_copies_learn_and_close_what_they_opened(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("dropin_worker.py")
    env = {**os.environ, "PYTHONPATH": str(Path(zeroband.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    env.pop("ZERO_BAND_STORE__URL", None)
    found: dict[str, dict[str, Any]] = {}
    for form in ("ddp", "fsdp"):
        command = [sys.executable, *TORCHRUN, str(worker), form, str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr[-3000:]
        found[form] = json.loads((tmp_path / f"{form}.json").read_text())
    assert found["ddp"]["params"] == pytest.approx(found["fsdp"]["params"], abs=1e-6)
    for told in found.values():
        before, during, after = told["gloo"]
        assert during > before == after
        assert told["rounds"] == 3
        assert told["threads"] == []

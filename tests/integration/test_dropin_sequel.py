"""A run of peers with loops of their own that dies and goes on from its checkpoint, with another peer beside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.peers import Peers

from zeroband.tools.cluster import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.faults]

WORKER = Path(__file__).with_name("dropin_sequel.py")


def begun(peers: Peers, name: str) -> dict[str, int]:
    """What a peer says first."""
    return json.loads(next(line for line in peers.log(name).splitlines() if line.startswith("{")))


def forget_those_without(name: str, saved: Path) -> None:
    """Remove checkpoints that were completed when this peer had been killed already, and so without its part."""
    steps = list(saved.glob("*/step_*"))
    whole = [step for step in steps if (step / "nodes" / name).is_dir()]
    assert whole, steps
    for step in set(steps) - set(whole):
        shutil.rmtree(step)


def digests(peers: Peers, name: str) -> dict[int, str]:
    return {event["round"]: event["digest"] for event in peers.rounds(name)}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.soak) for name in ("diloco", "ddp")])
def story(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Peers]:
    """A begins, b comes late; both are killed; a resumes, and c comes to it."""
    folder = tmp_path_factory.mktemp(f"sequel-{request.param}")
    arguments = ("--saved", str(folder / "saved"), "--type", request.param)
    peers = Peers(folder, redis_server.url, WORKER, arguments)
    try:
        peers.start("a")
        peers.until(lambda: len(peers.rounds("a")) >= 2, "a trains")
        peers.start("b")
        peers.until_contributing("a", "a", "b")
        both = len(peers.rounds("b"))
        peers.until(lambda: len(peers.rounds("b")) >= both + 6, "a and b share rounds, and save one")
        peers.kill()
        peers.running.clear()
        forget_those_without("a", folder / "saved")
        before = len(peers.rounds("a"))
        peers.start("a")
        peers.until(lambda: len(peers.rounds("a")) > before, "a goes on")
        peers.start("c")
        peers.until_contributing("a", "a", "c")
        shared = len(peers.rounds("c"))
        peers.until(lambda: len(peers.rounds("c")) >= shared + 2, "c takes part")
        yield peers
    finally:
        peers.kill()


def test_peers_hold_one_state_before_and_after(story: Peers) -> None:
    told = {name: story.rounds(name) for name in "abc"}
    for other in "bc":
        theirs = {event["digest"] for event in told[other]}
        assert len(theirs & {event["digest"] for event in told["a"]}) >= 2


def test_peer_that_saved_goes_on_where_it_was_and_another_begins_with_its_own(story: Peers) -> None:
    resumed = next(event for event in story.read("a", "events.jsonl") if event["kind"] == "resumed_from")
    assert resumed["has_inner"] is True
    assert resumed["digest"] in digests(story, "b").values()
    assert begun(story, "a")["inner_step"] == resumed["step"]
    assert begun(story, "a")["given"] > 0 and begun(story, "c")["given"] == 0
    assert begun(story, "a")["moments"] == 4
    assert begun(story, "c")["inner_step"] > resumed["step"]

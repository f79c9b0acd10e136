"""The examples in loops of other libraries: a peer begins, another comes late, both train to the end of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.peers import Peers
from tests.plain_form import plain_form

from zeroband.tools.cluster import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.faults]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORKER = Path(__file__).with_name("example_peer.py")
STEPS, INNER_STEPS = 48, 4
LIBRARY = {
    "nano_gpt": "torch",
    "accelerate_loop": "accelerate",
    "hf_trainer": "transformers",
    "lightning_loop": "lightning",
}
BY_HAND = ("accelerate_loop", "hf_trainer", "lightning_loop", "nano_gpt")
MICRO_BATCHES = {"nano_gpt": 2, "accelerate_loop": 2, "hf_trainer": 2, "lightning_loop": 1}


@dataclass(frozen=True)
class Story:
    """What two peers did with one example."""

    name: str
    peers: Peers
    codes: dict[str, int]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.soak) if name in BY_HAND else name for name in LIBRARY],
)
def story(
    request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Story]:
    """The first, a, begins the run and waits; b comes, and both train to its end."""
    name = str(request.param)
    pytest.importorskip(LIBRARY[name])
    folder = tmp_path_factory.mktemp(name)
    came, trains = folder / "came", folder / "trains"
    arguments = ("--steps", str(STEPS), "--inner-steps", str(INNER_STEPS))
    peers = Peers(folder, redis_server.url, WORKER, ())
    example, plain = EXAMPLES / f"{name}.py", folder / "plain.py"
    plain.write_text(plain_form(example.read_text())[0])
    try:
        waits = ("--until", str(came), "--then", str(trains), "--plain", str(plain))
        peers.start("a", str(example), str(folder / "a.json"), *waits, *arguments)
        peers.until(lambda: bool(peers.rounds("a")), "a begins")
        peers.start("b", str(example), str(folder / "b.json"), *arguments)
        peers.until(lambda: any(e["kind"] == "recovering" for e in peers.read("b", "events.jsonl")), "b comes")
        came.touch()
        peers.until(lambda: any(set(peers.weights(e)) == {"a", "b"} for e in peers.rounds("a")), "both contribute")
        trains.touch()
        yield Story(name, peers, {one: peers.end(one) for one in "ab"})
    finally:
        peers.kill()


def test_late_peer_and_first_one_end_well_with_one_state(story: Story) -> None:
    peers = story.peers
    assert story.codes == {"a": 0, "b": 0}, peers.log("a")[-3000:] + peers.log("b")[-3000:]
    told = [{event["round"]: event["digest"] for event in peers.rounds(one)} for one in "ab"]
    common = sorted(told[0].keys() & told[1].keys())
    assert common[-1] == STEPS // INNER_STEPS == max(told[0]) == max(told[1])
    assert min(told[0]) < min(told[1])
    assert [told[0][round] for round in common] == [told[1][round] for round in common]
    assert [peers.memory(one) for one in "ab"] == [[], []]


def test_late_peer_has_the_learning_rates_of_the_first_one(story: Story) -> None:
    first, late = ({m["step"]: m["train/lr"] for m in story.peers.read(one, "metrics.jsonl")} for one in "ab")
    common = sorted(first.keys() & late.keys())
    assert len(common) >= INNER_STEPS
    assert [late[step] for step in common] == [first[step] for step in common]
    assert len(set(first.values())) >= STEPS // INNER_STEPS  # it is a schedule


def test_loss_falls_for_a_peer_and_in_the_loop_without_what_is_marked(story: Story) -> None:
    told = json.loads((story.peers.folder / "a.json").read_text())
    for losses in (told["losses"], told["plain"]):
        assert len(losses) == STEPS * MICRO_BATCHES[story.name]
        assert sum(losses[-8:]) < 0.8 * sum(losses[:8])

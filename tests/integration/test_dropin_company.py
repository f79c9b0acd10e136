"""What peers are told of one another: who is there, who trains on the same batches, that a run is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.peers import Peers

from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import RedisServer

pytestmark = [pytest.mark.soak, pytest.mark.faults]

PASSWORD = "open-sesame"
TOTAL_STEPS = 8
WORKER = Path(__file__).with_name("dropin_peer.py")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peers, dict[str, int]]]:
    """a, b and c begin together, a and b with the same batches; d comes in the last round, e when all is over.

    Gives the exit codes.
    """
    folder = tmp_path_factory.mktemp("company")
    hold, together = folder / "go", {"ZERO_BAND_ELASTIC__START_NODES": "3"}
    with RedisServer(password=PASSWORD) as server:
        peers = Peers(folder, server.url, WORKER, ("--total-steps", str(TOTAL_STEPS)))
        try:
            for name, data in (("a", "1"), ("b", "1"), ("c", "2")):
                peers.start(name, "--data", data, "--hold", str(hold), settings=together)
            peers.until(lambda: len(peers.rounds("a")) >= TOTAL_STEPS // 2, "all but the last round")
            peers.start("d", "--data", "3")
            peers.until(lambda: any(e["kind"] == "recovering" for e in peers.read("d", "events.jsonl")), "d comes")
            hold.touch()
            codes = {name: peers.end(name) for name in "abcd"}
            peers.start("e", "--data", "4")
            codes["e"] = peers.end("e")
            yield peers, codes
        finally:
            peers.kill()


def test_start_says_run_place_and_store_in_one_line_without_the_password(story: tuple[Peers, dict[str, int]]) -> None:
    peers, _ = story
    places: list[str] = []
    for name in "abc":
        said = [line for line in peers.log(name).splitlines() if f"in run {peers.run_id!r} as {name}, " in line]
        assert len(said) == 1, peers.log(name)
        assert "store unix://" in said[0] and PASSWORD not in peers.log(name)
        places.append(said[0].partition("member ")[2].partition(",")[0])
    assert sorted(places) == ["1 of 3", "2 of 3", "3 of 3"]


def test_peers_with_the_same_batches_are_both_told_and_others_are_not(story: tuple[Peers, dict[str, int]]) -> None:
    peers, _ = story
    told = {
        name: [
            node_id_of_member(e["member_id"]) for e in peers.read(name, "events.jsonl") if e["kind"] == "same_batches"
        ]
        for name in "abcd"
    }
    assert told == {"a": ["b"], "b": ["a"], "c": [], "d": []}
    assert "peer b trains on the same batches as this node" in peers.log("a")
    assert "peer a trains on the same batches as this node" in peers.log("b")
    assert "same batches" not in peers.log("c")


@pytest.mark.parametrize("name", ["d", "e"])
def test_peer_that_comes_at_the_end_is_done_without_a_traceback(story: tuple[Peers, dict[str, int]], name: str) -> None:
    peers, codes = story
    assert codes == dict.fromkeys("abcde", 0), peers.log(name)
    assert "Traceback" not in peers.log(name)
    assert json.loads(peers.log(name).splitlines()[-1])["is_done"] is True


def test_peer_that_comes_when_the_run_is_complete_is_told_so(story: tuple[Peers, dict[str, int]]) -> None:
    peers, _ = story
    (said,) = [line for line in peers.log("e").splitlines() if "is complete" in line]
    assert f"run {peers.run_id!r}" in said and "new run.id" in said and "is_done is true" in said

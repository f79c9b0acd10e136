"""The examples as real processes: peers that come late, are killed, have several ranks, and leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import zeroband
from zeroband.cluster.processes import ranks_of
from zeroband.observe.view import node_id_of

pytestmark = [pytest.mark.slow, pytest.mark.faults]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
INNER_STEPS, BATCH = 4, 8
DEADLINE_S = 120.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


@dataclass
class Peers:
    """Peers of one run on this machine; what they have written."""

    folder: Path
    store_url: str
    script: Path
    arguments: tuple[str, ...]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    def start(self, name: str, *launcher: str) -> None:
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(zeroband.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "ZERO_BAND_NODE__ID": name,
            "ZERO_BAND_RUN__ID": self.folder.name,
            "ZERO_BAND_RUN__DIR": str(self.folder),
            "ZERO_BAND_FAULT__DETECT_S": "2",
        }
        command = [sys.executable, *launcher, str(self.script), "--store", self.store_url, *self.arguments]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def read(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.folder / self.folder.name / name / file
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rounds(self, name: str) -> list[dict[str, Any]]:
        """Rounds that a peer has recorded."""
        return [event for event in self.read(name, "events.jsonl") if event["kind"] == "round_committed"]

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            ended = [name for name, peer in self.running.items() if peer.poll() not in (None, -signal.SIGKILL)]
            if ended or time.monotonic() > end_s:
                said = "\n".join((self.folder / f"{name}.log").read_text()[-3000:] for name in self.running)
                raise AssertionError(f"not within {DEADLINE_S:g} s, or {ended} ended: {what}\n{said}")
            time.sleep(0.1)

    def until_contributing(self, watched: str, *names: str) -> None:
        """Wait until a peer records a round to which exactly these contributed."""

        def contribute() -> bool:
            newest = self.rounds(watched)[-1:]
            return any(set(self.weights(event)) == set(names) for event in newest)

        self.until(contribute, f"{', '.join(names)} contribute, and nobody else")

    @staticmethod
    def weights(event: Mapping[str, Any]) -> dict[str, int]:
        """Of the contributions to a round, by name."""
        pairs = zip(event["members"], event["weights"], strict=True)
        return {node_id_of(member): weight for member, weight in pairs if weight}

    def leave(self, name: str) -> int:
        """Ask a peer of one process to leave; its exit code."""
        self.running[name].terminate()
        return self.running.pop(name).wait(DEADLINE_S)


@pytest.fixture(scope="module")
def peers(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """a begins; b comes late, with another batch size, and is killed; c, with two ranks, comes and stays."""
    arguments = ("--inner-steps", str(INNER_STEPS), "--pause-s", "0.05", "--batch-size")
    story = Peers(tmp_path_factory.mktemp("peers"), redis_server.url, EXAMPLES / "plain_torch.py", arguments)
    try:
        story.arguments = (*arguments, str(BATCH))
        story.start("a")
        story.until_contributing("a", "a")
        story.arguments = (*arguments, str(2 * BATCH))
        story.start("b")
        story.until_contributing("a", "a", "b")
        story.running["b"].kill()
        story.until_contributing("a", "a")
        story.start("c", *TORCHRUN)
        story.until_contributing("a", "a", "c")
        yield story
    finally:
        for peer in story.running.values():
            for pid in (*ranks_of(peer.pid), peer.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            peer.wait()


def test_peers_hold_one_outer_state_through_a_late_join_a_kill_and_a_peer_of_two_ranks(peers: Peers) -> None:
    digests: dict[int, dict[str, str]] = {}
    for name in ("a", "b", "c"):
        for event in peers.rounds(name):
            digests.setdefault(event["round"], {})[name] = event["digest"]
    assert {name for told in digests.values() for name in told} == {"a", "b", "c"}
    common = [told for told in digests.values() if len(told) > 1]
    assert len(common) >= 4
    assert [told for told in common if len(set(told.values())) != 1] == []
    assert len({told["a"] for told in digests.values() if "a" in told}) > 4  # they do train


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
    both = [weights for event in peers.rounds("a") if len(weights := peers.weights(event)) == 2]
    assert both[0] == {"a": INNER_STEPS * BATCH, "b": 2 * INNER_STEPS * BATCH}
    assert both[-1] == {"a": INNER_STEPS * BATCH, "c": 2 * INNER_STEPS * BATCH}


def test_peer_that_is_asked_to_leave_hands_over_and_leaves_nothing(peers: Peers) -> None:
    before = peers.rounds("a")[-1]["round"]
    assert peers.leave("a") == 0, (peers.folder / "a.log").read_text()[-3000:]
    last = peers.rounds("a")[-1]
    assert last["round"] > before and "a" in peers.weights(last)
    peers.until(lambda: peers.rounds("c")[-1]["round"] > last["round"] + 1, "the other goes on")
    assert {e["round"]: e["digest"] for e in peers.rounds("c")}[last["round"]] == last["digest"]
    assert not list(Path("/dev/shm").glob(f"zeroband-{peers.folder.name}@a"))


@pytest.mark.soak
def test_llama_of_transformers_is_trained_by_two_peers(redis_server: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    arguments = ("--inner-steps", "4", "--batch-size", "2", "--total-steps", "40")
    story = Peers(tmp_path, redis_server.url, EXAMPLES / "hugging_face.py", arguments)
    story.start("a")
    story.until(lambda: len(story.rounds("a")) > 1, "the first peer trains")
    story.start("b")
    codes = {name: peer.wait(DEADLINE_S) for name, peer in story.running.items()}
    assert codes == {"a": 0, "b": 0}, (tmp_path / "b.log").read_text()[-3000:]
    ends = [story.rounds(name)[-1] for name in ("a", "b")]
    assert ends[0]["digest"] == ends[1]["digest"] and ends[0]["progress"]["is_complete"]
    assert set(story.weights(ends[0])) == {"a", "b"}

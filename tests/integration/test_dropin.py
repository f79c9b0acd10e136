"""The examples as real processes: peers that come late, have several ranks, are killed, and leave."""

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
from zeroband.cluster import RedisServer
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

    def start(self, name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> None:
        """Start a peer. `launcher`: arguments of Python before the script's."""
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(zeroband.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "ZERO_BAND_NODE__ID": name,
            "ZERO_BAND_RUN__ID": self.folder.name,
            "ZERO_BAND_RUN__DIR": str(self.folder),
            "ZERO_BAND_FAULT__DETECT_S": "2",
        }
        arguments = ("--store", self.store_url, *self.arguments, *arguments)
        command = [sys.executable, *launcher, str(self.script), *arguments]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def read(self, name: str, file: str) -> list[dict[str, Any]]:
        path = self.folder / self.folder.name / name / file
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rounds(self, name: str) -> list[dict[str, Any]]:
        """Rounds that a peer has recorded."""
        return [event for event in self.read(name, "events.jsonl") if event["kind"] == "round_committed"]

    def memory(self, name: str) -> list[Path]:
        """What a peer has in shared memory."""
        return list(Path("/dev/shm").glob(f"zeroband-{self.folder.name}@{name}"))

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            ended = [name for name, peer in self.running.items() if peer.poll() is not None]
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
        """Ask a peer to leave, the last of its ranks if it has several; its exit code."""
        peer = self.running.pop(name)
        os.kill((peer.pid, *ranks_of(peer.pid))[-1], signal.SIGTERM)
        return peer.wait(DEADLINE_S)

    def kill(self) -> None:
        """End all that still runs."""
        for peer in self.running.values():
            for pid in (*ranks_of(peer.pid), peer.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            peer.wait()


@pytest.fixture(scope="module")
def peers(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """a begins; b, with two ranks and another batch size, comes late; a is killed, b goes on and leaves."""
    arguments = ("--inner-steps", str(INNER_STEPS), "--pause-s", "0.05")
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
    both = [weights for event in peers.rounds("a") if len(weights := peers.weights(event)) == 2]
    assert both[0] == {"a": INNER_STEPS * BATCH, "b": 2 * INNER_STEPS * BATCH}


def test_peer_that_is_killed_is_missed_once_and_leaves_nothing(peers: Peers) -> None:
    lost = [event for event in peers.read("b", "events.jsonl") if event["kind"] == "peer_lost"]
    assert [[node_id_of(member) for member in event["member_ids"]] for event in lost] == [["a"]]
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

"""What the page of a run costs: 64 nodes that write a line a second each, with nobody looking and with one viewer.

Writes the files of made-up nodes, a past first, and starts `zeroband board` on them. Measures the page's share of a
core and its memory from /proc, how long the loss of a node takes to a viewer, and the compressed bytes of everything
that a browser loads first. Ends with 1 where a viewer costs 1 % of a core or more.

    python bench/board.py [--nodes 64] [--seconds 30] [--past 1800] [--inner-steps 10]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx
from evidence import count, require

SAMPLES = 4
MOST_SHARE = 0.01
SERIES_EVERY_S, ASK_AGAIN_S = 4.0, 5.0
"""As in the page's board.js."""
LINKS_EVERY = 10
"""Seconds after which one more node says how its links are."""


class Nodes:
    """Made-up nodes of one run; each writes what a trainer would."""

    def __init__(self, run_dir: Path, count: int, inner_steps: int) -> None:
        self.ids = [f"node{number:02}" for number in range(count)]
        self.members = [f"{node_id}#1" for node_id in self.ids]
        self.numbered = list(enumerate(self.members))
        self.inner_steps = inner_steps
        self.files: dict[str, tuple[IO[str], IO[str]]] = {}
        for node_id in self.ids:
            (run_dir / node_id).mkdir(parents=True)
            names = ("events.jsonl", "metrics.jsonl")
            events, metrics = ((run_dir / node_id / name).open("a", buffering=1) for name in names)
            self.files[node_id] = (events, metrics)

    def event(self, node_id: str, at_s: float, kind: str, **fields: Any) -> None:
        self.files[node_id][0].write(json.dumps({"at_s": at_s, "kind": kind, **fields}) + "\n")

    def found(self, at_s: float) -> None:
        for node_id, member in zip(self.ids, self.members, strict=True):
            self.event(node_id, at_s, "node_started", total_steps=10**6, local_world_size=8, parameters=10**9)
            self.event(node_id, at_s, "joined", member_id=member, round=0)
            self.event(node_id, at_s, "epoch_changed", epoch=1, members=self.members)
            self.say_links(node_id, at_s, 90.0)

    def say_links(self, node_id: str, at_s: float, mbit_s: float) -> None:
        others = [member for member in self.members if not member.startswith(f"{node_id}#")]
        links = [{"to": other, "mbit_s": mbit_s, "rtt_ms": 31.5, "is_cut_off": False} for other in others]
        self.event(node_id, at_s, "links", links=links)

    def step(self, node_id: str, step: int, at_s: float) -> None:
        record: dict[str, Any] = {
            "step": step, "at_s": round(at_s, 3), "train/loss": 3.0 + step % 7 / 10, "train/tokens": step * 10**6,
            "train/perplexity": 20.1, "train/lr": 4e-4, "train/grad_norm": 1.2, "train/tokens_per_s": 5e4,
            "train/step_s": 0.98, "train/data_s": 0.01, "train/mfu": 0.4, "outer/blocked_s": 0.0, "data/pass": 0,
            "node/rss_bytes": 4 * 10**8,
        }  # fmt: skip
        if step % self.inner_steps == 0:
            number = step // self.inner_steps
            self.commit(node_id, number, step, at_s)
            record |= {
                "outer/round": number, "outer/epoch": 1, "outer/nodes": len(self.ids), "outer/digest": f"{number:032x}",
                "outer/wait_s": 0.31, "outer/transfer_s": 0.52, "outer/apply_s": 0.11, "outer/retries": 0,
                "outer/sent_bytes": 10**9, "outer/received_bytes": 10**9, "outer/ddp_bytes": 8 * 10**10,
            }  # fmt: skip
        self.files[node_id][1].write(json.dumps(record) + "\n")

    def commit(self, node_id: str, number: int, step: int, at_s: float) -> None:
        nodes = len(self.ids)
        spans = {m: [[(number * nodes + i) * SAMPLES, (number * nodes + i + 1) * SAMPLES]] for i, m in self.numbered}
        ledger = {"next": (number + 1) * nodes * SAMPLES, "returned": [], "assigned": spans}
        progress = {"inner_step": step, "tokens": step * 10**6, "ledgers": {"": ledger}, "founding": "1"}
        fields = {"digest": f"{number:032x}", "weights": [SAMPLES] * nodes, "samples": [SAMPLES] * nodes, "late": []}
        self.event(
            node_id, round(at_s, 3), "round_committed", round=number, epoch=1, members=self.members,
            progress={**progress, "follows": None}, **fields,
        )  # fmt: skip

    def write(self, first: int, stop: threading.Event) -> None:
        """A step a second of all nodes, evenly spread over it."""
        step, begin_s = first, time.time()
        while not stop.is_set():
            if step % LINKS_EVERY == 0:
                self.say_links(self.ids[step // LINKS_EVERY % len(self.ids)], time.time(), 50.0 + step % 7)
            for number, node_id in enumerate(self.ids):
                due_s = begin_s + step - first + number / len(self.ids)
                if stop.wait(max(0.0, due_s - time.time())):
                    return
                self.step(node_id, step, time.time())
            step += 1


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def share(pid: int, seconds: float) -> float:
    """Share of a core that a process takes meanwhile."""
    before_s, begun_s = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before_s) / (time.monotonic() - begun_s)


class Viewer:
    """What a browser with the page open asks for: the state when it is told of a new one, curves now and then."""

    def __init__(self, address: str, stop: threading.Event) -> None:
        self._address, self._stop = address, stop
        self._etags: dict[str, str] = {}
        self._told = threading.Event()
        self.standings: dict[str, str] = {}
        """Where each node stands, as it was seen last."""
        self.documents = 0
        self.threads = [threading.Thread(target=one, daemon=True) for one in (self._listen, self._ask)]

    def _listen(self) -> None:
        ends = contextlib.suppress(httpx.HTTPError)  # the page is ended first
        with ends, httpx.stream("GET", f"{self._address}/api/stream", timeout=60.0, trust_env=False) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    self._told.set()

    def _ask(self) -> None:
        ends = contextlib.suppress(httpx.HTTPError)
        with ends, httpx.Client(base_url=self._address, timeout=60.0, trust_env=False) as client:
            curves_s = 0.0
            while not self._stop.is_set():
                state = self._get(client, "/api/state")
                if state is not None:
                    self.documents += 1
                    self.standings = {node["id"]: node["state"] for node in state["nodes"]}
                if time.monotonic() - curves_s >= SERIES_EVERY_S:
                    self._get(client, "/api/series?by=tokens&points=400")
                    curves_s = time.monotonic()
                self._told.wait(ASK_AGAIN_S)
                self._told.clear()

    def _get(self, client: httpx.Client, path: str) -> Any:
        """A document; None: the one that was here before is still the newest."""
        answer = client.get(path, headers={"if-none-match": self._etags.get(path, "")})
        self._etags[path] = answer.headers["etag"]
        return None if answer.status_code == 304 else answer.json()


def seconds_until(holds: Callable[[], bool], most_s: float = 60.0) -> float:
    begun_s = time.monotonic()
    while not holds() and time.monotonic() - begun_s < most_s:
        time.sleep(0.01)
    return time.monotonic() - begun_s


def lose(nodes: Nodes, viewer: Viewer, number: int) -> float:
    """Have a node say that another one is lost. Seconds until the viewer knows."""
    node_id = nodes.ids[number]
    nodes.event(nodes.ids[0], time.time(), "peer_lost", round=number, member_ids=[nodes.members[number]])
    seconds = seconds_until(lambda: viewer.standings.get(node_id) == "lost")
    time.sleep(2.0)
    return seconds


def first_load(client: httpx.Client) -> dict[str, int]:
    """Bytes on the line of each thing that is loaded first."""
    static = Path(__file__).parents[1] / "src/zeroband/tools/board/static"
    files = [f"/static/{path.name}" for path in sorted(static.glob("*")) if path.suffix != ".html"]
    paths = ["/", *files, "/static/uplot.js", "/static/uplot.css", "/api/state", "/api/series?by=tokens&points=400"]
    found: dict[str, int] = {}
    for path in paths:
        with client.stream("GET", path) as answer:
            if answer.status_code == 200:
                found[path] = len(b"".join(answer.iter_raw()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=64)
    parser.add_argument("--seconds", type=count, default=30)
    parser.add_argument("--past", type=count, default=1800, help="steps of each node before the page begins")
    parser.add_argument("--inner-steps", type=count, default=10)
    arguments = parser.parse_args()
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        nodes = Nodes(Path(folder) / "run", arguments.nodes, arguments.inner_steps)
        begin_s = time.time() - arguments.past
        nodes.found(begin_s)
        for node_id in nodes.ids:
            for step in range(1, arguments.past + 1):
                nodes.step(node_id, step, begin_s + step)
        command = [sys.executable, "-m", "zeroband.cli", "board", folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page:
            threads = [threading.Thread(target=nodes.write, args=(arguments.past + 1, stop), daemon=True)]
            try:
                assert page.stdout is not None
                address = page.stdout.readline().split(" is at ")[1].split()[0]
                with httpx.Client(base_url=address, timeout=120.0, trust_env=False) as client:
                    while client.get("/api/state").json()["run"]["step"] != arguments.past:
                        time.sleep(0.2)
                    print(f"past read     {cpu_s(page.pid):.1f} s of processor, {resident_mb(page.pid):.0f} MB")
                    loaded = first_load(client)
                threads[0].start()
                time.sleep(25.0)  # until nobody counts as watching
                print(f"nobody looks  {share(page.pid, arguments.seconds):.2%} of a core")
                viewer = Viewer(address, stop)
                for thread in viewer.threads:
                    thread.start()
                time.sleep(5.0)
                viewer.documents = 0
                viewed = share(page.pid, arguments.seconds)
                every_s = arguments.seconds / max(1, viewer.documents)
                print(f"one viewer    {viewed:.2%} of a core, a new document every {every_s:.1f} s")
                lost_s = [lose(nodes, viewer, number) for number in range(1, min(5, arguments.nodes - 1) + 1)]
                print(f"a loss shows  after {', '.join(f'{seconds:.2f}' for seconds in lost_s)} s")
                print(f"memory        {resident_mb(page.pid):.0f} MB")
                state = httpx.get(f"{address}/api/state", trust_env=False, timeout=60.0).json()
                print(f"first load    {sum(loaded.values()) / 1e6:.2f} MB: {loaded}")
                require(state["run"]["step"] > arguments.past, "the page saw nothing of what was written meanwhile")
                require(len(state["nodes"]) == arguments.nodes, "the page does not show all nodes")
                if viewed >= MOST_SHARE:
                    raise SystemExit(f"one viewer costs {viewed:.2%} of a core; it has to be below {MOST_SHARE:.0%}")
            finally:
                stop.set()
                page.terminate()
                if threads[0].ident:
                    threads[0].join(10)


if __name__ == "__main__":
    main()

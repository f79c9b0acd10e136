"""What it costs to show a run in its store: made-up nodes that record an inner step a second, told by real publishers.

    python bench/facts.py [--nodes 64] [--seconds 60] [--hour 3600] [--server PROGRAM]

Lived: for each step the processor time of the server and of the thread that tells it, and the bytes on the line.
Kept: what the server holds of one node after an hour of such steps, told one at a time as if they had been lived.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import redis
from evidence import count, require

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.fact_publisher import EVERY_S, FactPublisher
from zeroband.elastic.store.keys import Keys
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.metrics import METRICS_FILE
from zeroband.tools.cluster import RedisServer

RUN, TOKEN = "run", "token"


def line_of(step: int) -> str:
    """What a trainer records of an inner step without a round."""
    record = {
        "step": step, "at_s": 1.8e9 + step + 0.253, "train/loss": 2.774752616882324,
        "train/perplexity": 16.034750480425, "train/lr": 4.0000000000000003e-04, "train/grad_norm": 1.2944585084915161,
        "train/tokens": 524288 * step, "train/tokens_per_s": 65250.6818414514546, "train/step_s": 1.0023441739998816,
        "train/data_s": 0.014071442999920691, "train/mfu": 0.41235612342134, "outer/blocked_s": 4.204300012133899e-05,
        "data/pass": 0, "node/rss_bytes": 31325388800, "node/gpu_peak_bytes": 71325388800,
    }  # fmt: skip
    return json.dumps(record) + "\n"


class Node:
    """A made-up node: its folder, and the publisher that follows it."""

    def __init__(self, folder: Path, url: str, *, every_s: float) -> None:
        folder.mkdir()
        self.stream = Keys(RUN).facts(folder.name)
        self._file = (folder / METRICS_FILE).open("a", buffering=1)
        open_store = partial(RedisStore, url, RUN, key=RunKey.of(TOKEN, RUN), lease_s=5.0, retry_s=5.0)
        self._publisher = FactPublisher(folder, folder.name, open_store, every_s=every_s)

    def record(self, step: int) -> None:
        self._file.write(line_of(step))

    def close(self) -> None:
        self._publisher.close()
        self._file.close()


@contextmanager
def nodes_of(number: int, client: redis.Redis, url: str, *, every_s: float) -> Iterator[list[Node]]:
    """Make so many nodes, each of which has told its first step."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nodes = [Node(folder / f"node{place:02}", url, every_s=every_s) for place in range(number)]
        for node in nodes:
            stack.callback(node.close)
            node.record(1)
        while not all(client.exists(node.stream) for node in nodes):
            time.sleep(0.05)
        yield nodes


def live(client: redis.Redis, url: str, number: int, seconds: int) -> None:
    """Print what a step costs while it is lived."""
    with nodes_of(number, client, url, every_s=EVERY_S) as nodes:
        before, told_s, wrote_s = info(client), time.process_time(), time.thread_time()
        begun_s = time.monotonic()
        for step in range(2, seconds + 2):
            for node in nodes:
                node.record(step)
            time.sleep(max(0.0, begun_s + step - 1 - time.monotonic()))
        time.sleep(2 * EVERY_S)
        after, told_s, wrote_s = info(client), time.process_time() - told_s, time.thread_time() - wrote_s
        require(all(client.xlen(node.stream) > seconds / 2 for node in nodes), "the streams lack what was recorded")
    steps = number * seconds
    spent = {name: after[name] - before[name] for name in after}
    server_s = spent["used_cpu_user"] + spent["used_cpu_sys"]
    sent = spent["total_net_input_bytes"] + spent["total_net_output_bytes"]
    print(f"each step        {1e3 * server_s / steps:.2f} ms of the server's processor, ", end="")
    print(f"{1e3 * (told_s - wrote_s) / steps:.2f} ms of the trainer's, {sent / steps:.0f} bytes both ways")
    print(f"{number} nodes         {sent / seconds / 1e3:.0f} KB/s, {server_s / seconds:.2%} of a core of the server")


def keep(client: redis.Redis, url: str, number: int, steps: int) -> None:
    """Print what the server keeps of a node that has told so many steps, one entry each."""
    empty = info(client)["used_memory"]
    with nodes_of(1, client, url, every_s=1e-3) as (node,):
        for step in range(2, steps + 1):
            newest = last_id(client, node)
            node.record(step)
            while last_id(client, node) == newest:
                time.sleep(1e-4)
        client.connection_pool.disconnect()
        entries, size = client.xlen(node.stream), client.memory_usage(node.stream, samples=0) or 0
        kept = (info(client)["used_memory"] - empty) / 1e6
    print(f"{steps} steps       {kept:.1f} MB of the server for a node, {number * kept:.0f} MB for {number}; ", end="")
    print(f"its stream: {size / 1e6:.1f} MB, {entries} entries")


def last_id(client: redis.Redis, node: Node) -> bytes:
    ((newest, _),) = cast("list[tuple[bytes, object]]", client.xrevrange(node.stream, count=1))
    return newest


def info(client: redis.Redis) -> dict[str, float]:
    """What the server says of itself."""
    said: dict[str, Any] = client.info("all")
    names = ("used_cpu_user", "used_cpu_sys", "total_net_input_bytes", "total_net_output_bytes", "used_memory")
    return {name: float(said[name]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=64)
    parser.add_argument("--seconds", type=count, default=60, help="how long they are lived")
    parser.add_argument("--hour", type=count, default=3600, help="steps of the node whose stream is weighed")
    parser.add_argument("--server", type=Path, metavar="PROGRAM", help="redis-server or valkey-server (the one found)")
    arguments = parser.parse_args()
    with RedisServer(program=arguments.server) as server:
        client = redis.Redis.from_url(server.url)
        said = client.info("server")
        print(f"{said.get('server_name', 'redis')} {said.get('valkey_version', said['redis_version'])}, ", end="")
        print(f"lines of {len(line_of(1800))} bytes")
        keep(client, server.url, arguments.nodes, arguments.hour)
        client.flushall()
        live(client, server.url, arguments.nodes, arguments.seconds)


if __name__ == "__main__":
    main()

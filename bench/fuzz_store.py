"""A training of a few tiny nodes whose store is damaged all the time, key by key; what must hold holds all the same.

Every key of the run is deleted, given another type, cut in two, overwritten, forged, put back as it was earlier, or
replaced by another one's value; now and then all of them at once. Rounds must follow while that goes on, no round may
have two results, no sample may be repeated or skipped, no node may end, and all must be members at the end.

  python bench/fuzz_store.py --minutes 60 --seed 1 [--nodes 4] [--each-key]

Exit code 0 if all of it held, over at least one damage of every kind and one round.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any

import redis

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.keys import Keys
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.data.audit import audit, read_rounds

TOKEN = "fuzz"
DETECT_S = 1.0
DEADLINE_S = 120.0
"""For the run to go on, however the store was damaged; a few leases on cores that it has to itself."""
TINY = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64"),
    *("--data.seq-length", "32", "--data.hold-out", "0", "--data.source.type", "synthetic"),
    *("--data.source.documents", "200", "--train.total-steps", "1000000", "--train.dtype", "float32"),
    *("--train.threads", "1", "--train.batch-size", "4", "--train.micro-bs", "4"),
    *("--outer.type", "diloco", "--outer.inner-steps", "5", "--fault.detect-s", str(DETECT_S)),
    *("--fault.inject", "inner@+0=TAKES0.03"),
)
FORGED = b"00112233445566778899aabbccddeeff 999999999 999999999 forged - {}"
NAMES = (*Keys.names(), "ready", "ready_rev", "facts")
_LIFE_MS = 3_600_000


class Damager:
    """Somebody who reaches the Redis of a run and wishes it ill, but does not know its token."""

    def __init__(self, client: redis.Redis, run_id: str, chance: random.Random) -> None:
        self._client: Any = client
        self._prefix = Keys(run_id).prefix
        self._chance = chance
        self._earlier: dict[bytes, bytes] = {}
        self.kinds: dict[str, Callable[[bytes], object]] = {
            "deleted": self._client.delete,
            "made a string": lambda key: self._put(key, lambda at_once: at_once.set(key, b"\xff not for you")),
            "made a hash": lambda key: self._put(key, lambda at_once: at_once.hset(key, b"\xff", FORGED)),
            "made a list": lambda key: self._put(key, lambda at_once: at_once.rpush(key, b"a", b"b")),
            "made a sorted set": lambda key: self._put(key, lambda at_once: at_once.zadd(key, {"ghost": "inf"})),
            "cut in two": lambda key: self._change(key, lambda old: old[: len(old) // 2], 0.0),
            "forged": lambda key: self._change(key, lambda old: b"9" * 15 if old.isdigit() else FORGED, float("inf")),
            "emptied": lambda key: self._change(key, lambda _: b"", 0.0),
            "set to 0": lambda key: self._change(key, lambda _: b"0", 0.0),
            "put back as it was": self._put_back,
            "made another key's": self._make_another,
        }
        self.done: Counter[tuple[str, str]] = Counter()
        """Name of the key and kind of damage -> how often."""

    def keys(self) -> list[bytes]:
        """Those of the run that there are."""
        return sorted(self._client.scan_iter(f"{self._prefix}:*"))

    def remember(self) -> None:
        """Keep a copy of everything, to put parts of it back later."""
        self._earlier = {key: value for key in self.keys() if (value := self._client.dump(key)) is not None}

    def newest(self, name: str) -> bytes:
        """The key of this name; of those that every round has for itself, that of the current one."""
        whole = f"{self._prefix}:{name}"
        is_string = self._client.type(f"{self._prefix}:plan") == b"string"
        raw = self._client.get(f"{self._prefix}:plan") if is_string else None
        words = (raw or b"").split()
        if name in ("ready", "ready_rev") and len(words) > 1 and words[1].isdigit():  # else it was damaged just now
            whole += f":{words[1].decode()}"
        elif name == "facts":
            whole += ":node0"
        return whole.encode()

    def strike(self, key: bytes, kind: str) -> str:
        """Damage a key; what was done, in words."""
        self.kinds[kind](key)
        name = key.decode().removeprefix(f"{self._prefix}:").partition(":")[0]
        self.done[name, kind] += 1
        return f"{key.decode()} {kind}"

    def lose_everything(self) -> str:
        """As a Redis that restarts empty, or with a file of an earlier hour."""
        self._client.flushall()
        if self._chance.random() < 0.5:
            for key, value in self._earlier.items():
                self._client.restore(key, _LIFE_MS, value, replace=True)
        self.done["everything", "lost"] += 1
        return "everything lost"

    def _put(self, key: bytes, write: Callable[[Any], object]) -> None:
        with self._client.pipeline(transaction=True) as at_once:  # or a member writes the key in between
            at_once.delete(key)
            write(at_once)
            at_once.execute()

    def _change(self, key: bytes, value: Callable[[bytes], bytes], score: float) -> None:
        client = self._client
        match client.type(key):
            case b"string":
                client.set(key, value(client.get(key) or b""))
            case b"hash":
                fields = {name: value(old) for name, old in client.hgetall(key).items()}
                self._put(key, lambda at_once: at_once.hset(key, mapping=fields or {"a": "b"}))
            case b"zset":
                client.zadd(key, dict.fromkeys(client.zrange(key, 0, -1) or [b"ghost"], score))
            case _:
                self._put(key, lambda at_once: at_once.set(key, value(b"nothing")))

    def _put_back(self, key: bytes) -> None:
        value = self._earlier.get(key) or self._earlier.get(self._chance.choice(sorted(self._earlier)))
        self._client.restore(key, _LIFE_MS, value, replace=True)

    def _make_another(self, key: bytes) -> None:
        other = self._chance.choice(self.keys() or [key])
        if (value := self._client.dump(other)) is not None:
            self._client.restore(key, _LIFE_MS, value, replace=True)


class Fuzz:
    """The run and its damager. Raises AssertionError where something does not hold."""

    def __init__(self, cluster: LocalCluster, store: RedisStore, damager: Damager, chance: random.Random) -> None:
        self._cluster = cluster
        self._store = store
        self._damager = damager
        self._chance = chance
        self.strikes = 0

    @property
    def newest(self) -> int:
        """The newest round that the nodes say they have committed: what the store says may be anything."""
        rounds = [event["round"] for node in self._cluster.nodes.values() for event in node.events("round_committed")]
        return max(rounds, default=-1)

    def members(self) -> set[str]:
        committed = self._store.view(0).committed
        return set() if committed is None else {node_id_of_member(member) for member in committed.members}

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            ended = [node.node_id for node in self._cluster.nodes.values() if not node.is_running]
            assert not ended, f"{', '.join(ended)} ended; waiting for: {what}\n{self._cluster.describe()}"
            assert time.monotonic() < end_s, f"not within {DEADLINE_S:g} s: {what}\n{self._cluster.describe()}"
            time.sleep(0.1)

    def all_take_part(self) -> None:
        """Wait until all nodes are members of one round, and of another after it."""
        for _ in range(2):
            newest = self.newest
            self.until(lambda newest=newest: self.newest > newest, f"a round after {newest}")
            self.until(lambda: self.members() == set(self._cluster.nodes), "all nodes are members")

    def strike_each_key(self, kinds: Sequence[str], pause_s: float) -> None:
        """Every key in turn, in the given ways."""
        for number, (name, kind) in enumerate(product(NAMES, kinds), start=1):
            self._strike(self._damager.newest(name), kind)
            time.sleep(pause_s)
            if number % 10 == 0:
                self._goes_on()

    def strike_at_random(self, minutes: float) -> None:
        """Any key in any way, several at once now and then."""
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s:
            for _ in range(self._chance.choice((1, 1, 1, 2, 5))):
                key = self._damager.newest(self._chance.choice(NAMES))
                self._strike(key, self._chance.choice(sorted(self._damager.kinds)))
            if self._chance.random() < 0.02:
                print(self._damager.lose_everything(), flush=True)
            time.sleep(self._chance.choice((0.05, 0.3, 1.0, 4 * DETECT_S)))
            if self._chance.random() < 0.05:
                self._damager.remember()
            if self.strikes % 20 == 0:
                self._goes_on()

    def _strike(self, key: bytes, kind: str) -> None:
        print(self._damager.strike(key, kind), flush=True)
        self.strikes += 1

    def _goes_on(self) -> None:
        newest = self.newest
        self.until(lambda: self.newest > newest, f"a round after {newest}; {self.strikes} damages")

    def check(self) -> str:
        """What must hold at the end; a line about it."""
        digests: dict[int, set[str]] = {}
        fences = 0
        for node in self._cluster.nodes.values():
            fences += len(node.events("fenced"))
            for event in node.events("round_committed"):
                digests.setdefault(event["round"], set()).add(event["digest"])
        assert digests, "no round was committed, so nothing was shown"
        assert self._damager.done, "nothing was damaged, so nothing was shown"
        assert not (split := {r: found for r, found in digests.items() if len(found) > 1}), f"two results: {split}"
        result = audit(read_rounds(self._cluster.run_dir))
        assert result.accounts and all(account.is_exact for account in result.accounts.values()), result.accounts
        struck = sorted({name for name, _ in self._damager.done})
        return (
            f"all held: {sum(self._damager.done.values())} damages of {len(struck)} keys ({', '.join(struck)}), "
            f"{len(digests)} rounds, {fences} fences that healed, no sample repeated or skipped"
        )


def fuzz(options: argparse.Namespace, folder: Path) -> str:
    """One run, from its founding to its end; what was found."""
    env = {"OMP_NUM_THREADS": "1", "ZERO_BAND_RUN__TOKEN": TOKEN}
    arguments = (*TINY, "--data.cache-dir", str(folder / "cache"))
    chance = random.Random(options.seed)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(folder / "runs", arguments, nodes=options.nodes, env=env))
        for _ in range(options.nodes):
            cluster.start()
        assert cluster.store_url is not None
        key = RunKey.of(TOKEN, cluster.run_id)
        store = stack.enter_context(closing(RedisStore(cluster.store_url, cluster.run_id, key=key, retry_s=30.0)))
        client = stack.enter_context(redis.Redis.from_url(cluster.store_url))
        damager = Damager(client, cluster.run_id, chance)
        run = Fuzz(cluster, store, damager, chance)
        run.all_take_part()
        damager.remember()
        if options.each_key:
            run.strike_each_key(options.kinds or list(damager.kinds), options.pause_s)
        run.strike_at_random(options.minutes)
        print("no more damages; all nodes shall take part again", flush=True)
        run.all_take_part()
        said = run.check()
        for node in cluster.running:
            node.terminate()
        codes = cluster.wait(timeout_s=DEADLINE_S)
        assert set(codes.values()) == {0}, f"exit codes {codes}\n{cluster.describe()}"
        return said


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of damages at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--each-key", action="store_true", help="before that, every key in turn in every way")
    parser.add_argument("--kinds", nargs="*", help="of --each-key; without it, all")
    parser.add_argument("--pause-s", type=float, default=0.5, help="between two damages of --each-key")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = options_of(argv)
    with tempfile.TemporaryDirectory(prefix="zeroband-fuzz-", dir=os.environ.get("TMPDIR")) as folder:
        try:
            print(fuzz(options, Path(folder)))
        except AssertionError as error:
            print(f"did not hold: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a run may touch in Redis: its keys, their kinds and lives, and the commands that its nodes say. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from zeroband.elastic.membership.records import RoundPlan

RUN_TTL_S = 30 * 24 * 3600
"""Life of the run's own record after its last write."""

ROUND_TTL_S = 7 * 24 * 3600
"""Life of what belongs to one round: longer than any pause a run may sit through."""

SPENT_TTL_S = 3600
"""Life of what belonged to a round that is committed, and of what writers say of a checkpoint."""

GROUP_TTL_S = 3600
"""Life of the keys through which the processes of one group find each other."""

FACTS_TTL_S = ROUND_TTL_S
"""Life of what a node recorded, after its last line."""

HISTORY_LENGTH = 1000
"""Verdicts kept for readers of the run's history."""

COMMANDS = (
    *("del", "evalsha", "exists", "expire", "get", "getrange", "hdel", "hexists", "hget", "hgetall", "hincrby", "hlen"),
    *("hmget", "hset", "hsetnx", "incrby", "lpush", "lrange", "ltrim", "mget", "script|load", "select", "set"),
    *("strlen", "time", "type", "xadd", "xdel", "xrange", "xread", "xrevrange", "zadd", "zcard", "zcount"),
    *("zrangebyscore", "zrem", "zscore"),
)
"""What a run says to Redis, inside its scripts and outside."""

KEY_PATTERN = "zeroband:*"
"""The keys of all runs."""

ACL_RULES = " ".join((f"~{KEY_PATTERN}", *(f"+{command}" for command in COMMANDS)))
"""All that a run's user needs: `ACL SETUSER NAME on >PASSWORD` and these. `select` only where a database is named."""


def rules_of_run(run_id: str) -> str:
    """Return the ACL rules for the nodes of one run on a dedicated server: the commands above, on this run's keys.

    Includes the keys of its doctor, which uses a separate run name (`rehearsal_of`).
    """
    patterns = (f"~zeroband:{{{name}}}:*" for name in (run_id, rehearsal_of(run_id)))
    return " ".join((*patterns, *(f"+{command}" for command in COMMANDS)))


def rehearsal_of(run_id: str) -> str:
    """Return the name under which `zeroband doctor` tries out a run."""
    return f"{run_id}.doctor"


class StoreKey:
    """A key of which a run has one. Its kind is Redis' own word; of an instance of `Keys`, it is the key's name."""

    def __init__(self, kind: str, name: str = "") -> None:
        self.kind, self.name = kind, name
        self._attribute = ""

    def __set_name__(self, owner: type[Keys], name: str) -> None:
        self.name, self._attribute = self.name or name, name

    @overload
    def __get__(self, keys: None, owner: type[Keys]) -> StoreKey: ...

    @overload
    def __get__(self, keys: Keys, owner: type[Keys]) -> str: ...

    def __get__(self, keys: Keys | None, owner: type[Keys]) -> StoreKey | str:
        if keys is None:
            return self
        made = vars(keys)[self._attribute] = f"{keys.prefix}:{self.name}"  # the next look finds it there
        return made


class Keys:
    """Every key of a run. Hash tags keep a run on one shard of a cluster.

    All values are sealed records, except the leases and the clock, which the store's scripts write. For each key with
    members' records, the key with suffix `_at` holds the number of the change that wrote each record.
    """

    run = StoreKey("string")  # what all nodes must share
    leases = StoreKey("zset")  # member -> when its lease ends, in ms of the store's clock
    clock = StoreKey("hash")  # last renewal, end of settling
    peers = StoreKey("hash")  # member -> where it is and whom it does not reach
    peers_at = StoreKey("zset")
    plan = StoreKey("string")  # the current plan
    plan_patch = StoreKey("string", "plan:patch")  # what of it is another than in the one before it
    votes = StoreKey("hash")  # member -> the result that it holds for the current plan
    votes_at = StoreKey("zset")
    last_votes = StoreKey("hash")  # those for the newest verdict, while another round is open
    failed = StoreKey("string")  # why the current plan cannot be finished
    committed = StoreKey("string")  # the newest verdict
    committed_patch = StoreKey("string", "committed:patch")  # the same of the newest verdict
    leaving = StoreKey("hash")  # members that are on their way out
    restart_point = StoreKey("string")  # on which checkpoint the run is to begin again
    orders = StoreKey("string")  # what operators want of the run
    history = StoreKey("list")  # the newest verdicts, newest first
    holdings = StoreKey("hash")  # member -> which checkpoints it has, and whose folder it sees
    claims = StoreKey("hash")  # joiner -> samples that it trains on before a round dealt it any
    links = StoreKey("hash")  # member -> what its links to the others carry
    links_at = StoreKey("zset")
    measuring = StoreKey("zset")  # member -> when its measurement of a link is over
    changes = StoreKey("hash")  # numbers all that a look shows
    news = StoreKey("stream")  # the numbers of the changes for which members wait
    generation = StoreKey("string")  # the generation that began here last, of several stores
    store_id = StoreKey("string")  # by which several stores, and lives of one, are told apart
    member_reports = StoreKey("hash")  # member -> what it tells, since the run may go to this store
    told_at = StoreKey("hash")  # member -> when
    meeting = StoreKey("string")  # two lines of history that met
    elsewhere = StoreKey("string")  # where the run goes on that does not use this store
    recorders = StoreKey("hash")  # name of a node, with its key -> what a late reader has to know of it

    def __init__(self, run_id: str) -> None:
        self.prefix = f"zeroband:{{{run_id}}}"

    @classmethod
    def names(cls) -> list[str]:
        """Attributes with a key of which a run has one."""
        return [name for name, key in vars(cls).items() if isinstance(key, StoreKey)]

    def scratch(self) -> list[str]:
        """Keys that mean nothing: a string, a hash, a list, a sorted set and a stream."""
        return [f"{self.prefix}:self_test:{kind}" for kind in ("string", "hash", "list", "zset", "stream")]

    def ready(self, round: int) -> str:
        """Hash: member -> that it stands at the boundary of this round."""
        return f"{self.prefix}:ready:{round}"

    def ready_at(self, round: int) -> str:
        return f"{self.prefix}:ready_at:{round}"

    def of_round(self, round: int) -> dict[str, str]:
        """Those of a round, by their names in scripts."""
        return {"ready": self.ready(round), "ready_at": self.ready_at(round)}

    def gradients(self, round: int, member_id: str) -> str:
        """String: digest of a member's first gradients of a round, by which equal batches are noticed."""
        return f"{self.prefix}:gradients:{round}:{member_id}"

    def attempt(self, plan_id: str) -> str:
        """Hash: what members saw of a plan that failed; from the next one on, itself, its votes and its failure."""
        return f"{self.prefix}:attempt:{plan_id}"

    def saving(self, attempt: str) -> str:
        """Hash: name of a node, with its key -> what its writer last said of this save of a checkpoint."""
        return f"{self.prefix}:saving:{attempt}"

    def facts(self, node: str) -> str:
        """Stream: the newest lines that a node recorded, some in each entry, and the bytes that came before them."""
        return f"{self.prefix}:facts:{node}"

    def group(self, plan: RoundPlan, lane: int) -> str:
        """The members stand in it: a store that came back with old data may give an epoch's number twice."""
        members = hashlib.blake2b("/".join(plan.members).encode(), digest_size=6).hexdigest()
        return f"{self.prefix}:group:{plan.epoch}:{members}:{lane}"

"""What a run uses in Redis: its keys, their types and TTLs, and the commands that its nodes send. Pure."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroband.elastic.membership.records import RoundPlan

RUN_TTL_S = 30 * 24 * 3600
"""TTL of the run's own records, renewed by each write."""

ROUND_TTL_S = 7 * 24 * 3600
"""TTL of the records of one round; longer than any pause of a run."""

SPENT_TTL_S = 3600
"""TTL of the records of a committed round, and of checkpoint writers' messages."""

GROUP_TTL_S = 3600
"""TTL of the rendezvous keys of a process group."""

FACTS_TTL_S = ROUND_TTL_S
"""TTL of a node's published facts, renewed by each entry."""

HISTORY_LENGTH = 1000
"""Number of verdicts kept for readers of the run's history."""

COMMANDS = (
    *("del", "evalsha", "exists", "expire", "get", "getrange", "hdel", "hexists", "hget", "hgetall", "hincrby", "hlen"),
    *("hmget", "hset", "hsetnx", "incrby", "lpush", "lrange", "ltrim", "mget", "script|load", "select", "set"),
    *("strlen", "time", "type", "xadd", "xdel", "xrange", "xread", "xrevrange", "zadd", "zcard", "zcount"),
    *("zrangebyscore", "zrem", "zscore"),
)
"""Every Redis command of a run, inside its scripts and outside."""

KEY_PATTERN = "zeroband:*"
"""The keys of all runs."""

ACL_RULES = " ".join((f"~{KEY_PATTERN}", *(f"+{command}" for command in COMMANDS)))
"""ACL rules of a run's user: `ACL SETUSER NAME on >PASSWORD` and these. Only a database number needs `select`."""


def rules_of_run(run_id: str) -> str:
    """Return the ACL rules for the nodes of one run on a dedicated server: the commands above, on this run's keys.

    Includes the keys of its doctor, which uses a separate run name (`rehearsal_of`).
    """
    patterns = (f"~zeroband:{{{name}}}:*" for name in (run_id, rehearsal_of(run_id)))
    return " ".join((*patterns, *(f"+{command}" for command in COMMANDS)))


def rehearsal_of(run_id: str) -> str:
    """Return the name under which `zeroband doctor` tries out a run."""
    return f"{run_id}.doctor"


class StoreKey(cached_property[str]):
    """A key that exists once per run. `kind`: its type as Redis names it. An instance of `Keys` has the full name."""

    def __init__(self, kind: str, name: str = "") -> None:
        super().__init__(lambda keys: f"{keys.prefix}:{name or self.attrname}")
        self.kind = kind


class Keys:
    """Every key of a run. The braces are a hash tag, which keeps a run on one shard of a cluster.

    All values are sealed records except for the leases, the clock and the counters, which the scripts write. A hash of
    members' records comes with a sorted set of suffix `_rev`: member -> revision that wrote its record.
    """

    run = StoreKey("string")  # settings that all nodes must share
    leases = StoreKey("zset")  # member -> end of its lease in ms of the store's clock
    clock = StoreKey("hash")  # time of the last renewal, end of settling
    peers = StoreKey("hash")  # member -> its address, and the members that it cannot reach
    peers_rev = StoreKey("zset")
    plan = StoreKey("string")  # the current plan
    plan_patch = StoreKey("string", "plan:patch")  # patch from the previous plan to the current one
    votes = StoreKey("hash")  # member -> digest of its result under the current plan
    votes_rev = StoreKey("zset")
    last_votes = StoreKey("hash")  # votes for the newest verdict, while the next round is open
    failed = StoreKey("string")  # why the current plan failed
    committed = StoreKey("string")  # the newest verdict
    committed_patch = StoreKey("string", "committed:patch")  # patch from the previous verdict to the newest one
    leaving = StoreKey("hash")  # members that are leaving
    restart_point = StoreKey("string")  # checkpoint from which the run resumes
    orders = StoreKey("string")  # operators' orders
    history = StoreKey("list")  # recent verdicts, newest first
    holdings = StoreKey("hash")  # member -> its checkpoints, and the nodes that share its folder
    claims = StoreKey("hash")  # joiner -> samples that it trains on before its first round
    links = StoreKey("hash")  # member -> measured rates of its links
    links_rev = StoreKey("zset")
    measuring = StoreKey("zset")  # member -> end of its slot for measuring a link
    revision = StoreKey("hash")  # counter of the writes that a view shows
    wakeups = StoreKey("stream")  # an entry for each revision that waiting members must see
    generation = StoreKey("string")  # with several stores: the generation that began here last
    store_id = StoreKey("string")  # random id of this store's data
    member_reports = StoreKey("hash")  # member -> its report, if the run may switch to this store
    reported_at = StoreKey("hash")  # member -> time of its report
    split_brain = StoreKey("string")  # two lines of history that have seen each other
    forward_pointer = StoreKey("string")  # where the run continues, if not in this store
    recorders = StoreKey("hash")  # node name with key -> facts that a late reader needs

    def __init__(self, run_id: str) -> None:
        self.prefix = f"zeroband:{{{run_id}}}"

    @classmethod
    def names(cls) -> list[str]:
        """Names of the keys that exist once per run."""
        return [name for name, key in vars(cls).items() if isinstance(key, StoreKey)]

    def scratch(self) -> list[str]:
        """Keys for the self-test: a string, a hash, a list, a sorted set and a stream."""
        return [f"{self.prefix}:self_test:{kind}" for kind in ("string", "hash", "list", "zset", "stream")]

    def ready(self, round: int) -> str:
        """Hash: member -> its `Ready` record of this round."""
        return f"{self.prefix}:ready:{round}"

    def ready_rev(self, round: int) -> str:
        return f"{self.prefix}:ready_rev:{round}"

    def of_round(self, round: int) -> dict[str, str]:
        """The keys of a round by their names in scripts."""
        return {"ready": self.ready(round), "ready_rev": self.ready_rev(round)}

    def gradients(self, round: int, member_id: str) -> str:
        """String: digest of a member's first gradients of a round, which reveals equal batches."""
        return f"{self.prefix}:gradients:{round}:{member_id}"

    def attempt(self, plan_id: str) -> str:
        """Hash: evidence on a failed plan; once the next plan is open, also the plan, its votes and its failure."""
        return f"{self.prefix}:attempt:{plan_id}"

    def saving(self, attempt: str) -> str:
        """Hash: node name with key -> the last message of its writer on this save of a checkpoint."""
        return f"{self.prefix}:saving:{attempt}"

    def facts(self, node: str) -> str:
        """Stream: batches of lines that a node recorded, and the number of bytes before each."""
        return f"{self.prefix}:facts:{node}"

    def group(self, plan: RoundPlan, lane: int) -> str:
        """Prefix of a group's rendezvous. Names the members, since a restored store may assign an epoch twice."""
        members = hashlib.blake2b("/".join(plan.members).encode(), digest_size=6).hexdigest()
        return f"{self.prefix}:group:{plan.epoch}:{members}:{lane}"

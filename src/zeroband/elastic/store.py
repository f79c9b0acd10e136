"""The only file that speaks to Redis: every key, every script, every time to live.

All writes that decide something are compare-and-set in Lua, fenced by the version of the opening that they build on.
May be called from any thread. Raises StoreLost when Redis does not answer within `patience_s`.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from zeroband.elastic.epoch import (
    Opening,
    Ready,
    Verdict,
    View,
    opening_from,
    ready_from,
    to_record,
    verdict_from,
)
from zeroband.errors import JoinRefused, StoreLost

PROTOCOL = 1
"""Version of the records below; nodes with another one are refused at join."""

RUN_TTL_S = 30 * 24 * 3600
"""Life of the run's own record after its last write."""

ROUND_TTL_S = 7 * 24 * 3600
"""Life of what belongs to one round: longer than any pause a run may sit through."""

GROUP_TTL_S = 3600
"""Life of the keys through which the processes of one group find each other."""

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 0.5


class Keys:
    """Every key of a run. Hash tags keep a run on one shard of a cluster."""

    def __init__(self, run_id: str) -> None:
        self.prefix = f"zeroband:{{{run_id}}}"
        self.run = f"{self.prefix}:run"  # hash: what all nodes must share
        self.present = f"{self.prefix}:present"  # set: members that ever took a lease and were not seen dead
        self.info = f"{self.prefix}:info"  # hash: member -> where and what it is
        self.opening = f"{self.prefix}:opening"  # string: the current opening
        self.committed = f"{self.prefix}:committed"  # string: the newest verdict
        self.history = f"{self.prefix}:history"  # list: the newest verdicts, newest first

    def lease(self, member_id: str) -> str:
        return f"{self.prefix}:lease:{member_id}"

    def ready(self, round: int) -> str:
        return f"{self.prefix}:ready:{round}"

    def votes(self, version: int) -> str:
        return f"{self.prefix}:votes:{version}"

    def failed(self, version: int) -> str:
        return f"{self.prefix}:failed:{version}"

    def group(self, epoch: int, lane: int) -> str:
        return f"{self.prefix}:group:{epoch}:{lane}"


_VIEW = """
-- KEYS: opening committed present ready   ARGV: prefix
local opening = redis.call('GET', KEYS[1])
local alive = {}
for _, member in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  if redis.call('EXISTS', ARGV[1] .. ':lease:' .. member) == 1 then alive[#alive + 1] = member end
end
local votes, failed = {}, false
if opening then
  local version = cjson.decode(opening)['version']
  votes = redis.call('HGETALL', ARGV[1] .. ':votes:' .. version)
  failed = redis.call('GET', ARGV[1] .. ':failed:' .. version)
end
return {opening, redis.call('GET', KEYS[2]), alive, redis.call('HGETALL', KEYS[4]), votes, failed}
"""

_OPEN = """
-- KEYS: opening committed   ARGV: expected_version round record ttl
local current, committed = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
local version = current and cjson.decode(current)['version'] or 0
if version ~= tonumber(ARGV[1]) then return 0 end
if committed and cjson.decode(committed)['round'] >= tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], ARGV[3], 'EX', ARGV[4])
return 1
"""

_COMMIT = """
-- KEYS: opening committed history failed present info   ARGV: version round record ttl keep prefix
local current, committed = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if not current or cjson.decode(current)['version'] ~= tonumber(ARGV[1]) then return 0 end
if committed and cjson.decode(committed)['round'] >= tonumber(ARGV[2]) then return 0 end
if redis.call('EXISTS', KEYS[4]) == 1 then return 0 end
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
redis.call('LPUSH', KEYS[3], ARGV[3])
redis.call('LTRIM', KEYS[3], 0, ARGV[5] - 1)
redis.call('EXPIRE', KEYS[3], ARGV[4])
local listed = {}
for _, member in ipairs(cjson.decode(ARGV[3])['members']) do listed[member] = true end
for _, member in ipairs(redis.call('SMEMBERS', KEYS[5])) do -- forget the dead that can no longer return
  if not listed[member] and redis.call('EXISTS', ARGV[6] .. ':lease:' .. member) == 0 then
    redis.call('SREM', KEYS[5], member)
    redis.call('HDEL', KEYS[6], member)
  end
end
return 1
"""

_FAIL = """
-- KEYS: committed failed   ARGV: version reason ttl
-- An opening is either committed or failed, never both.
local committed = redis.call('GET', KEYS[1])
if committed and cjson.decode(committed)['version'] >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'NX', 'EX', ARGV[3])
return 1
"""

_RENEW = """
-- KEYS: lease present opening   ARGV: member ttl_ms progress first ttl
-- A lease that ran out is taken again only by a member of the current opening: no verdict is newer than that.
if redis.call('EXISTS', KEYS[1]) == 0 and ARGV[4] == '0' then
  local opening = redis.call('GET', KEYS[3])
  local listed = not opening
  if opening then
    for _, member in ipairs(cjson.decode(opening)['members']) do
      if member == ARGV[1] then listed = true end
    end
  end
  if not listed then return 0 end
end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 1
"""

_LEAVE = """
-- KEYS: lease present info   ARGV: member
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
return 1
"""

_FOUND = """
-- KEYS: run   ARGV: ttl field value field value ...   returns the first differing {field, theirs, ours}
if redis.call('EXISTS', KEYS[1]) == 1 then
  local mine = {}
  for i = 2, #ARGV, 2 do
    mine[ARGV[i]] = true
    local theirs = redis.call('HGET', KEYS[1], ARGV[i]) or 'absent'
    if theirs ~= ARGV[i + 1] then return {ARGV[i], theirs, ARGV[i + 1]} end
  end
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if not mine[field] then return {field, redis.call('HGET', KEYS[1], field), 'absent'} end
  end
end
for i = 2, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return {}
"""

HISTORY_LENGTH = 1000
"""Verdicts kept for readers of the run's history."""


class Store:
    """A run's record in Redis.

    `patience_s`: how long a call is retried, with jittered back-off, before it raises StoreLost.
    """

    def __init__(self, url: str, run_id: str, *, patience_s: float) -> None:
        self.keys = Keys(run_id)
        self._patience_s = patience_s
        self._redis = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            url,
            socket_timeout=patience_s / 2,
            socket_connect_timeout=patience_s / 2,
            retry=Retry(NoBackoff(), 0),  # _call retries: it counts seconds, not attempts
            health_check_interval=10,
        )
        register = self._redis.register_script
        self._view, self._open, self._commit = register(_VIEW), register(_OPEN), register(_COMMIT)
        self._renew, self._leave, self._found = register(_RENEW), register(_LEAVE), register(_FOUND)
        self._fail = register(_FAIL)

    def _call(self, call: Callable[[], Any]) -> Any:
        deadline_s, pause_s = time.monotonic() + self._patience_s, _PAUSE_MIN_S
        while True:
            try:
                return call()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if time.monotonic() + pause_s > deadline_s:
                    message = f"Redis did not answer for {self._patience_s:g} s: {error}; check store.url"
                    raise StoreLost(message) from error
            time.sleep(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    # -- the run ------------------------------------------------------------------------------------------------

    def found_or_match(self, shared: Mapping[str, str], token: str | None) -> None:
        """Write what the run's nodes must share, or compare with what the first node wrote. Raises JoinRefused."""
        record = {"run.token": token_digest(token), "protocol": str(PROTOCOL), **shared}
        flat = [part for item in record.items() for part in item]
        differing = self._call(lambda: self._found(keys=[self.keys.run], args=[RUN_TTL_S, *flat]))
        if differing:
            key, theirs, ours = (_text(part) for part in differing)
            raise JoinRefused(key, theirs, ours) if key != "run.token" else JoinRefused(key, "another", "this one")

    # -- leases -------------------------------------------------------------------------------------------------

    def renew_lease(self, member_id: str, *, lease_s: float, progress: int, first: bool = False) -> bool:
        """Keep a member counted alive for `lease_s`. False: the run went on without it (the member is fenced)."""
        keys = [self.keys.lease(member_id), self.keys.present, self.keys.opening]
        args = [member_id, int(lease_s * 1000), progress, int(first), RUN_TTL_S]
        return bool(self._call(lambda: self._renew(keys=keys, args=args)))

    def release_lease(self, member_id: str) -> None:
        """Leave at once instead of by expiry."""
        keys = [self.keys.lease(member_id), self.keys.present, self.keys.info]
        self._call(lambda: self._leave(keys=keys, args=[member_id]))

    def describe_member(self, member_id: str, info: Mapping[str, Any]) -> None:
        """Publish where a member's state can be fetched, and what it is."""

        def write() -> None:
            self._redis.hset(self.keys.info, member_id, json.dumps(info))
            self._redis.expire(self.keys.info, RUN_TTL_S)

        self._call(write)

    def members_info(self) -> dict[str, dict[str, Any]]:
        """Every described member, alive or not."""
        raw = self._call(lambda: self._redis.hgetall(self.keys.info))
        return {_text(member): json.loads(info) for member, info in raw.items()}

    # -- rounds -------------------------------------------------------------------------------------------------

    def view(self, round: int) -> View:
        """All that the rules need for `round`, read at one instant."""
        keys = [self.keys.opening, self.keys.committed, self.keys.present, self.keys.ready(round)]
        opening, committed, alive, ready, votes, failed = self._call(
            lambda: self._view(keys=keys, args=[self.keys.prefix])
        )
        return View(
            opening=opening_from(json.loads(opening)) if opening else None,
            committed=verdict_from(json.loads(committed)) if committed else None,
            alive=frozenset(_text(member) for member in alive),
            ready={m: ready_from(json.loads(r)) for m, r in _pairs(ready).items()},
            votes=_pairs(votes),
            failed=_text(failed) if failed else None,
        )

    def announce_ready(self, member_id: str, ready: Ready) -> None:
        """Say that a member stands at the boundary of a round; the first word counts."""

        def write() -> None:
            pipe = self._redis.pipeline()
            pipe.hsetnx(self.keys.ready(ready.round), member_id, json.dumps(to_record(ready)))
            pipe.expire(self.keys.ready(ready.round), ROUND_TTL_S)
            pipe.execute()

        self._call(write)

    def propose_opening(self, opening: Opening) -> bool:
        """Make this the current opening if it follows the current one. False: another proposal was first."""
        args = [opening.version - 1, opening.round, json.dumps(to_record(opening)), RUN_TTL_S]
        return bool(self._call(lambda: self._open(keys=[self.keys.opening, self.keys.committed], args=args)))

    def report_failure(self, version: int, reason: str) -> bool:
        """Have an opening fail for everybody, so that the round is opened again. False: it was committed already."""
        keys, args = [self.keys.committed, self.keys.failed(version)], [version, reason, ROUND_TTL_S]
        return bool(self._call(lambda: self._fail(keys=keys, args=args)))

    def vote(self, version: int, member_id: str, digest: str) -> None:
        """Say which result a member holds for an opening; the first word counts."""

        def write() -> None:
            pipe = self._redis.pipeline()
            pipe.hsetnx(self.keys.votes(version), member_id, digest)
            pipe.expire(self.keys.votes(version), ROUND_TTL_S)
            pipe.execute()

        self._call(write)

    def propose_verdict(self, verdict: Verdict) -> bool:
        """Commit a round if its opening is the current one and did not fail. False: it was settled already."""
        record = json.dumps(to_record(verdict))
        args = [verdict.version, verdict.round, record, RUN_TTL_S, HISTORY_LENGTH, self.keys.prefix]
        keys = [self.keys.opening, self.keys.committed, self.keys.history, self.keys.failed(verdict.version)]
        keys += [self.keys.present, self.keys.info]
        return bool(self._call(lambda: self._commit(keys=keys, args=args)))

    def history(self) -> list[Verdict]:
        """The newest committed rounds, oldest first."""
        raw = cast("list[bytes]", self._call(lambda: self._redis.lrange(self.keys.history, 0, -1)))
        return [verdict_from(json.loads(record)) for record in reversed(raw)]

    # -- rendezvous of process groups ---------------------------------------------------------------------------

    def group_set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._redis.set(key, value, ex=GROUP_TTL_S))

    def group_get(self, keys: list[str]) -> list[bytes | None]:
        return self._call(lambda: self._redis.mget(keys))

    def group_add(self, key: str, amount: int) -> int:
        def add() -> int:
            pipe = self._redis.pipeline()
            pipe.incrby(key, amount)
            pipe.expire(key, GROUP_TTL_S)
            return int(pipe.execute()[0])

        return self._call(add)

    def group_delete(self, key: str) -> bool:
        return bool(self._call(lambda: self._redis.delete(key)))

    def close(self) -> None:
        self._redis.close()


def token_digest(token: str | None) -> str:
    """What of a run's token reaches the store. A slow hash, so that the record does not give the token away."""
    if token is None:
        return "none"
    return hashlib.pbkdf2_hmac("sha256", token.encode(), b"zeroband run token", 100_000).hex()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _pairs(flat: list[bytes]) -> dict[str, str]:
    return {_text(k): _text(v) for k, v in zip(flat[::2], flat[1::2], strict=True)}

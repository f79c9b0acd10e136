"""Lua scripts that run in Redis: compare-and-set of plans and verdicts, leases, and restoring lost records.

Redis runs a script atomically: no other client sees or changes anything between its reads and its writes.

Leases are compared only with the store's own clock (TIME), never with a node's. While no guardian renews any lease,
that clock is treated as stopped: the store was unreachable, so every lease that was valid then is granted anew.

A script accesses only keys declared as KEYS; some servers refuse any other. It does not trust what it finds: a key of
the wrong type is deleted and reported. A script cannot verify a seal, so the caller passes the values that it read and
found invalid (`rejected_*`), and the script treats them as absent. A value newer than the caller's read is unverified;
then the caller must read again before it decides.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from types import UnionType

from zeroband.elastic.store.keys import RUN_TTL_S, Keys

_PRELUDE = """
local deleted = {}
local function ensure_type(key, kind) -- a command on a key of the wrong type would abort the script half-way
  local found = redis.call('TYPE', key)['ok']
  if found ~= kind and found ~= 'none' then
    redis.call('DEL', key)
    deleted[#deleted + 1] = key
  end
end
local function valid(raw, rejected) -- the record; false if absent, empty, or rejected by the caller
  if raw and raw ~= '' and raw ~= rejected then return raw end
  return false
end
local function label(raw) -- round, version and id in a record's header; nil if it has none
  local round, version, id = string.match(raw or '', '^%x+ (%d+) (%d+) (%S+) ')
  return tonumber(round), tonumber(version), id
end
local function label_at(key) -- reads only the header, since a plan of many members is long
  return label(redis.call('GETRANGE', key, 0, 255))
end
local function in_generation(key, generation) -- generation '': the run has one store, which is always in use
  if generation == '' then return true end
  local _, number, id = label(redis.call('GET', key))
  return number ~= nil and string.format('%.0f %s', number, id) == generation
end
local function time_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function last_renewal(clock) return tonumber(redis.call('HGET', clock, 'renewed_ms')) end
local function is_outage(renewed, now, silence) -- now < renewed: the server's clock was set back
  return renewed and (now < renewed or now - renewed > silence)
end
local function lease_time(clock, silence) -- frozen at the last renewal during an outage, so that no lease expires
  local now, renewed = time_ms(), last_renewal(clock)
  if is_outage(renewed, now, silence) then return renewed end
  return now
end
local function alive_at(leases, at) return redis.call('ZRANGEBYSCORE', leases, '(' .. at, '+inf') end
local function alive_if_changed(leases, at, known) -- 1 if the digest of the living members equals `known`
  local alive = alive_at(leases, at)
  table.sort(alive)
  if redis.sha1hex(table.concat(alive, ' ')) == known then return 1 end
  return alive
end
local function lost_leases(leases, clock) -- only one of the two keys is left, or the clock was set back
  local now, renewed = time_ms(), last_renewal(clock)
  return (renewed == nil) ~= (redis.call('EXISTS', leases) == 0) or (renewed and now < renewed) or false
end
local function extend_after_outage(leases, clock, ends, silence)
  local now, renewed = time_ms(), last_renewal(clock)
  if not is_outage(renewed, now, silence) then return end
  local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', renewed)
  for _, member in ipairs(alive_at(leases, renewed)) do redis.call('ZADD', leases, ends, member) end
  -- Score 0 keeps an expired lease expired even after the clock was set back. Its member stays listed, since it may
  -- acquire the lease again.
  for _, member in ipairs(expired) do redis.call('ZADD', leases, 0, member) end
end
local function max_lease_end(now, silence) return now + 8 * silence end -- 4 leases; a later end is damage
local function is_settling(leases, clock, silence) -- members are still renewing or restoring: decide nothing yet
  local ends, now = tonumber(redis.call('HGET', clock, 'settling_until_ms')), time_ms()
  return lost_leases(leases, clock) or (ends and now < ends and ends <= max_lease_end(now, silence)) or false
end
local function reset_clock(leases, clock) -- without leases there is no outage; the next lease starts the clock again
  if redis.call('EXISTS', leases) == 0 then redis.call('HDEL', clock, 'renewed_ms') end
end
local function delete_keys(keys)
  for _, key in ipairs(keys) do redis.call('DEL', key) end
end
local function expire_keys(ttl, keys)
  for _, key in ipairs(keys) do redis.call('EXPIRE', key, ttl) end
end
local function set_fields(key, prefix, flat) -- copies an HGETALL reply
  for i = 1, #flat, 2 do redis.call('HSET', key, prefix .. flat[i], flat[i + 1]) end
end
local function push_history(history, verdict, keep, ttl)
  if redis.call('LRANGE', history, 0, 0)[1] ~= verdict then redis.call('LPUSH', history, verdict) end
  redis.call('LTRIM', history, 0, keep - 1)
  redis.call('EXPIRE', history, ttl)
end
local function attempt_tag(attempt, votes, failed) -- changes with everything that members add to the current plan
  local reason = redis.call('GET', failed) or ''
  return redis.sha1hex(redis.call('HLEN', attempt) .. ' ' .. redis.call('HLEN', votes) .. ' ' .. reason)
end
local function is_error(answer) return type(answer) == 'table' and answer.err ~= nil end
local function next_revision(revision) -- numbers every write that a view shows
  if redis.call('HEXISTS', revision, 'id') == 0 then redis.call('HSET', revision, 'id', time_ms()) end
  local n = redis.pcall('HINCRBY', revision, 'n', 1) -- fails on a damaged counter: not a number, or at its limit
  if not is_error(n) then return n end
  redis.call('DEL', revision)
  redis.call('HSET', revision, 'id', time_ms(), 'n', 1) -- the new id tells readers that the count started again
  return 1
end
local function notify(revision, wakeups) -- wake up members that block on the stream
  local n = next_revision(revision)
  for _ = 1, 2 do
    if not is_error(redis.pcall('XADD', wakeups, 'MAXLEN', '16', string.format('%.0f-0', n), 'n', '1')) then break end
    redis.call('DEL', wakeups) -- ids only grow, and this stream still has those of a counter that was lost
  end
  expire_keys(RUN_TTL, {wakeups, revision})
end
local function is_same_counter(revision, seen) -- seen: 'ID:N'; false if the counter was lost or set back since
  local id, n = string.match(seen, '^(.*):(%d+)$')
  return id ~= '' and id == redis.call('HGET', revision, 'id')
         and tonumber(n) <= (tonumber(redis.call('HGET', revision, 'n')) or -1)
end
local function read_revision(revision) return redis.call('HMGET', revision, 'id', 'n', 'links') end
local function mark_changed(revision, revisions, member, ttl) -- revisions: member -> revision that wrote its record
  redis.call('ZADD', revisions, next_revision(revision), member)
  redis.call('EXPIRE', revisions, ttl)
end
local function put_record(hash, revisions, revision, member, record, ttl)
  redis.call('HSET', hash, member, record)
  mark_changed(revision, revisions, member, ttl)
  redis.call('EXPIRE', hash, ttl)
end
local function remove_member(hash, revisions, member)
  redis.call('HDEL', hash, member)
  redis.call('ZREM', revisions, member)
end
local function remove_without_lease(hash, leases, flat) -- flat: the hash as HGETALL returned it
  for i = 1, #flat, 2 do
    if not redis.call('ZSCORE', leases, flat[i]) then redis.call('HDEL', hash, flat[i]) end
  end
end
local function records_since(hash, revisions, known) -- {count, 1 if these are all, records written after `known`}
  -- The count is a string because a reply carries a string's length, so a byte lost in transit is detected.
  local count = redis.call('HLEN', hash)
  if known == '0' or redis.call('ZCARD', revisions) ~= count then
    return {tostring(count), 1, redis.call('HGETALL', hash)}
  end
  local members, found = redis.call('ZRANGEBYSCORE', revisions, '(' .. known, '+inf'), {}
  for i = 1, #members, 1000 do -- unpack is limited by the size of Lua's stack
    local page = {unpack(members, i, math.min(i + 999, #members))}
    local records = redis.call('HMGET', hash, unpack(page))
    for j, member in ipairs(page) do
      if records[j] then found[#found + 1] = member; found[#found + 1] = records[j] end
    end
  end
  return {tostring(count), 0, found}
end
local function tag(key) -- identifies a sealed record by its MAC and length; '' if there is none
  local length = redis.call('STRLEN', key)
  if length == 0 then return '' end
  return redis.call('GETRANGE', key, 0, 31) .. length
end
local function get_if_changed(key, known) -- 1 if the caller knows this record
  if tag(key) == known then return 1 end
  return redis.call('GET', key)
end
local function get_or_patch(key, known, patch, expected)
  -- 1: the caller knows the record. 2: it is the one that the caller expects, '-': any. {PATCH}: the patch from the
  -- caller's record to this one. Else the record.
  local current = tag(key)
  if current == known then return 1 end
  if current ~= '' and (current == expected or expected == '-') then return 2 end
  local found, start = known ~= '' and redis.call('GET', patch) or '', #known + 2
  if string.sub(found, 1, start - 1) == known .. ' '
     and string.sub(found, start, start + 31) == string.sub(current, 1, 32) then
    return {string.sub(found, start)}
  end
  return redis.call('GET', key)
end
""".replace("RUN_TTL", str(RUN_TTL_S))


Shape = type | UnionType | frozenset[int] | tuple["Shape", ...]
"""Shape of an answer: a type, one of some numbers, or a list of exactly these shapes."""


@dataclass(frozen=True)
class Script:
    """A script as it is loaded into a server."""

    text: str
    keys: tuple[str, ...]
    """Names of its KEYS in order: attributes of `Keys`, or names that the caller maps to keys."""
    answer: Shape
    """Shape of what it returns."""

    @cached_property
    def sha(self) -> str:
        """Redis' name for it."""
        return hashlib.sha1(self.text.encode()).hexdigest()


_TEXT, _CACHED = bytes | None, bytes | int | None
_FLAG, _OUTCOME = frozenset((0, 1)), frozenset((0, 1, 2))
_LIST: type = list
_REVISION = (_TEXT, _TEXT, _TEXT)
_RECORDS = (bytes, _FLAG, _LIST | int)


def _script(keys: str, args: str, answer: Shape, body: str) -> Script:
    """Compile a body that names its keys and arguments (`key.plan`, `arg.round`) to KEYS[i] and ARGV[i].

    `keys`: attributes of `Keys`, whose type is enforced; NAME:TYPE for others, and for no check ("any"). `args`: in the
    order in which they are passed; further arguments start at MORE. The script returns the keys deleted for their wrong
    type, and its result.
    """
    declared = [_type_of(key) for key in keys.split()]
    checks = [f"ensure_type(KEYS[{i}], '{kind}')" for i, (_, kind) in enumerate(declared, 1) if kind != "any"]
    places = {f"key.{name}": f"KEYS[{i}]" for i, (name, _) in enumerate(declared, 1)}
    places |= {f"arg.{name}": f"ARGV[{i}]" for i, name in enumerate(args.split(), 1)}
    placed = re.sub(r"\b(?:key|arg)\.\w+", lambda found: places[found[0]], body)  # KeyError: undeclared name
    placed = placed.replace("MORE", str(len(args.split()) + 1))
    main = f"local function main()\n{placed}\nend\nlocal result = main()\nreturn {{deleted, result}}\n"
    return Script("\n".join((_PRELUDE, *checks, main)), tuple(name for name, _ in declared), (_LIST, answer))


def _type_of(key: str) -> tuple[str, str]:
    name, _, kind = key.partition(":")
    return name, kind or getattr(Keys, name).kind


VIEW = _script(
    "plan committed leases clock peers run ready:hash orders restart_point revision generation plan_patch"
    " committed_patch peers_rev ready_rev:zset votes votes_rev failed",
    "silence_ms revision tag_plan tag_committed tag_failed tag_run tag_orders tag_restart_point tag_generation alive"
    " ready peers votes_of votes whole enough_ready enough_votes member tag_ready tag_vote tag_expected"
    " record ttl generation record_plan",
    (
        *(_REVISION, _CACHED | _LIST, _CACHED | _LIST, *(_CACHED,) * 5, _LIST | int),
        *(_RECORDS, _RECORDS, _RECORDS, _FLAG, _CACHED, _CACHED),
    ),
    """
-- Reads a view, optionally after writing the caller's own record in the same round trip (`record` and what follows may
-- be absent). Arguments up to `tag_expected`, without `whole`, `enough_*` and `member`, describe the caller's cache;
-- only changes are returned.
-- Records of ready members and votes are returned if `whole` is set or enough members have written one; otherwise only
-- their number and the caller's own (1: as cached, 0: none).
local is_same = is_same_counter(key.revision, arg.revision)
local function known(revision) return is_same and revision or '0' end
local _, _, id = label_at(key.plan)
-- With `record_plan` the record is a vote, which counts only for the current plan.
if arg.record and in_generation(key.generation, arg.generation)
   and (arg.record_plan == '' or arg.record_plan == id) then
  local hash, revisions = key.ready, key.ready_rev
  if arg.record_plan ~= '' then hash, revisions = key.votes, key.votes_rev end
  -- HSETNX: the first record counts, and a call retried after a lost answer must not renumber it.
  if redis.call('HSETNX', hash, arg.member, arg.record) == 1 then
    mark_changed(key.revision, revisions, arg.member, arg.ttl)
  end
  redis.call('EXPIRE', hash, arg.ttl)
end
local function own(hash, cached)
  local record = redis.call('HGET', hash, arg.member)
  if record and cached ~= '' and string.sub(record, 1, 32) .. #record == cached then return 1 end
  return record or 0
end
local function read(hash, revisions, revision, enough)
  local count = redis.call('HLEN', hash)
  if arg.whole == '1' or count >= tonumber(enough) then return records_since(hash, revisions, known(revision)) end
  return {tostring(count), 0, 0}
end
local votes, own_vote, failed = {'0', 1, {}}, 0, false
if id then
  if id ~= arg.votes_of then arg.votes, arg.tag_vote, arg.tag_failed = '0', '', '' end -- cached for another plan
  own_vote, failed = own(key.votes, arg.tag_vote), get_if_changed(key.failed, arg.tag_failed)
  votes = read(key.votes, key.votes_rev, arg.votes, arg.enough_votes)
end
local silence = tonumber(arg.silence_ms)
return {read_revision(key.revision),
        get_or_patch(key.plan, arg.tag_plan, key.plan_patch, ''),
        get_or_patch(key.committed, arg.tag_committed, key.committed_patch, arg.tag_expected),
        failed, get_if_changed(key.run, arg.tag_run), get_if_changed(key.orders, arg.tag_orders),
        get_if_changed(key.restart_point, arg.tag_restart_point), get_if_changed(key.generation, arg.tag_generation),
        alive_if_changed(key.leases, lease_time(key.clock, silence), arg.alive),
        read(key.ready, key.ready_rev, arg.ready, arg.enough_ready),
        records_since(key.peers, key.peers_rev, known(arg.peers)),
        votes, is_settling(key.leases, key.clock, silence) and 1 or 0, own(key.ready, arg.tag_ready), own_vote}
""",
)

PROPOSE_PLAN = _script(
    "plan committed clock orders leases revision wakeups generation plan_patch votes votes_rev:any failed"
    " last_votes:any attempt:hash",
    "current round record ttl orders silence_ms rejected_plan rejected_committed rejected_orders generation patch"
    " attempt_tag spent_ttl",
    _FLAG,
    """
-- Compare-and-set of the plan. `attempt_tag`: state of the current attempt that the proposal is based on; '': any.
if not in_generation(key.generation, arg.generation) then return 0 end
local committed = valid(redis.call('GET', key.committed), arg.rejected_committed)
local orders = valid(redis.call('GET', key.orders), arg.rejected_orders)
if (valid(redis.call('GET', key.plan), arg.rejected_plan) or '') ~= arg.current then return 0 end
if is_settling(key.leases, key.clock, tonumber(arg.silence_ms)) then return 0 end
local round = label(committed)
if committed and (not round or round >= tonumber(arg.round)) then return 0 end
local _, version = label(orders) -- a proposer that has not seen the newest orders must not open a round
if orders and not version or (version or 0) ~= tonumber(arg.orders) then return 0 end
local _, _, open_id = label_at(key.plan)
local _, _, committed_id = label(committed)
if arg.attempt_tag ~= '' and attempt_tag(key.attempt, key.votes, key.failed) ~= arg.attempt_tag then return 0 end
if open_id and open_id == committed_id then -- members that were not in that round verify its votes
  redis.call('DEL', key.last_votes)
  set_fields(key.last_votes, '', redis.call('HGETALL', key.votes))
  redis.call('EXPIRE', key.last_votes, arg.ttl)
elseif open_id and arg.current ~= '' then -- keep the failed attempt: every member derives the findings from it
  redis.call('HSET', key.attempt, 'plan', arg.current)
  set_fields(key.attempt, 'vote ', redis.call('HGETALL', key.votes))
  local failed = redis.call('GET', key.failed)
  if failed then redis.call('HSET', key.attempt, 'failed', failed) end
  redis.call('EXPIRE', key.attempt, arg.spent_ttl)
end
redis.call('SET', key.plan, arg.record, 'EX', arg.ttl)
redis.call('SET', key.plan_patch, arg.patch, 'EX', arg.ttl)
delete_keys({key.votes, key.votes_rev, key.failed}) -- they belong to the previous plan
notify(key.revision, key.wakeups)
return 1
""",
)

PROPOSE_RESTART_POINT = _script(
    "restart_point plan committed clock leases revision wakeups",
    "restart_point plan committed record ttl silence_ms rejected_restart_point rejected_plan rejected_committed",
    _FLAG,
    """
local function is_as_seen(key, seen, rejected) return (valid(redis.call('GET', key), rejected) or '') == seen end
if not is_as_seen(key.restart_point, arg.restart_point, arg.rejected_restart_point)
   or not is_as_seen(key.plan, arg.plan, arg.rejected_plan)
   or not is_as_seen(key.committed, arg.committed, arg.rejected_committed) then return 0 end
if is_settling(key.leases, key.clock, tonumber(arg.silence_ms)) then return 0 end
redis.call('SET', key.restart_point, arg.record, 'EX', arg.ttl)
notify(key.revision, key.wakeups)
return 1
""",
)

COMMIT = _script(
    "plan committed history failed leases peers clock ready:hash votes orders revision wakeups links generation"
    " committed_patch run ready_rev:zset votes_rev peers_rev links_rev",
    "plan round record ttl keep silence_ms spent_ttl rejected_committed rejected_failed generation patch run orders"
    " next_orders",
    _OUTCOME,
    """
-- Compare-and-set of the verdict. MORE: the members that the plan lists. `run`: the run's record for the session that
-- this verdict begins, if it begins one. Returns 2 if the orders, which this round fulfils, have changed meanwhile.
if not in_generation(key.generation, arg.generation) then return 0 end
local silence = tonumber(arg.silence_ms)
local committed = valid(redis.call('GET', key.committed), arg.rejected_committed)
if redis.call('GET', key.plan) ~= arg.plan or is_settling(key.leases, key.clock, silence) then return 0 end
local round = label(committed)
if committed and (not round or round >= tonumber(arg.round)) then return 0 end
-- Members that saw the failure have discarded the result.
if valid(redis.call('GET', key.failed), arg.rejected_failed) then return 0 end
if arg.next_orders ~= '' then
  if redis.call('GET', key.orders) ~= arg.orders then return 2 end
  redis.call('SET', key.orders, arg.next_orders, 'EX', arg.ttl)
end
if arg.run ~= '' then redis.call('SET', key.run, arg.run, 'EX', arg.ttl) end
redis.call('SET', key.committed, arg.record, 'EX', arg.ttl)
redis.call('SET', key.committed_patch, arg.patch, 'EX', arg.ttl)
push_history(key.history, arg.record, arg.keep, arg.ttl)
expire_keys(arg.spent_ttl, {key.ready, key.votes, key.ready_rev, key.votes_rev})
local listed = {}
for i = MORE, #ARGV do listed[ARGV[i]] = true end
-- A member with an expired lease that the plan does not list is fenced for good, so its records can go.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', key.leases, '-inf', lease_time(key.clock, silence))) do
  if not listed[member] then
    redis.call('ZREM', key.leases, member)
    remove_member(key.peers, key.peers_rev, member)
    remove_member(key.links, key.links_rev, member)
  end
end
notify(key.revision, key.wakeups)
return 1
""",
)

FAIL = _script(
    "committed failed revision wakeups plan",
    "version reason ttl rejected_committed rejected_failed id",
    _FLAG,
    """
-- A plan is either committed or failed, never both: COMMIT checks `failed`, and this script checks `committed`.
local committed = valid(redis.call('GET', key.committed), arg.rejected_committed)
local _, version = label(committed)
if committed and (not version or version >= tonumber(arg.version)) then return 0 end
local _, _, id = label_at(key.plan)
if id ~= arg.id then return 1 end -- a replaced plan cannot be committed any more
if not valid(redis.call('GET', key.failed), arg.rejected_failed) then redis.call('DEL', key.failed) end
redis.call('SET', key.failed, arg.reason, 'NX', 'EX', arg.ttl)
notify(key.revision, key.wakeups)
return 1
""",
)

RENEW_LEASE = _script(
    "leases clock peers plan run revision wakeups peers_rev",
    "member lease_ms silence_ms first peer ttl refuted revision alive peers",
    (_FLAG, _TEXT, _REVISION, _LIST | int, _RECORDS, bytes),
    """
-- An expired lease is granted again only if the current plan lists the member, which the caller must verify: without a
-- lease the plan is returned, and the caller repeats the call with it as `refuted`. `revision`, `alive` and `peers`
-- describe the caller's cache.
local now, silence = time_ms(), tonumber(arg.silence_ms)
local ends = now + tonumber(arg.lease_ms)
-- With lost leases nobody knows who is alive: give every member the time to renew.
if lost_leases(key.leases, key.clock) then redis.call('HSET', key.clock, 'settling_until_ms', ends) end
extend_after_outage(key.leases, key.clock, ends, silence)
for _, member in ipairs(alive_at(key.leases, max_lease_end(now, silence))) do -- a lease that would hardly ever expire
  redis.call('ZADD', key.leases, ends, member)
end
local plan, held_until = redis.call('GET', key.plan), tonumber(redis.call('ZSCORE', key.leases, arg.member))
local holds_lease = held_until and held_until > now
if arg.first == '0' and not holds_lease and plan and plan ~= arg.refuted then
  return {0, plan, {false, false, false}, 1, {'0', 0, 0}, string.format('%.0f', now)}
end
redis.call('ZADD', key.leases, ends, arg.member)
redis.call('HSET', key.clock, 'renewed_ms', now)
local is_same, before = is_same_counter(key.revision, arg.revision), redis.call('HGET', key.peers, arg.member)
if before ~= arg.peer then put_record(key.peers, key.peers_rev, key.revision, arg.member, arg.peer, arg.ttl) end
-- Redis does not expire members of a sorted set, so the first renewal after a lease ended wakes the waiting members.
local checked = tonumber(redis.call('HGET', key.clock, 'expiry_checked_ms')) or 0
redis.call('HSET', key.clock, 'expiry_checked_ms', now)
if (before and before ~= arg.peer) or redis.call('ZCOUNT', key.leases, '(' .. math.min(checked, now), now) > 0 then
  notify(key.revision, key.wakeups)
end
expire_keys(arg.ttl, {key.leases, key.clock, key.peers, key.run, key.peers_rev})
local peers = records_since(key.peers, key.peers_rev, is_same and arg.peers or '0')
return {1, false, read_revision(key.revision), alive_if_changed(key.leases, now, arg.alive), peers,
        string.format('%.0f', now)}
""",
)

END_LEASE = _script(
    "leases peers clock revision wakeups links peers_rev links_rev",
    "member forget",
    _FLAG,
    """
local ended
if arg.forget == '0' then -- score 0: expired but still listed, so a member that is alive after all can renew it
  ended = redis.call('ZADD', key.leases, 'XX', 'CH', 0, arg.member)
else
  remove_member(key.peers, key.peers_rev, arg.member)
  remove_member(key.links, key.links_rev, arg.member)
  ended = redis.call('ZREM', key.leases, arg.member)
  if ended == 1 then reset_clock(key.leases, key.clock) end
end
if ended == 1 then notify(key.revision, key.wakeups) end -- several guardians may report the same end
return ended
""",
)

LEAVE = _script(
    "leases clock leaving",
    "member silence_ms ttl record",
    (_LIST, _LIST),
    """
-- Returns the living members, and the records of those that leave.
redis.call('HSET', key.leaving, arg.member, arg.record)
redis.call('EXPIRE', key.leaving, arg.ttl)
return {alive_at(key.leases, lease_time(key.clock, tonumber(arg.silence_ms))), redis.call('HGETALL', key.leaving)}
""",
)

FOUND_OR_MATCH = _script(
    "run leases clock",
    "record ttl rejected silence_ms first",
    (_TEXT, _FLAG),
    """
-- Writes the run's record if there is none. Returns the record, and whether a member is alive. `first`: living members
-- get the time to restore a lost record.
local is_alive = #alive_at(key.leases, lease_time(key.clock, tonumber(arg.silence_ms))) > 0
local theirs = valid(redis.call('GET', key.run), arg.rejected)
if not theirs and not (is_alive and arg.first == '1') then
  theirs = arg.record
  redis.call('SET', key.run, theirs)
end
redis.call('EXPIRE', key.run, arg.ttl)
return {theirs, is_alive and 1 or 0}
""",
)

FORGET_DEAD_RUN = _script(
    "run leases clock",
    "lease_ms silence_ms",
    _FLAG,
    """
-- Deletes the run's record if no member holds a lease, so that nodes with other settings can resume the run.
local now = time_ms()
extend_after_outage(key.leases, key.clock, now + tonumber(arg.lease_ms), tonumber(arg.silence_ms))
redis.call('HSET', key.clock, 'renewed_ms', now) -- ends the outage: otherwise the leases would never expire
reset_clock(key.leases, key.clock)
if #alive_at(key.leases, now) > 0 then return 0 end
redis.call('DEL', key.run)
return 1
""",
)

RESTORE = _script(
    "plan committed history clock run ready:hash votes orders revision wakeups generation ready_rev:zset votes_rev"
    " failed",
    "ttl lease_ms keep round_ttl member plan committed run orders ready vote rejected_plan rejected_committed"
    " rejected_run rejected_orders rejected_ready rejected_vote generation vote_plan",
    _OUTCOME,
    """
-- Restores what the store lost from one member's backup; the highest committed round and the newest plan win.
-- Returns 1 if a record of the run was lost, 2 if a record without a header must be read and rejected first.
if not in_generation(key.generation, arg.generation) then return 0 end
local theirs = {plan = valid(redis.call('GET', key.plan), arg.rejected_plan),
                committed = valid(redis.call('GET', key.committed), arg.rejected_committed),
                orders = valid(redis.call('GET', key.orders), arg.rejected_orders)}
for _, raw in pairs(theirs) do if raw and not label(raw) then return 2 end end
local lost_run = redis.call('EXISTS', key.run) == 0
local function is_older(raw, ours)
  if ours == '' or raw == ours then return false end
  if not raw then return true end
  local round, version = label(raw)
  local our_round, our_version = label(ours)
  return round < our_round or (round == our_round and version < our_version)
end
local function put(key, record) redis.call('SET', key, record, 'EX', arg.ttl); lost_run = true end
if is_older(theirs.committed, arg.committed) then
  put(key.committed, arg.committed)
  push_history(key.history, arg.committed, arg.keep, arg.ttl)
end
local _, their_version = label(theirs.plan)
local _, our_version = label(arg.plan)
if arg.plan ~= '' and (not theirs.plan or their_version < our_version) then
  put(key.plan, arg.plan)
  delete_keys({key.votes, key.votes_rev, key.failed}) -- of another plan; each member restores its own
end
local _, _, id = label_at(key.plan)
if id ~= arg.vote_plan then arg.vote = '' end
if is_older(theirs.orders, arg.orders) then put(key.orders, arg.orders) end
if not valid(redis.call('GET', key.run), arg.rejected_run) then redis.call('SET', key.run, arg.run) end
redis.call('EXPIRE', key.run, arg.ttl)
local lost_own = false
local function put_own(hash, revisions, record, rejected)
  if record == '' then return end
  if not valid(redis.call('HGET', hash, arg.member), rejected) then
    put_record(hash, revisions, key.revision, arg.member, record, arg.round_ttl)
    lost_own = true
  end
  redis.call('EXPIRE', hash, arg.round_ttl)
end
put_own(key.ready, key.ready_rev, arg.ready, arg.rejected_ready)
put_own(key.votes, key.votes_rev, arg.vote, arg.rejected_vote)
-- Decide nothing for one lease: other members may hold newer records.
if lost_run then redis.call('HSET', key.clock, 'settling_until_ms', time_ms() + tonumber(arg.lease_ms)) end
redis.call('EXPIRE', key.clock, arg.ttl)
if lost_run or lost_own then
  -- A restored counter may assign numbers twice; a new id makes readers discard their cache, not skip changes.
  redis.call('HSET', key.revision, 'id', time_ms())
  notify(key.revision, key.wakeups)
end
return lost_run and 1 or 0
""",
)

PROBE_STORE = _script(
    "store_id generation member_reports reported_at committed forward_pointer split_brain",
    "new_id member member_report ttl fresh_ms",
    (bytes, _TEXT, _LIST, _TEXT, _TEXT, _TEXT),
    """
-- Reads a store that the run may switch to, after writing the member's report ('': read only).
redis.call('SET', key.store_id, arg.new_id, 'NX')
local now, reports = time_ms(), {}
if arg.member_report ~= '' then
  redis.call('HSET', key.member_reports, arg.member, arg.member_report)
  redis.call('HSET', key.reported_at, arg.member, now)
end
expire_keys(arg.ttl, {key.store_id, key.member_reports, key.reported_at})
local at = redis.call('HGETALL', key.reported_at)
for i = 1, #at, 2 do
  local age = now - (tonumber(at[i + 1]) or 0)
  if age >= 0 and age <= tonumber(arg.fresh_ms) then
    local report = redis.call('HGET', key.member_reports, at[i])
    if report then reports[#reports + 1] = at[i]; reports[#reports + 1] = report end
  else
    redis.call('HDEL', key.member_reports, at[i])
    redis.call('HDEL', key.reported_at, at[i])
  end
end
return {redis.call('GET', key.store_id), redis.call('GET', key.generation), reports, redis.call('GET', key.committed),
        redis.call('GET', key.forward_pointer), redis.call('GET', key.split_brain)}
""",
)

SET_FORWARD_POINTER = _script(
    "forward_pointer",
    "record ttl_ms rejected",
    _FLAG,
    """
local _, known = label(valid(redis.call('GET', key.forward_pointer), arg.rejected))
local _, number = label(arg.record)
if known and known > number then return 0 end -- of a later generation
redis.call('SET', key.forward_pointer, arg.record, 'PX', arg.ttl_ms)
return 1
""",
)

BEGIN_GENERATION = _script(
    "store_id generation plan committed history clock run leases orders revision wakeups votes votes_rev failed",
    "id generation rejected_generation plan committed run orders ttl keep lease_ms",
    _FLAG,
    """
-- Replaces this store's state by the handover state, unless the same or a newer generation began here.
-- MORE: its members.
if redis.call('GET', key.store_id) ~= arg.id then return 0 end
local _, newest = label(valid(redis.call('GET', key.generation), arg.rejected_generation))
local _, number = label(arg.generation)
if newest and newest >= number then return 0 end
local function replace(key, record)
  if record == '' then redis.call('DEL', key) else redis.call('SET', key, record, 'EX', arg.ttl) end
end
replace(key.generation, arg.generation)
replace(key.plan, arg.plan)
replace(key.committed, arg.committed)
replace(key.run, arg.run)
replace(key.orders, arg.orders)
delete_keys({key.votes, key.votes_rev, key.failed, key.leases})
if arg.committed ~= '' then push_history(key.history, arg.committed, arg.keep, arg.ttl) end
local now = time_ms()
for i = MORE, #ARGV do redis.call('ZADD', key.leases, now + tonumber(arg.lease_ms), ARGV[i]) end
if #ARGV >= MORE then redis.call('HSET', key.clock, 'renewed_ms', now) end
redis.call('HDEL', key.clock, 'settling_until_ms')
redis.call('HSET', key.revision, 'id', now)
notify(key.revision, key.wakeups)
return 1
""",
)

SET_ORDERS = _script(
    "orders revision wakeups",
    "current record ttl",
    _FLAG,
    """
if (redis.call('GET', key.orders) or '') ~= arg.current then return 0 end -- compare-and-set
redis.call('SET', key.orders, arg.record, 'EX', arg.ttl)
notify(key.revision, key.wakeups)
return 1
""",
)

ADD_ONCE = _script(
    "counter:string operation:string",
    "amount ttl",
    int,
    """
-- `operation` marks this addition as done, so that a retry after a lost answer does not add again.
if not string.match(redis.call('GET', key.counter) or '0', '^%-?%d+$') then redis.call('DEL', key.counter) end
if redis.call('SET', key.operation, 1, 'NX', 'EX', arg.ttl) then redis.call('INCRBY', key.counter, arg.amount) end
redis.call('EXPIRE', key.counter, arg.ttl)
return tonumber(redis.call('GET', key.counter))
""",
)

SELF_TEST = _script(
    "text:any hash:any list:any scores:any stream:any",
    "ttl",
    Exception | int,
    """
-- Runs each command that a run needs on scratch keys. Returns 1, or the error of the one that is refused.
local text, hash, list, scores, stream = key.text, key.hash, key.list, key.scores, key.stream
local refusal
local commands = {
  {'TIME'}, {'SET', text, 1, 'EX', arg.ttl}, -- first a write that needs memory: after one that does not, a full Redis
                                              -- accepts all writes of the script
  {'DEL', text}, {'DEL', hash}, {'DEL', list}, {'DEL', scores}, {'DEL', stream},
  {'SET', text, 1, 'NX', 'PX', 1000 * arg.ttl}, {'EXPIRE', text, arg.ttl}, {'TYPE', text}, {'EXISTS', text},
  {'GET', text}, {'MGET', text}, {'STRLEN', text}, {'GETRANGE', text, 0, 0}, {'INCRBY', text, 1},
  {'HSET', hash, 'a', 1}, {'HSETNX', hash, 'a', 1}, {'HINCRBY', hash, 'a', 1}, {'HEXISTS', hash, 'a'},
  {'HGET', hash, 'a'}, {'HMGET', hash, 'a'}, {'HGETALL', hash}, {'HLEN', hash}, {'HDEL', hash, 'a'},
  {'LPUSH', list, 1}, {'LRANGE', list, 0, -1}, {'LTRIM', list, 0, 0},
  {'ZADD', scores, 'XX', 'CH', 0, 'a'}, {'ZADD', scores, 1, 'a'}, {'ZCARD', scores}, {'ZCOUNT', scores, '(0', 1},
  {'ZRANGEBYSCORE', scores, '-inf', '+inf', 'WITHSCORES'}, {'ZSCORE', scores, 'a'}, {'ZREM', scores, 'a'},
  {'XADD', stream, 'MAXLEN', '~', 16, '1-0', 'a', 1}, {'XRANGE', stream, '-', '+', 'COUNT', 1},
  {'XREVRANGE', stream, '+', '-', 'COUNT', 1}, {'XDEL', stream, '1-0'},
}
for _, command in ipairs(commands) do
  local answer = redis.pcall(unpack(command))
  if is_error(answer) then
    refusal = {err = answer.err .. ' [' .. command[1] .. ']'}
    break
  end
end
if not refusal and redis.call('TYPE', text)['ok'] ~= 'string' then refusal = {err = 'ERR TYPE names no string'} end
if not refusal then
  mark_changed(hash, scores, 'a', arg.ttl)
  alive_if_changed(scores, 0, '')
end
for _, name in ipairs(KEYS) do redis.pcall('DEL', name) end
return refusal or 1
""",
)

READ = _script(
    "record:string plan committed",
    "",
    (_TEXT, _TEXT, _TEXT),
    """
return {redis.call('GET', key.record), redis.call('GET', key.plan), redis.call('GET', key.committed)}
""",
)

READ_HISTORY = _script("history", "", _LIST, "return redis.call('LRANGE', key.history, 0, -1)")

PUBLISH_LINKS = _script(
    "links revision links_rev",
    "member record ttl",
    _FLAG,
    """
put_record(key.links, key.links_rev, key.revision, arg.member, arg.record, arg.ttl)
-- Views show this number instead of the links, which only a proposer reads.
redis.call('HSET', key.revision, 'links', redis.call('HGET', key.revision, 'n'))
return 1
""",
)

READ_LINKS = _script(
    "links revision links_rev",
    "revision known",
    (_REVISION, _RECORDS),
    """
local known = is_same_counter(key.revision, arg.revision) and arg.known or '0'
return {read_revision(key.revision), records_since(key.links, key.links_rev, known)}
""",
)

ACQUIRE_MEASURING = _script(
    "measuring",
    "member limit duration_ms",
    _FLAG,
    """
-- A semaphore: `measuring` maps each holder to the time at which its slot expires.
local now = time_ms()
local duration = tonumber(arg.duration_ms)
for _, bounds in ipairs({{'-inf', now}, {'(' .. now + duration, '+inf'}}) do -- expired, or damaged
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key.measuring, bounds[1], bounds[2])) do
    redis.call('ZREM', key.measuring, member)
  end
end
if redis.call('ZCARD', key.measuring) >= tonumber(arg.limit) then return 0 end
redis.call('ZADD', key.measuring, now + duration, arg.member)
redis.call('EXPIRE', key.measuring, math.ceil(duration / 1000))
return 1
""",
)

CLAIM = _script(
    "claims leases",
    "member record ttl known",
    _FLAG,
    """
-- Compare-and-set on all claims (`known`: their digest); removes the claims of members without a lease.
local claims, fields = redis.call('HGETALL', key.claims), {}
for i = 1, #claims, 2 do fields[#fields + 1] = claims[i] .. ' ' .. claims[i + 1] end
table.sort(fields)
if redis.sha1hex(table.concat(fields, ' ')) ~= arg.known then return 0 end
remove_without_lease(key.claims, key.leases, claims)
redis.call('HSET', key.claims, arg.member, arg.record)
redis.call('EXPIRE', key.claims, arg.ttl)
return 1
""",
)

PUBLISH_HOLDING = _script(
    "holdings leases",
    "member record ttl",
    int,
    """
remove_without_lease(key.holdings, key.leases, redis.call('HGETALL', key.holdings))
redis.call('HSET', key.holdings, arg.member, arg.record)
return redis.call('EXPIRE', key.holdings, arg.ttl)
""",
)

SET_FIELD = _script(
    "hash:hash",
    "field record ttl",
    int,
    """
redis.call('HSET', key.hash, arg.field, arg.record)
return redis.call('EXPIRE', key.hash, arg.ttl)
""",
)

READ_HASH = _script("hash:hash", "", _LIST, "return redis.call('HGETALL', key.hash)")

TESTIFY = _script(
    "attempt:hash plan",
    "id member record ttl rejected again",
    _FLAG,
    """
-- A member's first evidence counts. Once the next plan is open, none is added: that plan's findings are based on what
-- was there. `again`: restores evidence that was there and was deleted from a kept attempt.
local field, _, _, open_id = 'said ' .. arg.member, label_at(key.plan)
if valid(redis.call('HGET', key.attempt, field), arg.rejected) then return 1 end
if open_id ~= arg.id and (arg.again == '0' or redis.call('HEXISTS', key.attempt, 'plan') == 0) then return 0 end
redis.call('HSET', key.attempt, field, arg.record)
return redis.call('EXPIRE', key.attempt, arg.ttl)
""",
)

READ_ATTEMPT = _script(
    "attempt:hash plan votes failed",
    "id",
    (_TEXT, _TEXT, _LIST, _LIST, bytes),
    """
-- Returns the plan, its failure and its votes if it is the current one; the kept records of the attempt; its tag.
local _, _, open_id = label_at(key.plan)
local kept = redis.call('HGETALL', key.attempt)
if open_id ~= arg.id then return {false, false, {}, kept, ''} end
return {redis.call('GET', key.plan), redis.call('GET', key.failed), redis.call('HGETALL', key.votes), kept,
        attempt_tag(key.attempt, key.votes, key.failed)}
""",
)

APPEND_FACTS = _script(
    "facts:stream recorders",
    "newest facts node snapshot is_new ttl max_entries max_bytes page known",
    (_FLAG, _LIST | bytes, bytes | int | None),
    """
-- Appends an entry if `newest` is the id of the newest one; otherwise returns the newest entries. `snapshot`: facts for
-- readers that come after their entries were trimmed; replaces the stored one if `is_new`, else is written only if
-- there is none. `known`: digest of the snapshot that the caller has read; another one is returned.
-- An entry stores the number of bytes before it, so that the stream can be trimmed by size.
local function size_of(entry) return #(entry[2][4] or '') end
local function offset_of(entry)
  local offset = tonumber(entry[2][2])
  return offset and offset >= 0 and offset < 2^52 and offset or 0
end
local newest = redis.call('XREVRANGE', key.facts, '+', '-', 'COUNT', 1)[1]
if (newest and newest[1] or '') ~= arg.newest then
  return {0, redis.call('XREVRANGE', key.facts, '+', '-', 'COUNT', arg.page), 0}
end
local offset = newest and offset_of(newest) + size_of(newest) or 0
-- A forged entry with the greatest possible id would block all later ones.
if newest and string.find(newest[1], '^1844674407370955%d%d%d%d%-') then
  redis.call('DEL', key.facts)
  deleted[#deleted + 1] = key.facts
  offset = 0
end
local id = redis.call('XADD', key.facts, 'MAXLEN', '~', arg.max_entries, '*',
                      'before', string.format('%.0f', offset), 'facts', arg.facts)
local total = offset + #arg.facts
for _ = 1, 256 do -- bounded: forged offsets must not keep the script, and with it all clients, busy
  local oldest = redis.call('XRANGE', key.facts, '-', '+', 'COUNT', 1)[1]
  local from = offset_of(oldest)
  if oldest[1] == id or (from <= total and total - from <= tonumber(arg.max_bytes)) then break end
  redis.call('XDEL', key.facts, oldest[1])
end
if arg.is_new == '1' then
  redis.call('HSET', key.recorders, arg.node, arg.snapshot)
elseif arg.snapshot ~= '' then
  redis.call('HSETNX', key.recorders, arg.node, arg.snapshot)
end
expire_keys(arg.ttl, {key.facts, key.recorders})
local snapshot = redis.call('HGET', key.recorders, arg.node)
if snapshot and redis.sha1hex(snapshot) == arg.known then snapshot = 1 end
return {1, id, snapshot}
""",
)

READ_FACTS = _script(
    "facts:any",
    "after count",
    _LIST,
    """
-- Returns the entries after this id, or from the oldest one on if it was trimmed. Readers delete nothing, so the type
-- is only checked.
if redis.call('TYPE', key.facts)['ok'] ~= 'stream' then return {} end
if arg.after ~= '' then
  local found = redis.call('XRANGE', key.facts, arg.after, '+', 'COUNT', arg.count + 1)
  if found[1] and found[1][1] == arg.after then
    table.remove(found, 1)
    return found
  end
end
return redis.call('XRANGE', key.facts, '-', '+', 'COUNT', arg.count)
""",
)

READ_RECORDERS = _script(
    "recorders:any",
    "",
    _LIST,
    """
if redis.call('TYPE', key.recorders)['ok'] ~= 'hash' then return {} end
return redis.call('HGETALL', key.recorders)
""",
)

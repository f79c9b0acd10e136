"""Lua scripts that run in Redis: compare-and-set of plans and verdicts, leases, and restoring a lost record.

Only the store's clock decides about leases. It stands still while no guardian renews: if all guardians stop at once,
it was the store that was away, and every member that held a lease when the silence began gets a fresh one.

A script touches only the keys that it is given as KEYS: some servers refuse any other. Scripts do not trust the data
that they find. A key of the wrong type is deleted and named in the answer. A script cannot check a seal, so its caller
names the values that it read and that do not verify (`rejected`); the script ignores them. A value that the caller has
not checked may be newer than its read: it must read again before it decides.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from zeroband.elastic.store.keys import RUN_TTL_S, Keys

if TYPE_CHECKING:
    from zeroband.elastic.store.connection import Shape

_PRELUDE = """
local mended = {}
local function mend(key, kind) -- so that no command fails by what somebody put there
  local is = redis.call('TYPE', key)['ok']
  if is ~= kind and is ~= 'none' then
    redis.call('DEL', key)
    mended[#mended + 1] = key
  end
end
local function judged(raw, rejected) -- a record, or nothing where it is empty or does not verify, as the caller found
  if raw and raw ~= '' and raw ~= rejected then return raw end
  return false
end
local function label(raw) -- round, version and id that a record names; nothing where it names none
  local round, version, id = string.match(raw or '', '^%x+ (%d+) (%d+) (%S+) ')
  return tonumber(round), tonumber(version), id
end
local function is_current(key, generation) -- whether a store of several is in it; empty: it is the only one
  if generation == '' then return true end
  local _, number, id = label(redis.call('GET', key))
  return number ~= nil and string.format('%.0f %s', number, id) == generation
end
local function time_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function pulse_of(clock) return tonumber(redis.call('HGET', clock, 'pulse')) end
local function is_silent(pulse, now, silence) -- a pulse ahead of now: the server's clock was set back
  return pulse and (now < pulse or now - pulse > silence)
end
local function reading(clock, silence) -- the time by which leases count; it stands still while no guardian renews
  local now, pulse = time_ms(), pulse_of(clock)
  if is_silent(pulse, now, silence) then return pulse end
  return now
end
local function holds(leases, member, at)
  local ends = tonumber(redis.call('ZSCORE', leases, member))
  return ends and ends > at
end
local function alive_at(leases, at) return redis.call('ZRANGEBYSCORE', leases, '(' .. at, '+inf') end
local function alive_unless(leases, at, known) -- who is alive; 1 where that digest is of the same members
  local alive = alive_at(leases, at)
  table.sort(alive)
  if redis.sha1hex(table.concat(alive, ' ')) == known then return 1 end
  return alive
end
local function is_torn(leases, clock) -- one of the two was lost, or the clock set back: whose lease held is not known
  local now, pulse = time_ms(), pulse_of(clock)
  return (pulse == nil) ~= (redis.call('EXISTS', leases) == 0) or (pulse and now < pulse) or false
end
local function wake(leases, clock, ends, silence) -- who held a lease when a silence began gets a fresh one
  local now, pulse = time_ms(), pulse_of(clock)
  if not is_silent(pulse, now, silence) then return end
  local dead = redis.call('ZRANGEBYSCORE', leases, '-inf', pulse)
  for _, member in ipairs(alive_at(leases, pulse)) do
    redis.call('ZADD', leases, ends, member)
  end
  -- Who was dead stays so, also by a clock that was set back, and stays listed: it may take its lease again.
  for _, member in ipairs(dead) do redis.call('ZADD', leases, 0, member) end
end
local function longest(now, silence) return now + 8 * silence end -- four leases, which are equal on all nodes
local function is_settling(leases, clock, silence)
  local settled, now = tonumber(redis.call('HGET', clock, 'settled')), time_ms()
  return is_torn(leases, clock) or (settled and now < settled and settled <= longest(now, silence)) or false
end
local function forget_stopped_clock(leases, clock) -- without leases: the next one restarts the clock
  if redis.call('EXISTS', leases) == 0 then redis.call('HDEL', clock, 'pulse') end
end
local function drop(keys)
  for _, key in ipairs(keys) do redis.call('DEL', key) end
end
local function let_live(ttl, keys)
  for _, key in ipairs(keys) do redis.call('EXPIRE', key, ttl) end
end
local function keep_in_history(history, verdict, keep, ttl) -- as the newest, if it is not there
  if redis.call('LRANGE', history, 0, 0)[1] ~= verdict then redis.call('LPUSH', history, verdict) end
  redis.call('LTRIM', history, 0, keep - 1)
  redis.call('EXPIRE', history, ttl)
end
local function known_of(attempt, votes, failed) -- tells what is known of the current plan from what was
  return redis.call('HLEN', attempt) .. ' ' .. redis.call('HLEN', votes) .. ' ' .. (redis.call('GET', failed) or '')
end
local function is_error(answer) return type(answer) == 'table' and answer.err ~= nil end
local function next_change(changes) -- numbers every write that a view shows
  if redis.call('HEXISTS', changes, 'born') == 0 then redis.call('HSET', changes, 'born', time_ms()) end
  local n = redis.pcall('HINCRBY', changes, 'n', 1) -- pcall: somebody may have put a word there, or the last number
  if not is_error(n) then return n end
  redis.call('DEL', changes)
  redis.call('HSET', changes, 'born', time_ms(), 'n', 1)
  return 1
end
local function tell(changes, news) -- and wake those who wait for what decides
  local n = next_change(changes)
  for _ = 1, 2 do
    if not is_error(redis.pcall('XADD', news, 'MAXLEN', '16', string.format('%.0f-0', n), 'n', '1')) then break end
    redis.call('DEL', news) -- a stream takes no smaller id than its last, and that is of a counter that was lost
  end
  redis.call('EXPIRE', news, RUN_TTL)
  redis.call('EXPIRE', changes, RUN_TTL)
end
local function follows(changes, seen) -- whether the changes go on from those that a caller has seen, as `born:n`
  local born, n = string.match(seen, '^(.*):(%d+)$')
  return born ~= '' and born == redis.call('HGET', changes, 'born')
         and tonumber(n) <= (tonumber(redis.call('HGET', changes, 'n')) or -1)
end
local function note(changes, times, member, ttl) -- times: member -> number of the change that its word came with
  redis.call('ZADD', times, next_change(changes), member)
  redis.call('EXPIRE', times, ttl)
end
local function forget(words, times, member)
  redis.call('HDEL', words, member)
  redis.call('ZREM', times, member)
end
local function since(words, times, known) -- how many there are, whether these are all of them, those after a change
  -- (a count is a string, of which the answer says how long it is: a byte that is lost on the way is noticed)
  local many = redis.call('HLEN', words)
  if known == '0' or redis.call('ZCARD', times) ~= many then
    return {tostring(many), 1, redis.call('HGETALL', words)}
  end
  local members, found = redis.call('ZRANGEBYSCORE', times, '(' .. known, '+inf'), {}
  for i = 1, #members, 1000 do -- Lua's stack holds the arguments of a call
    local some = {unpack(members, i, math.min(i + 999, #members))}
    local said = redis.call('HMGET', words, unpack(some))
    for j, member in ipairs(some) do
      if said[j] then found[#found + 1] = member; found[#found + 1] = said[j] end
    end
  end
  return {tostring(many), 0, found}
end
local function tag(key) -- tells a sealed record from the one that a caller knows: its MAC, and its length
  local length = redis.call('STRLEN', key)
  if length == 0 then return '' end
  return redis.call('GETRANGE', key, 0, 31) .. length
end
local function unless(key, known) -- the record of this key; 1 where it is the one that the caller knows
  if tag(key) == known then return 1 end
  return redis.call('GET', key)
end
local function changed(key, known, patch, expected)
  -- as above; 2 where it is the one that the caller expects, '-': any; what is another in it, where that knows the one
  -- before
  local is = tag(key)
  if is == known then return 1 end
  if is ~= '' and (is == expected or expected == '-') then return 2 end
  local made, at = known ~= '' and redis.call('GET', patch) or '', #known + 2
  if string.sub(made, 1, at - 1) == known .. ' ' and string.sub(made, at, at + 31) == string.sub(is, 1, 32) then
    return {string.sub(made, at)}
  end
  return redis.call('GET', key)
end
""".replace("RUN_TTL", str(RUN_TTL_S))


class Script(NamedTuple):
    """A script, as it is loaded into a server."""

    text: str
    keys: tuple[str, ...]
    """Names of its keys in their order: as `Keys` has them, or as the caller places them."""
    answer: Shape
    """Shape of its result."""


_TEXT, _NEWS = bytes | None, bytes | int | None
_FLAG, _OUTCOME = frozenset((0, 1)), frozenset((0, 1, 2))
_LIST: type = list
_TIMES = (_TEXT, _TEXT, _TEXT)
_WORDS = (bytes, _FLAG, _LIST | int)


def _script(keys: str, args: str, answer: Shape, body: str) -> Script:
    """A script that names its keys and arguments, as `key.plan` and `arg.round`; in what runs these are numbers.

    `keys`: those that `Keys` has, of the kind that it says; NAME:KIND for any other, or where the script itself looks
    after a kind ("any"). `args`: in the order in which they are given; those given beyond them begin at MORE.
    The script answers with the keys that were of another kind, which it has deleted, and its result.
    """
    declared = [_kind_of(key) for key in keys.split()]
    mending = [f"mend(KEYS[{i}], '{kind}')" for i, (_, kind) in enumerate(declared, 1) if kind != "any"]
    places = {f"key.{name}": f"KEYS[{i}]" for i, (name, _) in enumerate(declared, 1)}
    places |= {f"arg.{name}": f"ARGV[{i}]" for i, name in enumerate(args.split(), 1)}
    placed = re.sub(r"\b(?:key|arg)\.\w+", lambda found: places[found[0]], body)  # KeyError: our mistake
    placed = placed.replace("MORE", str(len(args.split()) + 1))
    main = f"local function main()\n{placed}\nend\nlocal result = main()\nreturn {{mended, result}}\n"
    return Script("\n".join((_PRELUDE, *mending, main)), tuple(name for name, _ in declared), answer)


def _kind_of(key: str) -> tuple[str, str]:
    name, _, kind = key.partition(":")
    return name, kind or getattr(Keys, name).kind


VIEW = _script(
    "plan committed leases clock peers run ready:hash orders restart_point changes generation plan_patch"
    " committed_patch peers_at ready_at:zset votes votes_at failed",
    "silence_ms changes tag_plan tag_committed tag_failed tag_run tag_orders tag_restart_point tag_generation alive"
    " ready peers votes_of votes whole enough_ready enough_votes member tag_ready tag_vote tag_expected"
    " word ttl generation word_on",
    (_TIMES, _NEWS | _LIST, _NEWS | _LIST, *(_NEWS,) * 5, _LIST | int, _WORDS, _WORDS, _WORDS, _FLAG, _NEWS, _NEWS),
    """
-- From `changes` to `votes` arguments say what the caller knows. From `word` on they may be missing.
-- What a member says is written first, if the store is in that generation; its first word counts. With the id of an
-- plan it is a vote, and counts if that is the current one. Told is what is another than the caller knows. Who is
-- ready and who has voted is told where it is asked for (`whole`), and where there are enough of them; else how many,
-- and what this member itself said: 1 where it is the word that the caller knows, 0 where there is none.
local goes_on = follows(key.changes, arg.changes)
local function known(change) return goes_on and change or '0' end
local _, _, id = label(redis.call('GETRANGE', key.plan, 0, 255))
if arg.word and is_current(key.generation, arg.generation) and (arg.word_on == '' or arg.word_on == id) then
  local words, times = key.ready, key.ready_at
  if arg.word_on ~= '' then words, times = key.votes, key.votes_at end
  -- A call whose answer was lost is made again, and must neither change a word nor number it anew.
  if redis.call('HSETNX', words, arg.member, arg.word) == 1 then note(key.changes, times, arg.member, arg.ttl) end
  redis.call('EXPIRE', words, arg.ttl)
end
local function own(words, known)
  local word = redis.call('HGET', words, arg.member)
  if word and known ~= '' and string.sub(word, 1, 32) .. #word == known then return 1 end
  return word or 0
end
local function told(words, times, change, enough) -- where they are asked for
  local many = redis.call('HLEN', words)
  if arg.whole == '1' or many >= tonumber(enough) then return since(words, times, known(change)) end
  return {tostring(many), 0, 0}
end
local votes, own_vote, failed = {'0', 1, {}}, 0, false
if id then
  if id ~= arg.votes_of then arg.votes, arg.tag_vote, arg.tag_failed = '0', '', '' end -- known of another plan
  own_vote, failed = own(key.votes, arg.tag_vote), unless(key.failed, arg.tag_failed)
  votes = told(key.votes, key.votes_at, arg.votes, arg.enough_votes)
end
local silence = tonumber(arg.silence_ms)
return {redis.call('HMGET', key.changes, 'born', 'n', 'links'),
        changed(key.plan, arg.tag_plan, key.plan_patch, ''),
        changed(key.committed, arg.tag_committed, key.committed_patch, arg.tag_expected),
        failed, unless(key.run, arg.tag_run), unless(key.orders, arg.tag_orders),
        unless(key.restart_point, arg.tag_restart_point), unless(key.generation, arg.tag_generation),
        alive_unless(key.leases, reading(key.clock, silence), arg.alive),
        told(key.ready, key.ready_at, arg.ready, arg.enough_ready), since(key.peers, key.peers_at, known(arg.peers)),
        votes, is_settling(key.leases, key.clock, silence) and 1 or 0, own(key.ready, arg.tag_ready), own_vote}
""",
)

OPEN = _script(
    "plan committed clock orders leases changes news generation plan_patch votes votes_at:any failed"
    " last_votes:any attempt:hash",
    "current round record ttl orders silence_ms rejected_plan rejected_committed rejected_orders generation patch"
    " heard spent_ttl",
    _FLAG,
    """
-- `heard`: what the caller knew of the current plan; empty: it does not matter.
if not is_current(key.generation, arg.generation) then return 0 end
local committed = judged(redis.call('GET', key.committed), arg.rejected_committed)
local orders = judged(redis.call('GET', key.orders), arg.rejected_orders)
if (judged(redis.call('GET', key.plan), arg.rejected_plan) or '') ~= arg.current then return 0 end
if is_settling(key.leases, key.clock, tonumber(arg.silence_ms)) then return 0 end
local round = label(committed)
if committed and (not round or round >= tonumber(arg.round)) then return 0 end
local _, version = label(orders) -- who has not seen an order begins no round without it
if orders and not version or (version or 0) ~= tonumber(arg.orders) then return 0 end
local _, _, open = label(redis.call('GETRANGE', key.plan, 0, 255))
local _, _, done = label(committed)
if arg.heard ~= '' and redis.sha1hex(known_of(key.attempt, key.votes, key.failed)) ~= arg.heard then return 0 end
if open and open == done then -- those who were not in that round ask for its votes
  redis.call('DEL', key.last_votes)
  local votes = redis.call('HGETALL', key.votes)
  for i = 1, #votes, 2 do redis.call('HSET', key.last_votes, votes[i], votes[i + 1]) end
  redis.call('EXPIRE', key.last_votes, arg.ttl)
elseif open and arg.current ~= '' then -- and those who check what follows from it ask for all of it
  redis.call('HSET', key.attempt, 'plan', arg.current)
  local votes, failed = redis.call('HGETALL', key.votes), redis.call('GET', key.failed)
  for i = 1, #votes, 2 do redis.call('HSET', key.attempt, 'vote ' .. votes[i], votes[i + 1]) end
  if failed then redis.call('HSET', key.attempt, 'failed', failed) end
  redis.call('EXPIRE', key.attempt, arg.spent_ttl)
end
redis.call('SET', key.plan, arg.record, 'EX', arg.ttl)
redis.call('SET', key.plan_patch, arg.patch, 'EX', arg.ttl)
drop({key.votes, key.votes_at, key.failed}) -- they were of the one before
tell(key.changes, key.news)
return 1
""",
)

BEGIN = _script(
    "restart_point plan committed clock leases changes news",
    "restart_point plan committed record ttl silence_ms rejected_restart_point rejected_plan rejected_committed",
    _FLAG,
    """
local function is_as_seen(key, seen, rejected) return (judged(redis.call('GET', key), rejected) or '') == seen end
if not is_as_seen(key.restart_point, arg.restart_point, arg.rejected_restart_point)
   or not is_as_seen(key.plan, arg.plan, arg.rejected_plan)
   or not is_as_seen(key.committed, arg.committed, arg.rejected_committed) then return 0 end
if is_settling(key.leases, key.clock, tonumber(arg.silence_ms)) then return 0 end
redis.call('SET', key.restart_point, arg.record, 'EX', arg.ttl)
tell(key.changes, key.news)
return 1
""",
)

COMMIT = _script(
    "plan committed history failed leases peers clock ready:hash votes orders changes news links generation"
    " committed_patch run ready_at:zset votes_at peers_at links_at",
    "plan round record ttl keep silence_ms spent_ttl rejected_committed rejected_failed generation patch run orders"
    " next_orders",
    _OUTCOME,
    """
-- MORE: the members that the plan lists. `run`: what all nodes share, for the session that begins here, if one
-- does.
-- Returns 2 where the orders are others than the caller has seen, which this round would change.
if not is_current(key.generation, arg.generation) then return 0 end
local silence = tonumber(arg.silence_ms)
local committed = judged(redis.call('GET', key.committed), arg.rejected_committed)
if redis.call('GET', key.plan) ~= arg.plan or is_settling(key.leases, key.clock, silence) then return 0 end
local round = label(committed)
if committed and (not round or round >= tonumber(arg.round)) then return 0 end
if judged(redis.call('GET', key.failed), arg.rejected_failed) then return 0 end -- who saw it fail dropped the result
if arg.next_orders ~= '' then
  if redis.call('GET', key.orders) ~= arg.orders then return 2 end
  redis.call('SET', key.orders, arg.next_orders, 'EX', arg.ttl)
end
if arg.run ~= '' then redis.call('SET', key.run, arg.run, 'EX', arg.ttl) end
redis.call('SET', key.committed, arg.record, 'EX', arg.ttl)
redis.call('SET', key.committed_patch, arg.patch, 'EX', arg.ttl)
redis.call('LPUSH', key.history, arg.record)
redis.call('LTRIM', key.history, 0, arg.keep - 1)
redis.call('EXPIRE', key.history, arg.ttl)
let_live(arg.spent_ttl, {key.ready, key.votes, key.ready_at, key.votes_at})
local listed = {}
for i = MORE, #ARGV do listed[ARGV[i]] = true end
local at = reading(key.clock, silence)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', key.leases, '-inf', at)) do -- forget the dead that cannot return
  if not listed[member] then
    redis.call('ZREM', key.leases, member)
    forget(key.peers, key.peers_at, member)
    forget(key.links, key.links_at, member)
  end
end
tell(key.changes, key.news)
return 1
""",
)

FAIL = _script(
    "committed failed changes news plan",
    "version reason ttl rejected_committed rejected_failed id",
    _FLAG,
    """
-- A plan is either committed or failed, never both. One that is not the current one cannot be finished anyway.
local committed = judged(redis.call('GET', key.committed), arg.rejected_committed)
local _, version = label(committed)
if committed and (not version or version >= tonumber(arg.version)) then return 0 end
local _, _, id = label(redis.call('GETRANGE', key.plan, 0, 255))
if id ~= arg.id then return 1 end
if not judged(redis.call('GET', key.failed), arg.rejected_failed) then redis.call('DEL', key.failed) end
redis.call('SET', key.failed, arg.reason, 'NX', 'EX', arg.ttl)
tell(key.changes, key.news)
return 1
""",
)

RENEW = _script(
    "leases clock peers plan run changes news peers_at",
    "member lease_ms silence_ms first peer ttl refuted changes alive peers",
    (_FLAG, _TEXT, _TIMES, _LIST | int, _WORDS, bytes),
    """
-- A lease that ran out is taken again where the current plan lists its member: no verdict is newer than that. The
-- caller reads the plan; `refuted`: the one that does not keep it from its lease. Leases that ran out since anybody
-- looked are told to who waits. `changes`, `alive` and `peers` say what the caller knows.
local now, silence = time_ms(), tonumber(arg.silence_ms)
local ends = now + tonumber(arg.lease_ms)
if is_torn(key.leases, key.clock) then redis.call('HSET', key.clock, 'settled', ends) end -- all get the time to renew
wake(key.leases, key.clock, ends, silence)
for _, member in ipairs(alive_at(key.leases, longest(now, silence))) do redis.call('ZADD', key.leases, ends, member) end
local plan = redis.call('GET', key.plan)
if arg.first == '0' and not holds(key.leases, arg.member, now) and plan and plan ~= arg.refuted then
  return {0, plan, {false, false, false}, 1, {'0', 0, 0}, string.format('%.0f', now)}
end
redis.call('ZADD', key.leases, ends, arg.member)
redis.call('HSET', key.clock, 'pulse', now)
local goes_on, before = follows(key.changes, arg.changes), redis.call('HGET', key.peers, arg.member)
if before ~= arg.peer then
  redis.call('HSET', key.peers, arg.member, arg.peer)
  note(key.changes, key.peers_at, arg.member, arg.ttl)
end
local swept = tonumber(redis.call('HGET', key.clock, 'swept')) or 0
redis.call('HSET', key.clock, 'swept', now)
if (before and before ~= arg.peer) or redis.call('ZCOUNT', key.leases, '(' .. math.min(swept, now), now) > 0 then
  tell(key.changes, key.news)
end
let_live(arg.ttl, {key.leases, key.clock, key.peers, key.run, key.peers_at})
local times = redis.call('HMGET', key.changes, 'born', 'n', 'links')
local peers = since(key.peers, key.peers_at, goes_on and arg.peers or '0')
return {1, false, times, alive_unless(key.leases, now, arg.alive), peers, string.format('%.0f', now)}
""",
)

END_LEASE = _script(
    "leases peers clock changes news links peers_at links_at",
    "member forget",
    _FLAG,
    """
-- It stays listed as one that was alive a moment ago, so that it may take the lease again if it is alive after all.
local ended
if arg.forget == '0' then
  ended = redis.call('ZADD', key.leases, 'XX', 'CH', 0, arg.member)
else
  forget(key.peers, key.peers_at, arg.member)
  forget(key.links, key.links_at, arg.member)
  ended = redis.call('ZREM', key.leases, arg.member)
  if ended == 1 then forget_stopped_clock(key.leases, key.clock) end
end
if ended == 1 then tell(key.changes, key.news) end -- once: a guardian may be told of an end twice
return ended
""",
)

LEAVE = _script(
    "leases clock leaving",
    "member silence_ms ttl word",
    (_LIST, _LIST),
    """
-- Returns the living members, and who leaves.
redis.call('HSET', key.leaving, arg.member, arg.word)
redis.call('EXPIRE', key.leaving, arg.ttl)
return {alive_at(key.leases, reading(key.clock, tonumber(arg.silence_ms))), redis.call('HGETALL', key.leaving)}
""",
)

FOUND = _script(
    "run:any leases clock",
    "record ttl rejected silence_ms first",
    (_TEXT, _TEXT, _FLAG),
    """
-- Returns the run's record, the protocol of an older version that kept it as a hash, and whether somebody is alive.
-- `first`: it is left to the living ones to bring back what the store has lost.
local is_alive, protocol = #alive_at(key.leases, reading(key.clock, tonumber(arg.silence_ms))) > 0, false
if redis.call('TYPE', key.run)['ok'] == 'hash' then protocol = redis.call('HGET', key.run, 'protocol') end
if protocol then return {false, protocol, is_alive and 1 or 0} end
mend(key.run, 'string')
local theirs = judged(redis.call('GET', key.run), arg.rejected)
if not theirs and not (is_alive and arg.first == '1') then
  theirs = arg.record
  redis.call('SET', key.run, theirs)
end
redis.call('EXPIRE', key.run, arg.ttl)
return {theirs, false, is_alive and 1 or 0}
""",
)

CLEAR = _script(
    "run leases clock",
    "lease_ms silence_ms",
    _FLAG,
    """
-- Forgets what the nodes of a run shared, once none of them holds a lease: those that resume it may differ from them.
local now = time_ms()
wake(key.leases, key.clock, now + tonumber(arg.lease_ms), tonumber(arg.silence_ms))
redis.call('HSET', key.clock, 'pulse', now) -- or the clock of the leases would stand still
forget_stopped_clock(key.leases, key.clock)
if #alive_at(key.leases, now) > 0 then return 0 end
redis.call('DEL', key.run)
return 1
""",
)

RESTORE = _script(
    "plan committed history clock run ready:hash votes orders changes news generation ready_at:zset votes_at failed",
    "ttl lease_ms keep round_ttl member plan committed run orders ready vote rejected_plan rejected_committed"
    " rejected_run rejected_orders rejected_ready rejected_vote generation vote_on",
    _OUTCOME,
    """
-- Members tell what they remember; the highest committed round and the newest plan win.
-- Returns 1 where the store had lost any of it, 2 where a part must be looked at once more before.
if not is_current(key.generation, arg.generation) then return 0 end
local theirs = {plan = judged(redis.call('GET', key.plan), arg.rejected_plan),
                committed = judged(redis.call('GET', key.committed), arg.rejected_committed),
                orders = judged(redis.call('GET', key.orders), arg.rejected_orders)}
for _, raw in pairs(theirs) do if raw and not label(raw) then return 2 end end
local changed = redis.call('EXISTS', key.run) == 0
local function is_older(raw, ours)
  if ours == '' or raw == ours then return false end
  if not raw then return true end
  local round, version = label(raw)
  local our_round, our_version = label(ours)
  return round < our_round or (round == our_round and version < our_version)
end
local function put(key, record) redis.call('SET', key, record, 'EX', arg.ttl); changed = true end
if is_older(theirs.committed, arg.committed) then
  put(key.committed, arg.committed)
  keep_in_history(key.history, arg.committed, arg.keep, arg.ttl)
end
local _, their_version = label(theirs.plan)
local _, our_version = label(arg.plan)
if arg.plan ~= '' and (not theirs.plan or their_version < our_version) then
  put(key.plan, arg.plan)
  drop({key.votes, key.votes_at, key.failed}) -- members give theirs again
end
local _, _, id = label(redis.call('GETRANGE', key.plan, 0, 255))
if id ~= arg.vote_on then arg.vote = '' end
if is_older(theirs.orders, arg.orders) then put(key.orders, arg.orders) end
if not judged(redis.call('GET', key.run), arg.rejected_run) then redis.call('SET', key.run, arg.run) end
redis.call('EXPIRE', key.run, arg.ttl)
local is_older_file = false
local function put_word(words, times, word, rejected)
  if word == '' then return end
  if not judged(redis.call('HGET', words, arg.member), rejected) then
    redis.call('HSET', words, arg.member, word)
    note(key.changes, times, arg.member, arg.round_ttl)
    is_older_file = true
  end
  redis.call('EXPIRE', words, arg.round_ttl)
end
put_word(key.ready, key.ready_at, arg.ready, arg.rejected_ready)
put_word(key.votes, key.votes_at, arg.vote, arg.rejected_vote)
if changed then redis.call('HSET', key.clock, 'settled', time_ms() + tonumber(arg.lease_ms)) end
redis.call('EXPIRE', key.clock, arg.ttl)
if changed or is_older_file then
  redis.call('HSET', key.changes, 'born', time_ms()) -- it may count changes a second time, which readers must not skip
  tell(key.changes, key.news)
end
return changed and 1 or 0
""",
)

TELL_MEMBER_REPORT = _script(
    "store_id generation member_reports told_at committed elsewhere meeting",
    "new_id member member_report ttl fresh_ms",
    (bytes, _TEXT, _LIST, _TEXT, _TEXT, _TEXT),
    """
-- What a member tells that may go to this store; empty: it only looks. Returns the store's id, its generation, what was
-- told within the last moments, the newest verdict, where the run goes on, and two lines that met.
redis.call('SET', key.store_id, arg.new_id, 'NX')
local now, found = time_ms(), {}
if arg.member_report ~= '' then
  redis.call('HSET', key.member_reports, arg.member, arg.member_report)
  redis.call('HSET', key.told_at, arg.member, now)
end
let_live(arg.ttl, {key.store_id, key.member_reports, key.told_at})
local at = redis.call('HGETALL', key.told_at)
for i = 1, #at, 2 do
  local age = now - (tonumber(at[i + 1]) or 0)
  if age >= 0 and age <= tonumber(arg.fresh_ms) then
    local said = redis.call('HGET', key.member_reports, at[i])
    if said then found[#found + 1] = at[i]; found[#found + 1] = said end
  else
    redis.call('HDEL', key.member_reports, at[i])
    redis.call('HDEL', key.told_at, at[i])
  end
end
return {redis.call('GET', key.store_id), redis.call('GET', key.generation), found, redis.call('GET', key.committed),
        redis.call('GET', key.elsewhere), redis.call('GET', key.meeting)}
""",
)

TELL_FORWARD_POINTER = _script(
    "elsewhere",
    "record ttl_ms rejected",
    _FLAG,
    """
-- Where the run goes on, unless a newer word is there.
local _, known = label(judged(redis.call('GET', key.elsewhere), arg.rejected))
local _, number = label(arg.record)
if known and known > number then return 0 end
redis.call('SET', key.elsewhere, arg.record, 'PX', arg.ttl_ms)
return 1
""",
)

BEGIN_GENERATION = _script(
    "store_id generation plan committed history clock run leases orders changes news votes votes_at failed",
    "id generation rejected_generation plan committed run orders ttl keep lease_ms",
    _FLAG,
    """
-- A generation begins here, with what those who promised it know; unless a newer one did. MORE: its members.
if redis.call('GET', key.store_id) ~= arg.id then return 0 end
local _, newest = label(judged(redis.call('GET', key.generation), arg.rejected_generation))
local _, number = label(arg.generation)
if newest and newest >= number then return 0 end
local function begin_with(key, record)
  if record == '' then redis.call('DEL', key) else redis.call('SET', key, record, 'EX', arg.ttl) end
end
begin_with(key.generation, arg.generation)
begin_with(key.plan, arg.plan)
begin_with(key.committed, arg.committed)
begin_with(key.run, arg.run)
begin_with(key.orders, arg.orders)
drop({key.votes, key.votes_at, key.failed})
if arg.committed ~= '' then keep_in_history(key.history, arg.committed, arg.keep, arg.ttl) end
local now = time_ms()
redis.call('DEL', key.leases)
for i = MORE, #ARGV do redis.call('ZADD', key.leases, now + tonumber(arg.lease_ms), ARGV[i]) end
if #ARGV >= MORE then redis.call('HSET', key.clock, 'pulse', now) end
redis.call('HDEL', key.clock, 'settled')
redis.call('HSET', key.changes, 'born', now)
tell(key.changes, key.news)
return 1
""",
)

ORDER = _script(
    "orders changes news",
    "current record ttl",
    _FLAG,
    """
-- Only on the orders that were looked at.
if (redis.call('GET', key.orders) or '') ~= arg.current then return 0 end
redis.call('SET', key.orders, arg.record, 'EX', arg.ttl)
tell(key.changes, key.news)
return 1
""",
)

ADD_ONCE = _script(
    "counter:string sign:string",
    "amount ttl",
    int,
    """
-- `sign` marks this addition, so that one whose answer was lost is not made twice.
if not string.match(redis.call('GET', key.counter) or '0', '^%-?%d+$') then redis.call('DEL', key.counter) end
if redis.call('SET', key.sign, 1, 'NX', 'EX', arg.ttl) then redis.call('INCRBY', key.counter, arg.amount) end
redis.call('EXPIRE', key.counter, arg.ttl)
return tonumber(redis.call('GET', key.counter))
""",
)

SELF_TEST = _script(
    "text:any words:any list:any scores:any stream:any",
    "ttl",
    Exception | int,
    """
-- Says each command of a run once, on keys that mean nothing. Returns 1, or the error of the one that is refused.
local text, words, list, scores, stream = key.text, key.words, key.list, key.scores, key.stream
local refusal
local commands = {
  {'TIME'}, {'SET', text, 1, 'EX', arg.ttl}, -- before a write that takes no memory, which lets others take some
  {'DEL', text}, {'DEL', words}, {'DEL', list}, {'DEL', scores}, {'DEL', stream},
  {'SET', text, 1, 'NX', 'PX', 1000 * arg.ttl}, {'EXPIRE', text, arg.ttl}, {'TYPE', text}, {'EXISTS', text},
  {'GET', text}, {'MGET', text}, {'STRLEN', text}, {'GETRANGE', text, 0, 0}, {'INCRBY', text, 1},
  {'HSET', words, 'a', 1}, {'HSETNX', words, 'a', 1}, {'HINCRBY', words, 'a', 1}, {'HEXISTS', words, 'a'},
  {'HGET', words, 'a'}, {'HMGET', words, 'a'}, {'HGETALL', words}, {'HLEN', words}, {'HDEL', words, 'a'},
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
  note(words, scores, 'a', arg.ttl)
  alive_unless(scores, 0, '')
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

READ_HISTORY = _script(
    "history",
    "",
    _LIST,
    """
return redis.call('LRANGE', key.history, 0, -1)
""",
)

TELL_LINKS = _script(
    "links changes links_at",
    "member record ttl",
    _FLAG,
    """
redis.call('HSET', key.links, arg.member, arg.record)
note(key.changes, key.links_at, arg.member, arg.ttl)
redis.call('HSET', key.changes, 'links', redis.call('HGET', key.changes, 'n'))
redis.call('EXPIRE', key.links, arg.ttl)
return 1
""",
)

READ_LINKS = _script(
    "links changes links_at",
    "changes known",
    (_TIMES, _WORDS),
    """
local known = follows(key.changes, arg.changes) and arg.known or '0'
return {redis.call('HMGET', key.changes, 'born', 'n', 'links'), since(key.links, key.links_at, known)}
""",
)

MEASURE = _script(
    "measuring",
    "member most lasts_ms",
    _FLAG,
    """
-- measuring: member -> when its measurement is over at the latest
local now = time_ms()
local lasts = tonumber(arg.lasts_ms)
for _, bounds in ipairs({{'-inf', now}, {'(' .. now + lasts, '+inf'}}) do
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key.measuring, bounds[1], bounds[2])) do
    redis.call('ZREM', key.measuring, member)
  end
end
if redis.call('ZCARD', key.measuring) >= tonumber(arg.most) then return 0 end
redis.call('ZADD', key.measuring, now + lasts, arg.member)
redis.call('EXPIRE', key.measuring, math.ceil(lasts / 1000))
return 1
""",
)

CLAIM = _script(
    "claims leases",
    "member record ttl known",
    _FLAG,
    """
-- Only if the claims are still those that were read (`known`: their digest); those of the dead are removed.
local said, words = redis.call('HGETALL', key.claims), {}
for i = 1, #said, 2 do words[#words + 1] = said[i] .. ' ' .. said[i + 1] end
table.sort(words)
if redis.sha1hex(table.concat(words, ' ')) ~= arg.known then return 0 end
for i = 1, #said, 2 do
  if not redis.call('ZSCORE', key.leases, said[i]) then redis.call('HDEL', key.claims, said[i]) end
end
redis.call('HSET', key.claims, arg.member, arg.record)
redis.call('EXPIRE', key.claims, arg.ttl)
return 1
""",
)

SAY = _script(
    "said:hash",
    "who word ttl",
    int,
    """
redis.call('HSET', key.said, arg.who, arg.word)
return redis.call('EXPIRE', key.said, arg.ttl)
""",
)

TESTIFY = _script(
    "attempt:hash plan",
    "id member word ttl rejected again",
    _FLAG,
    """
-- The first word counts. Behind the next plan none does but one that was there already.
local field, _, _, open = 'said ' .. arg.member, label(redis.call('GETRANGE', key.plan, 0, 255))
local is_there = judged(redis.call('HGET', key.attempt, field), arg.rejected)
if is_there then return 1 end
if open ~= arg.id and (arg.again == '0' or redis.call('HEXISTS', key.attempt, 'plan') == 0) then return 0 end
redis.call('HSET', key.attempt, field, arg.word)
return redis.call('EXPIRE', key.attempt, arg.ttl)
""",
)

READ_ATTEMPT = _script(
    "attempt:hash plan votes failed",
    "id",
    (_TEXT, _TEXT, _LIST, _LIST, bytes),
    """
-- Returns the plan, its failure and its votes, where it is the current one; what else is known of it, and the tag.
local _, _, open = label(redis.call('GETRANGE', key.plan, 0, 255))
local kept, tag = redis.call('HGETALL', key.attempt), ''
if open ~= arg.id then return {false, false, {}, kept, ''} end
tag = redis.sha1hex(known_of(key.attempt, key.votes, key.failed))
return {redis.call('GET', key.plan), redis.call('GET', key.failed), redis.call('HGETALL', key.votes), kept, tag}
""",
)

TELL_HOLDING = _script(
    "holdings leases",
    "member record ttl",
    int,
    """
-- What those have said who hold no lease is forgotten.
local said = redis.call('HGETALL', key.holdings)
for i = 1, #said, 2 do
  if not redis.call('ZSCORE', key.leases, said[i]) then redis.call('HDEL', key.holdings, said[i]) end
end
redis.call('HSET', key.holdings, arg.member, arg.record)
return redis.call('EXPIRE', key.holdings, arg.ttl)
""",
)

READ_SAID = _script(
    "said:hash",
    "",
    _LIST,
    """
return redis.call('HGETALL', key.said)
""",
)

APPEND_FACTS = _script(
    "facts:stream recorders",
    "newest facts node word is_new ttl most_entries most_bytes looked known",
    (_FLAG, _LIST | bytes, bytes | int | None),
    """
-- Adds an entry behind the newest one that the caller knows; where it is another, returns the newest ones instead. An
-- entry says how many bytes of facts came before it, so that the oldest ones can be dropped by size. `is_new`: the
-- word is another one than before; else it is written where there is none. `known`: digest of the word that the caller
-- has seen, which is told where it is another.
local function size_of(entry) return #(entry[2][4] or '') end
local function before_of(entry)
  local before = tonumber(entry[2][2])
  return before and before >= 0 and before < 2^52 and before or 0
end
local newest = redis.call('XREVRANGE', key.facts, '+', '-', 'COUNT', 1)[1]
if (newest and newest[1] or '') ~= arg.newest then
  return {0, redis.call('XREVRANGE', key.facts, '+', '-', 'COUNT', arg.looked), 0}
end
local before = newest and before_of(newest) + size_of(newest) or 0
-- After the greatest id of a stream no entry can be added: anyone with access to the store could silence a node.
if newest and string.find(newest[1], '^1844674407370955%d%d%d%d%-') then
  redis.call('DEL', key.facts)
  mended[#mended + 1] = key.facts
  before = 0
end
local so_far = string.format('%.0f', before)
local id = redis.call('XADD', key.facts, 'MAXLEN', '~', arg.most_entries, '*', 'before', so_far, 'facts', arg.facts)
local total = before + #arg.facts
for _ = 1, 256 do -- not for ever: forged entries may say any size, and a script keeps all others waiting
  local oldest = redis.call('XRANGE', key.facts, '-', '+', 'COUNT', 1)[1]
  local from = before_of(oldest)
  if oldest[1] == id or (from <= total and total - from <= tonumber(arg.most_bytes)) then break end
  redis.call('XDEL', key.facts, oldest[1])
end
if arg.is_new == '1' then
  redis.call('HSET', key.recorders, arg.node, arg.word)
elseif arg.word ~= '' then
  redis.call('HSETNX', key.recorders, arg.node, arg.word)
end
redis.call('EXPIRE', key.facts, arg.ttl)
redis.call('EXPIRE', key.recorders, arg.ttl)
local word = redis.call('HGET', key.recorders, arg.node)
if word and redis.sha1hex(word) == arg.known then word = 1 end
return {1, id, word}
""",
)

READ_FACTS = _script(
    "facts:any",
    "behind count",
    _LIST,
    """
-- Returns the entries behind that one; from the oldest one on where it is gone. A reader mends nothing.
if redis.call('TYPE', key.facts)['ok'] ~= 'stream' then return {} end
if arg.behind ~= '' then
  local found = redis.call('XRANGE', key.facts, arg.behind, '+', 'COUNT', arg.count + 1)
  if found[1] and found[1][1] == arg.behind then
    table.remove(found, 1)
    return found
  end
end
return redis.call('XRANGE', key.facts, '-', '+', 'COUNT', arg.count)
""",
)

READ_NODES = _script(
    "recorders:any",
    "",
    _LIST,
    """
if redis.call('TYPE', key.recorders)['ok'] ~= 'hash' then return {} end
return redis.call('HGETALL', key.recorders)
""",
)

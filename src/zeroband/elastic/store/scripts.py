"""What runs inside Redis: the compare-and-set of openings and verdicts, leases, and bringing a lost record back.

The store's clock alone decides about leases. It stands still while nobody renews: when all guardians were kept from the
store at once, it was the store that was away, and whoever held a lease when the silence began gets a fresh one.

A script touches no key but those that it is given as KEYS: some servers refuse any other. Nothing in here trusts what
it finds. A key of the wrong type is deleted and named in the answer. A script cannot check
a seal, so its caller names the values that it looked at and that do not verify (`junk`): they are as if they were not
there. What the caller has not judged may have been written since it looked: it must look again before it decides.
"""

from __future__ import annotations

RUN_TTL_S = 30 * 24 * 3600
"""Life of the run's own record after its last write."""

_PRELUDE = """
local mended = {}
local function mend(key, kind) -- so that no command fails by what somebody put there
  local is = redis.call('TYPE', key)['ok']
  if is ~= kind and is ~= 'none' then
    redis.call('DEL', key)
    mended[#mended + 1] = key
  end
end
local function judged(raw, junk) -- a record, or nothing where it is empty or the caller found that it does not verify
  if raw and raw ~= '' and raw ~= junk then return raw end
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
local function is_silent(pulse, now, silence)
  return pulse and (now < pulse or now - pulse > silence)
end
local function reading(clock, silence) -- the time by which leases count
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
  for _, member in ipairs(dead) do redis.call('ZADD', leases, 0, member) end -- also by a clock that was set back
end
local function longest(now, silence) return now + 8 * silence end -- four leases, which are equal on all nodes
local function is_settling(leases, clock, silence)
  local settled, now = tonumber(redis.call('HGET', clock, 'settled')), time_ms()
  return is_torn(leases, clock) or (settled and now < settled and settled <= longest(now, silence)) or false
end
local function forget_stopped_clock(leases, clock) -- of nobody: the next lease begins it anew
  if redis.call('EXISTS', leases) == 0 then redis.call('HDEL', clock, 'pulse') end
end
local function is_error(answer) return type(answer) == 'table' and answer.err ~= nil end
local function next_change(changes) -- numbers every write that a view shows
  if redis.call('HEXISTS', changes, 'born') == 0 then redis.call('HSET', changes, 'born', time_ms()) end
  local n = redis.pcall('HINCRBY', changes, 'n', 1)
  if not is_error(n) then return n end
  redis.call('DEL', changes)
  redis.call('HSET', changes, 'born', time_ms(), 'n', 1)
  return 1
end
local function tell(changes, news) -- and wake those who wait for what decides
  local n = next_change(changes)
  for _ = 1, 2 do
    if not is_error(redis.pcall('XADD', news, 'MAXLEN', '16', string.format('%.0f-0', n), 'n', '1')) then break end
    redis.call('DEL', news) -- ids of a counter that was lost
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
  for i = 1, #members, 1000 do
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


_AS_IT_IS = "as-it-is"
"""A key that the script itself looks after."""


def _script(kinds: str, body: str) -> str:
    """A script whose KEYS are of these kinds; it answers with the keys that were of another kind, and its result."""
    typed = [(i, kind) for i, kind in enumerate(kinds.split(), 1) if kind != _AS_IT_IS]
    mending = "\n".join(f"if KEYS[{i}] then mend(KEYS[{i}], '{kind}') end" for i, kind in typed)
    return (
        f"{_PRELUDE}\n{mending}\nlocal function main()\n{body}\nend\nlocal result = main()\nreturn {{mended, result}}\n"
    )


VIEW = _script(
    "string string zset hash hash string hash string string hash string string string zset zset hash zset string",
    """
-- KEYS: opening committed leases clock peers run ready orders restart_point changes generation patch_opening
--   patch_committed peers_at ready_at votes votes_at failed
-- ARGV: silence_ms, then what the caller knows: changes tag_opening tag_committed tag_failed tag_run tag_orders
--   tag_restart_point tag_generation alive ready peers votes_of votes; whole enough_ready enough_votes member
--   lacks_ready lacks_vote tag_expected [word ttl generation opening]
-- What a member says is written first, if the store is in that generation; its first word counts. With the id of an
-- opening it is a vote, and counts if that is the current one. Told is what is another than the caller knows. Who is
-- ready and who has voted is told where it is asked for (`whole`), and where there are enough of them; else how many,
-- and what this member itself said: its word where the caller lacks it, 1 where it is there, 0 where it is not.
local goes_on = follows(KEYS[10], ARGV[2])
local function known(i) return goes_on and ARGV[i] or '0' end
local _, _, id = label(redis.call('GETRANGE', KEYS[1], 0, 255))
if ARGV[22] and is_current(KEYS[11], ARGV[24]) and (ARGV[25] == '' or ARGV[25] == id) then
  local words, times = KEYS[7], KEYS[15]
  if ARGV[25] ~= '' then words, times = KEYS[16], KEYS[17] end
  if redis.call('HSETNX', words, ARGV[18], ARGV[22]) == 1 then note(KEYS[10], times, ARGV[18], ARGV[23]) end
  redis.call('EXPIRE', words, ARGV[23])
end
local function own(words, lacks)
  if lacks == '1' then return redis.call('HGET', words, ARGV[18]) or 0 end
  return redis.call('HEXISTS', words, ARGV[18])
end
local function told(words, times, i, enough) -- where they are asked for
  local many = redis.call('HLEN', words)
  if ARGV[15] == '1' or many >= tonumber(enough) then return since(words, times, known(i)) end
  return {tostring(many), 0, 0}
end
local votes, own_vote, failed = {'0', 1, {}}, 0, false
if id then
  if id ~= ARGV[13] then ARGV[14] = '0' end
  own_vote = own(KEYS[16], id ~= ARGV[13] and '1' or ARGV[20])
  votes, failed = told(KEYS[16], KEYS[17], 14, ARGV[17]), unless(KEYS[18], id == ARGV[13] and ARGV[5] or '')
end
local alive = alive_unless(KEYS[3], reading(KEYS[4], tonumber(ARGV[1])), ARGV[10])
return {redis.call('HMGET', KEYS[10], 'born', 'n', 'links'), changed(KEYS[1], ARGV[3], KEYS[12], ''),
        changed(KEYS[2], ARGV[4], KEYS[13], ARGV[21]), failed,
        unless(KEYS[6], ARGV[6]), unless(KEYS[8], ARGV[7]), unless(KEYS[9], ARGV[8]),
        unless(KEYS[11], ARGV[9]), alive, told(KEYS[7], KEYS[15], 11, ARGV[16]), since(KEYS[5], KEYS[14], known(12)),
        votes, is_settling(KEYS[3], KEYS[4], tonumber(ARGV[1])) and 1 or 0, own(KEYS[7], ARGV[19]), own_vote}
""",
)

OPEN = _script(
    "string string hash string zset hash stream string string hash as-it-is as-it-is as-it-is",
    """
-- KEYS: opening committed clock orders leases changes news generation patch votes votes_at failed last_votes
-- ARGV: current round record ttl orders silence_ms junk_opening junk_committed junk_orders generation patch
if not is_current(KEYS[8], ARGV[10]) then return 0 end
local committed, orders = judged(redis.call('GET', KEYS[2]), ARGV[8]), judged(redis.call('GET', KEYS[4]), ARGV[9])
if (judged(redis.call('GET', KEYS[1]), ARGV[7]) or '') ~= ARGV[1] then return 0 end
if is_settling(KEYS[5], KEYS[3], tonumber(ARGV[6])) then return 0 end
local round = label(committed)
if committed and (not round or round >= tonumber(ARGV[2])) then return 0 end
local _, version = label(orders)
if orders and not version or (version or 0) ~= tonumber(ARGV[5]) then return 0 end
local _, _, open = label(redis.call('GETRANGE', KEYS[1], 0, 255))
local _, _, done = label(committed)
if open and open == done then -- those who were not in that round ask for its votes
  redis.call('DEL', KEYS[13])
  local votes = redis.call('HGETALL', KEYS[10])
  for i = 1, #votes, 2 do redis.call('HSET', KEYS[13], votes[i], votes[i + 1]) end
  redis.call('EXPIRE', KEYS[13], ARGV[4])
end
redis.call('SET', KEYS[1], ARGV[3], 'EX', ARGV[4])
redis.call('SET', KEYS[9], ARGV[11], 'EX', ARGV[4])
for i = 10, 12 do redis.call('DEL', KEYS[i]) end -- they were of the one before
tell(KEYS[6], KEYS[7])
return 1
""",
)

BEGIN = _script(
    "string string string hash zset hash stream",
    """
-- KEYS: restart_point opening committed clock leases changes news
-- ARGV: current opening committed record ttl silence_ms junk_restart_point junk_opening junk_committed
for i = 1, 3 do
  if (judged(redis.call('GET', KEYS[i]), ARGV[6 + i]) or '') ~= ARGV[i] then return 0 end
end
if is_settling(KEYS[5], KEYS[4], tonumber(ARGV[6])) then return 0 end
redis.call('SET', KEYS[1], ARGV[4], 'EX', ARGV[5])
tell(KEYS[6], KEYS[7])
return 1
""",
)

COMMIT = _script(
    "string string list string zset hash hash hash hash string hash stream hash string string string"
    " zset zset zset zset",
    """
-- KEYS: opening committed history failed leases peers clock ready votes orders changes news links generation patch run
--   ready_at votes_at peers_at links_at
-- ARGV: opening round record ttl keep silence_ms spent_ttl junk_committed junk_failed generation patch run orders
--   next_orders listed ...
-- run: what all nodes share, for the session that begins here; empty: none does.
-- Returns 2 where the orders are others than the caller has seen, which this round would change.
if not is_current(KEYS[14], ARGV[10]) then return 0 end
local silence = tonumber(ARGV[6])
local committed = judged(redis.call('GET', KEYS[2]), ARGV[8])
if redis.call('GET', KEYS[1]) ~= ARGV[1] or is_settling(KEYS[5], KEYS[7], silence) then return 0 end
local round = label(committed)
if committed and (not round or round >= tonumber(ARGV[2])) then return 0 end
if judged(redis.call('GET', KEYS[4]), ARGV[9]) then return 0 end
if ARGV[14] ~= '' then
  if redis.call('GET', KEYS[10]) ~= ARGV[13] then return 2 end
  redis.call('SET', KEYS[10], ARGV[14], 'EX', ARGV[4])
end
if ARGV[12] ~= '' then redis.call('SET', KEYS[16], ARGV[12], 'EX', ARGV[4]) end
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
redis.call('SET', KEYS[15], ARGV[11], 'EX', ARGV[4])
redis.call('LPUSH', KEYS[3], ARGV[3])
redis.call('LTRIM', KEYS[3], 0, ARGV[5] - 1)
redis.call('EXPIRE', KEYS[3], ARGV[4])
for _, key in ipairs({KEYS[8], KEYS[9], KEYS[17], KEYS[18]}) do redis.call('EXPIRE', key, ARGV[7]) end
local listed = {}
for i = 15, #ARGV do listed[ARGV[i]] = true end
local at = reading(KEYS[7], silence)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', at)) do -- forget the dead that cannot return
  if not listed[member] then
    redis.call('ZREM', KEYS[5], member)
    forget(KEYS[6], KEYS[19], member)
    forget(KEYS[13], KEYS[20], member)
  end
end
tell(KEYS[11], KEYS[12])
return 1
""",
)

FAIL = _script(
    "string string hash stream string",
    """
-- KEYS: committed failed changes news opening   ARGV: version reason ttl junk_committed junk_failed id
-- An opening is either committed or failed, never both. One that is not the current one cannot be finished anyway.
local committed = judged(redis.call('GET', KEYS[1]), ARGV[4])
local _, version = label(committed)
if committed and (not version or version >= tonumber(ARGV[1])) then return 0 end
local _, _, id = label(redis.call('GETRANGE', KEYS[5], 0, 255))
if id ~= ARGV[6] then return 1 end
if not judged(redis.call('GET', KEYS[2]), ARGV[5]) then redis.call('DEL', KEYS[2]) end
redis.call('SET', KEYS[2], ARGV[2], 'NX', 'EX', ARGV[3])
tell(KEYS[3], KEYS[4])
return 1
""",
)

RENEW = _script(
    "zset hash hash string string hash stream zset",
    """
-- KEYS: leases clock peers opening run changes news peers_at
-- ARGV: member lease_ms silence_ms first peer ttl refuted, then what the caller knows: changes alive peers
-- A lease that ran out is taken again where the current opening lists its member: no verdict is newer than that. The
-- caller reads the opening; `refuted`: the one that does not keep it from its lease. Leases that ran out since anybody
-- looked are told to who waits.
local now, silence = time_ms(), tonumber(ARGV[3])
local ends = now + tonumber(ARGV[2])
if is_torn(KEYS[1], KEYS[2]) then redis.call('HSET', KEYS[2], 'settled', ends) end -- all get the time to renew
wake(KEYS[1], KEYS[2], ends, silence)
for _, member in ipairs(alive_at(KEYS[1], longest(now, silence))) do redis.call('ZADD', KEYS[1], ends, member) end
local opening = redis.call('GET', KEYS[4])
if ARGV[4] == '0' and not holds(KEYS[1], ARGV[1], now) and opening and opening ~= ARGV[7] then
  return {0, opening, {false, false, false}, 1, {'0', 0, 0}}
end
redis.call('ZADD', KEYS[1], ends, ARGV[1])
redis.call('HSET', KEYS[2], 'pulse', now)
local goes_on, before = follows(KEYS[6], ARGV[8]), redis.call('HGET', KEYS[3], ARGV[1])
if before ~= ARGV[5] then
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[5])
  note(KEYS[6], KEYS[8], ARGV[1], ARGV[6])
end
local swept = tonumber(redis.call('HGET', KEYS[2], 'swept')) or 0
redis.call('HSET', KEYS[2], 'swept', now)
if (before and before ~= ARGV[5]) or redis.call('ZCOUNT', KEYS[1], '(' .. math.min(swept, now), now) > 0 then
  tell(KEYS[6], KEYS[7])
end
for _, key in ipairs({KEYS[1], KEYS[2], KEYS[3], KEYS[5], KEYS[8]}) do redis.call('EXPIRE', key, ARGV[6]) end
local times = redis.call('HMGET', KEYS[6], 'born', 'n', 'links')
return {1, false, times, alive_unless(KEYS[1], now, ARGV[9]), since(KEYS[3], KEYS[8], goes_on and ARGV[10] or '0')}
""",
)

END_LEASE = _script(
    "zset hash hash hash stream hash zset zset",
    """
-- KEYS: leases peers clock changes news links peers_at links_at   ARGV: member forget
-- It stays listed as one that was alive a moment ago, so that it may take the lease again if it is alive after all.
local ended
if ARGV[2] == '0' then
  ended = redis.call('ZADD', KEYS[1], 'XX', 'CH', 0, ARGV[1])
else
  forget(KEYS[2], KEYS[7], ARGV[1])
  forget(KEYS[6], KEYS[8], ARGV[1])
  ended = redis.call('ZREM', KEYS[1], ARGV[1])
  if ended == 1 then forget_stopped_clock(KEYS[1], KEYS[3]) end
end
if ended == 1 then tell(KEYS[4], KEYS[5]) end
return ended
""",
)

LEAVE = _script(
    "zset hash hash",
    """
-- KEYS: leases clock leaving   ARGV: member silence_ms ttl word   returns the living members, and who leaves
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[3])
return {alive_at(KEYS[1], reading(KEYS[2], tonumber(ARGV[2]))), redis.call('HGETALL', KEYS[3])}
""",
)

FOUND = _script(
    "as-it-is zset hash",
    """
-- KEYS: run leases clock   ARGV: record ttl junk silence_ms first
-- Returns the run's record, the protocol of an older version that kept it as a hash, and whether somebody is alive.
-- `first`: it is left to the living ones to bring back what the store has lost.
local is_alive, protocol = #alive_at(KEYS[2], reading(KEYS[3], tonumber(ARGV[4]))) > 0, false
if redis.call('TYPE', KEYS[1])['ok'] == 'hash' then protocol = redis.call('HGET', KEYS[1], 'protocol') end
if protocol then return {false, protocol, is_alive and 1 or 0} end
mend(KEYS[1], 'string')
local theirs = judged(redis.call('GET', KEYS[1]), ARGV[3])
if not theirs and not (is_alive and ARGV[5] == '1') then
  theirs = ARGV[1]
  redis.call('SET', KEYS[1], theirs)
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return {theirs, false, is_alive and 1 or 0}
""",
)

CLEAR = _script(
    "string zset hash",
    """
-- KEYS: run leases clock   ARGV: lease_ms silence_ms
-- Forgets what the nodes of a run shared, once none of them holds a lease: those that resume it may differ from them.
local now = time_ms()
wake(KEYS[2], KEYS[3], now + tonumber(ARGV[1]), tonumber(ARGV[2]))
redis.call('HSET', KEYS[3], 'pulse', now) -- or the clock of the leases would stand still
forget_stopped_clock(KEYS[2], KEYS[3])
if #alive_at(KEYS[2], now) > 0 then return 0 end
redis.call('DEL', KEYS[1])
return 1
""",
)

RESTORE = _script(
    "string string list hash string hash hash string hash stream string zset zset string",
    """
-- KEYS: opening committed history clock run ready votes orders changes news generation ready_at votes_at failed
-- ARGV: ttl lease_ms keep round_ttl member, then opening committed run orders ready vote, then what of these is junk,
--   then the generation, and the id of the opening that the vote is for
-- Members tell what they remember; the highest committed round and the newest opening win.
-- Returns 1 where the store had lost any of it, 2 where a part must be looked at once more before.
if not is_current(KEYS[11], ARGV[18]) then return 0 end
local opening, committed, run, orders, ready, vote = unpack(ARGV, 6, 11)
local junk = {unpack(ARGV, 12, 17)}
local theirs = {opening = judged(redis.call('GET', KEYS[1]), junk[1]),
                committed = judged(redis.call('GET', KEYS[2]), junk[2]),
                orders = judged(redis.call('GET', KEYS[8]), junk[4])}
for _, raw in pairs(theirs) do if raw and not label(raw) then return 2 end end
local changed = redis.call('EXISTS', KEYS[5]) == 0
local function is_older(raw, ours)
  if ours == '' or raw == ours then return false end
  if not raw then return true end
  local round, version = label(raw)
  local our_round, our_version = label(ours)
  return round < our_round or (round == our_round and version < our_version)
end
local function put(key, record) redis.call('SET', key, record, 'EX', ARGV[1]); changed = true end
if is_older(theirs.committed, committed) then
  put(KEYS[2], committed)
  if redis.call('LRANGE', KEYS[3], 0, 0)[1] ~= committed then redis.call('LPUSH', KEYS[3], committed) end
  redis.call('LTRIM', KEYS[3], 0, ARGV[3] - 1)
  redis.call('EXPIRE', KEYS[3], ARGV[1])
end
local _, their_version = label(theirs.opening)
local _, our_version = label(opening)
if opening ~= '' and (not theirs.opening or their_version < our_version) then
  put(KEYS[1], opening)
  for _, key in ipairs({KEYS[7], KEYS[13], KEYS[14]}) do redis.call('DEL', key) end -- members give theirs again
end
local _, _, id = label(redis.call('GETRANGE', KEYS[1], 0, 255))
if id ~= ARGV[19] then vote = '' end
if is_older(theirs.orders, orders) then put(KEYS[8], orders) end
if not judged(redis.call('GET', KEYS[5]), junk[3]) then redis.call('SET', KEYS[5], run) end
redis.call('EXPIRE', KEYS[5], ARGV[1])
local is_older_file = false
for i, word in ipairs({ready, vote}) do
  if word ~= '' then
    local key = KEYS[5 + i]
    if not judged(redis.call('HGET', key, ARGV[5]), junk[4 + i]) then
      redis.call('HSET', key, ARGV[5], word)
      note(KEYS[9], KEYS[11 + i], ARGV[5], ARGV[4])
      is_older_file = true
    end
    redis.call('EXPIRE', key, ARGV[4])
  end
end
if changed then redis.call('HSET', KEYS[4], 'settled', time_ms() + tonumber(ARGV[2])) end
redis.call('EXPIRE', KEYS[4], ARGV[1])
if changed or is_older_file then redis.call('HSET', KEYS[9], 'born', time_ms()) end -- it may count them a second time
if changed or is_older_file then tell(KEYS[9], KEYS[10]) end
return changed and 1 or 0
""",
)

TELL_ACCOUNT = _script(
    "string string hash hash string string string",
    """
-- KEYS: id generation accounts told_at committed elsewhere meeting   ARGV: new_id member account ttl fresh_ms
-- What a member tells that may go to this store; empty: it only looks. Returns the store's id, its generation, what was
-- told within the last moments, the newest verdict, where the run goes on, and two lines that met.
redis.call('SET', KEYS[1], ARGV[1], 'NX')
local now, found = time_ms(), {}
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
  redis.call('HSET', KEYS[4], ARGV[2], now)
end
for _, key in ipairs({KEYS[1], KEYS[3], KEYS[4]}) do redis.call('EXPIRE', key, ARGV[4]) end
local at = redis.call('HGETALL', KEYS[4])
for i = 1, #at, 2 do
  local age = now - (tonumber(at[i + 1]) or 0)
  if age >= 0 and age <= tonumber(ARGV[5]) then
    local said = redis.call('HGET', KEYS[3], at[i])
    if said then found[#found + 1] = at[i]; found[#found + 1] = said end
  else
    redis.call('HDEL', KEYS[3], at[i])
    redis.call('HDEL', KEYS[4], at[i])
  end
end
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]), found, redis.call('GET', KEYS[5]),
        redis.call('GET', KEYS[6]), redis.call('GET', KEYS[7])}
""",
)

TELL_WHEREABOUTS = _script(
    "string",
    """
-- KEYS: elsewhere   ARGV: record ttl_ms junk   where the run goes on, unless a newer word is there
local _, known = label(judged(redis.call('GET', KEYS[1]), ARGV[3]))
local _, number = label(ARGV[1])
if known and known > number then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
""",
)

BEGIN_GENERATION = _script(
    "string string string string list hash string zset string hash stream hash hash string",
    """
-- KEYS: id generation opening committed history clock run leases orders changes news votes votes_at failed
-- ARGV: id generation junk_generation opening committed run orders ttl keep lease_ms members ...
-- A generation begins here, with what those who promised it know; unless a newer one did.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local _, newest = label(judged(redis.call('GET', KEYS[2]), ARGV[3]))
local _, number = label(ARGV[2])
if newest and newest >= number then return 0 end
for i, record in ipairs({ARGV[2], ARGV[4], ARGV[5], ARGV[6], ARGV[7]}) do
  local key = ({KEYS[2], KEYS[3], KEYS[4], KEYS[7], KEYS[9]})[i]
  if record == '' then redis.call('DEL', key) else redis.call('SET', key, record, 'EX', ARGV[8]) end
end
for i = 12, 14 do redis.call('DEL', KEYS[i]) end
if ARGV[5] ~= '' and redis.call('LRANGE', KEYS[5], 0, 0)[1] ~= ARGV[5] then redis.call('LPUSH', KEYS[5], ARGV[5]) end
redis.call('LTRIM', KEYS[5], 0, ARGV[9] - 1)
redis.call('EXPIRE', KEYS[5], ARGV[8])
local now = time_ms()
redis.call('DEL', KEYS[8])
for i = 11, #ARGV do redis.call('ZADD', KEYS[8], now + tonumber(ARGV[10]), ARGV[i]) end
if #ARGV >= 11 then redis.call('HSET', KEYS[6], 'pulse', now) end
redis.call('HDEL', KEYS[6], 'settled')
redis.call('HSET', KEYS[10], 'born', now)
tell(KEYS[10], KEYS[11])
return 1
""",
)

ORDER = _script(
    "string hash stream",
    """
-- KEYS: orders changes news   ARGV: current record ttl   only on the orders that were looked at
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
tell(KEYS[2], KEYS[3])
return 1
""",
)

ADD_ONCE = _script(
    "string string",
    """
-- KEYS: counter sign   ARGV: amount ttl
-- `sign` marks this addition, so that one whose answer was lost is not made twice.
if not string.match(redis.call('GET', KEYS[1]) or '0', '^%-?%d+$') then redis.call('DEL', KEYS[1]) end
if redis.call('SET', KEYS[2], 1, 'NX', 'EX', ARGV[2]) then redis.call('INCRBY', KEYS[1], ARGV[1]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return tonumber(redis.call('GET', KEYS[1]))
""",
)

SELF_TEST = _script(
    "as-it-is as-it-is as-it-is as-it-is as-it-is",
    """
-- KEYS: string hash list zset stream   ARGV: ttl
-- Says each command of a run once, on keys that mean nothing. Returns 1, or the error of the one that is refused.
local text, words, list, scores, stream = unpack(KEYS)
local refusal
local commands = {
  {'TIME'}, {'SET', text, 1, 'EX', ARGV[1]}, -- before a write that takes no memory, which lets others take some
  {'DEL', text}, {'DEL', words}, {'DEL', list}, {'DEL', scores}, {'DEL', stream},
  {'SET', text, 1, 'NX', 'PX', 1000 * ARGV[1]}, {'EXPIRE', text, ARGV[1]}, {'TYPE', text}, {'EXISTS', text},
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
  note(words, scores, 'a', ARGV[1])
  alive_unless(scores, 0, '')
end
for _, key in ipairs(KEYS) do redis.pcall('DEL', key) end
return refusal or 1
""",
)

READ = _script(
    "string string string",
    """
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])}
""",
)

READ_HISTORY = _script(
    "list",
    """
return redis.call('LRANGE', KEYS[1], 0, -1)
""",
)

TELL_LINKS = _script(
    "hash hash zset",
    """
-- KEYS: links changes links_at   ARGV: member record ttl
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
note(KEYS[2], KEYS[3], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[2], 'links', redis.call('HGET', KEYS[2], 'n'))
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
""",
)

READ_LINKS = _script(
    "hash hash zset",
    """
-- KEYS: links changes links_at   ARGV: changes known
local known = follows(KEYS[2], ARGV[1]) and ARGV[2] or '0'
return {redis.call('HMGET', KEYS[2], 'born', 'n', 'links'), since(KEYS[1], KEYS[3], known)}
""",
)

MEASURE = _script(
    "zset",
    """
-- KEYS: measuring   ARGV: member most lasts_ms
-- measuring: member -> when its measurement is over at the latest
local now = time_ms()
local lasts = tonumber(ARGV[3])
for _, bounds in ipairs({{'-inf', now}, {'(' .. now + lasts, '+inf'}}) do
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], bounds[1], bounds[2])) do
    redis.call('ZREM', KEYS[1], member)
  end
end
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + lasts, ARGV[1])
redis.call('EXPIRE', KEYS[1], math.ceil(lasts / 1000))
return 1
""",
)

SAY = _script(
    "hash",
    """
-- KEYS: said   ARGV: who word ttl
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return redis.call('EXPIRE', KEYS[1], ARGV[3])
""",
)

TESTIFY = _script(
    "hash",
    """
-- KEYS: evidence   ARGV: member word ttl junk   the first word counts
if not judged(redis.call('HGET', KEYS[1], ARGV[1]), ARGV[4]) then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
return redis.call('EXPIRE', KEYS[1], ARGV[3])
""",
)

TELL_HOLDING = _script(
    "hash zset",
    """
-- KEYS: holdings leases   ARGV: member record ttl   what those have said who hold no lease is forgotten
local said = redis.call('HGETALL', KEYS[1])
for i = 1, #said, 2 do
  if not redis.call('ZSCORE', KEYS[2], said[i]) then redis.call('HDEL', KEYS[1], said[i]) end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return redis.call('EXPIRE', KEYS[1], ARGV[3])
""",
)

READ_SAID = _script(
    "hash",
    """
return redis.call('HGETALL', KEYS[1])
""",
)

APPEND_FACTS = _script(
    "stream hash",
    """
-- KEYS: facts nodes   ARGV: newest facts node word is_new ttl most_entries most_bytes looked known
-- Adds an entry behind the newest one that the caller knows; where it is another, returns the newest ones instead. An
-- entry says how many bytes of facts came before it, so that the oldest ones can be dropped by size. `is_new`: the
-- word is another one than before; else it is written where there is none. `known`: digest of the word that the caller
-- has seen, which is told where it is another.
local function size_of(entry) return #(entry[2][4] or '') end
local function before_of(entry)
  local before = tonumber(entry[2][2])
  return before and before >= 0 and before < 2^52 and before or 0
end
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if (newest and newest[1] or '') ~= ARGV[1] then
  return {0, redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[9]), 0}
end
local before = newest and before_of(newest) + size_of(newest) or 0
if newest and string.find(newest[1], '^1844674407370955%d%d%d%d%-') then -- somebody used up the ids
  redis.call('DEL', KEYS[1])
  mended[#mended + 1] = KEYS[1]
  before = 0
end
local so_far = string.format('%.0f', before)
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[7], '*', 'before', so_far, 'facts', ARGV[2])
local total = before + #ARGV[2]
for _ = 1, 256 do
  local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
  local from = before_of(oldest)
  if oldest[1] == id or (from <= total and total - from <= tonumber(ARGV[8])) then break end
  redis.call('XDEL', KEYS[1], oldest[1])
end
if ARGV[5] == '1' then
  redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
elseif ARGV[4] ~= '' then
  redis.call('HSETNX', KEYS[2], ARGV[3], ARGV[4])
end
redis.call('EXPIRE', KEYS[1], ARGV[6])
redis.call('EXPIRE', KEYS[2], ARGV[6])
local word = redis.call('HGET', KEYS[2], ARGV[3])
if word and redis.sha1hex(word) == ARGV[10] then word = 1 end
return {1, id, word}
""",
)

READ_FACTS = _script(
    "as-it-is",
    """
-- KEYS: facts   ARGV: behind count
-- Returns the entries behind that one; from the oldest one on where it is gone. A reader mends nothing.
if redis.call('TYPE', KEYS[1])['ok'] ~= 'stream' then return {} end
if ARGV[1] ~= '' then
  local found = redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2] + 1)
  if found[1] and found[1][1] == ARGV[1] then
    table.remove(found, 1)
    return found
  end
end
return redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[2])
""",
)

READ_NODES = _script(
    "as-it-is",
    """
-- KEYS: nodes
if redis.call('TYPE', KEYS[1])['ok'] ~= 'hash' then return {} end
return redis.call('HGETALL', KEYS[1])
""",
)

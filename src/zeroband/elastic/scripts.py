"""What runs inside Redis: the compare-and-set of openings and verdicts, leases, and bringing a lost record back.

The store's clock alone decides about leases. It stands still while nobody renews: when all guardians were kept from the
store at once, it was the store that was away, and whoever held a lease when the silence began gets a fresh one.
"""

from __future__ import annotations

_CLOCK = """
local function time_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function is_silent(pulse, now, silence)
  return pulse and (now < pulse or now - pulse > silence)
end
local function reading(clock, silence) -- the time by which leases count
  local now, pulse = time_ms(), tonumber(redis.call('HGET', clock, 'pulse'))
  if is_silent(pulse, now, silence) then return pulse end
  return now
end
local function holds(leases, member, at)
  local ends = tonumber(redis.call('ZSCORE', leases, member))
  return ends and ends > at
end
local function wake(leases, clock, ends, silence) -- who held a lease when a silence began gets a fresh one
  local now, pulse = time_ms(), tonumber(redis.call('HGET', clock, 'pulse'))
  if not is_silent(pulse, now, silence) then return end
  local dead = redis.call('ZRANGEBYSCORE', leases, '-inf', pulse)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. pulse, '+inf')) do
    redis.call('ZADD', leases, ends, member)
  end
  for _, member in ipairs(dead) do redis.call('ZADD', leases, 0, member) end -- also by a clock that was set back
end
local function is_settling(clock)
  local settled, now = tonumber(redis.call('HGET', clock, 'settled')), time_ms()
  return settled and now < settled
end
"""

VIEW = (
    _CLOCK
    + """
-- KEYS: opening committed leases clock peers run ready orders beginning [said]
-- ARGV: prefix silence_ms [member word ttl]   what a member says is written first; its first word counts
if KEYS[10] then
  redis.call('HSETNX', KEYS[10], ARGV[3], ARGV[4])
  redis.call('EXPIRE', KEYS[10], ARGV[5])
end
local opening, votes, failed = redis.call('GET', KEYS[1]), {}, false
if opening then
  local id = redis.call('HGET', KEYS[4], 'opening')
  votes = redis.call('HGETALL', ARGV[1] .. ':votes:' .. id)
  failed = redis.call('GET', ARGV[1] .. ':failed:' .. id)
end
local at = reading(KEYS[4], tonumber(ARGV[2]))
return {opening, redis.call('GET', KEYS[2]), redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. at, '+inf'),
        redis.call('HGETALL', KEYS[7]), votes, failed, redis.call('HGETALL', KEYS[5]),
        redis.call('EXISTS', KEYS[6]), is_settling(KEYS[4]) and 1 or 0, redis.call('HGETALL', KEYS[8]),
        redis.call('GET', KEYS[9])}
"""
)

OPEN = (
    _CLOCK
    + """
-- KEYS: opening committed clock orders   ARGV: current round record id ttl orders
local committed = redis.call('GET', KEYS[2])
if (redis.call('HGET', KEYS[4], 'version') or '0') ~= ARGV[6] then return 0 end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] or is_settling(KEYS[3]) then return 0 end
if committed and cjson.decode(committed)['opening']['round'] >= tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], ARGV[3], 'EX', ARGV[5])
redis.call('HSET', KEYS[3], 'opening', ARGV[4])
return 1
"""
)

BEGIN = (
    _CLOCK
    + """
-- KEYS: beginning opening committed clock   ARGV: current opening committed_round record ttl
local committed = redis.call('GET', KEYS[3])
local round = committed and cjson.decode(committed)['opening']['round'] or -1
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] or (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then return 0 end
if round ~= tonumber(ARGV[3]) or is_settling(KEYS[4]) then return 0 end
redis.call('SET', KEYS[1], ARGV[4], 'EX', ARGV[5])
return 1
"""
)

COMMIT = (
    _CLOCK
    + """
-- KEYS: opening committed history failed leases peers clock ready votes orders
-- ARGV: opening round record ttl keep silence_ms spent_ttl
local committed = redis.call('GET', KEYS[2])
if redis.call('GET', KEYS[1]) ~= ARGV[1] or is_settling(KEYS[7]) then return 0 end
if committed and cjson.decode(committed)['opening']['round'] >= tonumber(ARGV[2]) then return 0 end
if redis.call('EXISTS', KEYS[4]) == 1 then return 0 end
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
redis.call('LPUSH', KEYS[3], ARGV[3])
redis.call('LTRIM', KEYS[3], 0, ARGV[5] - 1)
redis.call('EXPIRE', KEYS[3], ARGV[4])
redis.call('EXPIRE', KEYS[8], ARGV[7])
redis.call('EXPIRE', KEYS[9], ARGV[7])
local listed, opening = {}, cjson.decode(ARGV[1])
local rollback = redis.call('HGET', KEYS[10], 'rollback')
if rollback and tonumber(rollback) == opening['rollback'] then -- this round did it
  redis.call('HDEL', KEYS[10], 'rollback')
  redis.call('HSET', KEYS[10], 'version', redis.call('HGET', KEYS[10], 'version') + 1)
end
for _, member in ipairs(opening['members']) do listed[member] = true end
for _, member in ipairs(opening['late']) do listed[member] = true end
local at = reading(KEYS[7], tonumber(ARGV[6]))
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', at)) do -- forget the dead that cannot return
  if not listed[member] then
    redis.call('ZREM', KEYS[5], member)
    redis.call('HDEL', KEYS[6], member)
  end
end
return 1
"""
)

FAIL = """
-- KEYS: committed failed   ARGV: version reason ttl
-- An opening is either committed or failed, never both.
local committed = redis.call('GET', KEYS[1])
if committed and cjson.decode(committed)['opening']['version'] >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'NX', 'EX', ARGV[3])
return 1
"""

RENEW = (
    _CLOCK
    + """
-- KEYS: leases clock peers opening run   ARGV: member lease_ms silence_ms first peer ttl
-- A lease that ran out is taken again only by a member of the current opening: no verdict is newer than that.
local now = time_ms()
local ends = now + tonumber(ARGV[2])
wake(KEYS[1], KEYS[2], ends, tonumber(ARGV[3]))
if ARGV[4] == '0' and not holds(KEYS[1], ARGV[1], now) then
  local opening = redis.call('GET', KEYS[4])
  local listed = not opening
  if opening then
    opening = cjson.decode(opening)
    for _, names in ipairs({opening['members'], opening['late']}) do
      for _, member in ipairs(names) do listed = listed or member == ARGV[1] end
    end
  end
  if not listed then return {0, {}} end
end
redis.call('ZADD', KEYS[1], ends, ARGV[1])
redis.call('HSET', KEYS[2], 'pulse', now)
redis.call('HSET', KEYS[3], ARGV[1], ARGV[5])
for _, key in ipairs({KEYS[1], KEYS[2], KEYS[3], KEYS[5]}) do redis.call('EXPIRE', key, ARGV[6]) end
local peers = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')) do
  local peer = redis.call('HGET', KEYS[3], member)
  if peer then peers[#peers + 1] = member; peers[#peers + 1] = peer end
end
return {1, peers}
"""
)

END_LEASE = """
-- KEYS: leases peers   ARGV: member forget
-- It stays listed as one that was alive a moment ago, so that it may take the lease again if it is alive after all.
if ARGV[2] == '1' then
  redis.call('HDEL', KEYS[2], ARGV[1])
  return redis.call('ZREM', KEYS[1], ARGV[1])
end
return redis.call('ZADD', KEYS[1], 'XX', 'CH', 0, ARGV[1])
"""

LEAVE = (
    _CLOCK
    + """
-- KEYS: leases clock leaving   ARGV: member silence_ms ttl   returns the living members that are not leaving
redis.call('HSET', KEYS[3], ARGV[1], 1)
redis.call('EXPIRE', KEYS[3], ARGV[3])
local leaving, staying = {}, {}
for _, member in ipairs(redis.call('HKEYS', KEYS[3])) do leaving[member] = true end
local at = reading(KEYS[2], tonumber(ARGV[2]))
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. at, '+inf')) do
  if not leaving[member] then staying[#staying + 1] = member end
end
return staying
"""
)

FOUND = """
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

CLEAR = (
    _CLOCK
    + """
-- KEYS: run leases clock   ARGV: lease_ms silence_ms
-- Forgets what the nodes of a run shared, once none of them holds a lease: those that resume it may differ from them.
local now = time_ms()
wake(KEYS[2], KEYS[3], now + tonumber(ARGV[1]), tonumber(ARGV[2]))
redis.call('HSET', KEYS[3], 'pulse', now) -- or the clock of the leases would stand still
if #redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. now, '+inf') > 0 then return 0 end
redis.call('DEL', KEYS[1])
return 1
"""
)

RESTORE = (
    _CLOCK
    + """
-- KEYS: opening committed history clock run ready votes orders
-- ARGV: ttl lease_ms keep opening id committed member ready vote round_ttl orders field value ...
-- Members tell what they remember; the highest committed round and the newest opening win.
local changed = redis.call('EXISTS', KEYS[5]) == 0
local ours = ARGV[6] ~= '' and cjson.decode(ARGV[6])['opening']
local theirs = redis.call('GET', KEYS[2])
theirs = theirs and cjson.decode(theirs)['opening']
if ours and (not theirs or theirs['round'] < ours['round']
             or (theirs['round'] == ours['round'] and theirs['version'] < ours['version'])) then
  redis.call('SET', KEYS[2], ARGV[6], 'EX', ARGV[1])
  redis.call('LPUSH', KEYS[3], ARGV[6])
  redis.call('LTRIM', KEYS[3], 0, ARGV[3] - 1)
  redis.call('EXPIRE', KEYS[3], ARGV[1])
  redis.call('DEL', KEYS[5])
  changed = true
end
local current = redis.call('GET', KEYS[1])
if ARGV[4] ~= '' and (not current or cjson.decode(current)['version'] < cjson.decode(ARGV[4])['version']) then
  redis.call('SET', KEYS[1], ARGV[4], 'EX', ARGV[1])
  redis.call('HSET', KEYS[4], 'opening', ARGV[5])
  changed = true
end
local orders = cjson.decode(ARGV[11])
if tonumber(redis.call('HGET', KEYS[8], 'version') or '0') < tonumber(orders['version']) then
  redis.call('DEL', KEYS[8])
  for field, value in pairs(orders) do redis.call('HSET', KEYS[8], field, value) end
  redis.call('EXPIRE', KEYS[8], ARGV[1])
  changed = true
end
for i = 12, #ARGV, 2 do redis.call('HSETNX', KEYS[5], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[5], ARGV[1])
if ARGV[8] ~= '' then
  redis.call('HSETNX', KEYS[6], ARGV[7], ARGV[8])
  redis.call('EXPIRE', KEYS[6], ARGV[10])
end
if ARGV[9] ~= '' then
  redis.call('HSETNX', KEYS[7], ARGV[7], ARGV[9])
  redis.call('EXPIRE', KEYS[7], ARGV[10])
end
if changed then redis.call('HSET', KEYS[4], 'settled', time_ms() + tonumber(ARGV[2])) end
redis.call('EXPIRE', KEYS[4], ARGV[1])
return changed and 1 or 0
"""
)

ORDER = """
-- KEYS: orders   ARGV: version ttl field value ...   only on the orders that were looked at
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""

ADD_ONCE = """
-- KEYS: counter sign   ARGV: amount ttl
-- `sign` marks this addition, so that one whose answer was lost is not made twice.
if redis.call('SET', KEYS[2], 1, 'NX', 'EX', ARGV[2]) then redis.call('INCRBY', KEYS[1], ARGV[1]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return tonumber(redis.call('GET', KEYS[1]))
"""

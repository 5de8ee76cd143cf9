-- Give the lease to an owner, with a token larger than all before.
-- KEYS[1] lease key, KEYS[2] counter key; ARGV[1] owner, ARGV[2] ttl (milliseconds)
-- returns {'granted', token} (also when this owner has it already: then with the token stored beside it and its
-- ttl refreshed), {'held', token, owner, remaining milliseconds or -1 without end}, {'foreign', key} for a value
-- that is none of ours, {'exhausted', key} after the last token
local value = redis.call('get', KEYS[1])
if value then
  local token, owner = value:match('^(%d+) (.+)$')
  if not token then return {'foreign', KEYS[1]} end
  if owner ~= ARGV[1] then return {'held', token, owner, redis.call('pttl', KEYS[1])} end
  redis.call('pexpire', KEYS[1], ARGV[2])
  return {'granted', token}
end
-- Checked first: whatever fails, no lease is left behind and the counter does not leave the range of tokens.
local last = redis.call('get', KEYS[2]) or '0'
if not last:match('^%d+$') then return {'foreign', KEYS[2]} end
if tonumber(last) >= 9007199254740991 then return {'exhausted', KEYS[2]} end
-- '%.0f', because Lua's .. would write a large token as 1e+15.
local token = string.format('%.0f', redis.call('incr', KEYS[2]))
redis.call('set', KEYS[1], token .. ' ' .. ARGV[1], 'px', ARGV[2])
return {'granted', token}

-- As owner, move the counter above a fence and take the next token; the ttl is refreshed.
-- KEYS[1] lease key, KEYS[2] counter key; ARGV[1] owner, ARGV[2] ttl (milliseconds), ARGV[3] the fence's token
-- returns {'lifted', token}, {'missing'} when the lease is gone, {'taken_over'} when another owner holds it,
-- {'foreign', key} for a value that is none of ours, {'exhausted', key} after the last token
local value = redis.call('get', KEYS[1])
if not value then return {'missing'} end
local token, owner = value:match('^(%d+) (.+)$')
if owner ~= ARGV[1] then return {'taken_over'} end
local last = redis.call('get', KEYS[2]) or '0'
if not last:match('^%d+$') then return {'foreign', KEYS[2]} end
-- Doubles hold all of these exactly: none is above 2^53 - 1, or the next line ends it.
local top = math.max(tonumber(last), tonumber(token), tonumber(ARGV[3]))
if top >= 9007199254740991 then return {'exhausted', KEYS[2]} end
token = string.format('%.0f', top + 1)
redis.call('set', KEYS[2], token)
redis.call('set', KEYS[1], token .. ' ' .. ARGV[1], 'px', ARGV[2])
return {'lifted', token}

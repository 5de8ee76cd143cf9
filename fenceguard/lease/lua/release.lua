-- Give the lease back, if it is this owner's.
-- KEYS[1] lease key; ARGV[1] owner
-- returns 1 when given back, 0 when the lease is gone, -1 when another owner holds it; the value is "<token> <owner>"
local value = redis.call('get', KEYS[1])
if not value then return 0 end
if value:match('^%d+ (.+)$') ~= ARGV[1] then return -1 end
return redis.call('del', KEYS[1])

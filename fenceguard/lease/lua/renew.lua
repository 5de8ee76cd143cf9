-- Let the lease live for another ttl, if it is this owner's, whatever token stands beside it.
-- KEYS[1] lease key; ARGV[1] owner, ARGV[2] ttl (milliseconds)
-- returns 1 when renewed, 0 when the lease is gone, -1 when another owner holds it; the value is "<token> <owner>"
local value = redis.call('get', KEYS[1])
if not value then return 0 end
if value:match('^%d+ (.+)$') ~= ARGV[1] then return -1 end
return redis.call('pexpire', KEYS[1], ARGV[2])

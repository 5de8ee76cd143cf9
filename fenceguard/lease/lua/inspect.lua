-- Tell who holds the lease.
-- KEYS[1] lease key
-- returns {'held', token, owner, remaining milliseconds or -1 without end}, {'free'}, {'foreign', key} for a value
-- that is none of ours
local value = redis.call('get', KEYS[1])
if not value then return {'free'} end
local token, owner = value:match('^(%d+) (.+)$')
if not token then return {'foreign', KEYS[1]} end
return {'held', token, owner, redis.call('pttl', KEYS[1])}

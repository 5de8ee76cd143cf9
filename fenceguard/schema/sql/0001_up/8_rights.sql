-- Nobody may do anything until it is granted. A role that writes to fenced tables needs
--     grant usage on schema fenceguard to app;
--     grant execute on function fenceguard.claim, fenceguard.enter, fenceguard.enter_announced, fenceguard.gate_holders,
--         fenceguard.gate, fenceguard.refuse_write, fenceguard.version to app;
-- one that may write round the fence, for maintenance, also
--     grant execute on function fenceguard.unfenced to maintainer;
-- and one that fences tables
--     grant usage, create on schema fenceguard to migrator;
--     grant execute on all functions in schema fenceguard to migrator;

revoke all on schema fenceguard from public;
revoke all on all tables in schema fenceguard from public;
revoke all on all functions in schema fenceguard from public;

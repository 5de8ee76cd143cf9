-- Demos on one database put up and take down one after the other; a wait that never ends would be no demo.
set local lock_timeout = '10s';
set local statement_timeout = '30s';
select pg_advisory_xact_lock(hashtext('fenceguard demo'));

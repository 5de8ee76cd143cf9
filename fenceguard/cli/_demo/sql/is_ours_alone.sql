-- returns whether a demo has installed fenceguard's schema and nobody uses it
select
    coalesce(obj_description('fenceguard'::regnamespace, 'pg_namespace'), '') = '$mark'
    and not exists (select from fenceguard.fence)
    and not exists (
        select from pg_trigger t
        join pg_proc p on p.oid = t.tgfoid
        where p.pronamespace = 'fenceguard'::regnamespace
            and t.tgrelid <> 'fenceguard.fence'::regclass
    );

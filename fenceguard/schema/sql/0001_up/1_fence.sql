-- The fence: for each resource the newest claim. It never goes down.

-- All of it is new here, so no lock is waited for, and it runs in one transaction.
-- squawk-ignore-file require-lock-timeout, require-statement-timeout, prefer-robust-stmts

do $block$
begin
    if current_setting('server_version_num')::integer < 150000 then
        raise exception using
            errcode = 'feature_not_supported',
            message = format('this server is Postgres %s, fenceguard needs 15 or newer',
                             current_setting('server_version'));
    end if;
end
$block$;

create function fenceguard.version() returns text
    language sql immutable parallel safe
    return '0001';
comment on function fenceguard.version() is 'the newest migration of fenceguard that ran here';

-- Never from pg_control_checkpoint(): seconds after a promotion that still tells the old one.
create function fenceguard.timeline() returns text
    language sql volatile
    return left(pg_walfile_name(pg_current_wal_insert_lsn()), 8);
comment on function fenceguard.timeline() is
    'the WAL timeline that this server writes now: a promotion or a point-in-time recovery begins another';

create function fenceguard.gate(p_resource text) returns bigint
    language sql immutable strict parallel safe
    return hashtextextended(p_resource, 7022359018);
comment on function fenceguard.gate(text) is
    'key of a resource''s advisory lock: writers hold it shared, a claim takes it exclusively; a collision costs a wait';

create function fenceguard.is_name(p_name text) returns boolean
    language sql immutable parallel safe
    return p_name is not null
        and octet_length(p_name) between 1 and 512
        and p_name !~ '[\u0001-\u001f\u007f]'
        -- Elsewhere these are halves of letters, or letters.
        and (getdatabaseencoding() <> 'UTF8' or p_name !~ '[\u0080-\u009f]');
comment on function fenceguard.is_name(text) is
    'resources and owners: 1 to 512 bytes without control characters (fenceguard.resources.check_resource)';

create function fenceguard.check_name(p_kind text, p_name text) returns void
    language plpgsql immutable parallel safe
as $function$
begin
    if not fenceguard.is_name(p_name) then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('%s %s is no valid name', p_kind, coalesce(to_json(left(p_name, 60))::text, 'NULL')),
            hint = 'Names have 1 to 512 bytes of UTF-8 and hold no control characters.';
    end if;
end
$function$;

create function fenceguard.check_token(p_token bigint) returns void
    language plpgsql immutable parallel safe
as $function$
begin
    if p_token is null or p_token not between 1 and 9007199254740991 then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('token %s is no fencing token', coalesce(p_token::text, 'NULL')),
            hint = 'Tokens lie between 1 and 9007199254740991 (2^53 - 1).';
    end if;
end
$function$;

-- "C": an index must survive an upgrade of the system's collations, or a lookup could miss its fence.
create table fenceguard.fence (
    resource text collate "C" not null,
    token bigint not null,
    owner text collate "C" not null,
    timeline text collate "C" not null,
    claimed_at timestamptz not null default clock_timestamp(),
    constraint fence_pkey primary key (resource),
    constraint fence_resource_check check (fenceguard.is_name(resource)),
    constraint fence_token_check check (token between 1 and 9007199254740991),
    constraint fence_owner_check check (fenceguard.is_name(owner)),
    constraint fence_timeline_check check (timeline ~ '^[0-9A-F]{8}$')
);
comment on table fenceguard.fence is 'the newest claim of each resource; written by fenceguard.claim';

create function fenceguard.guard_fence() returns trigger
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if tg_op = 'TRUNCATE' then
        raise exception using
            errcode = 'object_not_in_prerequisite_state',
            message = 'fenceguard.fence cannot be truncated: every stale holder could claim again',
            hint = 'Delete single rows, and only of resources whose tokens can never come back.';
    end if;
    -- A claim holds the gate already; this one is for changes made by hand.
    perform pg_advisory_xact_lock(fenceguard.gate(case tg_op when 'INSERT' then new.resource else old.resource end));
    if tg_op = 'UPDATE' and (new.resource <> old.resource or new.token < old.token) then
        raise exception using
            errcode = 'object_not_in_prerequisite_state',
            message = format('the fence of "%s" stays at its resource and never goes down (token %s)',
                             old.resource, old.token),
            hint = 'Claim a larger token instead.';
    end if;
    return case tg_op when 'DELETE' then old else new end;
end
$function$;

create trigger guard before insert or update or delete on fenceguard.fence
    for each row execute function fenceguard.guard_fence();

create trigger guard_truncate before truncate on fenceguard.fence
    for each statement execute function fenceguard.guard_fence();

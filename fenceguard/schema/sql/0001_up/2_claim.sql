-- Claims: raise the fence of a resource, strictly, when no earlier holder's transaction is open.

-- All of it is new here, so no lock is waited for.
-- squawk-ignore-file require-lock-timeout, require-statement-timeout

create function fenceguard.take_gate(p_resource text, p_wait_ms integer) returns void
    language plpgsql volatile
as $function$
begin
    if p_wait_ms = 0 then
        if not pg_try_advisory_xact_lock(fenceguard.gate(p_resource)) then
            raise exception using
                errcode = 'lock_not_available',
                message = format('open transactions hold the gate of "%s"', p_resource),
                hint = 'fenceguard.gate_holders names them.';
        end if;
        return;
    end if;
    if p_wait_ms is not null then
        perform set_config('lock_timeout', p_wait_ms::text, true);
    end if;
    perform pg_advisory_xact_lock(fenceguard.gate(p_resource));
end
$function$;

create function fenceguard.claim(p_resource text, p_token bigint, p_owner text, p_wait_ms integer default null)
    returns bigint
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_lock_timeout text := current_setting('lock_timeout');
    v_fence fenceguard.fence;
begin
    perform fenceguard.check_name('resource', p_resource);
    perform fenceguard.check_token(p_token);
    perform fenceguard.check_name('owner', p_owner);
    if p_wait_ms < 0 then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('p_wait_ms is %s', p_wait_ms),
            hint = 'Say milliseconds, 0 to try once, or NULL for the session''s lock_timeout.';
    end if;
    -- A claim that a crash forgets would let its token be claimed twice.
    if current_setting('synchronous_commit') <> 'remote_apply' then
        perform set_config('synchronous_commit', 'on', true);
    end if;

    perform fenceguard.take_gate(p_resource, p_wait_ms);
    -- Each statement of a VOLATILE function takes its own snapshot: these see what the gate waited for.
    insert into fenceguard.fence as f (resource, token, owner, timeline)
    values (p_resource, p_token, p_owner, fenceguard.timeline())
    on conflict (resource) do update
        set token = excluded.token, owner = excluded.owner, timeline = excluded.timeline,
            claimed_at = excluded.claimed_at
        where f.token < excluded.token;  -- strictly: this is what makes a token unique
    if not found then
        select * into v_fence from fenceguard.fence where resource = p_resource;
        -- Our own claim, whose reply was lost, is no refusal.
        if (v_fence.token, v_fence.owner, v_fence.timeline)
            is distinct from (p_token, p_owner, fenceguard.timeline())
        then
            raise exception using
                errcode = 'ZF001',
                message = format('claim of "%s" under token %s refused: token %s has claimed it',
                                 p_resource, p_token, v_fence.token),
                detail = jsonb_build_object('resource', p_resource, 'token', p_token,
                                            'newest', v_fence.token, 'owner', v_fence.owner)::text,
                hint = 'Claim a larger token, if the lease is still yours.';
        end if;
    end if;
    -- What this very transaction has entered may be stale now.
    perform set_config('fenceguard.entered', '', true);
    -- The rest of a caller's transaction waits for locks as it did before.
    perform set_config('lock_timeout', v_lock_timeout, true);
    return p_token;
end
$function$;
comment on function fenceguard.claim(text, bigint, text, integer) is
    'raises the fence of a resource to a token, strictly, and returns the token; one autocommit statement at '
    'READ COMMITTED. Refused: ZF001, JSON in DETAIL. Gate not had within p_wait_ms: 55P03';

create function fenceguard.gate_holders(p_resource text) returns setof text
    language sql volatile
begin atomic
    select case when l.pid is null
        then format('prepared transaction %s of %s, prepared %s', to_json(x.gid), x.owner, x.prepared)
        else format('pid %s%s, %s for %s s, transaction open for %s s, last query: %s',
            l.pid, ' (' || nullif(a.application_name, '') || ')', a.state,
            round(extract(epoch from clock_timestamp() - a.state_change), 1),
            round(extract(epoch from clock_timestamp() - a.xact_start), 1),
            left(regexp_replace(a.query, '\s+', ' ', 'g'), 200))
        end
    from pg_catalog.pg_locks l
    left join pg_catalog.pg_stat_activity a on a.pid = l.pid
    -- A prepared transaction has no backend; it is known by the lock on its own id.
    left join pg_catalog.pg_locks i on l.pid is null and i.pid is null
        and i.locktype = 'transactionid' and i.virtualtransaction = l.virtualtransaction
    left join pg_catalog.pg_prepared_xacts x on x.transaction = i.transactionid
    where l.locktype = 'advisory'
        and l.granted
        and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
        and l.objsubid = 1
        and l.classid = ((fenceguard.gate(p_resource) >> 32) & 4294967295)::oid
        and l.objid = (fenceguard.gate(p_resource) & 4294967295)::oid
        and l.pid is distinct from pg_backend_pid()
    order by l.mode, l.pid;
end;
comment on function fenceguard.gate_holders(text) is
    'one readable line for each transaction that a claim of the resource has to wait for; queries of other roles '
    'show as pg_stat_activity shows them';

-- Entering: prove, under the shared gate, that the announced grants are still the newest claims.
--
-- Setting fenceguard.grants, transaction-local: {"account:42": {"token": 7, "owner": "..."}}; unset, '' and '{}' mean
-- unannounced. What it says is a claim to be checked, never a proof.
--
-- Two more settings remember what this transaction has entered; each begins with the transaction's id, so that a
-- value from elsewhere counts for nothing, and a rolled back savepoint reverts them as it releases its gates:
--     fenceguard.entered  "<xid> <the announcement that was entered>"
--     fenceguard.gates    "<xid> <JSON object whose keys are all resources entered>"

-- All of it is new here, so no lock is waited for.
-- squawk-ignore-file require-lock-timeout, require-statement-timeout

create function fenceguard.parse_grants(p_announced text) returns jsonb
    language plpgsql immutable
as $function$
declare
    v_grants jsonb;
begin
    begin
        v_grants := p_announced;
    exception when data_exception then
        null;
    end;
    if jsonb_typeof(v_grants) is distinct from 'object' then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('fenceguard.grants is no JSON object: %s', left(p_announced, 200)),
            hint = 'Announce {"resource": {"token": 7, "owner": "..."}}, or '''' for nothing.';
    end if;
    return v_grants;
end
$function$;

create function fenceguard.compare(p_resource text, p_token bigint, p_owner text, p_table text) returns void
    language plpgsql volatile
as $function$
declare
    v_old_snapshot boolean := current_setting('transaction_isolation') in ('repeatable read', 'serializable');
    v_changed boolean := false;
    v_fence fenceguard.fence;
    v_newest bigint;
begin
    if v_old_snapshot then
        -- The gate alone proves nothing here: a plain read sees the fence as it was when the transaction began.
        begin
            select * into v_fence from fenceguard.fence where resource = p_resource for share;
        exception when serialization_failure then
            v_changed := true;
        end;
    end if;
    if v_changed or not v_old_snapshot then
        select * into v_fence from fenceguard.fence where resource = p_resource;
    end if;
    if not v_changed and v_fence.token = p_token and v_fence.owner = p_owner
        and v_fence.timeline = fenceguard.timeline()
    then
        return;
    end if;

    if v_fence.token > p_token or (v_fence.token = p_token and v_fence.owner <> p_owner) then
        v_newest := v_fence.token;
    elsif v_changed and v_fence.token = p_token then
        v_newest := p_token + 1;  -- at least: the newer fence is hidden from this snapshot
    end if;
    if v_newest is not null then
        raise exception using
            errcode = 'ZF001',
            message = format('write%s for %s under token %s refused: token %s has claimed it since',
                             ' to ' || p_table, to_json(p_resource), p_token, v_newest),
            detail = jsonb_build_object('resource', p_resource, 'token', p_token, 'newest', v_newest,
                                        'table', p_table, 'key', null)::text,
            hint = 'A newer holder is at work. Stop, and do not retry under this token.';
    elsif v_changed or (v_old_snapshot and v_fence.token is null) then
        raise exception using
            errcode = 'ZF005',
            message = format('this transaction is older than the claim of %s under token %s',
                             to_json(p_resource), p_token),
            detail = jsonb_build_object('resource', p_resource, 'token', p_token)::text,
            hint = 'Roll back and repeat it in a new transaction.';
    end if;
    -- No fence, a lower one, or one from before a failover or restore that may have lost others.
    raise exception using
        errcode = 'ZF003',
        message = format('%s is not claimed under token %s on this timeline', to_json(p_resource), p_token),
        detail = jsonb_build_object('resource', p_resource, 'token', p_token)::text,
        hint = 'Claim it with fenceguard.claim; after a failover or restore under a larger token.';
end
$function$;

create function fenceguard.enter_announced(p_table text default null) returns void
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_announced text := current_setting('fenceguard.grants', true);
    v_xid text;
    v_grants jsonb;
    v_gates jsonb;
    v_count integer;
    v_resources jsonb;
    v_resource text;
    v_grant jsonb;
    v_token bigint;
begin
    if v_announced is null or v_announced in ('', '{}') then
        return;
    end if;
    v_xid := pg_current_xact_id()::text || ' ';
    if current_setting('fenceguard.entered', true) = v_xid || v_announced then
        return;
    end if;

    v_grants := fenceguard.parse_grants(v_announced);
    -- Gates stay with the transaction, also of resources that it no longer announces.
    v_gates := v_grants;
    if starts_with(current_setting('fenceguard.gates', true), v_xid) then
        v_gates := substr(current_setting('fenceguard.gates'), length(v_xid) + 1)::jsonb || v_grants;
    end if;
    v_count := jsonb_array_length(jsonb_path_query_array(v_gates, '$.keyvalue()'));
    if v_count > 64 then
        raise exception using
            errcode = 'ZF006',
            message = format('the transaction enters %s resources, at most 64 are allowed', v_count),
            detail = jsonb_build_object('count', v_count, 'limit', 64)::text,
            hint = 'Each takes a lock in a table that all sessions share: use several transactions, or a coarser '
                'resource.';
    end if;

    v_resources := jsonb_path_query_array(v_grants, '$.keyvalue().key');
    for i in 0 .. jsonb_array_length(v_resources) - 1 loop
        v_resource := v_resources ->> i;
        v_grant := v_grants -> v_resource;
        v_token := case
            when jsonb_typeof(v_grant -> 'token') = 'number' and v_grant ->> 'token' ~ '^[0-9]{1,16}$'
                and jsonb_typeof(v_grant -> 'owner') = 'string' and fenceguard.is_name(v_grant ->> 'owner')
                and fenceguard.is_name(v_resource)
            then v_grant ->> 'token' end;
        if (v_token between 1 and 9007199254740991) is not true then
            raise exception using
                errcode = 'invalid_parameter_value',
                message = format('fenceguard.grants holds no valid grant for %s: %s', to_json(v_resource), v_grant),
                hint = 'A grant is {"token": an integer from 1 to 2^53 - 1, "owner": a string}; resources and owners '
                    'have 1 to 512 bytes and no control characters.';
        end if;
        -- Two statements: the snapshot of the one that compares must be newer than the gate.
        perform pg_advisory_xact_lock_shared(fenceguard.gate(v_resource));
        perform fenceguard.compare(v_resource, v_token, v_grant ->> 'owner', p_table);
    end loop;

    perform set_config('fenceguard.gates', v_xid || v_gates::text, true),
        set_config('fenceguard.entered', v_xid || v_announced, true);
    -- A holder that died between two statements must not keep the next one out for ever.
    if current_setting('idle_in_transaction_session_timeout')::interval
        not between interval '1 ms' and interval '60 s'
    then
        perform set_config('idle_in_transaction_session_timeout', '60s', true);
    end if;
end
$function$;
comment on function fenceguard.enter_announced(text) is
    'enters all that fenceguard.grants announces; the triggers of fenced tables call it. Refused: ZF001 stale, ZF003 '
    'not claimed, ZF005 transaction too old, ZF006 too many resources, JSON in DETAIL';

create function fenceguard.enter(p_resource text, p_token bigint, p_owner text) returns void
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_grants jsonb;
begin
    perform fenceguard.check_name('resource', p_resource);
    v_grants := fenceguard.parse_grants(coalesce(nullif(current_setting('fenceguard.grants', true), ''), '{}'))
        || jsonb_build_object(p_resource, jsonb_build_object('token', p_token, 'owner', p_owner));
    perform set_config('fenceguard.grants', v_grants::text, true);
    perform fenceguard.enter_announced();
end
$function$;
comment on function fenceguard.enter(text, bigint, text) is
    'announces a grant for the rest of the transaction and enters at once';

create function fenceguard.unfenced(p_reason text) returns void
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if btrim(coalesce(p_reason, '')) = '' then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = 'unfenced writes need a reason',
            hint = 'Say why, as in fenceguard.unfenced(''back-fill 2027-01'').';
    end if;
    raise log 'fenceguard: % writes unfenced in transaction %: %', session_user, pg_current_xact_id(), p_reason;
    perform set_config('fenceguard.unfenced', pg_current_xact_id()::text || ' ' || p_reason, true);
end
$function$;
comment on function fenceguard.unfenced(text) is
    'lets the rest of the transaction write to enforced tables without announcing; logged with its reason; '
    'set_config(''fenceguard.unfenced'', '''', true) ends it earlier';

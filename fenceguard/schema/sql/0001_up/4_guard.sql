-- The statement trigger of fenced tables, on the table and on every partition: it enters, whatever rows follow.
--
-- Its arguments say what the fence is: level, resource (a template, a constant or '*'), column. Everything else, the
-- row trigger too, is derived from them.
--
-- It runs with the rights of whoever writes and, for speed, with the caller's search_path: so each name is qualified.

-- All of it is new here, so no lock is waited for.
-- squawk-ignore-file require-lock-timeout, require-statement-timeout

create function fenceguard.refuse_write(p_table text, p_grants jsonb default null, p_resource text default null)
    returns void
    language plpgsql volatile
as $function$
begin
    if pg_catalog.starts_with(
        pg_catalog.current_setting('fenceguard.unfenced', true),
        pg_catalog.concat(pg_catalog.pg_current_xact_id(), ' '))
    then
        return;
    elsif p_grants is null then
        raise exception using
            errcode = 'ZF002',
            message = pg_catalog.format('%s is enforced and the transaction announces no grant', p_table),
            detail = pg_catalog.jsonb_build_object('table', p_table)::pg_catalog.text,
            hint = 'Write under a hold of its resource, or after fenceguard.unfenced(reason) for maintenance.';
    end if;
    raise exception using
        errcode = 'ZF004',
        message = pg_catalog.format('a row of %s belongs to resource %s, which the transaction does not announce',
            p_table, coalesce(pg_catalog.to_json(p_resource)::pg_catalog.text, '(none)')),
        detail = pg_catalog.jsonb_build_object(
            'table', p_table,
            'resource', case
                when pg_catalog.octet_length(p_resource) operator(pg_catalog.<=) 512
                    and p_resource operator(pg_catalog.!~) '[\u0001-\u001f\u007f-\u009f]'
                then p_resource
            end,
            'announced', array(select pg_catalog.jsonb_object_keys(p_grants)))::pg_catalog.text,
        hint = 'Hold the resource of each row; for a row that changes its resource, both.';
end
$function$;
comment on function fenceguard.refuse_write(text, jsonb, text) is
    'refuses a write of a row whose resource is not among the grants (ZF004), or without any (ZF002), unless the '
    'transaction has called fenceguard.unfenced; the triggers of fenced tables call it';

create function fenceguard.guard_statement() returns trigger
    language plpgsql volatile
as $function$
declare
    v_announced pg_catalog.text := pg_catalog.current_setting('fenceguard.grants', true);
begin
    if v_announced is null
        or v_announced operator(pg_catalog.=) ''
        or v_announced operator(pg_catalog.=) '{}'
    then
        if tg_argv[0] operator(pg_catalog.=) 'enforce' then
            perform fenceguard.refuse_write(pg_catalog.concat(tg_table_schema, '.', tg_table_name));
        end if;
        return null;
    end if;
    -- As enter_announced looks first: here it saves a call that costs more than the rest.
    if (pg_catalog.current_setting('fenceguard.entered', true)
        operator(pg_catalog.=) pg_catalog.concat(pg_catalog.pg_current_xact_id(), ' ', v_announced)) is not true
    then
        perform fenceguard.enter_announced(pg_catalog.concat(tg_table_schema, '.', tg_table_name));
    end if;
    return null;
end
$function$;

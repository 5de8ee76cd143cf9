-- Removes what 0001_up made; the version table and the schema itself go with the last step of the chain.

-- Removing is its purpose, it runs in one transaction, and it asks first whether a table needs any of it.
-- squawk-ignore-file ban-drop-table, ban-drop-function, prefer-robust-stmts
-- squawk-ignore-file require-lock-timeout, require-statement-timeout

do $block$
declare
    v_tables text := (
        select string_agg(distinct tgrelid::regclass::text, ', ') from pg_catalog.pg_trigger
        where tgfoid = 'fenceguard.guard_statement()'::regprocedure
    );
    v_function regprocedure;
begin
    if v_tables is not null then
        raise exception using
            errcode = 'object_in_use',
            message = 'fenceguard cannot be removed, tables are still fenced: ' || v_tables,
            hint = 'Take their fences off first, with op.drop_fence or fenceguard.drop_fence.';
    end if;
    -- A row function stays behind when its table is dropped without drop_fence.
    for v_function in
        select oid from pg_catalog.pg_proc
        where pronamespace = 'fenceguard'::regnamespace and proname like 'guard\_rows\_%'
    loop
        execute format('drop function %s', v_function);
    end loop;
end
$block$;

drop table fenceguard.fence;

drop function
    fenceguard.add_fence(regclass, text, text, name),
    fenceguard.drop_fence(regclass),
    fenceguard.is_fenced(regclass, text, text, name),
    fenceguard.check_fence(regclass, text, text, name),
    fenceguard.create_row_guard(regclass, text, text, name),
    fenceguard.row_guard_of(regclass),
    fenceguard.has_fence_column(regclass, name),
    fenceguard.check_table(regclass),
    fenceguard.fence_of(regclass),
    fenceguard.row_guard_source(regclass, text, text, name),
    fenceguard.row_check_source(regclass, text, name),
    fenceguard.row_resource(regclass, text, text),
    fenceguard.check_field(regclass, text, text),
    fenceguard.parse_template(text),
    fenceguard.guard_statement(),
    fenceguard.refuse_write(text, jsonb, text),
    fenceguard.unfenced(text),
    fenceguard.enter(text, bigint, text),
    fenceguard.enter_announced(text),
    fenceguard.compare(text, bigint, text, text),
    fenceguard.parse_grants(text),
    fenceguard.gate_holders(text),
    fenceguard.claim(text, bigint, text, integer),
    fenceguard.take_gate(text, integer),
    fenceguard.guard_fence(),
    fenceguard.check_token(bigint),
    fenceguard.check_name(text, text),
    fenceguard.is_name(text),
    fenceguard.gate(text),
    fenceguard.timeline(),
    fenceguard.version();

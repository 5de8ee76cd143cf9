-- Fencing a table: a column, a statement trigger on it and each partition, a row trigger.

-- All of it is new here, so no lock is waited for.
-- squawk-ignore-file require-lock-timeout, require-statement-timeout

create function fenceguard.fence_of(p_table regclass, out level text, out resource text, out column_name text)
    language sql stable
begin atomic
    -- A trigger's arguments are kept as bytes, each ended by a zero; no name holds \x01.
    select split_part(a.texts, e'\x01', 1), split_part(a.texts, e'\x01', 2), split_part(a.texts, e'\x01', 3)
    from pg_catalog.pg_trigger t,
        lateral (
            select convert_from(
                decode(replace(regexp_replace(encode(t.tgargs, 'hex'), '(..)', '\1 ', 'g'), '00 ', '01 '), 'hex'),
                getdatabaseencoding()) as texts
        ) a
    where t.tgrelid = p_table
        and t.tgfoid = 'fenceguard.guard_statement()'::regprocedure
        and not t.tgisinternal;
end;
comment on function fenceguard.fence_of(regclass) is 'what fences a table; no level where nothing does';

create function fenceguard.check_table(p_table regclass) returns void
    language plpgsql stable
as $function$
declare
    v_class pg_class;
    v_other text;
begin
    select * into v_class from pg_class where oid = p_table;
    if not found then
        raise exception using
            errcode = 'undefined_table',
            message = format('there is no table %s', coalesce(p_table::text, 'NULL')),
            hint = 'Create the table first, or name its schema.';
    elsif v_class.relkind not in ('r', 'p') or v_class.relnamespace = 'fenceguard'::regnamespace
        or v_class.relnamespace = 'pg_catalog'::regnamespace
    then
        raise exception using
            errcode = 'wrong_object_type',
            message = format('%s cannot be fenced: it is no ordinary or partitioned table of yours', p_table),
            hint = 'Fence the tables that a view or foreign table stands for.';
    elsif v_class.relispartition then
        raise exception using
            errcode = 'wrong_object_type',
            message = format('%s is a partition', p_table),
            hint = format('Fence its root instead: %s.', pg_partition_root(p_table));
    end if;
    v_other := (
        select inhrelid::regclass from pg_inherits
        where v_class.relkind = 'r' and p_table in (inhrelid, inhparent)
        union all
        select relid from pg_partition_tree(p_table)
        where (select relkind from pg_class where oid = relid) not in ('r', 'p')
        limit 1
    );
    if v_other is not null then
        raise exception using
            errcode = 'feature_not_supported',
            message = format('%s cannot be fenced because of %s: table inheritance and foreign partitions have no '
                             'triggers that see every row', p_table, v_other),
            hint = 'Use declarative partitions that are tables.';
    end if;
    if not has_function_privilege(v_class.relowner, 'fenceguard.enter_announced(text)', 'execute')
        or not has_function_privilege(v_class.relowner, 'fenceguard.refuse_write(text, jsonb, text)', 'execute')
        or not has_schema_privilege(v_class.relowner, 'fenceguard', 'usage')
    then
        raise exception using
            errcode = 'insufficient_privilege',
            message = format('%s, the owner of %s, may not enter: cascades of foreign keys write as the owner',
                             v_class.relowner::regrole, p_table),
            hint = format('grant usage on schema fenceguard to %1$s; '
                          'grant execute on function fenceguard.enter_announced, fenceguard.refuse_write to %1$s;',
                          v_class.relowner::regrole);
    end if;
end
$function$;

create function fenceguard.has_fence_column(p_table regclass, p_column name) returns boolean
    language plpgsql stable
as $function$
-- returns whether the column is there; raises when something else is there under its name
declare
    v_column record;
begin
    select a.atttypid, a.attnotnull, a.attgenerated, a.attidentity, pg_get_expr(d.adbin, d.adrelid) as default_,
        format_type(a.atttypid, a.atttypmod) as type_
    into v_column
    from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where a.attrelid = p_table and a.attname = p_column and not a.attisdropped;
    if not found then
        return false;
    elsif v_column.atttypid <> 'int8'::regtype or not v_column.attnotnull or v_column.attgenerated <> ''
        or v_column.attidentity <> '' or coalesce(v_column.default_, '') !~ '^\(?''?0''?\)?(::bigint)?$'
    then
        raise exception using
            errcode = 'datatype_mismatch',
            message = format('column %s of %s is %s%s%s, not bigint not null default 0', to_json(p_column::text), p_table,
                             v_column.type_, case when v_column.attnotnull then ' not null' else '' end,
                             ' default ' || v_column.default_),
            hint = 'Alter it to "bigint not null default 0", or give the fence a column of another name.';
    end if;
    return true;
end
$function$;

create function fenceguard.row_guard_of(p_table regclass) returns regprocedure
    language sql stable
begin atomic
    select t.tgfoid::regprocedure from pg_catalog.pg_trigger t where t.tgrelid = p_table and t.tgname = '~fenceguard';
end;

create function fenceguard.create_row_guard(p_table regclass, p_resource text, p_level text, p_column name) returns void
    language plpgsql volatile
as $function$
declare
    v_stem constant text := 'guard_rows_' || p_table::oid;
    v_name text := v_stem;
    v_partition regclass;
begin
    -- Restored from a dump, another table's function may have this table's number.
    for i in 2 .. 1000 loop
        exit when not exists (
            select from pg_proc where pronamespace = 'fenceguard'::regnamespace and proname = v_name);
        v_name := v_stem || '_' || i;
    end loop;
    execute format('create function fenceguard.%I() returns trigger language plpgsql volatile as %L', v_name,
                   fenceguard.row_guard_source(p_table, p_resource, p_level, p_column));
    execute format('revoke all on function fenceguard.%I() from public', v_name);
    execute format('comment on function fenceguard.%I() is %L', v_name, format('guards the rows of %s', p_table));
    -- "~" sorts last: what other BEFORE triggers change is checked as well.
    execute format('create trigger "~fenceguard" before insert or update or delete on %s for each row '
                   'execute function fenceguard.%I()', p_table, v_name);
    if p_resource <> '*' then
        for v_partition in select relid from pg_partition_tree(p_table) union select p_table loop
            execute format('create trigger "~fenceguard_truncate" before truncate on %s for each statement '
                           'execute function fenceguard.%I()', v_partition, v_name);
        end loop;
    end if;
end
$function$;

create function fenceguard.check_fence(p_table regclass, p_resource text, p_level text, p_column name)
    returns void
    language plpgsql stable
as $function$
begin
    if p_level is null or p_level not in ('reject', 'enforce') then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('level %s is not known', coalesce(to_json(p_level)::text, 'NULL')),
            hint = 'Levels are reject (unannounced writes pass) and enforce (they are refused).';
    end if;
    perform fenceguard.check_table(p_table);
    if p_resource = '*' then
        return;
    end if;
    perform fenceguard.row_resource(p_table, p_resource, 'new');
    if p_column::text = any ((select fields from fenceguard.parse_template(p_resource))::text[]) then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('template %s: column %s is the row fence itself', to_json(p_resource),
                             to_json(p_column::text)),
            hint = 'Name a row by other columns, or give the fence a column of another name.';
    end if;
end
$function$;

create function fenceguard.is_fenced(p_table regclass, p_resource text, p_level text, p_column name) returns boolean
    language plpgsql stable
as $function$
-- returns whether the table is fenced in this way; raises when it is fenced in another
declare
    v_present record;
begin
    select * into v_present from fenceguard.fence_of(p_table);
    if v_present.level is null then
        return false;
    elsif (v_present.level, v_present.resource, v_present.column_name) = (p_level, p_resource, p_column::text) then
        return true;
    end if;
    raise exception using
        errcode = 'duplicate_object',
        message = format('%s is fenced already: level %s, resource %s, column %s', p_table, v_present.level,
                         to_json(v_present.resource), to_json(v_present.column_name)),
        hint = 'Drop its fence first.';
end
$function$;

create function fenceguard.add_fence(p_table regclass, p_resource text, p_level text, p_column name default 'fence')
    returns void
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_partition regclass;
begin
    perform fenceguard.check_fence(p_table, p_resource, p_level, p_column);
    if fenceguard.is_fenced(p_table, p_resource, p_level, p_column) then
        return;
    end if;
    -- The strongest lock first: an upgrade could deadlock with readers that go on to write.
    execute format('lock table %s in %s mode', p_table,
                   case when fenceguard.has_fence_column(p_table, p_column)
                       then 'share row exclusive' else 'access exclusive' end);
    -- Looked at again: another may have had the lock before.
    if fenceguard.is_fenced(p_table, p_resource, p_level, p_column) then
        return;
    elsif not fenceguard.has_fence_column(p_table, p_column) then
        execute format('alter table %s add column %I bigint not null default 0', p_table, p_column);
    end if;
    for v_partition in select relid from pg_partition_tree(p_table) union select p_table loop
        execute format('create trigger fenceguard before insert or update or delete or truncate on %s '
                       'for each statement execute function fenceguard.guard_statement(%L, %L, %L)',
                       v_partition, p_level, p_resource, p_column);
    end loop;
    if p_resource <> '*' or exists (select from pg_class where oid = p_table and relkind = 'p') then
        perform fenceguard.create_row_guard(p_table, p_resource, p_level, p_column);
    end if;
end
$function$;
comment on function fenceguard.add_fence(regclass, text, text, name) is
    'fences a table: rows belong to the resource that the template names, or to any (''*''); level reject or enforce';

create function fenceguard.drop_fence(p_table regclass) returns void
    language plpgsql volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_present record;
    v_row_guard regprocedure := fenceguard.row_guard_of(p_table);
    v_trigger record;
begin
    select * into v_present from fenceguard.fence_of(p_table);
    if (select relispartition from pg_class where oid = p_table) then
        raise exception using
            errcode = 'wrong_object_type',
            message = format('%s is a partition', p_table),
            hint = format('Drop the fence of its root instead: %s.', pg_partition_root(p_table));
    elsif v_present.level is null then
        raise exception using
            errcode = 'undefined_object',
            message = format('table %s has no fence', coalesce(p_table::text, 'NULL')),
            hint = 'Nothing is to be dropped here; add_fence adds one.';
    end if;
    execute format('lock table %s in access exclusive mode', p_table);
    -- The row function may also guard a partition that was detached since.
    for v_trigger in
        select t.tgname, t.tgrelid::regclass as table_ from pg_trigger t
        where t.tgparentid = 0 and not t.tgisinternal
            and (t.tgfoid = v_row_guard
                or t.tgfoid = 'fenceguard.guard_statement()'::regprocedure
                    and (t.tgrelid = p_table or t.tgrelid in (select relid from pg_partition_tree(p_table))))
    loop
        execute format('drop trigger %I on %s', v_trigger.tgname, v_trigger.table_);
    end loop;
    if v_row_guard is not null then
        execute format('drop function %s', v_row_guard);
    end if;
    execute format('alter table %s drop column %I', p_table, v_present.column_name);
end
$function$;
comment on function fenceguard.drop_fence(regclass) is 'takes the fence off a table: its triggers and its column';

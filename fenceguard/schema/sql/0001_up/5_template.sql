-- Templates: how a row names its resource. fenceguard.resources.Template is the same rule in Python.

-- All of it is new here, so no lock is waited for.
-- squawk-ignore-file require-lock-timeout, require-statement-timeout

create function fenceguard.parse_template(p_template text, out literals text[], out fields text[])
    language plpgsql immutable
as $function$
declare
    v_piece text;
    v_text text := '';
    v_problem text;
begin
    perform fenceguard.check_name('template', p_template);
    literals := '{}';
    fields := '{}';
    for v_piece in
        select m[1] from regexp_matches(p_template, '(\{\{|\}\}|\{[^{}]*\}|[{}]|[^{}]+)', 'g') m
    loop
        if v_piece in ('{{', '}}') then
            v_text := v_text || left(v_piece, 1);
        elsif v_piece !~ '[{}]' then
            v_text := v_text || v_piece;
        elsif v_piece in ('{', '}') then
            v_problem := format('unmatched "%s"; write it twice for a brace', v_piece);
        -- Which letters beyond ASCII make a name is left to the table, which has such a column or not.
        elsif v_piece !~ '^\{[^\u0001-@\[-^`{-\u007f][^\u0001-/:-@\[-^`{-\u007f]*\}$' then
            v_problem := format('"%s" is no field; write {column}', v_piece);
        elsif v_text = '' and cardinality(fields) > 0 then
            v_problem := 'put text between two fields, or their values run together';
        else
            literals := literals || v_text;
            fields := fields || substr(v_piece, 2, length(v_piece) - 2);
            v_text := '';
        end if;
        exit when v_problem is not null;
    end loop;
    literals := literals || v_text;
    if v_problem is not null then
        raise exception using
            errcode = 'invalid_parameter_value',
            message = format('template %s: %s', to_json(p_template), v_problem),
            hint = 'A template is a constant, or text with fields as in account:{id}.';
    end if;
end
$function$;

create function fenceguard.check_field(p_table regclass, p_template text, p_field text) returns text
    language plpgsql stable
as $function$
declare
    v_column pg_attribute;
    v_type oid;
begin
    select * into v_column from pg_attribute
    where attrelid = p_table and attname = p_field and attnum > 0 and not attisdropped;
    if not found then
        raise exception using
            errcode = 'undefined_column',
            message = format('template %s: table %s has no column %s', to_json(p_template), p_table, to_json(p_field)),
            hint = 'The fields of a template are columns of its table.';
    end if;
    v_type := v_column.atttypid;
    while exists (select from pg_type where oid = v_type and typtype = 'd') loop
        v_type := (select typbasetype from pg_type where oid = v_type);
    end loop;
    if v_type not in ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'text'::regtype, 'varchar'::regtype,
                      'uuid'::regtype)
    then
        raise exception using
            errcode = 'datatype_mismatch',
            message = format('template %s: column %s of %s is of type %s', to_json(p_template), to_json(p_field),
                             p_table, format_type(v_column.atttypid, v_column.atttypmod)),
            hint = 'Fields are smallint, integer, bigint, text, varchar or uuid: other types read differently in '
                'Python and in Postgres.';
    elsif v_column.attgenerated <> '' then
        raise exception using
            errcode = 'datatype_mismatch',
            message = format('template %s: column %s of %s is generated', to_json(p_template), to_json(p_field), p_table),
            hint = 'A generated column has no value yet when the trigger looks at it; use the columns it comes from.';
    end if;
    return v_type::regtype::text;
end
$function$;

create function fenceguard.row_resource(p_table regclass, p_template text, p_row text) returns text
    language plpgsql stable
as $function$
-- returns an SQL expression over the record p_row; it is NULL where the row names no resource: a field is NULL, empty,
-- or holds a separator, so that two rows could share a resource
declare
    v_parsed record := fenceguard.parse_template(p_template);
    v_parts text[] := array[quote_literal(v_parsed.literals[1])];
    v_tests text[] := '{}';
    v_value text;
    v_separator text;
begin
    for i in 1 .. cardinality(v_parsed.fields) loop
        v_value := format('%s.%I::pg_catalog.text collate pg_catalog."C"', p_row, v_parsed.fields[i]);
        if fenceguard.check_field(p_table, p_template, v_parsed.fields[i]) in ('text', 'character varying') then
            v_tests := v_tests || format('(%s) operator(pg_catalog.<>) ''''', v_value);
        end if;
        foreach v_separator in array v_parsed.literals[2 : cardinality(v_parsed.fields)] loop
            -- Also a value whose end and the separator's start form the separator: "a-" before "--".
            v_tests := v_tests || format(
                'pg_catalog.strpos((%1$s) operator(pg_catalog.||) %2$L, %2$L) operator(pg_catalog.=)'
                ' (pg_catalog.length(%1$s) operator(pg_catalog.+) 1)', v_value, v_separator);
        end loop;
        v_parts := v_parts || format('(%s)', v_value) || quote_literal(v_parsed.literals[i + 1]);
    end loop;
    return case when cardinality(v_tests) > 0
        then format('case when %s then %s end', array_to_string(v_tests, ' and '),
                    array_to_string(v_parts, ' operator(pg_catalog.||) '))
        else array_to_string(v_parts, ' operator(pg_catalog.||) ')
    end;
end
$function$;

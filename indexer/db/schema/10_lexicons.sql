-- Typed views of record types, and the functions that they use.

-- The lexicons that were added, and those that their fields refer to. The latter have no view.
create table indexer.lexicon (
    nsid text collate "C" not null,
    -- The lexicon as JSON, with its fields in their original order.
    document json not null,
    -- The file, or the AT-URI of the verified record, that it was read from.
    source text not null,
    -- The view in schema lexicon; null for a lexicon without a view.
    view_name text collate "C",
    -- The fields of a record in the order of the columns of the view.
    fields jsonb,
    -- The query of the view when it was last created.
    definition text,
    added_at timestamptz not null default now(),
    constraint lexicon_view_name unique (view_name),
    primary key (nsid),
    constraint lexicon_has_view check ((view_name is null) = (fields is null))
);

-- Empty. Its lock serializes the building of indexes on typed views.
create table indexer.lexicon_index_lock ();

-- The string; null for another type and for a longer string.
-- The functions return null for a value that does not fit, and never fail. Those in SQL are not strict, because
-- Postgres inlines no strict function that contains CASE. A query on a view is as fast as one with the written-out
-- expressions.
create function lexicon.to_text(value jsonb, max_bytes integer) returns text
language sql immutable parallel safe
return case jsonb_typeof(value) when 'string' then
    case when octet_length(value #>> '{}') <= max_bytes then value #>> '{}' end
end;

-- The integer; null for another type, a fraction, and more than 64 bits.
create function lexicon.to_bigint(value jsonb) returns bigint
language sql immutable parallel safe
return case jsonb_typeof(value) when 'number' then
    case when value::numeric between -9223372036854775808 and 9223372036854775807
        and value::numeric = trunc(value::numeric) then value::numeric::bigint end
end;

-- The boolean; null for another type.
create function lexicon.to_boolean(value jsonb) returns boolean
language sql immutable parallel safe
return case jsonb_typeof(value) when 'boolean' then value::boolean end;

-- The object; null for another type.
create function lexicon.to_object(value jsonb) returns jsonb
language sql immutable parallel safe
return case jsonb_typeof(value) when 'object' then value end;

-- The array; null for another type.
create function lexicon.to_array(value jsonb) returns jsonb
language sql immutable parallel safe
return case jsonb_typeof(value) when 'array' then value end;

-- The value; null for a null of JSON.
create function lexicon.to_any(value jsonb) returns jsonb
language sql immutable parallel safe
return nullif(value, 'null'::jsonb);

-- The strings of an array, null for an item that is no string or is longer; null for another type.
create function lexicon.to_text_array(value jsonb, max_bytes integer) returns text[]
language sql immutable strict parallel safe
return case jsonb_typeof(value) when 'array' then array(
    select lexicon.to_text(item, max_bytes)
    from jsonb_array_elements(case jsonb_typeof(value) when 'array' then value else '[]' end) item
) end;

-- The time of a datetime as the AT Protocol defines it; null for everything else. It depends on no setting, so it can
-- be indexed.
-- A datetime of the AT Protocol: RFC 3339 with a T, seconds, and a time zone that is not -00:00. Postgres accepts
-- offsets below 16 hours; of a larger one, 12 hours are subtracted after the cast. The days of each month are spelled
-- out, so that the cast after this check cannot fail. The cast is not immutable for every text, because it may depend
-- on DateStyle and TimeZone. For a text that passes the check it depends on nothing. Z is replaced, because it is
-- looked up in a file of time zone abbreviations. Times whose year in UTC is not 1 to 9999 are left out, because
-- drivers cannot represent them.
create function lexicon.to_timestamp(value jsonb) returns timestamptz
language plpgsql immutable strict parallel safe as $$
declare
    text_value pg_catalog.text := value operator(pg_catalog.#>>) '{}';
    rest pg_catalog.interval := '0';
    found timestamptz;
begin
    if pg_catalog.jsonb_typeof(value) operator(pg_catalog.=) 'string'
        and pg_catalog.octet_length(text_value) operator(pg_catalog.<=) 64
        and text_value operator(pg_catalog.~) (
            '^([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])'
            '|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))'
            '|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)'
            'T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])$'
        )
        and pg_catalog.left(text_value, 4) operator(pg_catalog.<>) '0000'
        and pg_catalog.right(text_value, 6) operator(pg_catalog.<>) '-00:00'
    then
        if text_value operator(pg_catalog.~) '[+-](1[6-9]|2[0-3]):[0-9]{2}$' then
            rest := (pg_catalog.left(pg_catalog.right(text_value, 6), 1) operator(pg_catalog.||) '12:00')
                ::pg_catalog.interval;
            text_value := pg_catalog.left(text_value, -5) operator(pg_catalog.||) pg_catalog.to_char(
                pg_catalog.right(text_value, 5)::pg_catalog.interval operator(pg_catalog.-) '12:00', 'HH24:MI'
            );
        end if;
        found := pg_catalog.replace(text_value, 'Z', '+00:00')::pg_catalog.timestamptz
            operator(pg_catalog.-) rest;
        if found operator(pg_catalog.>=) pg_catalog.to_timestamp(-62135596800)
            and found operator(pg_catalog.<) pg_catalog.to_timestamp(253402300800)
        then
            return found;
        end if;
    end if;
    return null;
end $$;

-- The time to sort a record by: createdAt if it is a datetime, but not later than the record was first stored.
create function lexicon.sort_at(value jsonb, first_seen timestamptz, indexed_at timestamptz) returns timestamptz
language sql immutable parallel safe
return least(lexicon.to_timestamp(value -> 'createdAt'), coalesce(first_seen, indexed_at));

-- Why a value does not fit its field; null if it does.
create function lexicon.field_problem(
    value jsonb, kind text, max_bytes integer, required boolean, nullable boolean
) returns text
language plpgsql immutable parallel safe as $$
declare
    found constant text := pg_catalog.jsonb_typeof(value);
    expected constant text := case kind
        when 'text' then 'string' when 'timestamp' then 'string' when 'bigint' then 'number'
        when 'boolean' then 'boolean' when 'array' then 'array' when 'text_array' then 'array'
        when 'any' then found else 'object'
    end;
begin
    if found is null then
        return case when required then 'missing' end;
    elsif found = 'null' then
        return case when not nullable then 'null' end;
    elsif found <> expected then
        return pg_catalog.format('expected %s, found %s', expected, found);
    end if;
    return case
        when kind = 'text' and lexicon.to_text(value, max_bytes) is null then
            pg_catalog.format('longer than %s bytes', max_bytes)
        when kind = 'bigint' and lexicon.to_bigint(value) is null then 'not a 64-bit integer'
        when kind = 'timestamp' and lexicon.to_timestamp(value) is null then 'not a datetime'
        when kind = 'text_array' then case
            when pg_catalog.array_position(lexicon.to_text_array(value, 2147483647), null) is not null then
                'an item is not a string'
            when pg_catalog.array_position(lexicon.to_text_array(value, max_bytes), null) is not null then
                pg_catalog.format('an item is longer than %s bytes', max_bytes)
        end
        when kind = 'link' and lexicon.to_text(value -> '$link', 256) is null then 'not a link'
        when kind = 'blob' then case
            when lexicon.to_text(coalesce(value -> 'ref' -> '$link', value -> 'cid'), 256) is null
                or lexicon.to_text(value -> 'mimeType', 256) is null
            then 'not a blob'
            when value -> 'size' is not null and coalesce(lexicon.to_bigint(value -> 'size'), -1) < 0 then
                'its size is not a number of bytes'
        end
        when kind = 'strong_ref' and (
            lexicon.to_text(value -> 'uri', 2048) is null or lexicon.to_text(value -> 'cid', 256) is null
        ) then 'not a strong reference'
    end;
end $$;

-- Why a record does not fit its lexicon; null if it does.
create function lexicon.problem(value jsonb, value_problem text, fields jsonb) returns text
language plpgsql immutable parallel safe as $$
declare
    problems text;
    problem text;
    name text; kind text; max_bytes integer; required boolean; nullable boolean;
begin
    if value is null or value_problem = 'not-a-map' then
        return 'record: ' || coalesce(value_problem, 'no value');
    elsif value_problem in ('no-type', 'other-type') then
        problems := '$type: ' || value_problem;
    end if;
    for name, kind, max_bytes, required, nullable in
        select f ->> 0, f ->> 1, (f ->> 2)::integer, (f ->> 3)::boolean, (f ->> 4)::boolean
        from pg_catalog.jsonb_array_elements(fields) f
    loop
        problem := lexicon.field_problem(value -> name, kind, max_bytes, required, nullable);
        if problem is not null then
            problems := pg_catalog.concat_ws('; ', problems, name || ': ' || problem);
        end if;
    end loop;
    return problems;
end $$;

-- The expressions of the columns of a field.
create function indexer.lexicon_expressions(field jsonb) returns text[]
language plpgsql immutable strict set search_path = pg_catalog, pg_temp as $$
declare
    member constant text := format('(value -> %L)', field ->> 'field');
    max_bytes constant text := field ->> 'max_bytes';
begin
    return case field ->> 'kind'
        when 'text' then array[format('lexicon.to_text(%s, %s)', member, max_bytes)]
        when 'text_array' then array[format('lexicon.to_text_array(%s, %s)', member, max_bytes)]
        when 'link' then array[format('lexicon.to_text(%s -> ''$link'', 256)', member)]
        when 'strong_ref' then array[
            format('lexicon.to_text(%s -> ''uri'', 2048)', member),
            format('lexicon.to_text(%s -> ''cid'', 256)', member)
        ]
        when 'blob' then array[
            format('lexicon.to_text(coalesce(%s -> ''ref'' -> ''$link'', %1$s -> ''cid''), 256)', member),
            format('lexicon.to_text(%s -> ''mimeType'', 256)', member),
            format('nullif(greatest(lexicon.to_bigint(%s -> ''size''), -1), -1)', member)
        ]
        else array[format('lexicon.to_%s(%s)', field ->> 'kind', member)]
    end;
end $$;

-- The condition that the value of a field fits.
-- It is inlined, so that only values that do not fit cost a call of lexicon.problem.
create function indexer.lexicon_condition(field jsonb) returns text
language sql immutable strict set search_path = pg_catalog, pg_temp
return (
    select format('(%s%s%s)',
        case when not (field ->> 'required')::boolean then
            format('(value -> %L) is null or ', field ->> 'field')
        end,
        case when (field ->> 'nullable')::boolean then
            format('(value -> %L) is not distinct from ''null''::jsonb or ', field ->> 'field')
        end,
        string_agg(
            case
                when field ->> 'kind' = 'text_array' then
                    format('array_position(coalesce(%s, array[null::text]), null) is null', e.expression)
                when e.n = 3 then  -- a blob of an early release has no size
                    format('((value -> %L -> ''size'') is null or %s is not null)', field ->> 'field', e.expression)
                else format('%s is not null', e.expression)
            end,
            ' and ' order by e.n
        )
    )
    from unnest(indexer.lexicon_expressions(field)) with ordinality as e(expression, n)
);

-- The columns that each view has, unless a field of the lexicon has the name, and their comments.
create function indexer.lexicon_keys(out name text, out comment text) returns setof record
language sql immutable set search_path = pg_catalog, pg_temp
begin atomic
    values ('did', 'The DID of the repo that contains the record.'),
        ('rkey', 'The record key.'),
        ('uri', 'The AT-URI of the record.'),
        ('cid', 'The CID of the record.'),
        ('rev', 'The rev of the commit that wrote the record, or of the export in which it was found.'),
        ('indexed_at', 'When the record was last written here, by the clock of this server.'),
        ('lexicon_problem', 'Why columns are null although the lexicon requires or allows a value, by field; null: no '
            'problem.'),
        ('bucket', 'The bucket of the DID, as atproto.bucket_of returns it.'),
        ('first_seen', 'When the record was first stored; updates do not change it.'),
        ('first_seen_live', 'True if found live, false if by a resync; null: unknown.'),
        ('sort_at', 'createdAt if it is a datetime before first_seen; otherwise first_seen.');
end;

-- The query of the view of a record type. Columns that the view already has stay where they are; new ones follow.
create function indexer.lexicon_query(nsid text, view_name text, fields jsonb) returns text
language sql stable strict set search_path = pg_catalog, pg_temp
return (
    with field as (select f, n from jsonb_array_elements(fields) with ordinality as fields_in_order(f, n)),
    field_column as (
        select c.name, e.expression, field.n, e.n as part
        from field, unnest(indexer.lexicon_expressions(f)) with ordinality as e(expression, n)
            join jsonb_array_elements_text(f -> 'columns') with ordinality as c(name, n) on c.n = e.n
    ),
    key_column as (
        select name, case when name = 'lexicon_problem' then format(
            'case when value_problem is not null%s then lexicon.problem(value, value_problem, %L::jsonb) end',
            (select string_agg(format(' or not %s', indexer.lexicon_condition(f)), '' order by n) from field),
            coalesce((
                select jsonb_agg(jsonb_build_array(
                    f -> 'field', f -> 'kind', f -> 'max_bytes', f -> 'required', f -> 'nullable'
                ) order by n) from field
            ), '[]')
        ) else name end as expression, 0 as n, part
        from indexer.lexicon_keys() with ordinality as keys(name, comment, part)
        where name not in (select name from field_column)
    )
    select format('select %s from atproto.records where collection = %L', (
        select string_agg(format('%s as %I', c.expression, c.name), ', ' order by a.attnum, c.n, c.part)
        from (select * from key_column union all select * from field_column) c left join pg_attribute a
            on a.attrelid = to_regclass(format('lexicon.%I', view_name)) and a.attname = c.name
    ), nsid)
);

-- Create the view of a stored lexicon, or replace it if its query has changed; true if it did. If its columns cannot
-- stay, the view is dropped first, which fails if other objects depend on it.
-- Nothing but the comments changes if the query is the same, so that no reader is waited for.
create function indexer.create_lexicon_view(nsid text) returns boolean
language plpgsql strict set search_path = pg_catalog, pg_temp as $$
declare
    stored indexer.lexicon;
    present boolean;
    query text;
    name text;
    comment text;
    role text;
begin
    select * into strict stored from indexer.lexicon l where l.nsid = $1;
    present := to_regclass(format('lexicon.%I', stored.view_name)) is not null;
    query := indexer.lexicon_query(stored.nsid, stored.view_name, stored.fields);
    if present and stored.definition is null then
        raise exception 'lexicon.% exists and is not a view of a lexicon', quote_ident(stored.view_name)
            using errcode = 'duplicate_table';
    end if;
    if not present or stored.definition is distinct from query then
        begin
            execute format('create or replace view lexicon.%I as %s', stored.view_name, query);
        exception when invalid_table_definition then
            execute format('drop view lexicon.%I', stored.view_name);
            execute format('create view lexicon.%I as %s', stored.view_name, query);
        end;
        for role in select rolname from pg_roles where rolname in ('atproto_reader', 'atproto_operator') loop
            execute format('grant select on lexicon.%I to %I', stored.view_name, role);
        end loop;
    end if;
    execute format('comment on view lexicon.%I is %L', stored.view_name,
        coalesce(stored.document -> 'defs' -> 'main' ->> 'description', 'Records of ' || stored.nsid || '.'));
    for name, comment in
        select k.name, k.comment from indexer.lexicon_keys() k
        where not jsonb_path_exists(stored.fields, '$[*].columns[*] ? (@ == $name)', jsonb_build_object('name', k.name))
        union all
        select c.column_name, c.comment from jsonb_array_elements(stored.fields) f,
            rows from (
                jsonb_array_elements_text(f -> 'columns'), jsonb_array_elements_text(f -> 'comments')
            ) as c(column_name, comment)
    loop
        execute format('comment on column lexicon.%I.%I is %L', stored.view_name, name, comment);
    end loop;
    update indexer.lexicon l set definition = query where l.nsid = $1 and l.definition is distinct from query;
    return not present or stored.definition is distinct from query;
end $$;

-- Remove a stored lexicon and its view.
create function indexer.drop_lexicon_view(nsid text) returns void
language plpgsql strict set search_path = pg_catalog, pg_temp as $$
declare
    name text;
begin
    delete from indexer.lexicon l where l.nsid = $1 returning view_name into name;
    if name is not null then
        execute format('drop view if exists lexicon.%I', name);
    end if;
end $$;

-- Create the views that are missing, replace those whose query has changed, and return how many.
create function indexer.recreate_lexicon_views() returns bigint
language sql set search_path = pg_catalog, pg_temp
begin atomic
    select count(*) filter (where indexer.create_lexicon_view(l.nsid))
    from indexer.lexicon l where l.view_name is not null;
end;

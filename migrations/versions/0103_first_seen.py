"""Store when a record was first seen, and sort by it. Rows that exist have nulls, for which the views show indexed_at.

Each statement only needs a lock for a moment. The views are locked before the table, as queries do. `migrate` replaces
the typed views at the end: they get the new columns after those that they have, so views of users stay.
"""

from alembic import op

revision = "0103"
down_revision = "0102"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    do $$ declare
        view regclass;
    begin
        for view in select oid from pg_class
            where relkind = 'v' and relnamespace in ('atproto'::regnamespace, 'lexicon'::regnamespace)
        loop
            execute format('alter view %s reset (check_option)', view);
        end loop;
    end $$
    """,
    "alter table indexer.record add column first_live boolean, add column first_seen timestamptz",
    """
create function lexicon.sort_at(value jsonb, first_seen timestamptz, indexed_at timestamptz) returns timestamptz
language sql immutable parallel safe
return least(lexicon.to_timestamp(value -> 'createdAt'), coalesce(first_seen, indexed_at))
    """,
    """
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
end
    """,
    "drop function indexer.lexicon_query(text, jsonb, boolean)",
    """
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
)
    """,
    """
create or replace function indexer.create_lexicon_view(nsid text) returns boolean
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
end $$
    """,
    """
    do $do$ begin
        execute replace(
            pg_get_functiondef('indexer.adapt_public_schema()'::regprocedure),
            $old$
            case c.proof when 'c' then 'commit' when 'e' then 'export' when 'r' then 'range' end as proof
$old$,
            $new$
            case lower(c.proof::text) when 'c' then 'commit' when 'e' then 'export' when 'r' then 'range' end as proof,
            coalesce(c.first_seen, c.indexed_at) as first_seen,
            case when c.first_seen is null then c.proof in ('c', 'E', 'R') else c.first_live end as first_seen_live,
            lexicon.sort_at(c.value, c.first_seen, c.indexed_at) as sort_at
$new$
        );
    end $do$
    """,
    "select indexer.adapt_public_schema()",
)
COMMENTS = {
    "column atproto.records.first_seen": (
        "When it was first stored here, or an earlier imported time; updates do not change it. Of a record that an "
        "earlier release stored: when that last wrote it."
    ),
    "column atproto.records.first_seen_live": (
        "True if found live, false if by a resync, as in atproto.changes; null: unknown. What an earlier "
        "release stored: how that wrote it last."
    ),
    "column atproto.records.sort_at": "createdAt if it is a datetime before first_seen; otherwise first_seen.",
}


def upgrade() -> None:
    """Execute the statements one by one, because Citus sends the text of some of them to other nodes."""
    comments = [f"comment on {name} is '{text}'" for name, text in COMMENTS.items()]
    for statement in (*STATEMENTS, *comments):
        op.execute(statement)

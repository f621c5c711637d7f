"""Make the public schema work on a distributed database: buckets in the views, and functions that Citus can plan.

Citus sends a query to a single shard only if the query compares the bucket of each table with a constant. It derives no
bucket for the inner query of a view if that has a LIMIT, which plain Postgres needs for good plans. So
`indexer.adapt_public_schema` creates the views in one form or the other. Citus plans no SQL function whose parameters
select rows of a distributed table, so such functions are in PL/pgSQL.
"""

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

PUBLIC_FUNCTIONS = (
    """
    create function atproto.bucket_of(did text) returns smallint
    language sql immutable strict parallel safe
    return get_byte(sha256(convert_to(did, 'UTF8')), 0)::smallint
    """,
    """
    create or replace function atproto.record_bytes(did text, collection text, rkey text) returns bytea
    language plpgsql stable strict security definer set search_path = pg_catalog, pg_temp as $$
    begin
        return (
            select c.original from indexer.record c join indexer.repo r using (did, bucket)
            where c.did = $1 and c.collection = $2 and c.rkey = $3 and c.bucket = indexer.bucket_of($1)
                and r.active and not r.takedown
        );
    end $$
    """,
    """
    create or replace function atproto.did_of(handle text) returns text
    language plpgsql stable strict security definer set search_path = pg_catalog, pg_temp as $$
    declare
        wanted constant text collate "C" := lower(ltrim($1, '@') collate "C");
    begin
        return (
            select i.did from indexer.identity i where i.handle = wanted and i.handle <> 'handle.invalid'
            order by i.handle_due_at desc nulls last limit 1
        );
    end $$
    """,
)

CLUSTER_FUNCTIONS = (
    # Only a database with Citus has its catalogs. The query is planned when it is executed.
    """
    create function indexer.is_distributed(relation regclass) returns boolean
    language plpgsql stable strict set search_path = pg_catalog, pg_temp as $$
    begin
        if to_regclass('pg_catalog.pg_dist_partition') is null then
            return false;
        end if;
        return exists (select from pg_dist_partition p where p.logicalrelid = relation and p.partmethod = 'h');
    end $$
    """,
    # On the coordinator a distributed table is empty, so every node is asked for its shards. The name of a shard ends
    # with its number. While a shard is moved, two nodes have it, and one of them is its place.
    """
    create function indexer.parts_of(
        relation regclass, out buckets smallint[], out pages bigint, out estimated_rows bigint
    ) returns setof record
    language plpgsql stable strict set search_path = pg_catalog, pg_temp as $$
    declare
        every_bucket constant smallint[] := array(select generate_series(0, 255));
        table_name constant text := (select relname from pg_class where oid = relation);
        sizes constant text := 'array[pg_relation_size(oid) / current_setting(''block_size'')::bigint, '
            'greatest(reltuples::bigint, pg_stat_get_live_tuples(oid), 0)]';
        found bigint[];
        node record;
    begin
        if not indexer.is_distributed(relation) then
            execute format('select %s from pg_class where oid = $1', sizes) into found using relation;
            return query select every_bucket, found[1], found[2];
            return;
        end if;
        for node in
            select d.groupid, a.success, a.result
            from run_command_on_all_nodes(format(
                'select coalesce(json_object_agg(relname, %s), ''{}'') from pg_class '
                    'where relnamespace = ''indexer''::regnamespace and relkind = ''r'' and relname ~ %L',
                sizes, format('^%s_[0-9]+$', table_name)
            )) a join pg_dist_node d using (nodeid)
        loop
            if not node.success then
                raise exception 'a node of the cluster cannot tell the size of %: %', relation, node.result
                    using errcode = 'connection_failure';
            end if;
            return query
                select s.buckets, (f.value ->> 0)::bigint, (f.value ->> 1)::bigint
                from json_each(node.result::json) f join (
                    select get_shard_id_for_distribution_column(relation, bucket) as shardid,
                        array_agg(bucket order by bucket) as buckets
                    from unnest(every_bucket) bucket group by 1
                ) s on f.key = format('%s_%s', table_name, s.shardid)
                join pg_dist_placement p on p.shardid = s.shardid and p.groupid = node.groupid;
        end loop;
    end $$
    """,
    # A worker reads its shards with the rights of the role that reads the view. So that role needs the tables and, on
    # the workers, their schema. It does not get the schema here: no query at the coordinator can name the tables.
    # Moved shards keep the rights on tables. A new worker has none on the schema until this is called again.
    """
    create function indexer.grant_shards_to_readers() returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
    declare
        readers constant text := (
            select string_agg(quote_ident(rolname), ', ' order by rolname)
            from pg_roles where rolname in ('atproto_reader', 'atproto_operator')
        );
        failed text;
    begin
        if readers is null then
            return;
        end if;
        execute format('grant select on indexer.repo, indexer.identity, indexer.record, indexer.link to %s', readers);
        select string_agg(format('%s:%s: %s', nodename, nodeport, result), '; ') into failed
        from run_command_on_workers(format(
            'do $grant$ begin
                perform set_config(''citus.enable_ddl_propagation'', ''off'', true);
                grant usage on schema indexer to %s;
            end $grant$', readers
        ))
        where not success;
        if failed is not null then
            raise exception 'the schema of the shards cannot be granted to %: %', readers, failed
                using errcode = 'connection_failure';
        end if;
    end $$
    """,
    # LIMIT, because the planner multiplies the selectivities of did and bucket, which depend on each other: without it,
    # plain Postgres expects a 256th of the rows, and sorts whole repos and collections for their first page.
    # Workers call the functions in the queries on their shards.
    # A filter of a path returns nothing where a member has another type, so no cast fails. Without `strict`, a filter
    # looks into arrays, and ** returns their members twice. `true` returns nothing for a member that does not exist.
    """
    create function indexer.adapt_public_schema() returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
    declare
        distributed constant boolean := indexer.is_distributed('indexer.record');
        visible constant text :=
            'select from indexer.repo r where r.did = c.did and r.bucket = c.bucket and r.active and not r.takedown';
        joined constant text :=
            case when distributed then '' else format('cross join lateral (%s limit 1) shown', visible) end;
        condition constant text := case when distributed then format('exists (%s)', visible) else 'true' end;
    begin
        execute $view$
            create or replace view atproto.repos as
            select r.did, i.handle, i.pds, r.sync_status, r.sync_reason, r.rev, atproto.cid_text(r.data) as data,
                coalesce(r.hosting_status, case when r.active then 'active' else 'inactive' end) as hosting_status,
                r.takedown, r.active and not r.takedown as visible,
                r.attempts as resync_attempts, r.next_attempt_at, r.last_error, r.synchronized_at, r.updated_at,
                r.bucket
            from indexer.repo r left join indexer.identity i using (did, bucket)
            where r.tracked
        $view$;
        execute format($view$
            create or replace view atproto.records as
            select c.did, c.collection, c.rkey, 'at://' || c.did || '/' || c.collection || '/' || c.rkey as uri,
                atproto.cid_text(c.cid) as cid, c.rev, c.value,
                coalesce(c.value_problem, case when c.value is null then 'not-stored' end) as value_problem,
                c.indexed_at, c.bucket
            from indexer.record c %s where %s
        $view$, joined, condition);
        execute format($view$
            create or replace view atproto.blobs as
            select c.did, blob.object #>> '{ref,$link}' as cid,
                jsonb_path_query_first(blob.object, 'strict $.mimeType ? (@.type() == "string")', '{}', true) #>> '{}'
                    as mime_type,
                (
                    jsonb_path_query_first(
                        blob.object, 'strict $.size ? (@ >= 0 && @ <= 9223372036854775807)', '{}', true
                    ) #>> '{}'
                )::numeric::bigint as size,
                c.collection, c.rkey, 'at://' || c.did || '/' || c.collection || '/' || c.rkey as uri, c.bucket
            from indexer.record c %s
            cross join lateral jsonb_path_query(c.value, 'strict $.** ? (@."$type" == "blob")') as blob(object)
            where jsonb_typeof(blob.object #> '{ref,$link}') = 'string' and %s
        $view$, joined, condition);
        execute format($view$
            create or replace view atproto.links as
            select c.target, c.kind as target_kind, c.did, c.collection, c.rkey, c.path, c.bucket
            from indexer.link c %s where %s
        $view$, joined, condition);
        if distributed then
            perform create_distributed_function(f.oid::regprocedure) from pg_proc f
            where (
                f.pronamespace = 'lexicon'::regnamespace
                or f.oid in ('atproto.cid_text(bytea)'::regprocedure, 'atproto.bucket_of(text)'::regprocedure,
                    'indexer.bucket_of(text)'::regprocedure)
            ) and not exists (
                select from pg_dist_object o where o.classid = 'pg_proc'::regclass and o.objid = f.oid
            );
            perform indexer.grant_shards_to_readers();
        end if;
    end $$
    """,
    "revoke all on function indexer.adapt_public_schema(), indexer.grant_shards_to_readers() from public",
    "select indexer.adapt_public_schema()",
)

# A view of an earlier release gets no bucket, so that its columns stay in their places, until it is created again. Nor
# does one with a field of that name from an earlier release.
LEXICON_FUNCTIONS = (
    "drop function indexer.lexicon_query(text, jsonb)",
    """
    create function indexer.lexicon_query(nsid text, fields jsonb, with_bucket boolean) returns text
    language sql immutable strict set search_path = pg_catalog, pg_temp
    return (
        select format(
            'select did, rkey, uri, cid, rev, indexed_at, '
            'case when value_problem is not null%s then lexicon.problem(value, value_problem, %L::jsonb) end '
            'as lexicon_problem%s%s from atproto.records where collection = %L',
            (
                select string_agg(format(' or not %s', indexer.lexicon_condition(f)), '' order by n)
                from jsonb_array_elements(fields) with ordinality as fields_in_order(f, n)
            ),
            coalesce((
                select jsonb_agg(jsonb_build_array(
                    f -> 'field', f -> 'kind', f -> 'max_bytes', f -> 'required', f -> 'nullable'
                ) order by n)
                from jsonb_array_elements(fields) with ordinality as fields_in_order(f, n)
            ), '[]'),
            case when with_bucket then ', bucket' end,
            coalesce((
                select string_agg(format(', %s as %I', e.expression, c.name), '' order by o.n, e.n)
                from jsonb_array_elements(fields) with ordinality as o(f, n),
                    unnest(indexer.lexicon_expressions(o.f)) with ordinality as e(expression, n)
                    join jsonb_array_elements_text(o.f -> 'columns') with ordinality as c(name, n) on c.n = e.n
            ), ''),
            nsid
        )
    )
    """,
    """
    create or replace function indexer.create_lexicon_view(nsid text) returns boolean
    language plpgsql strict set search_path = pg_catalog, pg_temp as $$
    declare
        stored indexer.lexicon;
        view_oid regclass;
        present boolean;
        free boolean;
        with_bucket boolean;
        query text;
        name text;
        comment text;
        role text;
    begin
        select * into strict stored from indexer.lexicon l where l.nsid = $1;
        view_oid := to_regclass(format('lexicon.%I', stored.view_name));
        present := view_oid is not null;
        free := not jsonb_path_exists(stored.fields, '$[*].columns[*] ? (@ == "bucket")');
        with_bucket := free and (
            not present or exists (select from pg_attribute a where a.attrelid = view_oid and a.attname = 'bucket')
        );
        query := indexer.lexicon_query(stored.nsid, stored.fields, with_bucket);
        if present and stored.definition is null then
            raise exception 'lexicon.% exists and is not a view of a lexicon', quote_ident(stored.view_name)
                using errcode = 'duplicate_table';
        end if;
        if not present or stored.definition is distinct from query then
            begin
                execute format('create or replace view lexicon.%I as %s', stored.view_name, query);
            exception when invalid_table_definition then
                execute format('drop view lexicon.%I', stored.view_name);
                with_bucket := free;
                query := indexer.lexicon_query(stored.nsid, stored.fields, with_bucket);
                execute format('create view lexicon.%I as %s', stored.view_name, query);
            end;
            for role in select rolname from pg_roles where rolname in ('atproto_reader', 'atproto_operator') loop
                execute format('grant select on lexicon.%I to %I', stored.view_name, role);
            end loop;
        end if;
        execute format('comment on view lexicon.%I is %L', stored.view_name,
            coalesce(stored.document -> 'defs' -> 'main' ->> 'description', 'Records of ' || stored.nsid || '.'));
        for name, comment in
            select * from (values
                ('did', 'The DID of the repo that contains the record.'),
                ('rkey', 'The record key.'),
                ('uri', 'The AT-URI of the record.'),
                ('cid', 'The CID of the record.'),
                ('rev', 'The rev of the commit that wrote the record, or of the export in which it was found.'),
                ('indexed_at', 'When the record was last written here, by the clock of this server.'),
                ('lexicon_problem', 'Why columns are null although the lexicon requires or allows a value, by field; '
                    'null: no problem.')
            ) keys
            union all
            select 'bucket', 'The bucket of the DID, as atproto.bucket_of returns it.' where with_bucket
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
)

GRANTS = (
    """
    do $$ declare
        role name;
    begin
        for role in select rolname from pg_roles where rolname in ('atproto_reader', 'atproto_operator') loop
            execute format('grant execute on function atproto.bucket_of(text) to %I', role);
        end loop;
    end $$
    """,
)

_BUCKET = (
    "The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a constant "
    "reads one shard."
)
COMMENTS = {
    "function atproto.bucket_of(text)": (
        "Return the bucket of a DID, 0 to 255: the first byte of its SHA-256. On a cluster, a query for "
        "did = $1 and bucket = atproto.bucket_of($1) reads one shard."
    ),
    "column atproto.repos.bucket": _BUCKET,
    "column atproto.records.bucket": _BUCKET,
    "column atproto.blobs.bucket": _BUCKET,
    "column atproto.links.bucket": _BUCKET,
    "function indexer.is_distributed(regclass)": "True if the rows of the table are on several nodes.",
    "function indexer.parts_of(regclass)": (
        "The shards of a table, or the table itself, with the buckets, the pages and about the rows that each has. The "
        "rows of one part can be sampled with one statement."
    ),
    "function indexer.grant_shards_to_readers()": "Let the readers of the public views read the shards on each worker.",
    "function indexer.adapt_public_schema()": (
        "Create the public views in the form that suits a plain or a distributed database. To be called again after a "
        "database was distributed, and after a node was added."
    ),
    "function indexer.lexicon_query(text, jsonb, boolean)": "The query of the view of a record type.",
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in (*PUBLIC_FUNCTIONS, *CLUSTER_FUNCTIONS, *LEXICON_FUNCTIONS, *GRANTS):
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

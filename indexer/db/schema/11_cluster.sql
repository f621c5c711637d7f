-- A database that is distributed over the nodes of a Citus cluster.

-- One row if the tables of this database are distributed with Citus, or are being distributed; no row in a plain
-- database.
create table indexer.distribution (
    singleton boolean not null default true,
    -- The number of shards of each distributed table.
    shards integer not null,
    started_at timestamptz not null default now(),
    -- When all tables were distributed; null if that is not complete.
    finished_at timestamptz,
    primary key (singleton),
    constraint distribution_shards check (shards between 1 and 256),
    constraint distribution_singleton check (singleton)
);

-- On a distributed database, lets each transaction that writes a table of the coordinator commit in two phases.
-- Citus commits in two phases only if it knows of writes on two nodes, and it knows nothing of writes to plain tables
-- of the coordinator. The table distribution is in its metadata. Security definer: the triggers also fire for
-- consumers, which may not write private tables.
create function indexer.use_two_phases() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    update indexer.distribution set shards = shards where false;
    return null;
end $$;

-- The shards of a table, or the table itself, with the buckets, the pages and about the rows that each has. The rows
-- of one part can be sampled with one statement.
-- On the coordinator a distributed table is empty, so every node is asked for its shards. The name of a shard ends
-- with its number. While a shard is moved, two nodes have it, and one of them is its place. Rows are estimated from
-- the last vacuum and the size: a session reports its inserted rows up to ten seconds after COMMIT, and ANALYZE in
-- between counts them twice. Counted rows are used as long as the table was never analyzed.
create function indexer.parts_of(
    relation regclass, out buckets smallint[], out pages bigint, out estimated_rows bigint
) returns setof record
language plpgsql stable strict set search_path = pg_catalog, pg_temp as $$
declare
    every_bucket constant smallint[] := array(select generate_series(0, 255));
    table_name constant text := (select relname from pg_class where oid = relation);
    pages_now constant text := 'pg_relation_size(oid) / current_setting(''block_size'')::bigint';
    sizes constant text := 'array[' || pages_now || ', case when reltuples > 0 and relpages > 0 '
        'then (reltuples / relpages * ' || pages_now || ')::bigint else pg_stat_get_live_tuples(oid) end]';
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
end $$;

-- Let the readers of the public views read the shards on each worker.
-- A worker reads its shards with the rights of the role that reads the view. So that role needs the tables and, on
-- the workers, their schema. It does not get the schema here: no query at the coordinator can name the tables. Moved
-- shards keep the rights on tables. A new worker has none on the schema until this is called again.
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
    execute format('grant select on indexer.repo, indexer.identity, indexer.record, indexer.record_link to %s', readers);
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
end $$;

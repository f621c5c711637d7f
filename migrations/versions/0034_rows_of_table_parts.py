"""Estimate the rows of a table from its last vacuum and its size, as the planner does, and not from counted rows.

A session reports its inserted rows up to ten seconds after COMMIT. If ANALYZE ran in between, the statistics contain
these rows twice until the next vacuum. After `indexer distribute`, this could double the estimate of whole tables.
"""

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

STATEMENTS = (
    # Counted rows are used as long as the table was never analyzed: ANALYZE does not add to them.
    """
    create or replace function indexer.parts_of(
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
    end $$
    """,
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)

"""Number the changes of a distributed database after their commit, when all nodes show what the transaction wrote.

A plain database keeps the trigger `publish`, which numbers changes in COMMIT. `indexer distribute` replaces it by a
trigger with the function `queue_batch`, and the daemons number the batches in the queue
(docs/decisions/0014-change-log-on-a-cluster.md).
"""

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create table indexer.unnumbered_batch (
        commit_order bigint generated always as identity primary key,
        segment smallint not null,
        batch bigint not null,
        size integer not null,
        buckets smallint[] not null,
        queued_at timestamptz not null default clock_timestamp()
    )
    """,
    # It does the numbering that `publish` did until now. Its caller owns the numbering lock.
    """
    create function indexer.number_batch(segment smallint, batch bigint, size integer) returns void
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    declare
        first bigint;
        first_time bigint;
    begin
        first := nextval('indexer.change_seq');
        perform setval('indexer.change_seq', first + number_batch.size - 1);
        first_time := greatest(
            nextval('indexer.change_time'), (extract(epoch from clock_timestamp()) * 1000000)::bigint
        );
        perform setval('indexer.change_time', first_time + number_batch.size - 1);
        update indexer.change_batch b
        set first_seq = first, time = timestamptz 'epoch' + first_time * interval '1 microsecond'
        where b.id = number_batch.batch and b.segment = number_batch.segment;
    end $$
    """,
    """
    create or replace function indexer.publish() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
        lock table indexer.numbering_lock in share update exclusive mode;
        perform indexer.number_batch(new.segment, new.id, new.size);
        perform pg_notify('atproto_changes', '');
        return null;
    end $$
    """,
    # Deferred: it runs within COMMIT, so that its row has the transaction ID under which Citus stores the names of the
    # prepared transactions. The row of the batch has that of a savepoint, if there was one. The order is that of the
    # changes of each repo: the transaction still has the locks of the rows that it wrote.
    """
    create function indexer.queue_batch() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
        insert into indexer.unnumbered_batch (segment, batch, size, buckets)
        select new.segment, new.id, new.size, array(
            select distinct c.bucket from indexer.change c where c.segment = new.segment and c.batch = new.id
        );
        return null;
    end $$
    """,
    # The index is used also if the statistics are from a moment at which the table was empty.
    """
    create function indexer.unnumbered_batches(after bigint)
    returns table (commit_order bigint, age double precision)
    language plpgsql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
    begin
        return query
            select u.commit_order, extract(epoch from clock_timestamp() - u.queued_at)::double precision
            from indexer.unnumbered_batch u where u.commit_order > after order by u.commit_order;
    end $$
    """,
    # Read on the nodes: the argument lets Citus run it there, once for each row of a distributed table.
    """
    create function indexer.prepared_transactions(bucket smallint) returns json
    language plpgsql volatile set search_path = pg_catalog, pg_temp as $$
    begin
        return json_build_object(
            'node', (select l.groupid from pg_dist_local_group l),
            'ages', (
                select coalesce(
                    json_object_agg(p.gid, extract(epoch from clock_timestamp() - p.prepared)), '{}'::json
                )
                from pg_prepared_xacts p where p.database = current_database()
            )
        );
    end $$
    """,
    # Citus stores a row for each transaction that it prepares on a node, in the transaction itself. It removes the row
    # when the transaction is complete on that node. A transaction of two nodes may be complete on one of them, so that
    # another one has written the same repo since and is complete. So the later one waits, if they share a bucket.
    """
    create function indexer.number_changes(orders bigint[], answered integer[], nodes integer[], gids text[])
    returns table (commit_order bigint, age double precision)
    language plpgsql security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
    declare
        incomplete text[] := array(  -- the type xid cannot be sorted
            select t.xmin::text from pg_dist_transaction t
            join unnest(nodes, gids) p(groupid, gid) on p.groupid = t.groupid and p.gid = t.gid
            union all
            select t.xmin::text from pg_dist_transaction t
            where t.groupid in (select n.groupid from pg_dist_node n where n.groupid <> all(answered))
        );
        waiting smallint[] := '{}';
        numbered integer := 0;
        written record;
        queued indexer.unnumbered_batch;
    begin
        lock table indexer.numbering_lock in share update exclusive mode;
        for written in
            select u.xmin::text as id, array_agg(distinct u.commit_order) as places,
                array_agg(distinct b.bucket) as buckets
            from indexer.unnumbered_batch u left join unnest(u.buckets) b(bucket) on true
            where u.commit_order = any(orders) group by u.xmin::text order by min(u.commit_order)
        loop
            if written.id = any(incomplete) or written.buckets && waiting then
                waiting := array(select distinct b from unnest(waiting || written.buckets) b where b is not null);
                continue;
            end if;
            for queued in
                select u.* from indexer.unnumbered_batch u
                where u.commit_order = any(written.places) order by u.commit_order
            loop
                perform indexer.number_batch(queued.segment, queued.batch, queued.size);
                commit_order := queued.commit_order;
                age := extract(epoch from clock_timestamp() - queued.queued_at);
                return next;
            end loop;
            delete from indexer.unnumbered_batch u where u.commit_order = any(written.places);
            perform pg_notify('atproto_changes', '');
            numbered := numbered + cardinality(written.places);
            exit when numbered >= 1000;  -- the rest in the next call: a backlog may be long
        end loop;
    end $$
    """,
    *(
        f"revoke all on function indexer.{function} from public"
        for function in (
            "number_batch(smallint, bigint, integer)",
            "queue_batch()",
            "unnumbered_batches(bigint)",
            "number_changes(bigint[], integer[], integer[], text[])",
        )
    ),
)

COMMENTS = {
    "table indexer.unnumbered_batch": (
        "On a distributed database: committed change batches whose changes have no numbers yet. Otherwise empty."
    ),
    "column indexer.unnumbered_batch.buckets": "The buckets of its changes.",
    "column indexer.unnumbered_batch.commit_order": (
        "The order in which batches get their numbers. Changes of the same repo are in their order."
    ),
    "function indexer.number_batch(smallint, bigint, integer)": (
        "Assign the next numbers to the changes of a batch. The caller owns the numbering lock."
    ),
    "function indexer.publish()": (
        "In COMMIT, on a plain database: number the changes of a batch in commit order, and notify listeners."
    ),
    "function indexer.queue_batch()": "In COMMIT, on a distributed database: let a daemon number the batch later.",
    "function indexer.unnumbered_batches(bigint)": "The batches in the queue after this one, each with its age.",
    "function indexer.prepared_transactions(smallint)": (
        "The node that has this bucket, and the ages of the transactions that are prepared there."
    ),
    "function indexer.number_changes(bigint[], integer[], integer[], text[])": (
        "Number these batches of the queue and notify listeners. A batch stays in the queue if its transaction is one "
        "of these prepared ones or was prepared on a node that has not answered, and if an earlier one waits that has "
        "changes of the same buckets. Returns the numbered batches with their ages."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

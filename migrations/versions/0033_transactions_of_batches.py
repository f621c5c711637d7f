"""Store the transaction of each batch in the queue, so that a savepoint cannot separate it from its prepared ones.

A batch waits as long as its transaction is prepared on a node. Until now, both were compared by `xmin`. If a session of
an operator sets the constraints to immediate within a savepoint, the row of the queue has the ID of the savepoint, and
the change could get its number before its effect was visible.
"""

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

STATEMENTS = (
    # Rows that are in the queue now have no ID, and are compared by xmin.
    "alter table indexer.unnumbered_batch add column transaction text",
    "alter table indexer.unnumbered_batch alter column transaction set default pg_current_xact_id()::xid::text",
    """
    create or replace function indexer.number_changes(orders bigint[], answered integer[], nodes integer[], gids text[])
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
            select coalesce(u.transaction, u.xmin::text) as id, array_agg(distinct u.commit_order) as places,
                array_agg(distinct b.bucket) as buckets
            from indexer.unnumbered_batch u left join unnest(u.buckets) b(bucket) on true
            where u.commit_order = any(orders) group by 1 order by min(u.commit_order)
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
)

COMMENTS = {
    "column indexer.unnumbered_batch.transaction": (
        "The transaction that wrote the batch, also if it did so within a savepoint. Null: compare xmin."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

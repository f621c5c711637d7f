"""Notify listeners after the commit, not in it: see `indexer.service.background.change_notifier`.

All databases of a server share one queue of notifications. If any session fills it, each COMMIT fails that has one.
"""

from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None

STATEMENTS = (
    # An empty batch gets no number: it only shows that batches are committed.
    """
    create or replace function indexer.publish() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
        lock table indexer.numbering_lock in share update exclusive mode;
        if new.size > 0 then
            perform indexer.number_batch(new.segment, new.id, new.size);
        end if;
        return null;
    end $$
    """,
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
            numbered := numbered + cardinality(written.places);
            exit when numbered >= 1000;  -- the rest in the next call: a backlog may be long
        end loop;
    end $$
    """,
)

COMMENTS = {
    "function indexer.publish()": "In COMMIT, on a plain database: number the changes of a batch in commit order.",
    "function indexer.number_changes(bigint[], integer[], integer[], text[])": (
        "Number these batches of the queue. A batch stays in the queue if its transaction is one of these prepared "
        "ones or was prepared on a node that has not answered, and if an earlier one waits that has changes of the "
        "same buckets. Returns the numbered batches with their ages."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

"""Let links follow the change log, in tables of their own (docs/decisions/0012-links.md).

The links that are stored are not moved: they have no position in the change log. Where `INDEXER_LINKS` is on, the links
of all stored records are added again in the background. The daemon of the previous release writes the tables `link`,
`link_count`, `link_delta`, `link_recount` and `link_bucket`, which nothing reads any more.
"""

from alembic import op

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create table indexer.record_link (
        did text collate "C" not null,
        collection text collate "C" not null,
        rkey text collate "C" not null,
        bucket smallint not null,
        target text collate "C" not null,
        kind text not null,
        path text collate "C" not null,
        counted boolean not null,
        constraint record_link_kind check (kind in ('did', 'at-uri', 'strong-ref'))
    ) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,
        autovacuum_analyze_scale_factor = 0.02)
    """,
    # Citus moves no shard of a table that has neither a primary key nor this.
    "alter table indexer.record_link replica identity full",
    "create index record_link_record on indexer.record_link (did, collection, rkey)",
    "create index record_link_target on indexer.record_link (target, collection, path, did, rkey)",
    # Before the view that reads it. `distributed_tables.adapt` distributes the other tables after the migration.
    """
    do $$ begin
        if indexer.is_distributed('indexer.record') then
            perform create_distributed_table(
                'indexer.record_link', 'bucket', colocate_with => 'indexer.resync_queue'
            );
        end if;
    end $$
    """,
    """
    create table indexer.target_count (
        target text collate "C" not null,
        collection text collate "C" not null,
        path text collate "C" not null,
        bucket smallint not null,
        count bigint not null,
        constraint target_count_pkey primary key (target, collection, path, bucket)
    ) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02)
    """,
    """
    create table indexer.links_to_recount (
        did text collate "C" not null,
        bucket smallint not null,
        seq bigint not null,
        constraint links_to_recount_pkey primary key (did, bucket)
    )
    """,
    """
    create table indexer.link_reader (
        singleton boolean primary key default true constraint link_reader_singleton check (singleton),
        seq bigint not null,
        enabled_at timestamptz not null default now(),
        did text collate "C" not null default '',
        collection text collate "C" not null default '',
        rkey text collate "C" not null default '',
        repos bigint not null default 0,
        done_at timestamptz
    ) with (fillfactor = 50)
    """,
    # The functions of 0030, with the other table.
    """
    do $$
    declare
        name regprocedure;
    begin
        foreach name in array
            array['indexer.adapt_public_schema()', 'indexer.grant_shards_to_readers()']::regprocedure[]
        loop
            execute regexp_replace(pg_get_functiondef(name), 'indexer\\.link\\y', 'indexer.record_link', 'g');
        end loop;
    end $$
    """,
    """
    create or replace view atproto.link_progress as
    select
        case when count(*) = 0 then 'off' when count(r.done_at) = 0 then 'backfill' else 'complete' end as state,
        256 * count(r.done_at)::integer as buckets_done, 256 * count(*)::integer as buckets,
        coalesce(sum(r.repos), 0)::bigint as repos_done, min(r.enabled_at) as enabled_at,
        max(r.done_at) as completed_at, min(r.seq) as seq
    from indexer.link_reader r
    """,
    # Every statement of the function reads the same snapshot, because the function is stable.
    """
    create or replace function atproto.link_count(target text, collection text, path text) returns bigint
    language plpgsql stable strict security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
    declare
        total bigint;
        changed record;
    begin
        if not exists (select from indexer.link_reader r where r.done_at is not null) then
            return null;
        end if;
        total := coalesce((
            select c.count from indexer.target_count c
            where c.target = $1 and c.collection = $2 and c.path = $3 and c.bucket = indexer.bucket_of($1)
        ), 0);
        for changed in
            select w.did, w.bucket, r.active and not r.takedown as visible
            from indexer.links_to_recount w join indexer.repo r on r.did = w.did and r.bucket = w.bucket
        loop
            total := total + (
                select count(*) * case when changed.visible then 1 else -1 end from indexer.record_link l
                where l.target = $1 and l.collection = $2 and l.path = $3
                    and l.did = changed.did and l.bucket = changed.bucket and l.counted <> changed.visible
            );
        end loop;
        return total;
    end $$
    """,
    """
    create or replace function atproto.request_takedown(did text, takedown boolean) returns boolean
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    declare
        before indexer.repo;
    begin
        select r.* into before from indexer.repo r
        where r.did = $1 and r.bucket = indexer.bucket_of($1) for update;
        if not found then
            return false;
        end if;
        if before.takedown <> $2 then
            update indexer.repo r set version = r.version + 1, takedown = $2, updated_at = now()
            where r.did = $1 and r.bucket = before.bucket;
            if before.active then
                perform indexer.log_repo_change($1, case when $2 then 'hidden' else 'visible' end, before.rev);
            end if;
        end if;
        return true;
    end $$
    """,
    """
    create or replace function indexer.change_visibility(one text, visible boolean, rev text) returns void
    language plpgsql set search_path = pg_catalog, pg_temp as $$
    begin
        perform indexer.log_repo_change($1, case when $2 then 'visible' else 'hidden' end, $3);
    end $$
    """,
    "drop function indexer.request_link_recount(text)",
    "truncate indexer.link, indexer.link_count, indexer.link_delta, indexer.link_recount, indexer.link_bucket",
)

_PREVIOUS = "Written by the daemon of the previous release, and read by nothing else."
COMMENTS = {
    "table indexer.record_link": "The links in the values of stored records, if INDEXER_LINKS is on.",
    "column indexer.record_link.counted": (
        "True if the link is part of target_count. It differs from the visibility of the repo only while "
        "links_to_recount has a row for the repo, or the reader has not read the change."
    ),
    "table indexer.target_count": "The number of counted links by target, collection and path.",
    "column indexer.target_count.bucket": "The bucket of the target.",
    "table indexer.links_to_recount": (
        "Repos whose visibility changed, and whose links are to be counted or not any more."
    ),
    "column indexer.links_to_recount.seq": "The number of the change by which it changed last.",
    "table indexer.link_reader": "The position of the reader that keeps links. No row: INDEXER_LINKS is off.",
    "column indexer.link_reader.seq": "The links are those of all changes up to this number.",
    "column indexer.link_reader.did": (
        "The links of all records up to (did, collection, rkey) were added after INDEXER_LINKS was turned on."
    ),
    "column indexer.link_reader.repos": "The number of repos up to that record.",
    "column indexer.link_reader.done_at": "When the links of all stored records had been added.",
    "table indexer.link": _PREVIOUS,
    "table indexer.link_count": _PREVIOUS,
    "table indexer.link_delta": _PREVIOUS,
    "table indexer.link_recount": _PREVIOUS,
    "table indexer.link_bucket": _PREVIOUS,
    "function indexer.change_visibility(text, boolean, text)": "Log that a repo was shown or hidden.",
    "column atproto.link_progress.buckets_done": "256 if the backfill is complete, otherwise 0.",
    "column atproto.link_progress.buckets": "256 if links are kept, otherwise 0.",
    "column atproto.link_progress.seq": (
        "The number of the last change that atproto.links and atproto.link_count contain. Null if links are off. If it "
        "equals atproto.latest_seq() in the same snapshot, they are exactly those of the records of the snapshot. "
        "Otherwise, a record that has changed again may be shown as it is later."
    ),
    "function atproto.link_count(text, text, text)": (
        "Return the number of links to the target from visible repos, in records of the collection, at the path. Exact "
        "to the change link_progress.seq. Null if links are off or not complete (link_progress.state)."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    op.execute("select indexer.adapt_public_schema()")
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

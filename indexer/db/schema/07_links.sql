-- Links between records. The tables are empty unless INDEXER_LINKS is on (docs/decisions/0012-links.md).

-- The links in the values of stored records.
create table indexer.record_link (
    did text collate "C" not null,
    collection text collate "C" not null,
    rkey text collate "C" not null,
    bucket smallint not null,
    target text collate "C" not null,
    kind text not null,
    path text collate "C" not null,
    -- True if the link is part of target_count. It differs from the visibility of the repo only while
    -- links_to_recount has a row for the repo, or the reader has not read the change.
    counted boolean not null,
    constraint record_link_kind check (kind in ('did', 'at-uri', 'strong-ref'))
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.02
);
-- Citus moves no shard of a table that has neither a primary key nor this.
alter table indexer.record_link replica identity full;
create index record_link_record on indexer.record_link (did, collection, rkey);
create index record_link_target on indexer.record_link (target, collection, path, did, rkey);

-- The number of counted links by target, collection and path.
-- Do not index the count: then each update of it would update each index (no HOT).
create table indexer.target_count (
    target text collate "C" not null,
    collection text collate "C" not null,
    path text collate "C" not null,
    -- The bucket of the target.
    bucket smallint not null,
    count bigint not null,
    primary key (target, collection, path, bucket)
) with (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.02
);

-- Repos whose visibility changed, and whose links are to be counted or not any more.
create table indexer.links_to_recount (
    did text collate "C" not null,
    bucket smallint not null,
    -- The number of the change by which it changed last.
    seq bigint not null,
    primary key (did, bucket)
);

-- The position of the reader that keeps links. No row: INDEXER_LINKS is off.
create table indexer.link_reader (
    singleton boolean not null default true,
    -- The links are those of all changes up to this number.
    seq bigint not null,
    enabled_at timestamptz not null default now(),
    -- The links of all records up to (did, collection, rkey) were added after INDEXER_LINKS was turned on.
    did text collate "C" not null default ''::text,
    collection text collate "C" not null default ''::text,
    rkey text collate "C" not null default ''::text,
    -- The number of repos up to that record.
    repos bigint not null default 0,
    -- When the links of all stored records had been added.
    done_at timestamptz,
    primary key (singleton),
    constraint link_reader_singleton check (singleton)
) with (
    fillfactor = 50
);

-- Every statement of the function reads the same snapshot, because the function is stable.
create function atproto.link_count(target text, collection text, path text) returns bigint
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
        select w.did, w.bucket, r.visible
        from indexer.links_to_recount w join indexer.repo r on r.did = w.did and r.bucket = w.bucket
    loop
        total := total + (
            select count(*) * case when changed.visible then 1 else -1 end from indexer.record_link l
            where l.target = $1 and l.collection = $2 and l.path = $3
                and l.did = changed.did and l.bucket = changed.bucket and l.counted <> changed.visible
        );
    end loop;
    return total;
end $$;
comment on function atproto.link_count(text,text,text) is
    'Return how many visible records of the collection link to the target at the path. Exact to the change '
    'link_progress.seq. Null until link_progress.state is complete.';

create view atproto.link_progress as
select
    case when count(*) = 0 then 'off' when count(r.done_at) = 0 then 'backfill' else 'complete' end as state,
    256 * count(r.done_at)::integer as buckets_done, 256 * count(*)::integer as buckets,
    coalesce(sum(r.repos), 0)::bigint as repos_done, min(r.enabled_at) as enabled_at,
    max(r.done_at) as completed_at, min(r.seq) as seq
from indexer.link_reader r;
comment on view atproto.link_progress is 'The state of links, in one row.';
comment on column atproto.link_progress.state is 'off; backfill: links of stored records are being added; complete.';
comment on column atproto.link_progress.buckets_done is '256 if complete, otherwise 0.';
comment on column atproto.link_progress.buckets is '256 if links are on, otherwise 0.';
comment on column atproto.link_progress.repos_done is 'Repos whose links the backfill added.';
comment on column atproto.link_progress.enabled_at is 'When INDEXER_LINKS was turned on; null if off.';
comment on column atproto.link_progress.completed_at is 'When the backfill was completed; null if it is not.';
comment on column atproto.link_progress.seq is
    'The number of the last change that links contain; null if off. A record that changed again may be shown as it is '
    'later.';

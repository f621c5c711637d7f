"""Create the function `atproto.did_of`, the view `atproto.blobs`, and the tables and public objects of links.

The tables of links are empty unless `INDEXER_LINKS` is on. docs/decisions/0012-links.md says how counts stay exact.
"""

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

STATEMENTS = (
    # The collation "C" of lower(): in other locales it may change the letter I differently.
    """
    create function atproto.did_of(handle text) returns text
    language sql stable strict security definer set search_path = pg_catalog, pg_temp
    return (
        select i.did from indexer.identity i
        where i.handle = lower(ltrim($1, '@') collate "C") and i.handle <> 'handle.invalid'
        order by i.handle_due_at desc nulls last limit 1
    )
    """,
    # A filter of a path returns nothing where a member has another type, so no cast fails. Without `strict`, a filter
    # looks into arrays, and ** returns their members twice. `true` returns nothing for a member that does not exist.
    """
    create view atproto.blobs as
    select c.did, blob.object #>> '{ref,$link}' as cid,
        jsonb_path_query_first(blob.object, 'strict $.mimeType ? (@.type() == "string")', '{}', true) #>> '{}'
            as mime_type,
        (
            jsonb_path_query_first(blob.object, 'strict $.size ? (@ >= 0 && @ <= 9223372036854775807)', '{}', true)
            #>> '{}'
        )::numeric::bigint as size,
        c.collection, c.rkey, 'at://' || c.did || '/' || c.collection || '/' || c.rkey as uri
    from indexer.record c
    cross join lateral (
        select from indexer.repo r where r.did = c.did and r.bucket = c.bucket and r.active and not r.takedown limit 1
    ) shown
    cross join lateral jsonb_path_query(c.value, 'strict $.** ? (@."$type" == "blob")') as blob(object)
    where jsonb_typeof(blob.object #> '{ref,$link}') = 'string'
    """,
    """
    create table indexer.link (
        did text collate "C" not null,
        collection text collate "C" not null,
        rkey text collate "C" not null,
        number smallint not null,
        bucket smallint not null,
        target text collate "C" not null,
        kind text not null,
        path text collate "C" not null,
        counted boolean not null,
        constraint link_pkey primary key (did, collection, rkey, number, bucket),
        constraint link_kind check (kind in ('did', 'at-uri', 'strong-ref'))
    ) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05,
        autovacuum_analyze_scale_factor = 0.02)
    """,
    "create index link_target on indexer.link (target, collection, path, did, rkey)",
    # The count changes often and is in no index, so that its updates stay on the page.
    """
    create table indexer.link_count (
        target text collate "C" not null,
        collection text collate "C" not null,
        path text collate "C" not null,
        bucket smallint not null,
        count bigint not null,
        constraint link_count_pkey primary key (target, collection, path, bucket)
    ) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02)
    """,
    # An index by target would cost each link another entry that is removed a second later. Few deltas are open.
    """
    create table indexer.link_delta (
        bucket smallint not null,
        id bigint generated always as identity,
        target text collate "C" not null,
        collection text collate "C" not null,
        path text collate "C" not null,
        delta integer not null,
        constraint link_delta_pkey primary key (bucket, id)
    ) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)
    """,
    """
    create table indexer.link_recount (
        did text collate "C" not null,
        id bigint generated always as identity,
        bucket smallint not null,
        constraint link_recount_pkey primary key (did, id, bucket)
    ) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)
    """,
    """
    create table indexer.link_bucket (
        bucket smallint primary key,
        enabled_at timestamptz not null default now(),
        backfilled_to text collate "C" not null default '',
        backfilled_repos bigint not null default 0,
        done_at timestamptz,
        off_at timestamptz
    )
    """,
    """
    create view atproto.links as
    select l.target, l.kind as target_kind, l.did, l.collection, l.rkey, l.path
    from indexer.link l cross join lateral (
        select from indexer.repo r where r.did = l.did and r.bucket = l.bucket and r.active and not r.takedown limit 1
    ) shown
    """,
    """
    create view atproto.link_progress as
    select
        case when count(*) = 0 or bool_or(b.off_at is not null) then 'off'
            when bool_and(b.done_at is not null) then 'complete' else 'backfill' end as state,
        count(*) filter (where b.done_at is not null)::integer as buckets_done, count(*)::integer as buckets,
        coalesce(sum(b.backfilled_repos), 0)::bigint as repos_done, min(b.enabled_at) as enabled_at,
        case when bool_and(b.done_at is not null) then max(b.done_at) end as completed_at
    from indexer.link_bucket b
    """,
    # Every statement of the function reads the same snapshot, because the function is stable.
    """
    create function atproto.link_count(target text, collection text, path text) returns bigint
    language plpgsql stable strict security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
    declare
        target_bucket smallint := indexer.bucket_of($1);
        total bigint;
        changed record;
    begin
        if (select bool_and(b.done_at is not null and b.off_at is null) from indexer.link_bucket b) is not true then
            return null;
        end if;
        if exists (
            select from indexer.shard_owner o left join indexer.link_bucket b on b.bucket = o.first_bucket
            where b.bucket is null
        ) then
            return null;
        end if;
        total := coalesce((
            select c.count from indexer.link_count c
            where c.target = $1 and c.collection = $2 and c.path = $3 and c.bucket = target_bucket
        ), 0);
        total := total + coalesce((
            select sum(d.delta) from indexer.link_delta d
            where d.bucket = target_bucket and d.target = $1 and d.collection = $2 and d.path = $3
        ), 0);
        for changed in
            select w.did, w.bucket, r.active and not r.takedown as visible
            from (select did, bucket from indexer.link_recount group by did, bucket) w
            join indexer.repo r on r.did = w.did and r.bucket = w.bucket
        loop
            total := total + (
                select count(*) * case when changed.visible then 1 else -1 end from indexer.link l
                where l.target = $1 and l.collection = $2 and l.path = $3
                    and l.did = changed.did and l.bucket = changed.bucket and l.counted <> changed.visible
            );
        end loop;
        return total;
    end $$
    """,
    """
    create function indexer.request_link_recount(did text) returns void
    language plpgsql strict set search_path = pg_catalog, pg_temp as $$
    declare
        own_bucket smallint := indexer.bucket_of($1);
    begin
        if exists (select from indexer.link_bucket b where b.bucket = own_bucket and b.off_at is null) then
            insert into indexer.link_recount (did, bucket) values ($1, own_bucket);
        end if;
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
                perform indexer.request_link_recount($1);
            end if;
        end if;
        return true;
    end $$
    """,
    """
    do $$
    declare
        role text;
    begin
        foreach role in array array['atproto_reader', 'atproto_operator'] loop
            if exists (select from pg_roles where rolname = role) then
                execute format('grant select on atproto.blobs, atproto.links, atproto.link_progress to %I', role);
                execute format(
                    'grant execute on function atproto.did_of(text), atproto.link_count(text, text, text) to %I', role
                );
            end if;
        end loop;
    end $$
    """,
    "revoke all on function atproto.did_of(text), atproto.link_count(text, text, text) from public",
)

COMMENTS = {
    "function indexer.request_link_recount(text)": (
        "Let the links of a repo whose visibility changes be recounted, if links are kept."
    ),
    "function atproto.did_of(text)": (
        "Return the DID with this verified handle, in any case and with or without @; null if no account has it. A "
        "handle that an account claims and that was not verified counts as none."
    ),
    "view atproto.blobs": (
        "The blobs that records of visible repos refer to, read from the values of the records: a row for each "
        "reference. Indexed by did, and by (did, collection, rkey); without did it reads all records. The PDS of the "
        "account has the bytes."
    ),
    "column atproto.blobs.did": "The DID of the repo that contains the record, and of the account that has the blob.",
    "column atproto.blobs.cid": "The CID of the blob.",
    "column atproto.blobs.mime_type": "The MIME type that the record states; null if it states none.",
    "column atproto.blobs.size": (
        "The number of bytes that the record states; null if it states none, or one that is negative or over 64 bits."
    ),
    "column atproto.blobs.collection": "The NSID of the collection of the record.",
    "column atproto.blobs.rkey": "The key of the record.",
    "column atproto.blobs.uri": "The AT-URI of the record.",
    "table indexer.link": "The links in the values of all stored records, if INDEXER_LINKS is on.",
    "column indexer.link.number": "The number of the link in its record, in the order of paths and targets.",
    "column indexer.link.counted": (
        "True if the link is part of the sum of link_count and link_delta. It differs from the visibility of the repo "
        "only while link_recount has a row for the repo."
    ),
    "table indexer.link_count": "The number of counted links by target, collection and path, without open deltas.",
    "column indexer.link_count.bucket": "The bucket of the target.",
    "table indexer.link_delta": "Changes of counts that have not been added to link_count yet.",
    "column indexer.link_delta.bucket": "The bucket of the target.",
    "table indexer.link_recount": "Repos whose visibility changed, and whose links are to be counted or not any more.",
    "table indexer.link_bucket": (
        "The buckets of repos whose links are kept, and the progress of their backfill. No rows: INDEXER_LINKS is off."
    ),
    "column indexer.link_bucket.backfilled_to": "The links of all repos up to this DID are stored.",
    "column indexer.link_bucket.off_at": "When INDEXER_LINKS was turned off; the links are outdated since then.",
    "view atproto.links": (
        "The AT-URIs and DIDs in the values of records of visible repos: a row for each record, path and target. Empty "
        "unless INDEXER_LINKS is on, and incomplete until link_progress says complete. Indexed by (target, collection, "
        "path, did, rkey) and by (did, collection, rkey)."
    ),
    "column atproto.links.target": "The AT-URI or the DID, as it is in the record.",
    "column atproto.links.target_kind": (
        "strong-ref: an AT-URI as member uri of an object that also has a text cid; at-uri: any other AT-URI; did."
    ),
    "column atproto.links.did": "The DID of the repo that contains the record with the link.",
    "column atproto.links.collection": "The NSID of the collection of the record.",
    "column atproto.links.rkey": "The key of the record.",
    "column atproto.links.path": (
        "Where the link is in the value: .name for a member of an object, [] for an element of an array, [type] for "
        "one that is an object with this $type."
    ),
    "view atproto.link_progress": "The state of links, one row: if they are kept, and the progress of the backfill.",
    "column atproto.link_progress.state": (
        "off: no links are kept, or they are outdated; backfill: links of stored records are added; complete: all "
        "links are stored."
    ),
    "column atproto.link_progress.buckets_done": "Buckets whose backfill is complete.",
    "column atproto.link_progress.buckets": "Buckets whose links are kept: 256 if all processes keep links.",
    "column atproto.link_progress.repos_done": "Repos whose links were added by the backfill.",
    "column atproto.link_progress.enabled_at": "When INDEXER_LINKS was turned on; null if it is off.",
    "column atproto.link_progress.completed_at": "When the backfill was completed; null if it is not complete.",
    "function atproto.link_count(text, text, text)": (
        "Return the number of links to the target from visible repos, in records of the collection, at the path. "
        "Exact in every snapshot. Null if links are off or not complete (link_progress)."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

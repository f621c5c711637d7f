"""Store the scope: which repos are tracked, and which collections are stored. Functions change it while daemons run.

Repos keep the version of the scope for which their records are complete. An untracked repo keeps its row, so that no
message adds it again.
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

DID = "^did:[a-z]+:[a-zA-Z0-9._:%-]*[a-zA-Z0-9._-]$"
LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
FIRST_LABEL = "[a-zA-Z]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
NSID = rf"^{FIRST_LABEL}(\.{LABEL})+\.[a-zA-Z][a-zA-Z0-9]{{0,62}}$"
PREFIX = rf"^{FIRST_LABEL}(\.{LABEL})*\.\*$"

STATEMENTS = (
    "alter table indexer.repo add column scope_version bigint not null default 0",
    "alter table indexer.repo add column tracked boolean not null default true",
    "create index repo_scope on indexer.repo (bucket, scope_version)",
    """
    create table indexer.scope (
        singleton boolean primary key default true,
        version bigint not null,
        track text not null,
        collections text[] not null,
        added_in bigint[] not null,
        signal_collections text[] not null,
        changed_at timestamptz not null default now(),
        constraint scope_singleton check (singleton),
        constraint scope_track check (track in ('all', 'listed', 'signal')),
        constraint scope_collections check (cardinality(collections) > 0),
        constraint scope_added_in check (cardinality(added_in) = cardinality(collections)),
        constraint scope_signal check (track <> 'signal' or cardinality(signal_collections) > 0)
    )
    """,
    # The pattern "outer_pattern" matches every collection that the pattern "inner_pattern" matches.
    """
    create function indexer.pattern_covers(outer_pattern text, inner_pattern text) returns boolean
    language sql immutable strict parallel safe
    return outer_pattern = '*' or outer_pattern = inner_pattern
        or (right(outer_pattern, 2) = '.*' and starts_with(inner_pattern, left(outer_pattern, -1)))
    """,
    rf"""
    create function indexer.checked_patterns(patterns text[]) returns text[]
    language plpgsql immutable strict parallel safe set search_path = pg_catalog, pg_temp as $$
    declare
        pattern text;
    begin
        foreach pattern in array patterns loop
            if pattern is null or length(pattern) > 317
                or not (pattern = '*' or pattern ~ '{NSID}' or pattern ~ '{PREFIX}') then
                raise exception '% is neither an NSID, nor the beginning of one with .*, nor *',
                    coalesce(quote_literal(left(pattern, 100)), 'null')
                    using errcode = 'invalid_parameter_value';
            end if;
        end loop;
        return array(select distinct p collate "C" from unnest(patterns) p order by 1);
    end $$
    """,
    """
    create function indexer.change_scope(new_track text, new_collections text[], new_signal_collections text[])
    returns bigint language plpgsql set search_path = pg_catalog, pg_temp as $$
    declare
        present indexer.scope;
        next_track text;
        next_collections text[];
        next_signal text[];
    begin
        select s.* into present from indexer.scope s for update;
        if not found then
            raise exception 'no scope is stored yet; "indexer run" stores the first one, from the settings'
                using errcode = 'object_not_in_prerequisite_state';
        end if;
        next_track := coalesce(new_track, present.track);
        next_collections := coalesce(indexer.checked_patterns(new_collections), present.collections);
        next_signal := coalesce(indexer.checked_patterns(new_signal_collections), present.signal_collections);
        if next_track not in ('all', 'listed', 'signal') then
            raise exception '% is not a way to track repos; use all, listed or signal', quote_literal(next_track)
                using errcode = 'invalid_parameter_value';
        end if;
        if cardinality(next_collections) = 0 then
            raise exception 'no collection is named; use * for all collections'
                using errcode = 'invalid_parameter_value';
        end if;
        if next_track = 'signal' and cardinality(next_signal) = 0 then
            raise exception 'no signal collection is named, and repos are tracked by signal collections'
                using errcode = 'invalid_parameter_value';
        end if;
        if (next_track, next_collections, next_signal)
            = (present.track, present.collections, present.signal_collections) then
            return present.version;
        end if;
        update indexer.scope
        set version = present.version + 1, track = next_track, collections = next_collections,
            signal_collections = next_signal, changed_at = now(),
            added_in = array(
                select coalesce(
                    (
                        select min(o.added_in) from unnest(present.collections, present.added_in) o(pattern, added_in)
                        where indexer.pattern_covers(o.pattern, n.pattern)
                    ),
                    present.version + 1
                )
                from unnest(next_collections) with ordinality n(pattern, ordinal) order by n.ordinal
            );
        return present.version + 1;
    end $$
    """,
    """
    create function atproto.set_track(track text) returns bigint
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    begin
        return indexer.change_scope($1, null, null);
    end $$
    """,
    """
    create function atproto.set_collections(collections text[]) returns bigint
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    begin
        return indexer.change_scope(null, $1, null);
    end $$
    """,
    """
    create function atproto.set_signal_collections(collections text[]) returns bigint
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    begin
        return indexer.change_scope(null, null, $1);
    end $$
    """,
    # Sorted, so that concurrent calls and batches lock rows in the same order.
    rf"""
    create function indexer.checked_dids(dids text[]) returns text[]
    language plpgsql immutable strict parallel safe set search_path = pg_catalog, pg_temp as $$
    declare
        did text;
    begin
        foreach did in array dids loop
            if did is null or length(did) > 2048 or did !~ '{DID}' then
                raise exception '% is not a DID', coalesce(quote_literal(left(did, 100)), 'null')
                    using errcode = 'invalid_parameter_value';
            end if;
        end loop;
        return array(select distinct d collate "C" from unnest(dids) d order by 1);
    end $$
    """,
    """
    create function indexer.track_one(one text) returns boolean
    language plpgsql set search_path = pg_catalog, pg_temp as $$
    declare
        before indexer.repo;
    begin
        insert into indexer.repo (did, bucket, version, sync_status, sync_reason, active, hosting_seq, takedown,
            buffered_events, buffered_bytes, lease, attempts)
        values ($1, indexer.bucket_of($1), 1, 'desynchronized', 'new', true, 0, false, 0, 0, 0, 0)
        on conflict (did, bucket) do nothing;
        if found then
            return true;
        end if;
        select r.* into before from indexer.repo r where r.did = $1 and r.bucket = indexer.bucket_of($1) for update;
        if not before.tracked then
            update indexer.repo r
            set version = r.version + 1, tracked = true, active = true, hosting_status = null, erase_at = null,
                next_attempt_at = null, last_error = null, from_stream = false, updated_at = now()
            where r.did = $1 and r.bucket = indexer.bucket_of($1);
            if not before.takedown then
                perform indexer.log_repo_change($1, 'visible', null);
            end if;
        elsif before.from_stream and before.rev is null then
            update indexer.repo r
            set version = r.version + 1, from_stream = false, updated_at = now(),
                next_attempt_at = case when r.last_error like 'new-accounts%' then null else r.next_attempt_at end,
                last_error = case when r.last_error like 'new-accounts%' then null else r.last_error end
            where r.did = $1 and r.bucket = indexer.bucket_of($1);
        end if;
        return not before.tracked;
    end $$
    """,
    """
    create function indexer.untrack_one(one text) returns boolean
    language plpgsql set search_path = pg_catalog, pg_temp as $$
    declare
        before indexer.repo;
    begin
        insert into indexer.repo (did, bucket, version, sync_status, sync_reason, active, hosting_seq, takedown,
            buffered_events, buffered_bytes, lease, attempts, next_attempt_at, tracked)
        values ($1, indexer.bucket_of($1), 1, 'desynchronized', 'erased', false, 0, false,
            0, 0, 0, 0, 'infinity', false)
        on conflict (did, bucket) do nothing;
        select r.* into before from indexer.repo r where r.did = $1 and r.bucket = indexer.bucket_of($1) for update;
        if not before.tracked and not before.active then
            return false;
        end if;
        update indexer.repo r
        set version = r.version + 1, tracked = false, active = false, hosting_status = null, erase_at = now(),
            sync_status = 'desynchronized', sync_reason = 'erased', rev = null, data = null, commit = null,
            latest_verified_rev = null, latest_unverified_rev = null, unproven_since = null, attempts = 0,
            next_attempt_at = 'infinity', last_error = null, synchronized_at = null, lease_until = null,
            buffered_events = 0, buffered_bytes = 0, scope_version = 0, updated_at = now()
        where r.did = $1 and r.bucket = indexer.bucket_of($1);
        delete from indexer.buffered_event b where b.did = $1 and b.bucket = indexer.bucket_of($1);
        if before.active and not before.takedown then
            perform indexer.log_repo_change($1, 'hidden', before.rev);
        end if;
        return true;
    end $$
    """,
    """
    create function atproto.track(dids text[]) returns bigint
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    declare
        one text;
        changed bigint := 0;
    begin
        foreach one in array indexer.checked_dids($1) loop
            if indexer.track_one(one) then
                changed := changed + 1;
            end if;
        end loop;
        return changed;
    end $$
    """,
    """
    create function atproto.untrack(dids text[]) returns bigint
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    declare
        one text;
        changed bigint := 0;
    begin
        foreach one in array indexer.checked_dids($1) loop
            if indexer.untrack_one(one) then
                changed := changed + 1;
            end if;
        end loop;
        return changed;
    end $$
    """,
    """
    create or replace function atproto.request_resync(did text) returns boolean
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    begin
        update indexer.repo r
        set version = r.version + 1, sync_status = 'desynchronized', sync_reason = 'requested', attempts = 0,
            next_attempt_at = null, updated_at = now(), lease_until = null, buffered_events = 0, buffered_bytes = 0
        where r.did = $1 and r.bucket = indexer.bucket_of($1) and r.tracked;
        if not found then
            return false;
        end if;
        delete from indexer.buffered_event b where b.did = $1 and b.bucket = indexer.bucket_of($1);
        return true;
    end $$
    """,
    """
    create or replace view atproto.repos as
    select r.did, i.handle, i.pds, r.sync_status, r.sync_reason, r.rev, atproto.cid_text(r.data) as data,
        coalesce(r.hosting_status, case when r.active then 'active' else 'inactive' end) as hosting_status,
        r.takedown, r.active and not r.takedown as visible,
        r.attempts as resync_attempts, r.next_attempt_at, r.last_error, r.synchronized_at, r.updated_at
    from indexer.repo r left join indexer.identity i using (did, bucket)
    where r.tracked
    """,
    """
    create view atproto.scope_progress as
    select s.collection, s.added_in, s.added_in = s.version as newest, coalesce(sum(g.repos), 0)::bigint as repos,
        coalesce(sum(g.repos) filter (where g.fetched and g.scope_version >= s.added_in), 0)::bigint as complete
    from (
        select unnest(collections) as collection, unnest(added_in) as added_in, version from indexer.scope
    ) s left join (
        select scope_version, priority <> 2 as fetched, count(*) as repos
        from indexer.repo where tracked and active group by 1, 2
    ) g on true
    group by s.collection, s.added_in, s.version
    """,
    """
    revoke all on function indexer.change_scope(text, text[], text[]), indexer.track_one(text),
        indexer.untrack_one(text) from public
    """,
    """
    revoke all on function atproto.set_track(text), atproto.set_collections(text[]),
        atproto.set_signal_collections(text[]), atproto.track(text[]), atproto.untrack(text[]) from public
    """,
    """
    do $$
    declare
        role text;
    begin
        foreach role in array array['atproto_reader', 'atproto_operator'] loop
            if exists (select from pg_roles where rolname = role) then
                execute format('grant select on atproto.scope_progress to %I', role);
            end if;
        end loop;
        if exists (select from pg_roles where rolname = 'atproto_operator') then
            grant execute on function atproto.set_track(text), atproto.set_collections(text[]),
                atproto.set_signal_collections(text[]), atproto.track(text[]), atproto.untrack(text[])
                to atproto_operator;
        end if;
    end $$
    """,
)

COMMENTS = {
    "table indexer.scope": "One row: which repos are tracked, and which collections are stored.",
    "column indexer.scope.version": "Incremented by each change of the scope.",
    "column indexer.scope.track": (
        "all: every repo of the stream and of the repo lists; listed: only repos that were added; signal: repos with a "
        "record of a signal collection."
    ),
    "column indexer.scope.collections": "Patterns of the collections to store: an NSID, the beginning of one, or *.",
    "column indexer.scope.added_in": (
        "For each pattern the version of the scope that added it. A repo with a lower scope_version may lack records."
    ),
    "column indexer.scope.signal_collections": "Patterns of the collections that cause a repo to be tracked.",
    "column indexer.repo.scope_version": "The version of the scope for which the stored records are complete.",
    "column indexer.repo.tracked": (
        "False after atproto.untrack: its records are erased, and nothing of it is stored until atproto.track."
    ),
    "view atproto.scope_progress": (
        "The collections that are stored, with the progress of their backfill. Reads the row of every repo."
    ),
    "column atproto.scope_progress.collection": "The pattern: an NSID, the beginning of one with .*, or *.",
    "column atproto.scope_progress.added_in": "The version of the scope that added the collection.",
    "column atproto.scope_progress.newest": "True if the latest change of the scope added the collection.",
    "column atproto.scope_progress.repos": "The number of tracked repos of active accounts.",
    "column atproto.scope_progress.complete": (
        "The number of those repos of which all records of the collection are stored. A repo without such records "
        "counts, too, once this is known."
    ),
    "column atproto.changes.rev": (
        "The rev of the commit that made the change, or of the export in which a resync found it; null for a repo "
        "without a rev, for an erased record, and for one whose collection is no longer selected."
    ),
    "function indexer.pattern_covers(text, text)": "True if the first pattern matches all collections of the second.",
    "function indexer.checked_patterns(text[])": "The patterns, sorted, without duplicates; an error names a bad one.",
    "function indexer.checked_dids(text[])": "The DIDs, sorted and without duplicates; an error names a bad one.",
    "function indexer.change_scope(text, text[], text[])": (
        "Change the parts of the scope that are not null; return the version of the scope."
    ),
    "function indexer.track_one(text)": "Start tracking a repo; false if it was tracked.",
    "function indexer.untrack_one(text)": "Stop tracking a repo; false if it was not tracked.",
    "function atproto.track(text[])": (
        "Start tracking repos, also if they were untracked; return how many were not tracked before. Requires role "
        "atproto_operator."
    ),
    "function atproto.untrack(text[])": (
        "Stop tracking repos, whatever the scope says, until atproto.track; return how many were tracked. Their "
        "records are hidden at once, and then deleted in batches, with entries in the change log. Requires role "
        "atproto_operator."
    ),
    "function atproto.set_track(text)": (
        "Choose which repos are tracked from now on: all, listed or signal. Repos that are tracked already stay "
        "tracked. Return the version of the scope. Requires role atproto_operator."
    ),
    "function atproto.set_collections(text[])": (
        "Choose the collections to store. Records of others are deleted, and records of added ones are fetched, in the "
        "background: see atproto.scope_progress. Return the version of the scope. Requires role atproto_operator."
    ),
    "function atproto.set_signal_collections(text[])": (
        "Choose the collections that cause a repo to be tracked if the scope says signal. Return the version of the "
        "scope. Requires role atproto_operator."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

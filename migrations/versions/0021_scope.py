"""Store the scope: which repos are tracked, and which collections are stored. Version 0027 lets it be changed.

Repos keep the version of the scope for which their records are complete. An untracked repo keeps its row, so that no
message adds it again.
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

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
    do $$
    declare
        role text;
    begin
        foreach role in array array['atproto_reader', 'atproto_operator'] loop
            if exists (select from pg_roles where rolname = role) then
                execute format('grant select on atproto.scope_progress to %I', role);
            end if;
        end loop;
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
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

"""Store what operators have redacted or hidden. New tables and functions only take locks for a moment."""

from alembic import op

revision = "0105"
down_revision = "0104"
branch_labels = None
depends_on = None

STATEMENTS = (
    "alter table indexer.scope add column chosen_in bigint not null default 0",
    "update indexer.scope set chosen_in = version",
    """
create or replace view atproto.scope_progress as
select s.collection, s.added_in, s.added_in = s.chosen_in as newest, coalesce(sum(g.repos), 0)::bigint as repos,
    coalesce(sum(g.repos) filter (where g.fetched and g.scope_version >= s.added_in), 0)::bigint as complete
from (
    select unnest(collections) as collection, unnest(added_in) as added_in, chosen_in from indexer.scope
) s left join (
    select scope_version, priority <> 2 as fetched, count(*) as repos
    from indexer.repo where tracked and active group by 1, 2
) g on true
group by s.collection, s.added_in, s.chosen_in
    """,
    """
    create table indexer.removal (
        id bigint not null generated always as identity,
        target text collate "C" not null,
        action text not null,
        role text collate "C" not null,
        reason text,
        at timestamptz not null default now(),
        version bigint,
        primary key (id),
        constraint removal_action check (action in ('redact', 'hide', 'show'))
    )
    """,
    "create index removal_target on indexer.removal (target, id)",
    "create index removal_version on indexer.removal (version)",
    "create index removal_collection on indexer.removal (target) where position(':' in target) = 0",
    """
    create view indexer.removed as
    select target, action, role, reason, at from (
        select distinct on (target) * from indexer.removal order by target, action = 'redact' desc, id desc
    ) last where action <> 'show'
    """,
    """
create or replace function indexer.change_scope(
    new_track text, new_collections text[], new_signal_collections text[]
) returns bigint language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    present indexer.scope;
    next_track text;
    next_collections text[];
    next_signal text[];
    fewer_repos boolean;
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
    fewer_repos := case
        when next_track = 'all' or present.track = 'listed' then false
        when next_track <> present.track then true
        else exists (
            select from unnest(present.signal_collections) o(pattern)
            where not exists (
                select from unnest(next_signal) n(pattern) where indexer.pattern_covers(n.pattern, o.pattern)
            )
        )
    end;
    delete from indexer.crawl_progress where purpose = 'signal' or (fewer_repos and purpose = 'untrack');
    update indexer.scope
    set version = present.version + 1, track = next_track, collections = next_collections,
        signal_collections = next_signal, changed_at = now(), chosen_in = present.version + 1,
        repos_narrowed_in = case
            when next_track = 'all' then 0 when fewer_repos then present.version + 1 else present.repos_narrowed_in
        end,
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
create or replace function indexer.remove(target text, action text, reason text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    parts constant text[] := regexp_match(left($1, 2600), '^at://([^/]+)/([^/*]+)/([a-zA-Z0-9_~.:-]+)$');
    before text;
    next_version bigint;
begin
    if length($1) <= 2600 and length(parts[3]) <= 512 and parts[3] not in ('.', '..') then
        perform indexer.checked_dids(array[parts[1]]), indexer.checked_patterns(array[parts[2]]);
    elsif starts_with($1, 'did:') then
        perform indexer.checked_dids(array[$1]);
    else
        perform indexer.checked_patterns(array[replace($1, '*', '')]);
    end if;
    perform indexer.stop_tracking($1) where $2 = 'redact' and starts_with($1, 'did:');
    perform from indexer.repo r
    where $2 = 'show' and r.did = parts[1] and r.bucket = indexer.bucket_of(parts[1]) for update;
    perform from indexer.scope where not starts_with($1, 'did:') for update;
    before := (select r.action from indexer.removed r where r.target = $1);
    if $2 = 'show' and before = 'redact' then
        raise exception '% is redacted, which is irreversible', $1 using errcode = 'object_not_in_prerequisite_state';
    end if;
    if coalesce(before, 'show') in ($2, 'redact') then
        return false;
    end if;
    if before is null and not starts_with($1, 'did:')
        and (select count(*) from indexer.removed r where not starts_with(r.target, 'did:')) >= 100000
    then
        raise exception '100000 records and collections are redacted or hidden, which is the limit'
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    if not starts_with($1, 'did:') then
        perform atproto.request_resync(parts[1]) where $2 = 'show';
        update indexer.scope s
        set version = s.version + 1, chosen_in = case when parts is null then s.version + 1 else s.chosen_in end;
        next_version := coalesce((select s.version from indexer.scope s), 1);
    end if;
    insert into indexer.removal (target, action, role, reason, version)
    values ($1, $2, indexer.calling_role(), $3, next_version);
    return true;
end $$
    """,
    """
create or replace function indexer.start_tracking(one text, version_that_wants bigint) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    before indexer.repo;
begin
    if exists (select from indexer.removal r where r.target = $1 and r.action = 'redact') then
        raise warning '% is redacted, so it is not tracked', $1;
        return false;
    end if;
    insert into indexer.repo (did, bucket, version, sync_status, sync_reason, active, hosting_seq, takedown,
        buffered_events, buffered_bytes, lease, attempts, wanted_in)
    values ($1, indexer.bucket_of($1), 1, 'desynchronized', 'new', true, 0, false, 0, 0, 0, 0, $2)
    on conflict (did, bucket) do nothing;
    if found then
        return true;
    end if;
    select r.* into before from indexer.repo r where r.did = $1 and r.bucket = indexer.bucket_of($1) for update;
    if not before.tracked then
        if exists (select from indexer.removal r where r.target = $1 and r.action = 'redact') then
            return false;
        end if;
        update indexer.repo r
        set version = r.version + 1, tracked = true, active = true, hosting_status = null, withheld_since = null,
            erase_at = null,
            next_attempt_at = null, last_failure = null, last_error = null, from_stream = false, wanted_in = $2,
            updated_at = now()
        where r.did = $1 and r.bucket = indexer.bucket_of($1);
        if not before.takedown then
            perform indexer.change_visibility($1, true, null);
        end if;
        return true;
    end if;
    if before.from_stream and before.rev is null then
        update indexer.repo r
        set version = r.version + 1, from_stream = false, updated_at = now(),
            next_attempt_at = case when r.last_failure = 'new-accounts' then null else r.next_attempt_at end,
            last_error = case when r.last_failure = 'new-accounts' then null else r.last_error end,
            last_failure = nullif(r.last_failure, 'new-accounts')
        where r.did = $1 and r.bucket = indexer.bucket_of($1);
    end if;
    if before.wanted_in < $2 then
        update indexer.repo r set version = r.version + 1, wanted_in = $2
        where r.did = $1 and r.bucket = indexer.bucket_of($1);
    end if;
    return false;
end $$
    """,
    """
create or replace function indexer.take_down(target text, takedown boolean, reason text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    before indexer.repo;
begin
    if starts_with($1, 'at://') then
        if not exists (
            select from indexer.repo r
            where r.did = split_part($1, '/', 3) and r.bucket = indexer.bucket_of(split_part($1, '/', 3))
        ) then
            return false;
        end if;
        perform indexer.remove($1, case when $2 then 'hide' else 'show' end, $3);
        return true;
    end if;
    select r.* into before from indexer.repo r
    where r.did = $1 and r.bucket = indexer.bucket_of($1) for update;
    if not found then
        return false;
    end if;
    if before.takedown <> $2 then
        insert into indexer.removal (target, action, role, reason)
        values ($1, case when $2 then 'hide' else 'show' end, indexer.calling_role(), $3);
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
create or replace function atproto.request_takedown(did text, takedown boolean) returns boolean
language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
begin
    return indexer.take_down($1, $2, null);
end $$
    """,
    """
    comment on function atproto.request_takedown(text, boolean) is
    'Hide a repo (by its DID) or a record (by its AT-URI) locally, or show it again. False if the DID is unknown. '
    'Needs atproto_operator.'
    """,
    "revoke all on function indexer.remove(text, text, text), indexer.take_down(text, boolean, text) from public",
)


def upgrade() -> None:
    """Execute the statements one by one, because Citus sends the text of some of them to other nodes."""
    for statement in STATEMENTS:
        op.execute(statement)

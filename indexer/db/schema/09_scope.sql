-- The scope: which repos are tracked, and which collections are stored.

-- One row: which repos are tracked, and which collections are stored.
create table indexer.scope (
    singleton boolean not null default true,
    -- Incremented by each change of the scope.
    version bigint not null,
    -- all: every repo of the stream and of the repo lists; listed: only repos that were added; signal: repos with a
    -- record of a signal collection.
    track text not null,
    -- Patterns of the collections to store: an NSID, the beginning of one, or *.
    collections text[] not null,
    -- For each pattern the version of the scope that added it. A repo with a lower scope_version may lack records.
    added_in bigint[] not null,
    -- Patterns of the collections that cause a repo to be tracked.
    signal_collections text[] not null,
    changed_at timestamptz not null default now(),
    -- The version of the scope that last wanted fewer repos. Repos that no later one wants are untracked; 0: none.
    repos_narrowed_in bigint not null default 0,
    -- The version of the last change that was not just a redaction or takedown of a single record.
    chosen_in bigint not null default 0,
    primary key (singleton),
    constraint scope_added_in check (cardinality(added_in) = cardinality(collections)),
    constraint scope_collections check (cardinality(collections) > 0),
    constraint scope_signal check (track <> 'signal' or cardinality(signal_collections) > 0),
    constraint scope_singleton check (singleton),
    constraint scope_track check (track in ('all', 'listed', 'signal'))
);

-- The patterns, sorted, without duplicates; an error names a bad one.
create function indexer.checked_patterns(patterns text[]) returns text[]
language plpgsql immutable strict parallel safe set search_path = pg_catalog, pg_temp as $$
declare
    pattern text;
begin
    foreach pattern in array patterns loop
        if pattern is null or length(pattern) > 317
            or not (
                pattern = '*'
                or pattern ~ '^[a-zA-Z]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)+'
                    '\.[a-zA-Z][a-zA-Z0-9]{0,62}$'
                or pattern ~ '^[a-zA-Z]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*\.\*$'
            )
        then
            raise exception '% is neither an NSID, nor the beginning of one with .*, nor *',
                coalesce(quote_literal(left(pattern, 100)), 'null')
                using errcode = 'invalid_parameter_value';
        end if;
    end loop;
    return array(select distinct p collate "C" from unnest(patterns) p order by 1);
end $$;

-- The DIDs, sorted and without duplicates; an error names a bad one.
-- Sorted, so that concurrent calls and batches lock rows in the same order.
create function indexer.checked_dids(dids text[]) returns text[]
language plpgsql immutable strict parallel safe set search_path = pg_catalog, pg_temp as $$
declare
    did text;
begin
    foreach did in array dids loop
        if did is null or length(did) > 2048 or did !~ '^did:[a-z]+:[a-zA-Z0-9._:%-]*[a-zA-Z0-9._-]$' then
            raise exception '% is not a DID', coalesce(quote_literal(left(did, 100)), 'null')
                using errcode = 'invalid_parameter_value';
        end if;
    end loop;
    return array(select distinct d collate "C" from unnest(dids) d order by 1);
end $$;

-- True if the first pattern matches all collections of the second.
create function indexer.pattern_covers(outer_pattern text, inner_pattern text) returns boolean
language sql immutable strict parallel safe
return outer_pattern = '*' or outer_pattern = inner_pattern
    or (right(outer_pattern, 2) = '.*' and starts_with(inner_pattern, left(outer_pattern, -1)));

-- Change the parts of the scope that are not null; return the version of the scope.
create function indexer.change_scope(
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
end $$;

-- The redactions and takedowns by operators, and their reversals. A redaction is permanent; otherwise, the last row of a
-- target counts. Rows are never deleted.
create table indexer.removal (
    id bigint not null generated always as identity,
    -- A DID, the NSID of a collection, or the AT-URI of a record, with a DID.
    target text collate "C" not null,
    action text not null,
    role text collate "C" not null,
    reason text,
    at timestamptz not null default now(),
    -- The version of the scope that has it; null for an account, which is untracked or taken down.
    version bigint,
    primary key (id),
    constraint removal_action check (action in ('redact', 'hide', 'show'))
);
create index removal_target on indexer.removal (target, id);
create index removal_version on indexer.removal (version);
-- Collections have no colon. They are few, and each dead letter is compared with them.
create index removal_collection on indexer.removal (target) where position(':' in target) = 0;

-- The targets that are redacted or hidden now.
create view indexer.removed as
select target, action, role, reason, at from (
    select distinct on (target) * from indexer.removal order by target, action = 'redact' desc, id desc
) last where action <> 'show';

-- Redact or hide a target, or show it again; false if that changes nothing. Records and collections are a part of the
-- scope, so its version changes. Locks are taken before the last row is read, in the order of a resync: the repo, then
-- the scope. The latter is held until COMMIT, so rows with later versions are committed later.
create function indexer.remove(target text, action text, reason text) returns boolean
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
end $$;

-- Start to track a repo that this version of the scope wants; false if it was tracked, or is redacted.
create function indexer.start_tracking(one text, version_that_wants bigint) returns boolean
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
end $$;

-- Stop to track a repo; false if it was not tracked. The trigger ERASED of indexer/sync/repo.py.
create function indexer.stop_tracking(one text) returns boolean
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
        if before.hosting_status is not null then
            update indexer.repo r set version = r.version + 1, hosting_status = null, updated_at = now()
            where r.did = $1 and r.bucket = indexer.bucket_of($1);
        end if;
        return false;
    end if;
    update indexer.repo r
    set version = r.version + 1, tracked = false, active = false, hosting_status = null, erase_at = now(),
        sync_status = 'desynchronized', sync_reason = 'erased', rev = null, data = null, commit = null,
        latest_verified_rev = null, latest_unverified_rev = null, unproven_since = null, withheld_since = null,
        attempts = 0,
        next_attempt_at = 'infinity', last_failure = null, last_error = null, synchronized_at = null, lease_until = null,
        buffered_events = 0, buffered_bytes = 0, scope_version = 0, wanted_in = 0, updated_at = now()
    where r.did = $1 and r.bucket = indexer.bucket_of($1);
    delete from indexer.buffered_event b where b.did = $1 and b.bucket = indexer.bucket_of($1);
    if before.visible then
        perform indexer.change_visibility($1, false, before.rev);
    end if;
    return true;
end $$;

create function atproto.set_track(track text) returns bigint
language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
begin
    return indexer.change_scope($1, null, null);
end $$;
comment on function atproto.set_track(text) is
    'Choose which repos to track: all, listed or signal. Others are untracked in the background. Return the version '
    'of the scope. Needs atproto_operator.';

create function atproto.set_collections(collections text[]) returns bigint
language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
begin
    return indexer.change_scope(null, $1, null);
end $$;
comment on function atproto.set_collections(text[]) is
    'Choose the collections to store. Records of others are deleted, those of added ones fetched, in the background. '
    'Return the version of the scope. Needs atproto_operator.';

create function atproto.set_signal_collections(collections text[]) returns bigint
language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
begin
    return indexer.change_scope(null, null, $1);
end $$;
comment on function atproto.set_signal_collections(text[]) is
    'Choose the collections whose records cause a repo to be tracked if the scope says signal. Return the version of '
    'the scope. Needs atproto_operator.';

create function atproto.track(dids text[]) returns bigint
language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
declare
    one text;
    changed bigint := 0;
begin
    foreach one in array indexer.checked_dids($1) loop
        if indexer.start_tracking(one, 9223372036854775807) then
            changed := changed + 1;
        end if;
    end loop;
    return changed;
end $$;
comment on function atproto.track(text[]) is
    'Start tracking repos; return how many were not tracked before. Needs atproto_operator.';

create function atproto.untrack(dids text[]) returns bigint
language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
declare
    one text;
    changed bigint := 0;
begin
    foreach one in array indexer.checked_dids($1) loop
        if indexer.stop_tracking(one) then
            changed := changed + 1;
        end if;
    end loop;
    return changed;
end $$;
comment on function atproto.untrack(text[]) is
    'Stop tracking repos until atproto.track; return how many were tracked. Their records are hidden at once, and '
    'then deleted. Needs atproto_operator.';

create view atproto.scope_progress as
select s.collection, s.added_in, s.added_in = s.chosen_in as newest, coalesce(sum(g.repos), 0)::bigint as repos,
    coalesce(sum(g.repos) filter (where g.fetched and g.scope_version >= s.added_in), 0)::bigint as complete
from (
    select unnest(collections) as collection, unnest(added_in) as added_in, chosen_in from indexer.scope
) s left join (
    select scope_version, priority <> 2 as fetched, count(*) as repos
    from indexer.repo where tracked and active group by 1, 2
) g on true
group by s.collection, s.added_in, s.chosen_in;
comment on view atproto.scope_progress is
    'The collections to store, with the progress of their backfill. Reads the row of every repo.';
comment on column atproto.scope_progress.collection is 'An NSID, the beginning of one with .*, or *.';
comment on column atproto.scope_progress.added_in is 'The version of the scope that added it.';
comment on column atproto.scope_progress.newest is 'True if the latest version of the scope added it.';
comment on column atproto.scope_progress.repos is 'Tracked repos of active accounts.';
comment on column atproto.scope_progress.complete is
    'The repos whose records of the collection are all stored, or known not to exist.';

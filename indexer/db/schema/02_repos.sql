-- Repos: their state, identities and hosts, the resync queue, and what waits for a resync.

-- One row per tracked repo: sync status, head, hosting status, and resync schedule.
create table indexer.repo (
    did text collate "C" not null,
    bucket smallint not null,
    -- Incremented by every update. Every writer compares it with the version it read.
    version bigint not null,
    sync_status text not null,
    sync_reason text,
    rev text collate "C",
    data bytea,
    commit bytea,
    -- The newest rev of a message whose signature was verified.
    latest_verified_rev text collate "C",
    active boolean not null,
    hosting_status text,
    hosting_relay text,
    hosting_seq bigint not null,
    takedown boolean not null,
    buffered_events integer not null,
    buffered_bytes bigint not null,
    -- Incremented by every claim of a resync worker.
    lease bigint not null,
    lease_until timestamptz,
    attempts integer not null,
    -- Null: immediately. Infinity: parked until an event unparks the repo.
    next_attempt_at timestamptz,
    -- Why the last fetch failed: see FetchFailure in indexer/reasons.py.
    last_failure text,
    -- The same with details, for people.
    last_error text,
    synchronized_at timestamptz,
    updated_at timestamptz not null default now(),
    -- When the records of the deleted account may be erased.
    erase_at timestamptz,
    -- The newest rev of a message whose signature could not be checked, until the next resync completes.
    latest_unverified_rev text collate "C",
    -- Resync order: 0 synchronized before, 1 requested, 2 never synchronized.
    priority smallint not null generated always as (
        case when rev is null then 2 when sync_reason = 'requested' then 1 else 0 end
    ) stored,
    -- When the repo was parked after a permanent failure.
    parked_at timestamptz generated always as (
        case when sync_status = 'desynchronized' and active and next_attempt_at = 'infinity' then updated_at end
    ) stored,
    -- The epoch of the relay's sequence that hosting_seq belongs to.
    hosting_epoch bigint not null default 0,
    -- When the first undecidable commit since the last complete export was applied; null: there is none.
    unproven_since timestamptz,
    -- True if a message of the stream or the list of its host added the repo, and neither the repo list of a relay nor a
    -- command has named it since.
    from_stream boolean not null default false,
    -- The version of the scope for which the stored records are complete.
    scope_version bigint not null default 0,
    -- False after atproto.untrack: its records are erased, and nothing of it is stored until atproto.track.
    tracked boolean not null default true,
    -- The latest version of the scope that wanted the repo: it added the repo, or the list of a signal collection
    -- named it. The largest bigint if a command, SQL or a request named the repo; 0 if it is not tracked.
    wanted_in bigint not null default 0,
    -- The latest time of the messages that hosting_seq has named, as far as it was possible; null: not known.
    hosting_time timestamptz,
    -- When the relay first said that it withholds the account, for the reason in hosting_status; null: it does not.
    withheld_since timestamptz,
    -- The only definition of visibility in SQL: records of other repos are hidden from every reader.
    visible boolean not null generated always as (active and not takedown) stored,
    primary key (did, bucket),
    constraint repo_head check (num_nulls(rev, data, commit) in (0, 3)),
    constraint repo_last_failure check (last_failure in ('unreachable', 'no-such-host', 'timeout', 'http-status',
        'throttled', 'host-paused', 'too-large', 'refused-address', 'bad-answer', 'repo-not-found', 'repo-takendown',
        'repo-suspended', 'repo-deactivated', 'identity-missing', 'identity-gone', 'identity-doubtful',
        'identity-unavailable', 'new-accounts', 'export-rejected', 'export-incomplete', 'export-lacks-records',
        'export-stale', 'spool-full', 'spool-unreadable', 'not-storable')),
    constraint repo_last_error check ((last_failure is null) = (last_error is null)),
    constraint repo_leased check ((sync_status = 'in-progress') = (lease_until is not null)),
    constraint repo_sync_status check (sync_status in ('desynchronized', 'in-progress', 'synchronized')),
    constraint repo_synchronized check (sync_status <> 'synchronized' or rev is not null)
) with (
    fillfactor = 80,
    -- By default, a fifth of the rows must change before a vacuum: too late for a hundred million rows.
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.02
);
-- Do not index rev or updated_at, not even in a condition: then each commit would update each index (no HOT).
create index repo_denied on indexer.repo (bucket, parked_at)
    where parked_at is not null and priority = 2 and (from_stream or last_failure in ('identity-missing', 'identity-gone'));
create index repo_due on indexer.repo (bucket, priority, coalesce(next_attempt_at, '-infinity'::timestamptz))
    where sync_status = 'desynchronized' and active;
create index repo_erasures on indexer.repo (erase_at) where erase_at is not null;
create index repo_hidden on indexer.repo (bucket) where not active and priority = 2;
create index repo_leases on indexer.repo (lease_until) where sync_status = 'in-progress';
create index repo_parked on indexer.repo (bucket, parked_at) where parked_at is not null;
create index repo_scope on indexer.repo (bucket, scope_version);
create index repo_withheld on indexer.repo (bucket) where withheld_since is not null;
create index repo_unproven on indexer.repo (unproven_since) where unproven_since is not null;

-- One row per resync queue: each combination of bucket and priority.
create table indexer.resync_queue (
    bucket smallint not null,
    priority smallint not null,
    primary key (bucket, priority)
);
insert into indexer.resync_queue select bucket, priority from generate_series(0, 255) bucket, generate_series(0, 2)
    priority;

-- The contents of each DID document when it was last read, and the verified handle.
create table indexer.identity (
    did text collate "C" not null,
    bucket smallint not null,
    -- The handle that the DID document claims.
    claimed_handle text collate "C",
    pds text,
    signing_key text,
    fetched_at timestamptz not null,
    stale boolean not null,
    problem text,
    handle text collate "C",
    -- Checks since the claimed handle was new or last verified.
    handle_attempts integer not null,
    -- When the claimed handle is checked next; null if there is none, or if the repo was not tracked.
    handle_due_at timestamptz,
    -- How often in a row the directory denied the DID, hours apart. While it does, the document is the last one.
    denials integer not null default 0,
    -- The time of the last denial that counted.
    denied_at timestamptz,
    -- When the identity is looked up again although no message needs it; null: there is no such time.
    refresh_at timestamptz,
    -- Failed refreshes since the last successful one.
    refresh_failures integer not null default 0,
    -- The data that verifies the next operation of a did:plc, see StoredIdentity.chain; null: no operation was read.
    chain bytea,
    primary key (did, bucket)
) with (
    fillfactor = 90
);
create index identity_handle on indexer.identity (handle) where handle <> 'handle.invalid';
create index identity_handle_due on indexer.identity (handle_due_at) where handle_due_at is not null;
create index identity_refresh on indexer.identity (starts_with(did, 'did:web:'), refresh_at)
    where refresh_at is not null;

-- Request statistics of each host, and its pause.
create table indexer.host (
    host text collate "C" not null,
    requests bigint not null,
    failures bigint not null,
    consecutive_failures integer not null,
    paused_until timestamptz,
    pause_reason text,
    last_error text,
    last_success timestamptz,
    updated_at timestamptz not null default now(),
    primary key (host)
) with (
    fillfactor = 50
);

-- The hosts that each relay consumes, as its list of hosts said last.
create table indexer.relay_host (
    relay text collate "C" not null,
    host text collate "C" not null,
    -- The accounts of the host at the relay, those included that it withholds; null: the relay does not say.
    accounts bigint,
    status text,
    listed_at timestamptz not null,
    primary key (relay, host)
);

-- The repo list of each of these hosts.
create table indexer.host_list (
    host text collate "C" not null,
    url text not null,
    -- The bucket of the name: the process that has it reads the list.
    host_bucket smallint not null,
    -- The counts of the last complete reading, and its beginning and end: HostCounts in indexer/db/host_lists.py.
    counts jsonb,
    began_at timestamptz,
    finished_at timestamptz,
    -- The end of the last reading, complete or failed.
    ended_at timestamptz,
    -- Accounts of this host that no relay passes on, as far as it is known.
    lacking bigint not null default 0,
    -- The reading that is not complete: its counts so far, its beginning, and the cursor of the next page.
    reading jsonb,
    reading_since timestamptz,
    cursor text,
    failures integer not null default 0,
    last_error text,
    primary key (host)
) with (
    fillfactor = 50
);

-- The progress of reading each repo list or export of a PLC directory, by purpose.
create table indexer.crawl_progress (
    purpose text not null,
    source text not null,
    collection text not null,
    cursor text,
    listed bigint not null,
    found bigint not null,
    began_at timestamptz not null,
    finished_at timestamptz,
    -- The shard whose repos are compared, as index/count.
    shard text not null,
    -- The newest gap when the reconciliation began; it closes no later gap. 0 for other crawls.
    last_gap bigint not null,
    primary key (purpose, source, collection, shard)
);

-- Frames that arrived during the resync of their repo; applied when it completes.
create table indexer.buffered_event (
    did text collate "C" not null,
    id bigint not null generated always as identity,
    bucket smallint not null,
    seq bigint not null,
    frame bytea not null,
    -- The relay that sent the event and assigned its seq.
    relay text not null,
    primary key (did, id, bucket)
) with (
    -- The number of buffered events changes too fast for any fraction.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 10000
);

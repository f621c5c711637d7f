-- Positions in the streams of relays, gaps, dead letters, and the processes of the daemon.

-- The stream position per relay and shard. All effects up to seq are in the database.
create table indexer.cursor (
    relay text not null,
    shard text not null,
    seq bigint not null,
    event_time text,
    updated_at timestamptz not null default now(),
    caught_up_at timestamptz,
    -- The number of times that the relay has started a new sequence.
    epoch bigint not null default 0,
    -- Only the previous release reads and writes this column.
    stored_until timestamptz,
    primary key (relay, shard)
);

-- Spans of a relay's stream in which messages may have been missed.
create table indexer.gap (
    id bigint not null generated always as identity,
    relay text not null,
    shard text not null,
    reason text not null,
    first_seq bigint,
    last_seq bigint,
    opened_at timestamptz not null default now(),
    closed_at timestamptz,
    closed_by text,
    -- The positions of the shard (docs/glossary.md).
    positions int4range not null generated always as (
        int4range( split_part(shard, '/', 1)::int * 256 / split_part(shard, '/', 2)::int, (split_part(shard, '/',
            1)::int + 1) * 256 / split_part(shard, '/', 2)::int )
    ) stored,
    -- Positions that a reconciliation has compared since, or for which another stream covers the gap. The gap is closed
    -- when these are all.
    reconciled int4multirange not null default '{}'::int4multirange,
    primary key (id)
);
create index gap_open on indexer.gap (id) where closed_at is null;

-- The hosts whose own streams are read, because a relay withholds accounts of them.
create table indexer.subscribed_host (
    -- Its URL, as in indexer.identity.
    pds text collate "C" not null,
    shard text not null,
    -- Identifies the time for which no message of the stream was missed.
    id bigint not null generated always as identity,
    primary key (pds, shard)
);

-- Messages that were rejected by their own fault; the newest of each relay and reason.
create table indexer.dead_letter (
    id bigint not null generated always as identity,
    bucket smallint not null,
    relay text not null,
    seq bigint,
    did text collate "C",
    kind text not null,
    reason text not null,
    detail text not null,
    frame bytea not null,
    time timestamptz not null default now(),
    -- The epoch of the relay's sequence that seq belongs to.
    epoch bigint not null default 0,
    primary key (id, bucket)
);
create index dead_letter_reason on indexer.dead_letter (relay, reason, id);

-- The database session of each daemon process that owns a range of buckets. Rows of ended sessions count for nothing.
create table indexer.shard_owner (
    pid integer not null,
    role oid not null,
    -- When the session started. Together with pid it identifies the session.
    started_at timestamptz not null,
    -- The first position of the shard. On a plain database, this is a bucket; on a distributed one, a place in
    -- indexer.hash_order(), counted from 0. 256: the feed for clients of tap. 257: links.
    -- 258: operations of a PLC directory.
    first_bucket smallint not null,
    -- The last position of the shard.
    last_bucket smallint not null,
    primary key (pid)
);

-- The last report of each process of the daemon about itself. A row is valid as long as the session exists.
create table indexer.process_report (
    -- The process ID of the session in Postgres.
    pid integer not null,
    -- The role of the session.
    role oid not null,
    -- When the session started.
    started_at timestamptz not null,
    -- The roles of the process: INDEXER_ROLES.
    roles text[] not null,
    -- The first position of its shard, as in indexer.shard_owner.
    first_bucket smallint not null,
    -- The last position of its shard.
    last_bucket smallint not null,
    -- False while a process with the role live waits for its shard.
    owns boolean not null,
    -- When it last reported; it does so every two seconds.
    reported_at timestamptz not null,
    -- The reasons of /readyz at that time.
    reasons jsonb not null,
    primary key (pid)
);

create view atproto.cursors as select relay, shard, seq, event_time, updated_at, caught_up_at from indexer.cursor;
comment on view atproto.cursors is 'The stream position per relay and shard.';
comment on column atproto.cursors.relay is 'The URL of the relay.';
comment on column atproto.cursors.shard is 'The shard of the process, as index/count.';
comment on column atproto.cursors.seq is 'All effects of messages up to this seq are stored.';
comment on column atproto.cursors.event_time is 'The time in that message; null if it has none.';
comment on column atproto.cursors.updated_at is 'When the cursor was last saved.';
comment on column atproto.cursors.caught_up_at is 'Everything until this time is stored. Null if not known.';

-- Until when each shard has everything stored; null: not known, or messages may have been missed. Cursors of hosts,
-- whose URLs begin with http, are about some accounts only.
create view indexer.caught_up as
select case when not exists (select from indexer.gap where closed_at is null) and count(reached) = 256
    then min(reached) end as at
from (
    select max(c.caught_up_at) as reached
    from indexer.cursor c cross join generate_series(
        split_part(shard, '/', 1)::int * 256 / split_part(shard, '/', 2)::int,
        (split_part(shard, '/', 1)::int + 1) * 256 / split_part(shard, '/', 2)::int - 1
    ) position
    where c.relay not like 'http%'
    group by position
) positions;

create view atproto.gaps as
select relay, shard, reason, opened_at, first_seq, last_seq, closed_at, closed_by from indexer.gap;
comment on view atproto.gaps is
    'Spans of a stream in which messages may have been missed. While one is open, repos of its shard may be outdated.';
comment on column atproto.gaps.relay is 'The URL of the relay.';
comment on column atproto.gaps.shard is 'The shard of the process, as index/count.';
comment on column atproto.gaps.reason is 'Why messages may have been missed (docs/reasons.md).';
comment on column atproto.gaps.opened_at is 'When the gap was noticed.';
comment on column atproto.gaps.first_seq is 'The first seq that may be missing; null if not known.';
comment on column atproto.gaps.last_seq is 'The last seq that may be missing; null if not known.';
comment on column atproto.gaps.closed_at is 'When every affected repo was found equal or desynchronized; null if open.';
comment on column atproto.gaps.closed_by is 'The host whose repo list closed the gap, or the URL of the relay whose stream covered it.';

create view atproto.rejected as select id, relay, seq, did, kind, reason, time from indexer.dead_letter;
comment on view atproto.rejected is
    'Dead letters: the newest 1,000 rejected messages per relay and reason, including forged ones.';
comment on column atproto.rejected.id is 'The ID of the dead letter.';
comment on column atproto.rejected.relay is 'The URL of the relay.';
comment on column atproto.rejected.seq is 'The sequence number; null if unreadable.';
comment on column atproto.rejected.did is 'The DID that the message names, perhaps forged; null if unreadable.';
comment on column atproto.rejected.kind is 'The kind of message.';
comment on column atproto.rejected.reason is 'The rule that the message broke (docs/reasons.md).';
comment on column atproto.rejected.time is 'When the message was rejected.';

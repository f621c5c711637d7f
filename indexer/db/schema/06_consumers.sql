-- Consumers of the change log, and what the feed for clients of tap has delivered.

-- Registered consumers of the change log, each with the last seq that it has received.
create table indexer.consumer (
    name text not null,
    seq bigint not null,
    registered_at timestamptz not null default now(),
    seen_at timestamptz not null default now(),
    id bigint not null generated always as identity,
    -- The role that registered it.
    owner text collate "C" not null,
    -- Number of the consumer among those of its role. Limits how many a role has.
    slot smallint not null,
    constraint consumer_id unique (id),
    constraint consumer_slot unique (owner, slot),
    primary key (name)
) with (
    fillfactor = 50
);

-- The consumers that were disconnected. Only the daemon writes this table, so no consumer can lock its rows.
create table indexer.disconnected_consumer (
    id bigint not null,
    disconnected_at timestamptz not null default now(),
    primary key (id)
);

-- Changes after the position of a consumer that its clients have acknowledged: those up to delivered_to, except those
-- in undelivered.
create table indexer.feed_delivery (
    -- The id of the consumer.
    consumer_id bigint not null,
    -- The number of the newest change that was acknowledged.
    delivered_to bigint not null,
    -- The numbers of earlier changes that were not acknowledged.
    undelivered bigint[] not null,
    -- The snapshot was delivered up to this repo, collection and record key; null if no snapshot is being delivered.
    snapshot_did text,
    -- Empty if only the repo itself was delivered, no record of it.
    snapshot_collection text,
    -- Empty if only the repo itself was delivered, no record of it.
    snapshot_rkey text,
    -- Only the previous release reads and writes this column.
    refused jsonb not null default '[]'::jsonb,
    -- By DID, the number from which no change of the repo is delivered. Null if no repo is behind.
    behind jsonb,
    primary key (consumer_id)
);

-- What a consumer has not got although its position has passed it. hidden: records of a repo that was hidden when
-- they were due, one row for the repo. refused: an event that its clients refused for too long.
create table indexer.feed_set_aside (
    consumer_id bigint not null,
    reason text not null,
    did text not null,
    -- Empty for a whole repo.
    collection text not null,
    -- Empty for a whole repo.
    rkey text not null,
    -- The rev of the event. For a hidden repo, the lowest one: its records of this rev and later ones are sent when
    -- it is visible again.
    rev text not null,
    -- The action of a refused event; empty for a hidden repo.
    action text not null,
    attempts integer not null,
    since timestamptz not null,
    failure text not null,
    -- Send it: the repo is visible again, or an operator asked for it. The row is deleted when it is acknowledged.
    due boolean not null default false,
    primary key (consumer_id, reason, did, collection, rkey),
    constraint feed_set_aside_reason check (reason in ('hidden', 'refused'))
);
create index feed_set_aside_due on indexer.feed_set_aside (consumer_id) where due;

-- True if the caller may use a consumer of this role.
-- The role of the daemon, which owns the functions, and superusers may use every consumer.
create function indexer.may_use_consumer(owner text) returns boolean
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
    select indexer.calling_role() in (owner, current_user::text)
        or exists (select from pg_roles r where r.rolname = indexer.calling_role() and r.rolsuper);
end;

-- Raise an error if the consumer belongs to another role.
create function indexer.refuse_consumer_of_other_role(name text) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    owner text := (
        select c.owner from indexer.consumer c where c.name = $1 and not indexer.may_use_consumer(c.owner)
    );
begin
    if owner is not null then
        raise exception 'consumer % belongs to role %', quote_literal(name), owner
            using errcode = 'insufficient_privilege',
                  hint = format('Use another name, or connect as that role, or use SET ROLE %I.', owner);
    end if;
end $$;

-- The rows of the view atproto.readers.
create function indexer.consumer_states()
returns table (
    name text, seq bigint, behind bigint, behind_since timestamptz, registered_at timestamptz,
    seen_at timestamptz, cut_off_at timestamptz, owner text
)
language plpgsql stable rows 16 security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
declare
    latest bigint := atproto.latest_seq();
begin
    return query
        select c.name, c.seq, latest - c.seq,
            coalesce(
                (select case when b.last_seq > c.seq then b.time end from (
                    select first_seq + size - 1 as last_seq, b.time from indexer.change_batch b
                    where first_seq <= c.seq order by first_seq desc limit 1
                ) b),
                (select b.time from indexer.change_batch b where b.first_seq > c.seq order by b.first_seq limit 1)
            ),
            c.registered_at, c.seen_at, d.disconnected_at, c.owner
        from indexer.consumer c left join indexer.disconnected_consumer d using (id);
    raise exception using errcode = 'IX001';
exception when sqlstate 'IX001' then
    return;
end $$;

-- Trimming does not wait for this transaction. If it trims changes after the position, next_changes reports that. The
-- unique constraint on (owner, slot) limits the consumers of a role, also in concurrent transactions.
create function atproto.register_reader(name text, after bigint default null) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    caller text := indexer.calling_role();
    trimmed bigint;
    free_slot smallint;
    registered_seq bigint;
begin
    if name is null or name = '' then
        raise exception 'the name of a consumer must not be empty' using errcode = 'invalid_parameter_value';
    end if;
    select t.last_value into trimmed from indexer.trimmed_seq t;
    if after < trimmed then
        raise exception 'changes up to % have been trimmed, and % is before that', trimmed, after
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    loop
        update indexer.consumer c set seen_at = clock_timestamp()
        where c.name = register_reader.name and indexer.may_use_consumer(c.owner)
        returning c.seq into registered_seq;
        if found then
            return registered_seq;
        end if;
        perform indexer.refuse_consumer_of_other_role(name);
        if length(name) > 100 or name ~ '[[:cntrl:]]' then
            raise exception 'the name of a consumer has at most 100 characters, none of them a '
                'control character' using errcode = 'invalid_parameter_value';
        end if;
        select min(s.slot) into free_slot from generate_series(1, 16) s(slot)
        where not exists (select from indexer.consumer c where c.owner = caller and c.slot = s.slot);
        if free_slot is null then
            raise exception 'role % has 16 consumers, which is the limit', caller
                using errcode = 'configuration_limit_exceeded',
                      hint = 'Remove those that are no longer used: select atproto.unregister_reader(name)';
        end if;
        insert into indexer.consumer as c (name, seq, owner, slot)
        values (register_reader.name, coalesce(after, atproto.latest_seq()), caller, free_slot)
        on conflict do nothing returning c.seq into registered_seq;
        if found then
            return registered_seq;
        end if;  -- otherwise a concurrent transaction took the name or the slot
    end loop;
end $$;
comment on function atproto.register_reader(text,bigint) is
    'Register a consumer that has received all changes up to after (null: up to now), and return its position. Only '
    'the calling role may use it. A role has at most 16.';

create function atproto.unregister_reader(name text) returns boolean
language plpgsql strict security definer set search_path = pg_catalog, pg_temp set jit = off as $$
begin
    delete from indexer.consumer c where c.name = $1 and indexer.may_use_consumer(c.owner);
    if found then
        return true;
    end if;
    perform indexer.refuse_consumer_of_other_role(name);
    return false;
end $$;
comment on function atproto.unregister_reader(text) is 'Remove a consumer of your role; false if there is none.';

-- See latest_seq for the block that ends with an exception, and for the settings of the planner.
-- Without statistics, which a new segment lacks, the planner would join and sort the whole segment. These settings
-- leave it the indexes, in their order.
create function atproto.changes_after(after bigint, max integer)
returns table (
    seq bigint, did text, collection text, rkey text, action text, cid text, rev text, live boolean,
    "time" timestamptz
)
language plpgsql stable rows 1000 security definer
set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set enable_material = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
declare
    trimmed bigint := (select t.last_value from indexer.trimmed_seq t);
    start bigint;
begin
    after := coalesce(after, trimmed);
    begin
        start := coalesce(
            (select b.first_seq from indexer.change_batch b where b.first_seq <= changes_after.after
             order by b.first_seq desc limit 1),
            0
        );
        return query
            select b.first_seq + c.ordinal, c.did, c.collection, c.rkey, c.action, atproto.cid_text(c.cid), c.rev,
                c.live, b.time
            from indexer.change_batch b
            join indexer.change c
                on c.segment = b.segment and c.batch = b.id and c.ordinal > changes_after.after - b.first_seq
            where b.first_seq >= start
            order by b.first_seq, c.ordinal limit greatest(changes_after.max, 0);
        raise exception using errcode = 'IX001';
    exception when sqlstate 'IX001' then
        null;
    end;
    -- Read the sequence again after the rows: a segment can be truncated under any snapshot.
    select t.last_value into trimmed from indexer.trimmed_seq t;
    if after < trimmed then
        raise exception 'changes up to % have been trimmed, and % is before that', trimmed, after
            using errcode = 'object_not_in_prerequisite_state',
                  hint = 'Read atproto.records again, then continue from atproto.latest_seq().';
    end if;
end $$;
comment on function atproto.changes_after(bigint,integer) is
    'Return at most max changes after this seq (null: from the oldest). Raises an error if some of them have been '
    'trimmed.';

create function atproto.next_changes(reader text, max integer)
returns table (
    seq bigint, did text, collection text, rkey text, action text, cid text, rev text, live boolean,
    "time" timestamptz
)
language plpgsql rows 1000 security definer set search_path = pg_catalog, pg_temp set jit = off as $$
declare
    me indexer.consumer;
    disconnected_at timestamptz;
begin
    select c.* into me from indexer.consumer c
    where c.name = reader and indexer.may_use_consumer(c.owner) for update;
    if me.name is null then
        perform indexer.refuse_consumer_of_other_role(reader);
        raise exception 'no consumer is registered as %', coalesce(quote_literal(reader), 'null')
            using errcode = 'object_not_in_prerequisite_state',
                  hint = 'select atproto.register_reader(name)';
    end if;
    select d.disconnected_at into disconnected_at from indexer.disconnected_consumer d where d.id = me.id;
    if found then
        raise exception
            'consumer % was disconnected at %: it was too far behind; changes after its position % may be gone',
            quote_literal(reader), disconnected_at, me.seq
            using errcode = 'object_not_in_prerequisite_state',
                  hint = 'Unregister it, register it again, and read atproto.records again.';
    end if;
    for seq, did, collection, rkey, action, cid, rev, live, "time" in
        select c.* from atproto.changes_after(me.seq, next_changes.max) c
    loop
        me.seq := seq;
        return next;
    end loop;
    update indexer.consumer c
    set seq = me.seq, seen_at = clock_timestamp()
    where c.name = me.name;
end $$;
comment on function atproto.next_changes(text,integer) is
    'Return at most max next changes of a registered consumer, and advance its position in your transaction. A '
    'concurrent call for the same consumer waits for your commit.';

create view atproto.readers as
select s.name, s.seq, s.behind, s.behind_since, s.registered_at, s.seen_at, s.cut_off_at, s.owner
from indexer.consumer_states() s;
comment on view atproto.readers is 'Registered consumers of the change log.';
comment on column atproto.readers.name is 'The name of the consumer.';
comment on column atproto.readers.seq is 'The seq of the last change that it received.';
comment on column atproto.readers.behind is 'The latest seq minus that of the consumer.';
comment on column atproto.readers.behind_since is 'When the first change that it lacks was committed; null if none.';
comment on column atproto.readers.registered_at is 'When it was registered.';
comment on column atproto.readers.seen_at is 'When it last asked for changes or was registered.';
comment on column atproto.readers.cut_off_at is 'When it was disconnected for being too far behind; null if not.';
comment on column atproto.readers.owner is 'The role that may use and remove it.';

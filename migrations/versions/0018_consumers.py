"""Give consumers an owner and a limit, and keep their transactions from holding locks that trimming needs.

A private table replaces the advisory locks of shards. The reasons are in
docs/decisions/0005-number-changes-at-commit.md and docs/decisions/0009-single-writer.md.
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

MAX_CONSUMERS = 16
MAX_NAME_CHARACTERS = 100

TABLES = (
    """
    create table indexer.shard_owner (
        pid integer not null,
        role oid not null,
        started_at timestamptz not null,
        first_bucket smallint not null,
        last_bucket smallint not null,
        constraint shard_owner_pkey primary key (pid)
    )
    """,
    """
    create table indexer.disconnected_consumer (
        id bigint not null,
        disconnected_at timestamptz not null default now(),
        constraint disconnected_consumer_pkey primary key (id)
    )
    """,
    """
    alter table indexer.consumer
        add column id bigint not null generated always as identity,
        add column owner text collate "C",
        add column slot smallint,
        add constraint consumer_id unique (id),
        add constraint consumer_slot unique (owner, slot)
    """,
    """
    insert into indexer.disconnected_consumer
    select id, cut_off_at from indexer.consumer where cut_off_at is not null
    """,
    # No value is stored outside of the row. So rows that a function has read stay complete after it released its locks.
    """
    alter table indexer.change
        alter column did set storage main, alter column collection set storage main, alter column rkey set storage main
    """,
)

# The functions read the segments in a block that always ends with an exception. Postgres then releases the locks that
# were taken in the block, which TRUNCATE would otherwise wait for until the transaction of the consumer ends. The rows
# and the variables are kept. SQLSTATE IX001 is used for nothing else.
FUNCTIONS = (
    # `current_user` is the owner of the calling function. SET ROLE is visible only in the setting.
    """
    create function indexer.calling_role() returns text
    language sql stable set search_path = pg_catalog, pg_temp
    begin atomic
        select case current_setting('role') when 'none' then session_user::text else current_setting('role') end;
    end
    """,
    # The daemon's role, which owns the functions, and superusers may use every consumer.
    """
    create function indexer.may_use_consumer(owner text) returns boolean
    language sql stable set search_path = pg_catalog, pg_temp
    begin atomic
        select owner is null or indexer.calling_role() in (owner, current_user::text)
            or exists (select from pg_roles r where r.rolname = indexer.calling_role() and r.rolsuper);
    end
    """,
    """
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
    end $$
    """,
    """
    create or replace function atproto.latest_seq() returns bigint
    language plpgsql stable security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
    declare
        latest bigint;
    begin
        latest := (
            select b.first_seq + b.size - 1 from indexer.change_batch b where b.first_seq is not null
            order by b.first_seq desc limit 1
        );
        latest := coalesce(latest, (select t.last_value from indexer.trimmed_seq t));
        raise exception using errcode = 'IX001';
    exception when sqlstate 'IX001' then
        return latest;
    end $$
    """,
    # Sequential scans are off, because the statistics of a segment that was empty a moment ago mislead the planner.
    """
    create or replace function atproto.changes_after(after bigint, max integer)
    returns table (
        seq bigint, did text, collection text, rkey text, action text, cid text, rev text, live boolean,
        "time" timestamptz
    )
    language plpgsql stable rows 1000 security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
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
    end $$
    """,
    # Trimming does not wait for this transaction. If it trims changes after the position, next_changes reports that.
    # The unique constraint on (owner, slot) limits the consumers of a role, also in concurrent transactions.
    f"""
    create or replace function atproto.register_reader(name text, after bigint default null) returns bigint
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
            update indexer.consumer c set seen_at = clock_timestamp(), owner = coalesce(c.owner, caller)
            where c.name = register_reader.name and indexer.may_use_consumer(c.owner)
            returning c.seq into registered_seq;
            if found then
                return registered_seq;
            end if;
            perform indexer.refuse_consumer_of_other_role(name);
            if length(name) > {MAX_NAME_CHARACTERS} or name ~ '[[:cntrl:]]' then
                raise exception 'the name of a consumer has at most {MAX_NAME_CHARACTERS} characters, none of them a '
                    'control character' using errcode = 'invalid_parameter_value';
            end if;
            select min(s.slot) into free_slot from generate_series(1, {MAX_CONSUMERS}) s(slot)
            where not exists (select from indexer.consumer c where c.owner = caller and c.slot = s.slot);
            if free_slot is null then
                raise exception 'role % has {MAX_CONSUMERS} consumers, which is the limit', caller
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
    end $$
    """,
    """
    create or replace function atproto.unregister_reader(name text) returns boolean
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp set jit = off as $$
    begin
        delete from indexer.consumer c where c.name = $1 and indexer.may_use_consumer(c.owner);
        if found then
            return true;
        end if;
        perform indexer.refuse_consumer_of_other_role(name);
        return false;
    end $$
    """,
    """
    create or replace function atproto.next_changes(reader text, max integer)
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
        set seq = me.seq, seen_at = clock_timestamp(), owner = coalesce(c.owner, indexer.calling_role())
        where c.name = me.name;
    end $$
    """,
    """
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
    end $$
    """,
    """
    create or replace view atproto.readers as
    select s.name, s.seq, s.behind, s.behind_since, s.registered_at, s.seen_at, s.cut_off_at, s.owner
    from indexer.consumer_states() s
    """,
    "alter table indexer.consumer drop column cut_off_at",
    "revoke all on function indexer.consumer_states() from public",
    """
    do $$ declare
        role name;
    begin
        for role in select rolname from pg_roles where rolname in ('atproto_reader', 'atproto_operator') loop
            execute format('grant execute on function indexer.consumer_states() to %I', role);
        end loop;
    end $$
    """,
)

COMMENTS = {
    "table indexer.migration_lock": "Empty. Its lock serializes migrations, which create it before the first one.",
    "table indexer.shard_owner": (
        "The database session of each daemon process that owns a range of buckets. Rows of ended sessions count for "
        "nothing."
    ),
    "column indexer.shard_owner.started_at": "When the session started. Together with pid it identifies the session.",
    "table indexer.disconnected_consumer": (
        "The consumers that were disconnected. Only the daemon writes this table, so no consumer can lock its rows."
    ),
    "column indexer.consumer.owner": "The role that uses it. Null: registered by an earlier release, not used since.",
    "column indexer.consumer.slot": "Number of the consumer among those of its role. Limits how many a role has.",
    "function indexer.calling_role()": "The role of the caller of a function of schema atproto, as set by SET ROLE.",
    "function indexer.may_use_consumer(text)": "True if the caller may use a consumer of this role.",
    "function indexer.refuse_consumer_of_other_role(text)": "Raise an error if the consumer belongs to another role.",
    "function indexer.consumer_states()": "The rows of the view atproto.readers.",
    "view atproto.readers": "Registered consumers of the change log, and how far each is behind.",
    "column atproto.readers.owner": (
        "The role that registered it, and that alone may use and remove it. Null: registered by an earlier release; it "
        "will belong to the role that next uses it."
    ),
    "function atproto.register_reader(text, bigint)": (
        "Register a consumer that has received all changes up to after (null: up to now) and return its position. A "
        "registered consumer keeps its position. Changes that it has not received are retained from the commit on, "
        f"within limits. Only the calling role may use the consumer. A role has at most {MAX_CONSUMERS}."
    ),
    "function atproto.unregister_reader(text)": (
        "Remove a consumer and its position; false if no such consumer exists. Only its role may do this, the role of "
        "the daemon, and superusers."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in (*TABLES, *FUNCTIONS):
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

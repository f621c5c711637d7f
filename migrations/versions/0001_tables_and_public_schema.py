"""Create the tables of schema `indexer` and the views and functions of the public schema `atproto`."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = (
    """
    create table indexer.repo (
        did text collate "C" not null,
        bucket smallint not null,
        version bigint not null,
        status text not null,
        reason text,
        rev text collate "C",
        data bytea,
        commit bytea,
        seen_rev text collate "C",
        active boolean not null,
        hosting_status text,
        hosting_relay text,
        hosting_seq bigint not null,
        takedown boolean not null,
        buffered_events integer not null,
        buffered_bytes bigint not null,
        lease bigint not null,
        lease_until timestamptz,
        attempts integer not null,
        next_attempt_at timestamptz,
        last_error text,
        synchronized_at timestamptz,
        updated_at timestamptz not null default now(),
        cold boolean not null generated always as (rev is null) stored,
        constraint repo_pkey primary key (did, bucket),
        constraint repo_status check (status in ('desynchronized', 'in-progress', 'synchronized')),
        constraint repo_head check (num_nulls(rev, data, commit) in (0, 3)),
        constraint repo_synchronized check (status <> 'synchronized' or rev is not null),
        constraint repo_leased check ((status = 'in-progress') = (lease_until is not null))
    ) with (fillfactor = 80)
    """,
    """
    create index repo_due on indexer.repo (bucket, cold, coalesce(next_attempt_at, '-infinity'::timestamptz))
    where status = 'desynchronized' and active
    """,
    "create index repo_leases on indexer.repo (lease_until) where status = 'in-progress'",
    """
    create table indexer.record (
        did text collate "C" not null,
        collection text collate "C" not null,
        rkey text collate "C" not null,
        bucket smallint not null,
        cid bytea not null,
        rev text collate "C" not null,
        value jsonb,
        value_problem text,
        original bytea,
        indexed_at timestamptz not null default now(),
        constraint record_pkey primary key (did, collection, rkey, bucket)
    )
    """,
    """
    create table indexer.change (
        seq bigint generated always as identity,
        bucket smallint not null,
        xid xid8 not null default pg_current_xact_id(),
        did text collate "C" not null,
        collection text collate "C" not null,
        rkey text collate "C" not null,
        action text not null,
        cid bytea,
        rev text collate "C" not null,
        live boolean not null,
        time timestamptz not null default now(),
        constraint change_pkey primary key (seq, bucket),
        constraint change_action check (action in ('create', 'update', 'delete')),
        constraint change_cid check ((action = 'delete') = (cid is null))
    )
    """,
    "create index change_order on indexer.change (xid, seq)",
    """
    create table indexer.kept_event (
        did text collate "C" not null,
        id bigint generated always as identity,
        bucket smallint not null,
        seq bigint not null,
        frame bytea not null,
        constraint kept_event_pkey primary key (did, id, bucket)
    )
    """,
    """
    create table indexer.dead_letter (
        id bigint generated always as identity,
        bucket smallint not null,
        relay text not null,
        seq bigint,
        did text collate "C",
        kind text not null,
        reason text not null,
        detail text not null,
        frame bytea not null,
        time timestamptz not null default now(),
        constraint dead_letter_pkey primary key (id, bucket)
    )
    """,
    "create index dead_letter_reason on indexer.dead_letter (relay, reason, id)",
    """
    create table indexer.cursor (
        relay text not null,
        shard text not null,
        seq bigint not null,
        event_time text,
        updated_at timestamptz not null default now(),
        constraint cursor_pkey primary key (relay, shard)
    )
    """,
    """
    create table indexer.identity (
        did text collate "C" not null,
        bucket smallint not null,
        handle text collate "C",
        pds text,
        signing_key text,
        fetched_at timestamptz not null,
        stale boolean not null,
        problem text,
        constraint identity_pkey primary key (did, bucket)
    ) with (fillfactor = 90)
    """,
    "create index identity_handle on indexer.identity (handle) where handle is not null",
)


CID_BYTES = 36
DIGITS = b"abcdefghijklmnopqrstuvwxyz234567".hex()


def _digit(index: int) -> str:
    """Return SQL for one base32 digit (RFC 4648) of $1, as a byte: the five bits at bit `5 * index`."""
    byte, bit = divmod(5 * index, 8)
    next_byte = f"get_byte($1, {byte + 1})" if byte + 1 < CID_BYTES else "0"
    return f"get_byte('\\x{DIGITS}', (((get_byte($1, {byte}) << 8) | {next_byte}) >> {11 - bit}) & 31)"


def _base32() -> str:
    """Return SQL for the base32 form of $1.

    It is a single expression, five times as fast as a concatenation of digits.
    """
    count = -(-CID_BYTES * 8 // 5)
    text = f"'\\x{'00' * count}'::bytea"
    for index in range(count):
        text = f"set_byte({text}, {index}, {_digit(index)})"
    return f"encode({text}, 'escape')"


FUNCTIONS = (
    """
    create function indexer.bucket_of(did text) returns smallint
    language sql immutable strict parallel safe
    return get_byte(sha256(convert_to(did, 'UTF8')), 0)::smallint
    """,
    f"""
    create function atproto.cid_text(cid bytea) returns text
    language sql immutable strict parallel safe
    return 'b' || {_base32()}
    """,
)

PUBLIC_SCHEMA = (
    """
    create view atproto.repos as
    select r.did, i.handle, i.pds,
        r.status as sync_status, r.reason as sync_reason,
        r.rev, atproto.cid_text(r.data) as data,
        coalesce(r.hosting_status, case when r.active then 'active' else 'inactive' end) as hosting_status,
        r.takedown, r.active and not r.takedown as visible,
        r.attempts as resync_attempts, r.next_attempt_at, r.last_error, r.synchronized_at, r.updated_at
    from indexer.repo r left join indexer.identity i using (did, bucket)
    """,
    """
    create view atproto.records as
    select c.did, c.collection, c.rkey, 'at://' || c.did || '/' || c.collection || '/' || c.rkey as uri,
        atproto.cid_text(c.cid) as cid, c.rev, c.value, c.value_problem, c.indexed_at
    from indexer.record c join indexer.repo r using (did, bucket)
    where r.active and not r.takedown
    """,
    """
    create view atproto.changes as
    select seq, did, collection, rkey, action, atproto.cid_text(cid) as cid, rev, live, time from indexer.change
    """,
    "create view atproto.cursors as select relay, shard, seq, event_time, updated_at from indexer.cursor",
    "create view atproto.rejected as select id, relay, seq, did, kind, reason, time from indexer.dead_letter",
    """
    create function atproto.record_bytes(did text, collection text, rkey text) returns bytea
    language sql stable strict security definer set search_path = pg_catalog
    return (
        select c.original from indexer.record c join indexer.repo r using (did, bucket)
        where c.did = $1 and c.collection = $2 and c.rkey = $3 and c.bucket = indexer.bucket_of($1)
            and r.active and not r.takedown
    )
    """,
    # A resync that is in progress is not disturbed.
    """
    create function atproto.request_resync(did text) returns boolean
    language plpgsql strict set search_path = pg_catalog as $$
    begin
        update indexer.repo r
        set version = r.version + 1, status = 'desynchronized', attempts = 0, next_attempt_at = null,
            updated_at = now(),
            reason = case when r.status = 'synchronized' then 'requested' else coalesce(r.reason, 'requested') end
        where r.did = $1 and r.bucket = indexer.bucket_of($1) and r.status <> 'in-progress';
        return exists (select from indexer.repo r where r.did = $1 and r.bucket = indexer.bucket_of($1));
    end $$
    """,
    """
    create function atproto.request_takedown(did text, takedown boolean) returns boolean
    language plpgsql strict set search_path = pg_catalog as $$
    begin
        update indexer.repo r set version = r.version + 1, takedown = $2, updated_at = now()
        where r.did = $1 and r.bucket = indexer.bucket_of($1);
        return found;
    end $$
    """,
)

COMMENTS = {
    "schema indexer": "The service''s own tables, which may change with any release. Read the schema atproto.",
    "schema atproto": "The public face: views and functions whose columns stay.",
    "table indexer.repo": "How our copy of each repo stands to the network''s, and what upstream says of the account.",
    "table indexer.record": "The records of the repos, at the state of their repo''s rev.",
    "table indexer.change": "What changed, each repo''s changes in the order in which they happened.",
    "table indexer.kept_event": "Frames that arrived during the resync of their repo, to be applied at its end.",
    "table indexer.dead_letter": "Messages that were refused by their own fault; the newest of each reason.",
    "table indexer.cursor": "Up to which seq of each relay everything has its effect here.",
    "table indexer.identity": "What each DID''s document said when it was last read.",
    "column indexer.repo.version": "Counts the row''s changes; every writer compares it with what it read.",
    "column indexer.repo.seen_rev": "The newest revision of an authentic message, ignored ones too.",
    "column indexer.repo.lease": "Numbers the claims by resync workers.",
    "column indexer.repo.next_attempt_at": "Null: at once. Infinity: not until something wakes it.",
    "column indexer.record.original": "The DAG-CBOR of the record, where value doesn''t hold all of it.",
    "column indexer.change.xid": "The transaction that wrote it: seq alone is not the order of commits.",
    "function indexer.bucket_of(text)": "The first byte of the DID''s SHA-256: its share of the work.",
    "column indexer.repo.cold": "Never synchronized: claimed behind those that were.",
    "view atproto.repos": "Every repo that we know of, with the state of our copy and the reason of it.",
    "column atproto.repos.did": "The account''s DID.",
    "column atproto.repos.handle": "The handle that its DID document claims, when last read.",
    "column atproto.repos.pds": "The base URL of its host, as its DID document says.",
    "column atproto.repos.sync_status": "desynchronized, in-progress, or synchronized.",
    "column atproto.repos.sync_reason": "Why it is not synchronized; null if it is.",
    "column atproto.repos.rev": "The revision that our records stand at; null as long as there are none.",
    "column atproto.repos.data": "The CID of the root of the tree that our records stand at.",
    "column atproto.repos.hosting_status": "What upstream says of the account, as sent.",
    "column atproto.repos.takedown": "Taken down here, whatever upstream says.",
    "column atproto.repos.visible": "Whether its records are shown: active upstream and not taken down here.",
    "column atproto.repos.resync_attempts": "Resyncs that failed or broke again, since it was last at rest.",
    "column atproto.repos.next_attempt_at": "When it may be fetched; null: at once, infinity: when something wakes it.",
    "column atproto.repos.last_error": "Why the last fetch failed; its first word is from a closed set.",
    "column atproto.repos.synchronized_at": "When it last became synchronized.",
    "column atproto.repos.updated_at": "When this row last changed.",
    "view atproto.records": "The records of visible repos.",
    "column atproto.records.did": "The DID of the repo that the record is in.",
    "column atproto.records.collection": "The NSID of its collection.",
    "column atproto.records.rkey": "Its key in the collection.",
    "column atproto.records.uri": "Its AT-URI.",
    "column atproto.records.cid": "The CID of its DAG-CBOR.",
    "column atproto.records.rev": "The repo''s revision that brought it, or at which a resync found it.",
    "column atproto.records.value": "AT Protocol JSON; null where it can''t be had or isn''t kept.",
    "column atproto.records.value_problem": "Why the value is null or not as it came.",
    "column atproto.records.indexed_at": "When it was last written here.",
    "view atproto.changes": "What changed, each repo''s own changes in the order in which they happened.",
    "column atproto.changes.seq": "Rises within a repo; over repos it is not the order in which rows become visible.",
    "column atproto.changes.did": "The DID of the repo.",
    "column atproto.changes.collection": "The NSID of the record''s collection.",
    "column atproto.changes.rkey": "The record''s key in the collection.",
    "column atproto.changes.action": "create, update, or delete.",
    "column atproto.changes.cid": "The record''s CID afterwards; null for a delete.",
    "column atproto.changes.rev": "The repo''s revision that brought the change, or at which a resync found it.",
    "column atproto.changes.live": "True for an event of the stream, false for a difference that a resync found.",
    "column atproto.changes.time": "When it was written here.",
    "view atproto.cursors": "Up to which seq of each relay everything has its effect here.",
    "column atproto.cursors.relay": "The relay''s URL.",
    "column atproto.cursors.shard": "The share of the DIDs that the process has: index/count.",
    "column atproto.cursors.seq": "Everything up to here has its effect in this database.",
    "column atproto.cursors.event_time": "The time of that message, in the relay''s own words.",
    "column atproto.cursors.updated_at": "When the cursor was last saved.",
    "view atproto.rejected": "The newest messages that were refused by their own fault, forged ones too.",
    "column atproto.rejected.id": "The number of the dead letter.",
    "column atproto.rejected.relay": "The relay that sent it.",
    "column atproto.rejected.seq": "Its sequence number, where it could be read.",
    "column atproto.rejected.did": "The DID that it claims to be of, where it could be read.",
    "column atproto.rejected.kind": "The kind of message.",
    "column atproto.rejected.reason": "The rule that it broke, from a closed set.",
    "column atproto.rejected.time": "When it was refused.",
    "function atproto.cid_text(bytea)": "The string form of a binary CID of 36 bytes.",
    "function atproto.record_bytes(text, text, text)": "A record''s DAG-CBOR, where its value doesn''t hold all of it.",
    "function atproto.request_resync(text)": "Asks for a repo to be fetched anew; false if it is unknown.",
    "function atproto.request_takedown(text, boolean)": "Hides a repo, or shows it again; false if it is unknown.",
}

GRANTS = (
    "revoke all on function atproto.request_resync(text) from public",
    "revoke all on function atproto.request_takedown(text, boolean) from public",
    # Roles belong to the whole server. Another database may have created the role already or may be creating it now,
    # and this user may lack the right to create it.
    """
    do $$ begin
        create role atproto_reader nologin;
    exception when duplicate_object or unique_violation or insufficient_privilege then
        raise notice 'role atproto_reader: %', sqlerrm;
    end $$
    """,
    """
    do $$ begin
        if exists (select from pg_roles where rolname = 'atproto_reader') then
            grant usage on schema atproto to atproto_reader;
            grant select on all tables in schema atproto to atproto_reader;
        end if;
    end $$
    """,
)


def upgrade() -> None:
    """Apply the migration."""
    op.execute("create schema if not exists indexer")
    op.execute("create schema atproto")
    for statement in (*TABLES, *FUNCTIONS, *PUBLIC_SCHEMA):
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")
    for statement in GRANTS:
        op.execute(statement)

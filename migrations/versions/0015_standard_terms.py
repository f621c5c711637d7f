"""Rename private tables and columns to the terms of docs/glossary.md, and describe the public schema in the same words.

The public schema `atproto` keeps every name. Views and SQL-standard function bodies follow a rename by themselves;
functions in plpgsql are text and are created again. Each rename changes the catalog only: no row is rewritten.
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

SEGMENTS = 8

TABLES = {
    "kept_event": "buffered_event",
    "listing": "crawl_progress",
    "choice": "stored_setting",
    "queue": "resync_queue",
    "feed": "change_log",
    "batch": "change_batch",
    **{f"batch_{segment}": f"change_batch_{segment}" for segment in range(SEGMENTS)},
    "turn": "numbering_lock",
    "reader": "consumer",
}

SEQUENCES = {"gone": "trimmed_seq", "batch_id_seq": "change_batch_id_seq", "kept_event_id_seq": "buffered_event_id_seq"}

COLUMNS = {
    "repo": {
        "status": "sync_status",
        "reason": "sync_reason",
        "seen_rev": "latest_verified_rev",
        "heard_rev": "latest_unverified_rev",
        "rank": "priority",
    },
    "resync_queue": {"rank": "priority"},
    "change_log": {"one": "singleton", "segment": "current_segment"},
    "change": {"place": "ordinal"},
    "host": {"streak": "consecutive_failures"},
}

CONSTRAINTS = {
    "buffered_event": {"kept_event_pkey": "buffered_event_pkey"},
    "crawl_progress": {"listing_pkey": "crawl_progress_pkey"},
    "stored_setting": {"choice_pkey": "stored_setting_pkey"},
    "resync_queue": {"queue_pkey": "resync_queue_pkey"},
    "change_log": {"feed_pkey": "change_log_pkey", "feed_one": "change_log_singleton"},
    "change_batch": {"batch_pkey": "change_batch_pkey", "batch_first_seq": "change_batch_first_seq"},
    "consumer": {"reader_pkey": "consumer_pkey"},
    "repo": {"repo_status": "repo_sync_status"},
    **{
        f"change_batch_{segment}": {
            f"batch_{segment}_pkey": f"change_batch_{segment}_pkey",
            f"batch_{segment}_first_seq_segment_key": f"change_batch_{segment}_first_seq_segment_key",
        }
        for segment in range(SEGMENTS)
    },
}

FUNCTIONS = (
    # Deferred: it runs within COMMIT and takes its lock last. The lock is released once the commit is visible, so the
    # next numbers go to changes that become visible later. It is a table lock, because any consumer could take an
    # advisory lock.
    """
    create or replace function indexer.publish() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    declare
        first bigint;
    begin
        lock table indexer.numbering_lock in share update exclusive mode;
        first := nextval('indexer.change_seq');
        perform setval('indexer.change_seq', first + new.size - 1);
        update indexer.change_batch b set first_seq = first, time = clock_timestamp()
        where b.id = new.id and b.segment = new.segment;
        perform pg_notify('atproto_changes', '');
        return null;
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
    set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
    declare
        trimmed bigint := (select t.last_value from indexer.trimmed_seq t);
        start bigint;
    begin
        after := coalesce(after, trimmed);
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
        -- Read the sequence again after the rows: a segment can be truncated under any snapshot.
        select t.last_value into trimmed from indexer.trimmed_seq t;
        if after < trimmed then
            raise exception 'changes up to % have been trimmed, and % is before that', trimmed, after
                using errcode = 'object_not_in_prerequisite_state',
                      hint = 'Read atproto.records again, then continue from atproto.latest_seq().';
        end if;
    end $$
    """,
    """
    create or replace function atproto.register_reader(name text, after bigint default null) returns bigint
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    declare
        trimmed bigint;
        registered_seq bigint;
    begin
        if name is null or name = '' then
            raise exception 'the name of a consumer must not be empty' using errcode = 'invalid_parameter_value';
        end if;
        perform from indexer.change_log for share;  -- blocks trimming until this transaction ends
        select t.last_value into trimmed from indexer.trimmed_seq t;
        if after < trimmed then
            raise exception 'changes up to % have been trimmed, and % is before that', trimmed, after
                using errcode = 'object_not_in_prerequisite_state';
        end if;
        insert into indexer.consumer as c (name, seq)
        values (register_reader.name, coalesce(after, atproto.latest_seq()))
        on conflict on constraint consumer_pkey do update set seen_at = clock_timestamp()
        returning c.seq into registered_seq;
        return registered_seq;
    end $$
    """,
    """
    create or replace function atproto.unregister_reader(name text) returns boolean
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    begin
        delete from indexer.consumer c where c.name = $1;
        return found;
    end $$
    """,
    """
    create or replace function atproto.next_changes(reader text, max integer)
    returns table (
        seq bigint, did text, collection text, rkey text, action text, cid text, rev text, live boolean,
        "time" timestamptz
    )
    language plpgsql rows 1000 security definer set search_path = pg_catalog, pg_temp as $$
    declare
        me indexer.consumer;
    begin
        select c.* into me from indexer.consumer c where c.name = reader for update;
        if me.name is null then
            raise exception 'no consumer is registered as %', coalesce(quote_literal(reader), 'null')
                using errcode = 'object_not_in_prerequisite_state',
                      hint = 'select atproto.register_reader(name)';
        end if;
        if me.cut_off_at is not null then
            raise exception
                'consumer % was disconnected at %: it was too far behind; changes after its position % may be gone',
                quote_literal(reader), me.cut_off_at, me.seq
                using errcode = 'object_not_in_prerequisite_state',
                      hint = 'Unregister it, register it again, and read atproto.records again.';
        end if;
        for seq, did, collection, rkey, action, cid, rev, live, "time" in
            select c.* from atproto.changes_after(me.seq, next_changes.max) c
        loop
            me.seq := seq;
            return next;
        end loop;
        update indexer.consumer c set seq = me.seq, seen_at = clock_timestamp() where c.name = me.name;
    end $$
    """,
    # The trigger REQUESTED of indexer/sync/repo_transitions.py. A test runs it in every state and compares.
    """
    create or replace function atproto.request_resync(did text) returns boolean
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    begin
        update indexer.repo r
        set version = r.version + 1, sync_status = 'desynchronized', sync_reason = 'requested', attempts = 0,
            next_attempt_at = null, updated_at = now(), lease_until = null, buffered_events = 0, buffered_bytes = 0
        where r.did = $1 and r.bucket = indexer.bucket_of($1);
        if not found then
            return false;
        end if;
        delete from indexer.buffered_event b where b.did = $1 and b.bucket = indexer.bucket_of($1);
        return true;
    end $$
    """,
)

PRIVATE_COMMENTS = {
    "schema indexer": "Private tables of the daemon. They may change with any release. Use schema atproto.",
    "schema atproto": "Public views and functions. Columns are added, never removed or redefined.",
    "table indexer.repo": "One row per tracked repo: sync status, head, hosting status, and resync schedule.",
    "table indexer.record": "The current records of each repo, at the rev of its repo row.",
    "table indexer.change": "The change log. The number of a change is first_seq of its batch plus its ordinal.",
    "table indexer.change_batch": (
        "One row per statement that wrote changes. COMMIT assigns the numbers of its changes."
    ),
    "table indexer.change_log": "One row: the segment of the change log that is being written.",
    "table indexer.numbering_lock": "Empty. Its lock serializes the numbering of changes with the commit.",
    "table indexer.consumer": "Registered consumers of the change log, each with the last seq that it has received.",
    "table indexer.buffered_event": "Frames that arrived during the resync of their repo; applied when it completes.",
    "table indexer.resync_queue": "One row per resync queue: each combination of bucket and priority.",
    "table indexer.dead_letter": "Messages that were rejected by their own fault; the newest of each relay and reason.",
    "table indexer.cursor": "The stream position per relay and shard. All effects up to seq are in the database.",
    "table indexer.identity": "The contents of each DID document when it was last read, and the verified handle.",
    "table indexer.stored_setting": "Settings that decide what is stored, as the last started daemon had them.",
    "table indexer.crawl_progress": "How far each repo list has been read, by purpose.",
    "table indexer.host": "Request statistics of each host, and its pause.",
    "sequence indexer.trimmed_seq": "The highest change number that has been trimmed from the change log.",
    "column indexer.repo.version": "Incremented by every update. Every writer compares it with the version it read.",
    "column indexer.repo.latest_verified_rev": "The newest rev of a message whose signature was verified.",
    "column indexer.repo.latest_unverified_rev": (
        "The newest rev of a message whose signature could not be checked, until the next resync completes."
    ),
    "column indexer.repo.lease": "Incremented by every claim of a resync worker.",
    "column indexer.repo.next_attempt_at": "Null: immediately. Infinity: parked until an event unparks the repo.",
    "column indexer.repo.erase_at": "When the records of the deleted account may be erased.",
    "column indexer.repo.priority": "Resync order: 0 synchronized before, 1 requested, 2 never synchronized.",
    "column indexer.repo.parked_at": "When the repo was parked after a permanent failure.",
    "column indexer.record.original": "The DAG-CBOR of the record, if value does not hold all of it.",
    "column indexer.change_log.opened_at": "When the current segment became the one that is written.",
    "column indexer.change_batch.first_seq": "The number of its first change; null until the transaction commits.",
    "column indexer.change_batch.time": "When the transaction committed.",
    "column indexer.buffered_event.relay": "The relay that sent the event and assigned its seq.",
    "column indexer.identity.claimed_handle": "The handle that the DID document claims.",
    "column indexer.identity.handle_attempts": "Checks since the claimed handle was new or last verified.",
    "column indexer.identity.handle_due_at": "When the claimed handle is checked next; null if there is none.",
    "function indexer.bucket_of(text)": "The bucket of a DID: the first byte of its SHA-256 hash.",
    "function indexer.publish()": "Numbers the changes of a batch in commit order and notifies listeners.",
    "function indexer.log_repo_change(text, text, text)": "Write one change of a whole repo to the change log.",
    **{
        f"table indexer.{table}_{segment}": "A segment of the change log. Segments are reused in turn."
        for table in ("change_batch", "change")
        for segment in range(SEGMENTS)
    },
}

PUBLIC_COMMENTS = {
    "view atproto.repos": (
        "Every tracked repo with its sync status and the reason for it. Indexed by did; any other condition scans the "
        "whole table."
    ),
    "column atproto.repos.did": "The DID of the account.",
    "column atproto.repos.handle": (
        "The verified handle: the DID document claims it and it resolves to the DID. handle.invalid if verification "
        "failed; null if it has not been checked yet."
    ),
    "column atproto.repos.pds": (
        "The base URL of the PDS in the DID document; null if there is none or it was not read."
    ),
    "column atproto.repos.sync_status": "desynchronized, in-progress, or synchronized.",
    "column atproto.repos.sync_reason": "Why the repo is not synchronized (docs/reasons.md); null if it is.",
    "column atproto.repos.rev": "The rev of the stored records; null if no records have been stored yet.",
    "column atproto.repos.data": "The CID of the MST root of the stored records; null if rev is null.",
    "column atproto.repos.hosting_status": (
        "The hosting status as sent upstream; active or inactive if upstream sent no status."
    ),
    "column atproto.repos.takedown": "True if the repo is taken down locally.",
    "column atproto.repos.visible": "True if atproto.records shows its records: active upstream, no local takedown.",
    "column atproto.repos.resync_attempts": (
        "Failed resyncs and repeated desynchronizations since the repo last settled."
    ),
    "column atproto.repos.next_attempt_at": (
        "When the next resync may start; null: immediately; infinity: parked until an event unparks the repo."
    ),
    "column atproto.repos.last_error": (
        "Why the last fetch failed. The first word is from a closed set (docs/reasons.md). Null if it did not fail."
    ),
    "column atproto.repos.synchronized_at": "When the repo last became synchronized; null if never.",
    "column atproto.repos.updated_at": "When this row was last updated.",
    "view atproto.records": (
        "The records of visible repos. Indexed by (did, collection, rkey) and by (collection, indexed_at)."
    ),
    "column atproto.records.did": "The DID of the repo that contains the record.",
    "column atproto.records.collection": "The NSID of the collection.",
    "column atproto.records.rkey": "The record key.",
    "column atproto.records.uri": "The AT-URI of the record.",
    "column atproto.records.cid": "The CID of the DAG-CBOR encoding.",
    "column atproto.records.rev": (
        "The rev of the commit that wrote the record, or of the export in which it was found."
    ),
    "column atproto.records.value": (
        "The record as AT Protocol JSON: links as $link objects, byte strings as $bytes objects. Null if value_problem "
        "says why."
    ),
    "column atproto.records.value_problem": (
        "Why value is null or differs from the original, from a closed set (docs/reasons.md). Null value: missing, "
        "not-stored, not-dag-cbor, too-large, too-deep, nul-character, reserved-key. Nearest JSON value: number. "
        "Unchanged value that does not fit its collection: not-a-map, no-type, other-type. Null: no problem."
    ),
    "column atproto.records.indexed_at": "When the record was last written here, by the clock of this server.",
    "view atproto.changes": (
        "The change log, in commit order. For ad-hoc queries: consumers use next_changes or changes_after, which use "
        "an index."
    ),
    "column atproto.changes.seq": (
        "The number of the change, assigned by COMMIT: a snapshot that shows a number shows all smaller ones. Numbers "
        "may be missing."
    ),
    "column atproto.changes.did": "The DID of the repo.",
    "column atproto.changes.collection": "The NSID of the collection; null for a change of the whole repo.",
    "column atproto.changes.rkey": "The record key; null for a change of the whole repo.",
    "column atproto.changes.action": (
        "For a record: create, update, delete. For a repo: hidden (its records are no longer visible), visible (they "
        "are visible again), deleted (the account was deleted upstream), moved (it has another PDS), completed (a "
        "resync completed; follows the changes of the resync)."
    ),
    "column atproto.changes.cid": "The CID of the new record; null for a delete and for a change of the whole repo.",
    "column atproto.changes.rev": (
        "The rev of the commit that made the change, or of the export in which a resync found it; null for a repo "
        "without a rev."
    ),
    "column atproto.changes.live": "True for an event of the stream, false for a difference found by a resync.",
    "column atproto.changes.time": "When the change was committed here.",
    "view atproto.readers": "Registered consumers of the change log, and how far each is behind.",
    "column atproto.readers.name": "The name of the consumer.",
    "column atproto.readers.seq": "The seq of the last change that it received.",
    "column atproto.readers.behind": "The latest seq minus the seq of the consumer.",
    "column atproto.readers.behind_since": (
        "When the first change that it has not received was committed; null if there is none."
    ),
    "column atproto.readers.registered_at": "When it was registered.",
    "column atproto.readers.seen_at": "When it last asked for changes or was registered again.",
    "column atproto.readers.cut_off_at": "When it was disconnected for being too far behind; null if it was not.",
    "view atproto.cursors": "The stream position per relay and shard: all effects up to seq are in this database.",
    "column atproto.cursors.relay": "The URL of the relay.",
    "column atproto.cursors.shard": "The shard of the process, as index/count.",
    "column atproto.cursors.seq": "All effects of messages up to this seq are in this database.",
    "column atproto.cursors.event_time": "The time in that message, as sent by the relay; null if it has none.",
    "column atproto.cursors.updated_at": "When the cursor was last saved.",
    "column atproto.cursors.caught_up_at": "When the stream was last open with no message waiting.",
    "view atproto.hosts": "Hosts that were asked for exports, identities and handles, with request statistics.",
    "column atproto.hosts.host": "The host name, with the port if it is not the default port.",
    "column atproto.hosts.requests": "The number of requests sent.",
    "column atproto.hosts.failures": "Requests that the host failed: no connection, no response, or a server error.",
    "column atproto.hosts.failures_in_a_row": "Failures since the last response.",
    "column atproto.hosts.paused_until": "No requests are sent until then; null if the host is not paused.",
    "column atproto.hosts.pause_reason": (
        "throttled: the host asked for a pause; host-paused: too many requests failed in a row."
    ),
    "column atproto.hosts.last_error": "The latest failure. The first word is from a closed set (docs/reasons.md).",
    "column atproto.hosts.last_success_at": "When a request last succeeded.",
    "column atproto.hosts.updated_at": "When this row was last updated.",
    "view atproto.rejected": (
        "Dead letters: messages that were rejected by their own fault, including forged ones. The newest 1,000 per "
        "relay and reason."
    ),
    "column atproto.rejected.id": "The ID of the dead letter.",
    "column atproto.rejected.relay": "The relay that sent the message.",
    "column atproto.rejected.seq": "The sequence number; null if it could not be read.",
    "column atproto.rejected.did": (
        "The DID that the message names, which proves nothing if the message is forged; null if it could not be read."
    ),
    "column atproto.rejected.kind": "The kind of message.",
    "column atproto.rejected.reason": "The rule that the message broke, from a closed set (docs/reasons.md).",
    "column atproto.rejected.time": "When the message was rejected.",
    "function atproto.cid_text(bytea)": "Return the string form of a binary CID of 36 bytes.",
    "function atproto.latest_seq()": "Return the number of the newest change visible to this statement; 0 if none.",
    "function atproto.changes_after(bigint, integer)": (
        "Return the next changes, at most max, after the given seq: the last one that you processed. Null: from the "
        "oldest change in the log. Columns as in the view. Raises an error if later changes have been trimmed."
    ),
    "function atproto.next_changes(text, integer)": (
        "Return the next changes of a registered consumer, at most max, and advance its position in your transaction. "
        "After a rollback they are returned again. Columns as in the view. A concurrent call for the same consumer "
        "waits for your commit."
    ),
    "function atproto.register_reader(text, bigint)": (
        "Register a consumer that has received all changes up to after (null: up to now) and return its position. A "
        "registered consumer keeps its position. Changes that it has not received are retained, within limits."
    ),
    "function atproto.unregister_reader(text)": "Remove a consumer and its position; false if no such consumer exists.",
    "function atproto.record_bytes(text, text, text)": (
        "Return the DAG-CBOR of a visible record if value does not hold all of it; null otherwise."
    ),
    "function atproto.request_resync(text)": (
        "Request a resync of a repo; its records stay visible meanwhile. False if the repo is unknown. Requires role "
        "atproto_operator."
    ),
    "function atproto.request_takedown(text, boolean)": (
        "Hide a repo locally, or show it again. False if the repo is unknown. Requires role atproto_operator."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for old, new in TABLES.items():
        op.execute(f"alter table indexer.{old} rename to {new}")
    for old, new in SEQUENCES.items():
        op.execute(f"alter sequence indexer.{old} rename to {new}")
    for table, columns in COLUMNS.items():
        for old, new in columns.items():
            op.execute(f"alter table indexer.{table} rename column {old} to {new}")
    for table, constraints in CONSTRAINTS.items():
        for old, new in constraints.items():
            op.execute(f"alter table indexer.{table} rename constraint {old} to {new}")
    for function in FUNCTIONS:
        op.execute(function)
    for thing, comment in {**PRIVATE_COMMENTS, **PUBLIC_COMMENTS}.items():
        op.execute(f"comment on {thing} is '{comment}'")

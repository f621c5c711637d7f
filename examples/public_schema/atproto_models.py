"""SQLAlchemy models of the public views of the indexer (schema `atproto`). Generated from the database: do not edit.

Copy this file into your project. The views are read-only.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Boolean, DateTime, Integer, MetaData, SmallInteger, Text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class PublicView(DeclarativeBase):
    """Base class of all views."""

    metadata = MetaData(schema="atproto")


class Blob(PublicView):
    """A row for each reference to a blob in the value of a visible record.

    Indexed by did, and by (did, collection, rkey); without did, it reads all records. The PDS has the bytes.
    """

    __tablename__ = "blobs"

    did: Mapped[str] = mapped_column(Text, primary_key=True)
    """The DID of the repo."""
    cid: Mapped[str] = mapped_column(Text, primary_key=True)
    """The CID of the blob."""
    mime_type: Mapped[str | None] = mapped_column(Text)
    """The MIME type that the record states; null if none."""
    size: Mapped[int | None] = mapped_column(BigInteger)
    """The size in bytes that the record states; null if none."""
    collection: Mapped[str] = mapped_column(Text, primary_key=True)
    """The NSID of the collection."""
    rkey: Mapped[str] = mapped_column(Text, primary_key=True)
    """The record key."""
    uri: Mapped[str] = mapped_column(Text)
    """The AT-URI of the record."""
    bucket: Mapped[int] = mapped_column(SmallInteger)
    """The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1)."""


class Change(PublicView):
    """The change log, in commit order.

    Consumers use next_changes or changes_after, which use an index.
    """

    __tablename__ = "changes"

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """The number: a snapshot that shows it shows all smaller ones. Numbers may be missing."""
    did: Mapped[str] = mapped_column(Text)
    """The DID of the repo."""
    collection: Mapped[str | None] = mapped_column(Text)
    """The NSID of the collection; null for a change of the repo."""
    rkey: Mapped[str | None] = mapped_column(Text)
    """The record key; null for a change of the repo."""
    action: Mapped[str] = mapped_column(Text)
    """Of a record: create, update, delete. Of a repo: hidden, visible, deleted, identity, moved, snapshot,
    completed."""
    cid: Mapped[str | None] = mapped_column(Text)
    """The CID of the new record; null for a delete and for a change of the repo."""
    rev: Mapped[str | None] = mapped_column(Text)
    """The rev of the commit, or of the export in which a resync found the change; null for an erased record or one
    outside the scope, and a repo without rev."""
    live: Mapped[bool] = mapped_column(Boolean)
    """False for snapshot and completed, and for differences found by a resync."""
    time: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the change was committed here: equal within a transaction, later for later ones."""


class Cursor(PublicView):
    """The stream position per relay and shard."""

    __tablename__ = "cursors"

    relay: Mapped[str] = mapped_column(Text, primary_key=True)
    """The URL of the relay."""
    shard: Mapped[str] = mapped_column(Text, primary_key=True)
    """The shard of the process, as index/count."""
    seq: Mapped[int] = mapped_column(BigInteger)
    """All effects of messages up to this seq are stored."""
    event_time: Mapped[str | None] = mapped_column(Text)
    """The time in that message; null if it has none."""
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the cursor was last saved."""
    caught_up_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """Everything until this time is stored. Null if not known."""


class Gap(PublicView):
    """Spans of a stream in which messages may have been missed.

    While one is open, repos of its shard may be outdated.
    """

    __tablename__ = "gaps"

    relay: Mapped[str] = mapped_column(Text, primary_key=True)
    """The URL of the relay."""
    shard: Mapped[str] = mapped_column(Text, primary_key=True)
    """The shard of the process, as index/count."""
    reason: Mapped[str] = mapped_column(Text)
    """Why messages may have been missed (docs/reasons.md)."""
    opened_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), primary_key=True)
    """When the gap was noticed."""
    first_seq: Mapped[int | None] = mapped_column(BigInteger)
    """The first seq that may be missing; null if not known."""
    last_seq: Mapped[int | None] = mapped_column(BigInteger)
    """The last seq that may be missing; null if not known."""
    closed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When every affected repo was found equal or desynchronized; null if open."""
    closed_by: Mapped[str] = mapped_column(Text)
    """The host whose repo list closed the gap, or the URL of the relay whose stream covered it."""


class Host(PublicView):
    """Hosts that relays list, or that were asked for exports, identities and handles.

    Requests to them, and what their own repo lists showed when they were last read to the end.
    """

    __tablename__ = "hosts"

    host: Mapped[str] = mapped_column(Text, primary_key=True)
    """The host name, with a port other than the default one."""
    requests: Mapped[int] = mapped_column(BigInteger)
    """Requests sent."""
    failures: Mapped[int] = mapped_column(BigInteger)
    """Requests without response, or with a server error."""
    failures_in_a_row: Mapped[int] = mapped_column(Integer)
    """Failures since the last response."""
    paused_until: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """No requests are sent until then; null if not paused."""
    pause_reason: Mapped[str | None] = mapped_column(Text)
    """throttled: the host asked for it; host-paused: too many failures. Null if not paused."""
    last_error: Mapped[str | None] = mapped_column(Text)
    """The latest failure, beginning with a reason of docs/reasons.md. Null if none."""
    last_success_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When a request last succeeded; null if never."""
    updated_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the request statistics were last updated; null without requests."""
    accounts: Mapped[int | None] = mapped_column(BigInteger)
    """Accounts that the host lists as active; null if its list was never read."""
    inactive_accounts: Mapped[int] = mapped_column(BigInteger)
    """Accounts that the host lists as inactive."""
    unproven_accounts: Mapped[int] = mapped_column(BigInteger)
    """Listed active accounts without a known identity that names this host. The list does not add them."""
    repos: Mapped[int] = mapped_column(BigInteger)
    """Listed active accounts that are tracked, and whose identities name this host."""
    synchronized_repos: Mapped[int] = mapped_column(BigInteger)
    """Accounts of repos that were synchronized."""
    accounts_not_passed_on: Mapped[int] = mapped_column(BigInteger)
    """Accounts of repos that relays withhold, omit (more repos than accounts at any relay), or bring late."""
    last_commit_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """The time in the newest stored rev of repos, by the clocks of accounts."""
    list_began_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the last complete reading of the list began."""
    list_ended_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When it ended."""
    list_error: Mapped[str | None] = mapped_column(Text)
    """Why the last reading of the list failed; null if it did not."""


class LinkProgress(PublicView):
    """The state of links, in one row."""

    __tablename__ = "link_progress"

    state: Mapped[str] = mapped_column(Text, primary_key=True)
    """off; backfill: links of stored records are being added; complete."""
    buckets_done: Mapped[int] = mapped_column(Integer)
    """256 if complete, otherwise 0."""
    buckets: Mapped[int] = mapped_column(Integer)
    """256 if links are on, otherwise 0."""
    repos_done: Mapped[int] = mapped_column(BigInteger)
    """Repos whose links the backfill added."""
    enabled_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When INDEXER_LINKS was turned on; null if off."""
    completed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the backfill was completed; null if it is not."""
    seq: Mapped[int | None] = mapped_column(BigInteger)
    """The number of the last change that links contain; null if off. A record that changed again may be shown as it
    is later."""


class Link(PublicView):
    """A row for each visible record, path and target.

    Incomplete until link_progress says complete. Indexed by (target, collection, path, did, rkey) and by (did,
    collection, rkey).
    """

    __tablename__ = "links"

    target: Mapped[str] = mapped_column(Text, primary_key=True)
    """The AT-URI or the DID, as in the record."""
    target_kind: Mapped[str] = mapped_column(Text)
    """strong-ref: the member uri of an object with a text cid; at-uri: another AT-URI; did."""
    did: Mapped[str] = mapped_column(Text, primary_key=True)
    """The DID of the repo."""
    collection: Mapped[str] = mapped_column(Text, primary_key=True)
    """The NSID of the collection."""
    rkey: Mapped[str] = mapped_column(Text, primary_key=True)
    """The record key."""
    path: Mapped[str] = mapped_column(Text, primary_key=True)
    """The place in the value: .name of a member, [] of an array element, [type] of an element with this $type."""
    bucket: Mapped[int] = mapped_column(SmallInteger)
    """The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1)."""


class Reader(PublicView):
    """Registered consumers of the change log."""

    __tablename__ = "readers"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    """The name of the consumer."""
    seq: Mapped[int] = mapped_column(BigInteger)
    """The seq of the last change that it received."""
    behind: Mapped[int] = mapped_column(BigInteger)
    """The latest seq minus that of the consumer."""
    behind_since: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the first change that it lacks was committed; null if none."""
    registered_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When it was registered."""
    seen_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When it last asked for changes or was registered."""
    cut_off_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When it was disconnected for being too far behind; null if not."""
    owner: Mapped[str] = mapped_column(Text)
    """The role that may use and remove it."""


class Record(PublicView):
    """The records of visible repos.

    Indexed by (did, collection, rkey) and by (collection, indexed_at).
    """

    __tablename__ = "records"

    did: Mapped[str] = mapped_column(Text, primary_key=True)
    """The DID of the repo."""
    collection: Mapped[str] = mapped_column(Text, primary_key=True)
    """The NSID of the collection."""
    rkey: Mapped[str] = mapped_column(Text, primary_key=True)
    """The record key."""
    uri: Mapped[str] = mapped_column(Text)
    """The AT-URI of the record."""
    cid: Mapped[str] = mapped_column(Text)
    """The CID of the DAG-CBOR encoding."""
    rev: Mapped[str] = mapped_column(Text)
    """The rev of the commit or export that it came with."""
    value: Mapped[Any] = mapped_column(JSONB)
    """The record as AT Protocol JSON. Null if value_problem says why."""
    value_problem: Mapped[str | None] = mapped_column(Text)
    """Why value is null or differs from the original (docs/reasons.md); null: no problem."""
    indexed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When it was last written here, by the clock of the server."""
    bucket: Mapped[int] = mapped_column(SmallInteger)
    """The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1)."""
    proof: Mapped[str | None] = mapped_column(Text)
    """The proof with which it was written: commit, export or range (docs/protocol.md#sparse-resync). Null: unknown."""
    first_seen: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When it was first stored here, or an earlier imported time; updates do not change it. Of a record that an
    earlier release stored: when that last wrote it."""
    first_seen_live: Mapped[bool | None] = mapped_column(Boolean)
    """True if found live, false if by a resync, as in atproto.changes; null: unknown. What an earlier release
    stored: how that wrote it last."""
    sort_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """createdAt if it is a datetime before first_seen; otherwise first_seen."""


class RejectedMessage(PublicView):
    """Dead letters: the newest 1,000 rejected messages per relay and reason, including forged ones."""

    __tablename__ = "rejected"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """The ID of the dead letter."""
    relay: Mapped[str] = mapped_column(Text)
    """The URL of the relay."""
    seq: Mapped[int | None] = mapped_column(BigInteger)
    """The sequence number; null if unreadable."""
    did: Mapped[str | None] = mapped_column(Text)
    """The DID that the message names, perhaps forged; null if unreadable."""
    kind: Mapped[str] = mapped_column(Text)
    """The kind of message."""
    reason: Mapped[str] = mapped_column(Text)
    """The rule that the message broke (docs/reasons.md)."""
    time: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the message was rejected."""


class RelayHost(PublicView):
    """The hosts that each relay consumes, and the accounts of them that it withholds."""

    __tablename__ = "relay_hosts"

    relay: Mapped[str] = mapped_column(Text, primary_key=True)
    """The URL of the relay."""
    host: Mapped[str] = mapped_column(Text, primary_key=True)
    """The host name, as in atproto.hosts."""
    accounts: Mapped[int | None] = mapped_column(BigInteger)
    """Accounts of the host at the relay by its own word, those included that it withholds; null if it does not say."""
    status: Mapped[str | None] = mapped_column(Text)
    """The status of the host at the relay: active, idle, offline, throttled, banned, or as sent; null if none."""
    withheld_accounts: Mapped[int | None] = mapped_column(BigInteger)
    """Tracked accounts that the relay withheld when the list of the host was last read; null if it never was."""
    withheld_by_status: Mapped[Any] = mapped_column(JSONB)
    """The same by the status that the relay gives as its reason: a JSON object; null if there are none."""
    listed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the relay last listed the host."""


class Repo(PublicView):
    """Every tracked repo.

    Indexed by did; other conditions scan the whole table.
    """

    __tablename__ = "repos"

    did: Mapped[str] = mapped_column(Text, primary_key=True)
    """The DID of the account."""
    handle: Mapped[str | None] = mapped_column(Text)
    """The verified handle. handle.invalid if verification failed; null if not checked yet."""
    pds: Mapped[str | None] = mapped_column(Text)
    """The base URL of the PDS; null if it is not known."""
    sync_status: Mapped[str] = mapped_column(Text)
    """desynchronized, in-progress, or synchronized."""
    sync_reason: Mapped[str | None] = mapped_column(Text)
    """Why the repo is not synchronized (docs/reasons.md); null if it is."""
    rev: Mapped[str | None] = mapped_column(Text)
    """The rev of the stored records; null if none."""
    data: Mapped[str | None] = mapped_column(Text)
    """The CID of their MST root; null if none."""
    hosting_status: Mapped[str] = mapped_column(Text)
    """The hosting status as sent upstream, otherwise active or inactive."""
    takedown: Mapped[bool] = mapped_column(Boolean)
    """True after a local takedown."""
    visible: Mapped[bool] = mapped_column(Boolean)
    """True if active upstream and without local takedown."""
    resync_attempts: Mapped[int] = mapped_column(Integer)
    """Failed resyncs and repeated desynchronizations since the repo last settled."""
    next_attempt_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the next resync may start; null: now; infinity: when an event unparks the repo."""
    last_error: Mapped[str | None] = mapped_column(Text)
    """last_failure, with details. Null if the last fetch did not fail."""
    synchronized_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the repo last became synchronized; null if never."""
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When this row was last updated."""
    bucket: Mapped[int] = mapped_column(SmallInteger)
    """The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1)."""
    withheld_since: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """Since when the relay does not pass on the account, for a reason of its own; null if it does. Records may be
    outdated, unless sync_status is synchronized: then the stream of the host is read."""
    last_failure: Mapped[str | None] = mapped_column(Text)
    """Why the last fetch failed (docs/reasons.md); null if it did not fail."""
    complete_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """All writes before this time are stored (docs/protocol.md#firehose-and-jetstream-compared). Null: it is not
    known, or the repo is not synchronized."""


class ScopeProgress(PublicView):
    """The collections to store, with the progress of their backfill.

    Reads the row of every repo.
    """

    __tablename__ = "scope_progress"

    collection: Mapped[str] = mapped_column(Text, primary_key=True)
    """An NSID, the beginning of one with .*, or *."""
    added_in: Mapped[int] = mapped_column(BigInteger)
    """The version of the scope that added it."""
    newest: Mapped[bool] = mapped_column(Boolean)
    """True if the latest version of the scope added it."""
    repos: Mapped[int] = mapped_column(BigInteger)
    """Tracked repos of active accounts."""
    complete: Mapped[int] = mapped_column(BigInteger)
    """The repos whose records of the collection are all stored, or known not to exist."""

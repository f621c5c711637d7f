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
    """The blobs that records of visible repos refer to, read from the values of the records: a row for each reference.

    Indexed by did, and by (did, collection, rkey); without did it reads all records. The PDS of the account has
    the bytes.
    """

    __tablename__ = "blobs"

    did: Mapped[str] = mapped_column(Text, primary_key=True)
    """The DID of the repo that contains the record, and of the account that has the blob."""
    cid: Mapped[str] = mapped_column(Text, primary_key=True)
    """The CID of the blob."""
    mime_type: Mapped[str | None] = mapped_column(Text)
    """The MIME type that the record states; null if it states none."""
    size: Mapped[int | None] = mapped_column(BigInteger)
    """The size in bytes that the record states; null if it states no number of bytes."""
    collection: Mapped[str] = mapped_column(Text, primary_key=True)
    """The NSID of the collection of the record."""
    rkey: Mapped[str] = mapped_column(Text, primary_key=True)
    """The key of the record."""
    uri: Mapped[str] = mapped_column(Text)
    """The AT-URI of the record."""
    bucket: Mapped[int] = mapped_column(SmallInteger)
    """The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a
    constant reads one shard."""


class Change(PublicView):
    """The change log, in commit order.

    For ad-hoc queries: consumers use next_changes or changes_after, which use an index.
    """

    __tablename__ = "changes"

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """The number of the change, assigned by COMMIT: a snapshot that shows a number shows all smaller ones. Numbers
    may be missing."""
    did: Mapped[str] = mapped_column(Text)
    """The DID of the repo."""
    collection: Mapped[str | None] = mapped_column(Text)
    """The NSID of the collection; null for a change of the whole repo."""
    rkey: Mapped[str | None] = mapped_column(Text)
    """The record key; null for a change of the whole repo."""
    action: Mapped[str] = mapped_column(Text)
    """For a record: create, update, delete. For a repo: hidden (its records are no longer visible), visible (they
    are visible again), deleted (the account was deleted upstream), identity (it has another handle, or another
    hosting status although its visibility did not change), moved (it has another PDS), completed (a resync
    completed; follows the changes of the resync)."""
    cid: Mapped[str | None] = mapped_column(Text)
    """The CID of the new record; null for a delete and for a change of the whole repo."""
    rev: Mapped[str | None] = mapped_column(Text)
    """The rev of the commit that made the change, or of the export in which a resync found it; null for a repo
    without a rev, for an erased record, and for one whose collection is no longer selected."""
    live: Mapped[bool] = mapped_column(Boolean)
    """False for a difference found by a resync, and for completed. True for everything else: an event of the
    stream, also one that was buffered during a resync, an erasure, a takedown, another handle, and another PDS."""
    time: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the change was committed here. Equal for the changes of one transaction, and later for later ones."""


class Cursor(PublicView):
    """The stream position per relay and shard: all effects up to seq are in this database."""

    __tablename__ = "cursors"

    relay: Mapped[str] = mapped_column(Text, primary_key=True)
    """The URL of the relay."""
    shard: Mapped[str] = mapped_column(Text, primary_key=True)
    """The shard of the process, as index/count."""
    seq: Mapped[int] = mapped_column(BigInteger)
    """All effects of messages up to this seq are in this database."""
    event_time: Mapped[str | None] = mapped_column(Text)
    """The time in that message, as sent by the relay; null if it has none."""
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the cursor was last saved."""
    caught_up_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """Everything until this time is stored: the median time of the latest messages, or the present time if the
    stream is open and no message has come for a while. Null if it is not known."""


class Gap(PublicView):
    """Spans of a relay's stream in which messages may have been missed.

    While a gap is open, repos of its shard may be outdated although they are synchronized.
    """

    __tablename__ = "gaps"

    relay: Mapped[str] = mapped_column(Text, primary_key=True)
    """The URL of the relay."""
    shard: Mapped[str] = mapped_column(Text, primary_key=True)
    """The shard of the process that may have missed messages, as index/count."""
    reason: Mapped[str] = mapped_column(Text)
    """Why messages may have been missed, from a closed set (docs/reasons.md)."""
    opened_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), primary_key=True)
    """When the gap was noticed."""
    first_seq: Mapped[int | None] = mapped_column(BigInteger)
    """The first seq that may be missing; null if it is not known."""
    last_seq: Mapped[int | None] = mapped_column(BigInteger)
    """The last seq that may be missing; null if it is not known."""
    closed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When every repo that may have been affected was found and either equal or desynchronized; null if open."""
    closed_by: Mapped[str] = mapped_column(Text)
    """The host whose repo list was compared with the database to close the gap."""


class Host(PublicView):
    """Hosts that were asked for exports, identities and handles, with request statistics."""

    __tablename__ = "hosts"

    host: Mapped[str] = mapped_column(Text, primary_key=True)
    """The host name, with the port if it is not the default port."""
    requests: Mapped[int] = mapped_column(BigInteger)
    """The number of requests sent."""
    failures: Mapped[int] = mapped_column(BigInteger)
    """Requests that the host failed: no connection, no response, or a server error."""
    failures_in_a_row: Mapped[int] = mapped_column(Integer)
    """Failures since the last response."""
    paused_until: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """No requests are sent until then; null if the host is not paused."""
    pause_reason: Mapped[str] = mapped_column(Text)
    """throttled: the host asked for a pause; host-paused: too many requests failed in a row."""
    last_error: Mapped[str] = mapped_column(Text)
    """The latest failure. The first word is from a closed set (docs/reasons.md)."""
    last_success_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When a request last succeeded."""
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When this row was last updated."""


class LinkProgress(PublicView):
    """The state of links, one row: if they are kept, and the progress of the backfill."""

    __tablename__ = "link_progress"

    state: Mapped[str] = mapped_column(Text, primary_key=True)
    """off: no links are kept; backfill: links of stored records are added; complete: all links are stored."""
    buckets_done: Mapped[int] = mapped_column(Integer)
    """256 if the backfill is complete, otherwise 0."""
    buckets: Mapped[int] = mapped_column(Integer)
    """256 if links are kept, otherwise 0."""
    repos_done: Mapped[int] = mapped_column(BigInteger)
    """Repos whose links were added by the backfill."""
    enabled_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When INDEXER_LINKS was turned on; null if it is off."""
    completed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the backfill was completed; null if it is not complete."""
    seq: Mapped[int | None] = mapped_column(BigInteger)
    """The number of the last change that atproto.links and atproto.link_count contain. Null if links are off. If it
    equals atproto.latest_seq() in the same snapshot, they are exactly those of the records of the snapshot.
    Otherwise, a record that has changed again may be shown as it is later."""


class Link(PublicView):
    """The AT-URIs and DIDs in the values of records of visible repos: a row for each record, path and target.

    Empty unless INDEXER_LINKS is on, and incomplete until link_progress says complete. Indexed by (target,
    collection, path, did, rkey) and by (did, collection, rkey).
    """

    __tablename__ = "links"

    target: Mapped[str] = mapped_column(Text, primary_key=True)
    """The AT-URI or the DID, as it is in the record."""
    target_kind: Mapped[str] = mapped_column(Text)
    """strong-ref: an AT-URI as member uri of an object that also has a text cid; at-uri: any other AT-URI; did."""
    did: Mapped[str] = mapped_column(Text, primary_key=True)
    """The DID of the repo that contains the record with the link."""
    collection: Mapped[str] = mapped_column(Text, primary_key=True)
    """The NSID of the collection of the record."""
    rkey: Mapped[str] = mapped_column(Text, primary_key=True)
    """The key of the record."""
    path: Mapped[str] = mapped_column(Text, primary_key=True)
    """Where the link is in the value: .name for a member of an object, [] for an element of an array, [type] for
    one that is an object with this $type."""
    bucket: Mapped[int] = mapped_column(SmallInteger)
    """The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a
    constant reads one shard."""


class Reader(PublicView):
    """Registered consumers of the change log, and how far each is behind."""

    __tablename__ = "readers"

    name: Mapped[str] = mapped_column(Text, primary_key=True)
    """The name of the consumer."""
    seq: Mapped[int] = mapped_column(BigInteger)
    """The seq of the last change that it received."""
    behind: Mapped[int] = mapped_column(BigInteger)
    """The latest seq minus the seq of the consumer."""
    behind_since: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the first change that it has not received was committed; null if there is none."""
    registered_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When it was registered."""
    seen_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When it last asked for changes or was registered again."""
    cut_off_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When it was disconnected for being too far behind; null if it was not."""
    owner: Mapped[str] = mapped_column(Text)
    """The role that registered it, and that alone may use and remove it."""


class Record(PublicView):
    """The records of visible repos.

    Indexed by (did, collection, rkey) and by (collection, indexed_at).
    """

    __tablename__ = "records"

    did: Mapped[str] = mapped_column(Text, primary_key=True)
    """The DID of the repo that contains the record."""
    collection: Mapped[str] = mapped_column(Text, primary_key=True)
    """The NSID of the collection."""
    rkey: Mapped[str] = mapped_column(Text, primary_key=True)
    """The record key."""
    uri: Mapped[str] = mapped_column(Text)
    """The AT-URI of the record."""
    cid: Mapped[str] = mapped_column(Text)
    """The CID of the DAG-CBOR encoding."""
    rev: Mapped[str] = mapped_column(Text)
    """The rev of the commit that wrote the record, or of the export in which it was found."""
    value: Mapped[Any] = mapped_column(JSONB)
    """The record as AT Protocol JSON: links as $link objects, byte strings as $bytes objects. Null if value_problem
    says why."""
    value_problem: Mapped[str | None] = mapped_column(Text)
    """Why value is null or differs from the original, from a closed set (docs/reasons.md). Null value: missing,
    not-stored, not-dag-cbor, too-large, omitted, too-many-items, too-deep. Nearest JSON value: number,
    nul-character, reserved-key. Unchanged value that does not fit its collection: not-a-map, no-type,
    other-type. Null: no problem."""
    indexed_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the record was last written here, by the clock of this server."""
    bucket: Mapped[int] = mapped_column(SmallInteger)
    """The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a
    constant reads one shard."""


class RejectedMessage(PublicView):
    """Dead letters: messages that were rejected by their own fault, including forged ones.

    The newest 1,000 per relay and reason.
    """

    __tablename__ = "rejected"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """The ID of the dead letter."""
    relay: Mapped[str] = mapped_column(Text)
    """The relay that sent the message."""
    seq: Mapped[int | None] = mapped_column(BigInteger)
    """The sequence number; null if it could not be read."""
    did: Mapped[str | None] = mapped_column(Text)
    """The DID that the message names, which proves nothing if the message is forged; null if it could not be read."""
    kind: Mapped[str] = mapped_column(Text)
    """The kind of message."""
    reason: Mapped[str] = mapped_column(Text)
    """The rule that the message broke, from a closed set (docs/reasons.md)."""
    time: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When the message was rejected."""


class Repo(PublicView):
    """Every tracked repo with its sync status and the reason for it.

    Indexed by did; any other condition scans the whole table.
    """

    __tablename__ = "repos"

    did: Mapped[str] = mapped_column(Text, primary_key=True)
    """The DID of the account."""
    handle: Mapped[str | None] = mapped_column(Text)
    """The verified handle: the DID document claims it and it resolves to the DID. handle.invalid if verification
    failed; null if it has not been checked yet."""
    pds: Mapped[str | None] = mapped_column(Text)
    """The base URL of the PDS in the DID document; null if there is none or it was not read."""
    sync_status: Mapped[str] = mapped_column(Text)
    """desynchronized, in-progress, or synchronized."""
    sync_reason: Mapped[str | None] = mapped_column(Text)
    """Why the repo is not synchronized (docs/reasons.md); null if it is."""
    rev: Mapped[str | None] = mapped_column(Text)
    """The rev of the stored records; null if no records have been stored yet."""
    data: Mapped[str | None] = mapped_column(Text)
    """The CID of the MST root of the stored records; null if rev is null."""
    hosting_status: Mapped[str] = mapped_column(Text)
    """The hosting status as sent upstream; active or inactive if upstream sent no status."""
    takedown: Mapped[bool] = mapped_column(Boolean)
    """True if the repo is taken down locally."""
    visible: Mapped[bool] = mapped_column(Boolean)
    """True if atproto.records shows its records: active upstream, no local takedown."""
    resync_attempts: Mapped[int] = mapped_column(Integer)
    """Failed resyncs and repeated desynchronizations since the repo last settled."""
    next_attempt_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the next resync may start; null: immediately; infinity: parked until an event unparks the repo."""
    last_error: Mapped[str | None] = mapped_column(Text)
    """Why the last fetch failed: last_failure, with details for people. Null if it did not fail."""
    synchronized_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """When the repo last became synchronized; null if never."""
    updated_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    """When this row was last updated."""
    bucket: Mapped[int] = mapped_column(SmallInteger)
    """The bucket of the DID, as atproto.bucket_of returns it. On a cluster, a query that compares it with a
    constant reads one shard."""
    withheld_since: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    """Since when the relay has said that it does not pass on the account, for a trouble of its own that
    hosting_status names, such as throttled. The records stay visible, and may be outdated. Null: it does not say
    so."""
    last_failure: Mapped[str | None] = mapped_column(Text)
    """Why the last fetch failed, as one of a closed set (docs/reasons.md); null if it did not fail."""


class ScopeProgress(PublicView):
    """The collections that are stored, with the progress of their backfill.

    Reads the row of every repo.
    """

    __tablename__ = "scope_progress"

    collection: Mapped[str] = mapped_column(Text, primary_key=True)
    """The pattern: an NSID, the beginning of one with .*, or *."""
    added_in: Mapped[int] = mapped_column(BigInteger)
    """The version of the scope that added the collection."""
    newest: Mapped[bool] = mapped_column(Boolean)
    """True if the latest change of the scope added the collection."""
    repos: Mapped[int] = mapped_column(BigInteger)
    """The number of tracked repos of active accounts."""
    complete: Mapped[int] = mapped_column(BigInteger)
    """The number of those repos of which all records of the collection are stored. A repo without such records
    counts, too, once this is known."""

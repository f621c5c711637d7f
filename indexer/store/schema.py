"""The tables of schema `indexer`, as SQLAlchemy Core metadata. A test compares it with the result of the migrations.

DIDs are text and CIDs are binary. Every table with a DID has a column `bucket`, which comes last in the keys that the
public views use. So `where did = …` is an index scan, and the same statements run on tables that are distributed by
bucket. Names use the collation "C" in every locale of the database. The measurements are in
docs/decisions/0001-table-layout-and-statements.md.
"""

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import INT4MULTIRANGE, INT4RANGE, JSON, JSONB, OID

metadata = MetaData(schema="indexer")

NAME = Text(collation="C")
TIME = DateTime(timezone=True)
NOW = text("now()")

_PRIORITY = "case when rev is null then 2 when sync_reason = 'requested' then 1 else 0 end"
_DUE_AT = text("coalesce(next_attempt_at, '-infinity'::timestamptz)")
_PARKED_AT = text(
    "case when sync_status = 'desynchronized' and active and next_attempt_at = 'infinity' then updated_at end"
)
_POSITIONS = """
    int4range(
        split_part(shard, '/', 1)::int * 256 / split_part(shard, '/', 2)::int,
        (split_part(shard, '/', 1)::int + 1) * 256 / split_part(shard, '/', 2)::int
    )
"""

repo = Table(
    "repo",
    metadata,
    Column("did", NAME, primary_key=True),
    Column("bucket", SmallInteger, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("sync_status", Text, nullable=False),
    Column("sync_reason", Text),
    Column("rev", NAME),
    Column("data", LargeBinary),
    Column("commit", LargeBinary),
    Column("latest_verified_rev", NAME),
    Column("latest_unverified_rev", NAME),
    Column("active", Boolean, nullable=False),
    Column("hosting_status", Text),
    Column("hosting_relay", Text),
    Column("hosting_seq", BigInteger, nullable=False),
    Column("takedown", Boolean, nullable=False),
    Column("buffered_events", Integer, nullable=False),
    Column("buffered_bytes", BigInteger, nullable=False),
    Column("lease", BigInteger, nullable=False),
    Column("lease_until", TIME),
    Column("attempts", Integer, nullable=False),
    Column("next_attempt_at", TIME),
    Column("last_error", Text),
    Column("synchronized_at", TIME),
    Column("updated_at", TIME, nullable=False, server_default=NOW),
    Column("erase_at", TIME),
    # Do not index `rev` or `updated_at`, not even in a WHERE: then every commit would update every index (no HOT).
    Column("priority", SmallInteger, Computed(_PRIORITY, persisted=True), nullable=False),
    Column("parked_at", TIME, Computed(_PARKED_AT, persisted=True)),
    Column("hosting_epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("unproven_since", TIME),
    Column("from_stream", Boolean, nullable=False, server_default=text("false")),
    Column("scope_version", BigInteger, nullable=False, server_default=text("0")),
    Column("tracked", Boolean, nullable=False, server_default=text("true")),
    Column("wanted_in", BigInteger, nullable=False, server_default=text("0")),
    Column("hosting_time", TIME),
    Column("withheld_since", TIME),
    CheckConstraint("sync_status in ('desynchronized', 'in-progress', 'synchronized')", name="repo_sync_status"),
    CheckConstraint("num_nulls(rev, data, commit) in (0, 3)", name="repo_head"),
    CheckConstraint("sync_status <> 'synchronized' or rev is not null", name="repo_synchronized"),
    CheckConstraint("(sync_status = 'in-progress') = (lease_until is not null)", name="repo_leased"),
    Index(
        "repo_due", "bucket", "priority", _DUE_AT, postgresql_where=text("sync_status = 'desynchronized' and active")
    ),
    postgresql_with={
        "fillfactor": "80",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_analyze_scale_factor": "0.02",
    },
)
Index("repo_erasures", repo.c.erase_at, postgresql_where=text("erase_at is not null"))
Index("repo_parked", repo.c.bucket, repo.c.parked_at, postgresql_where=text("parked_at is not null"))
Index(
    "repo_denied",
    repo.c.bucket,
    repo.c.parked_at,
    postgresql_where=text("parked_at is not null and priority = 2 and (from_stream or last_error like 'identity-%')"),
)
Index("repo_hidden", repo.c.bucket, postgresql_where=text("not active and priority = 2"))
Index("repo_unproven", repo.c.unproven_since, postgresql_where=text("unproven_since is not null"))
Index("repo_scope", repo.c.bucket, repo.c.scope_version)
Index("repo_leases", repo.c.lease_until, postgresql_where=text("sync_status = 'in-progress'"))

resync_queue = Table(
    "resync_queue",
    metadata,
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("priority", SmallInteger, primary_key=True, autoincrement=False),
)

record = Table(
    "record",
    metadata,
    Column("did", NAME, primary_key=True),
    Column("collection", NAME, primary_key=True),
    Column("rkey", NAME, primary_key=True),
    Column("bucket", SmallInteger, primary_key=True),
    Column("cid", LargeBinary, nullable=False),
    Column("rev", NAME, nullable=False),
    Column("value", JSONB),
    Column("value_problem", Text),
    Column("original", LargeBinary),
    Column("indexed_at", TIME, nullable=False, server_default=text("statement_timestamp()")),
    Index("record_collection", "collection", "indexed_at"),
    Index("record_missing", "did", "bucket", postgresql_where=text("value_problem = 'missing'")),
    postgresql_with={
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_insert_scale_factor": "0.05",
        "autovacuum_analyze_scale_factor": "0.02",
    },
)

# The index is deduplicated: an entry of six bytes for each further link of a record.
record_link = Table(
    "record_link",
    metadata,
    Column("did", NAME, nullable=False),
    Column("collection", NAME, nullable=False),
    Column("rkey", NAME, nullable=False),
    Column("bucket", SmallInteger, nullable=False),
    Column("target", NAME, nullable=False),
    Column("kind", Text, nullable=False),
    Column("path", NAME, nullable=False),
    Column("counted", Boolean, nullable=False),
    CheckConstraint("kind in ('did', 'at-uri', 'strong-ref')", name="record_link_kind"),
    Index("record_link_record", "did", "collection", "rkey"),
    Index("record_link_target", "target", "collection", "path", "did", "rkey"),
    postgresql_with={
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_insert_scale_factor": "0.05",
        "autovacuum_analyze_scale_factor": "0.02",
    },
)

# Do not index `count`: then every update of a count would update every index (no HOT).
target_count = Table(
    "target_count",
    metadata,
    Column("target", NAME, primary_key=True),
    Column("collection", NAME, primary_key=True),
    Column("path", NAME, primary_key=True),
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("count", BigInteger, nullable=False),
    postgresql_with={
        "fillfactor": "80",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_analyze_scale_factor": "0.02",
    },
)

links_to_recount = Table(
    "links_to_recount",
    metadata,
    Column("did", NAME, primary_key=True),
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
)

link_reader = Table(
    "link_reader",
    metadata,
    Column("singleton", Boolean, primary_key=True, server_default=text("true")),
    Column("seq", BigInteger, nullable=False),
    Column("enabled_at", TIME, nullable=False, server_default=NOW),
    Column("did", NAME, nullable=False, server_default=text("''")),
    Column("collection", NAME, nullable=False, server_default=text("''")),
    Column("rkey", NAME, nullable=False, server_default=text("''")),
    Column("repos", BigInteger, nullable=False, server_default=text("0")),
    Column("done_at", TIME),
    CheckConstraint("singleton", name="link_reader_singleton"),
    postgresql_with={"fillfactor": "50"},
)

# The daemon of the previous release writes these five tables. Nothing reads them.
link = Table(
    "link",
    metadata,
    Column("did", NAME, primary_key=True),
    Column("collection", NAME, primary_key=True),
    Column("rkey", NAME, primary_key=True),
    Column("number", SmallInteger, primary_key=True, autoincrement=False),
    Column("bucket", SmallInteger, primary_key=True),
    Column("target", NAME, nullable=False),
    Column("kind", Text, nullable=False),
    Column("path", NAME, nullable=False),
    Column("counted", Boolean, nullable=False),
    CheckConstraint("kind in ('did', 'at-uri', 'strong-ref')", name="link_kind"),
    Index("link_target", "target", "collection", "path", "did", "rkey"),
    postgresql_with={
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_vacuum_insert_scale_factor": "0.05",
        "autovacuum_analyze_scale_factor": "0.02",
    },
)

link_count = Table(
    "link_count",
    metadata,
    Column("target", NAME, primary_key=True),
    Column("collection", NAME, primary_key=True),
    Column("path", NAME, primary_key=True),
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("count", BigInteger, nullable=False),
    postgresql_with={
        "fillfactor": "80",
        "autovacuum_vacuum_scale_factor": "0.02",
        "autovacuum_analyze_scale_factor": "0.02",
    },
)

link_delta = Table(
    "link_delta",
    metadata,
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("target", NAME, nullable=False),
    Column("collection", NAME, nullable=False),
    Column("path", NAME, nullable=False),
    Column("delta", Integer, nullable=False),
    postgresql_with={"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "10000"},
)

link_recount = Table(
    "link_recount",
    metadata,
    Column("did", NAME, primary_key=True),
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    postgresql_with={"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "1000"},
)

link_bucket = Table(
    "link_bucket",
    metadata,
    Column("bucket", SmallInteger, primary_key=True, autoincrement=False),
    Column("enabled_at", TIME, nullable=False, server_default=NOW),
    Column("backfilled_to", NAME, nullable=False, server_default=text("''")),
    Column("backfilled_repos", BigInteger, nullable=False, server_default=text("0")),
    Column("done_at", TIME),
    Column("off_at", TIME),
)

change_log = Table(
    "change_log",
    metadata,
    Column("singleton", Boolean, primary_key=True, server_default=text("true")),
    Column("current_segment", SmallInteger, nullable=False),
    Column("opened_at", TIME, nullable=False, server_default=NOW),
    CheckConstraint("singleton", name="change_log_singleton"),
)

# Both are partitioned by segment. The migration creates the partitions.
change_batch = Table(
    "change_batch",
    metadata,
    Column("segment", SmallInteger, nullable=False),
    Column("id", BigInteger, Identity(), nullable=False),
    Column("size", Integer, nullable=False),
    Column("first_seq", BigInteger),
    Column("time", TIME),
    PrimaryKeyConstraint("id", "segment", name="change_batch_pkey"),
    UniqueConstraint("first_seq", "segment", name="change_batch_first_seq"),
    postgresql_partition_by="LIST (segment)",
)

change = Table(
    "change",
    metadata,
    Column("batch", BigInteger, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("segment", SmallInteger, nullable=False),
    Column("bucket", SmallInteger, nullable=False),
    Column("live", Boolean, nullable=False),
    Column("action", Text, nullable=False),
    Column("did", NAME, nullable=False),
    Column("collection", NAME),
    Column("rkey", NAME),
    Column("rev", NAME),
    Column("cid", LargeBinary),
    PrimaryKeyConstraint("batch", "ordinal", "segment", "bucket", name="change_pkey"),
    CheckConstraint(
        "action in ('create', 'update', 'delete', 'hidden', 'visible', 'deleted', 'identity', 'moved', 'completed')",
        name="change_action",
    ),
    CheckConstraint("(action in ('create', 'update')) = (cid is not null)", name="change_cid"),
    CheckConstraint(
        "num_nulls(collection, rkey) = case when action in ('create', 'update', 'delete') then 0 else 2 end",
        name="change_record",
    ),
    postgresql_partition_by="LIST (segment)",
)

numbering_lock = Table("numbering_lock", metadata)

unnumbered_batch = Table(
    "unnumbered_batch",
    metadata,
    Column("commit_order", BigInteger, Identity(always=True), primary_key=True),
    Column("segment", SmallInteger, nullable=False),
    Column("batch", BigInteger, nullable=False),
    Column("size", Integer, nullable=False),
    Column("buckets", ARRAY(SmallInteger), nullable=False),
    Column("queued_at", TIME, nullable=False, server_default=text("clock_timestamp()")),
    Column("transaction", Text, server_default=text("pg_current_xact_id()::xid::text")),
)

consumer = Table(
    "consumer",
    metadata,
    Column("name", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("registered_at", TIME, nullable=False, server_default=NOW),
    Column("seen_at", TIME, nullable=False, server_default=NOW),
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("owner", NAME),
    Column("slot", SmallInteger),
    UniqueConstraint("id", name="consumer_id"),
    UniqueConstraint("owner", "slot", name="consumer_slot"),
    postgresql_with={"fillfactor": "50"},
)

disconnected_consumer = Table(
    "disconnected_consumer",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("disconnected_at", TIME, nullable=False, server_default=NOW),
)

feed_delivery = Table(
    "feed_delivery",
    metadata,
    Column("consumer_id", BigInteger, primary_key=True, autoincrement=False),
    Column("delivered_to", BigInteger, nullable=False),
    Column("undelivered", ARRAY(BigInteger), nullable=False),
    Column("snapshot_did", Text),
    Column("snapshot_collection", Text),
    Column("snapshot_rkey", Text),
    Column("refused", JSONB, nullable=False, server_default=text("'[]'")),
    Column("behind", JSONB),
)

feed_set_aside = Table(
    "feed_set_aside",
    metadata,
    Column("consumer_id", BigInteger, primary_key=True, autoincrement=False),
    Column("reason", Text, primary_key=True),
    Column("did", Text, primary_key=True),
    Column("collection", Text, primary_key=True),
    Column("rkey", Text, primary_key=True),
    Column("rev", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("since", TIME, nullable=False),
    Column("failure", Text, nullable=False),
    Column("due", Boolean, nullable=False, server_default=text("false")),
    CheckConstraint("reason in ('hidden', 'refused')", name="feed_set_aside_reason"),
    Index("feed_set_aside_due", "consumer_id", postgresql_where=text("due")),
)

shard_owner = Table(
    "shard_owner",
    metadata,
    Column("pid", Integer, primary_key=True, autoincrement=False),
    Column("role", OID, nullable=False),
    Column("started_at", TIME, nullable=False),
    Column("first_bucket", SmallInteger, nullable=False),
    Column("last_bucket", SmallInteger, nullable=False),
)

process_report = Table(
    "process_report",
    metadata,
    Column("pid", Integer, primary_key=True, autoincrement=False),
    Column("role", OID, nullable=False),
    Column("started_at", TIME, nullable=False),
    Column("roles", ARRAY(Text), nullable=False),
    Column("first_bucket", SmallInteger, nullable=False),
    Column("last_bucket", SmallInteger, nullable=False),
    Column("owns", Boolean, nullable=False),
    Column("reported_at", TIME, nullable=False),
    Column("reasons", JSONB, nullable=False),
)

# It has no row in a plain database, and one in a database that `distribute` distributes.
distribution = Table(
    "distribution",
    metadata,
    Column("singleton", Boolean, primary_key=True, server_default=text("true")),
    Column("shards", Integer, nullable=False),
    Column("started_at", TIME, nullable=False, server_default=NOW),
    Column("finished_at", TIME),
    CheckConstraint("singleton", name="distribution_singleton"),
    CheckConstraint("shards between 1 and 256", name="distribution_shards"),
)

# `migrate` creates and locks it.
migration_lock = Table("migration_lock", metadata)

# `lexicon_indexes.lock_builds` locks it.
lexicon_index_lock = Table("lexicon_index_lock", metadata)

buffered_event = Table(
    "buffered_event",
    metadata,
    Column("did", NAME, primary_key=True),
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("bucket", SmallInteger, primary_key=True),
    Column("relay", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("frame", LargeBinary, nullable=False),
    postgresql_with={"autovacuum_vacuum_scale_factor": "0", "autovacuum_vacuum_threshold": "10000"},
)

dead_letter = Table(
    "dead_letter",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("bucket", SmallInteger, primary_key=True),
    Column("relay", Text, nullable=False),
    Column("seq", BigInteger),
    Column("did", NAME),
    Column("kind", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("frame", LargeBinary, nullable=False),
    Column("time", TIME, nullable=False, server_default=NOW),
    Column("epoch", BigInteger, nullable=False, server_default=text("0")),
)

Index("dead_letter_reason", dead_letter.c.relay, dead_letter.c.reason, dead_letter.c.id)

cursor = Table(
    "cursor",
    metadata,
    Column("relay", Text, primary_key=True),
    Column("shard", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("event_time", Text),
    Column("caught_up_at", TIME),
    Column("updated_at", TIME, nullable=False, server_default=NOW),
    Column("epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("stored_until", TIME),
)

gap = Table(
    "gap",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("relay", Text, nullable=False),
    Column("shard", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("first_seq", BigInteger),
    Column("last_seq", BigInteger),
    Column("opened_at", TIME, nullable=False, server_default=NOW),
    Column("closed_at", TIME),
    Column("closed_by", Text),
    Column("positions", INT4RANGE, Computed(_POSITIONS, persisted=True), nullable=False),
    Column("reconciled", INT4MULTIRANGE, nullable=False, server_default=text("'{}'")),
)
Index("gap_open", gap.c.id, postgresql_where=text("closed_at is null"))

scope = Table(
    "scope",
    metadata,
    Column("singleton", Boolean, primary_key=True, server_default=text("true")),
    Column("version", BigInteger, nullable=False),
    Column("track", Text, nullable=False),
    Column("collections", ARRAY(Text), nullable=False),
    Column("added_in", ARRAY(BigInteger), nullable=False),
    Column("signal_collections", ARRAY(Text), nullable=False),
    Column("changed_at", TIME, nullable=False, server_default=NOW),
    Column("repos_narrowed_in", BigInteger, nullable=False, server_default=text("0")),
    Column("earlier_repos_stay", Boolean, nullable=False, server_default=text("false")),
    CheckConstraint("singleton", name="scope_singleton"),
    CheckConstraint("track in ('all', 'listed', 'signal')", name="scope_track"),
    CheckConstraint("cardinality(collections) > 0", name="scope_collections"),
    CheckConstraint("cardinality(added_in) = cardinality(collections)", name="scope_added_in"),
    CheckConstraint("track <> 'signal' or cardinality(signal_collections) > 0", name="scope_signal"),
)

stored_setting = Table(
    "stored_setting",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

crawl_progress = Table(
    "crawl_progress",
    metadata,
    Column("purpose", Text, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("collection", Text, primary_key=True),
    Column("cursor", Text),
    Column("listed", BigInteger, nullable=False),
    Column("found", BigInteger, nullable=False),
    Column("began_at", TIME, nullable=False),
    Column("finished_at", TIME),
    Column("shard", Text, primary_key=True),
    Column("last_gap", BigInteger, nullable=False),
)

host = Table(
    "host",
    metadata,
    Column("host", NAME, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("consecutive_failures", Integer, nullable=False),
    Column("paused_until", TIME),
    Column("pause_reason", Text),
    Column("last_error", Text),
    Column("last_success", TIME),
    Column("updated_at", TIME, nullable=False, server_default=NOW),
    postgresql_with={"fillfactor": "50"},
)

identity = Table(
    "identity",
    metadata,
    Column("did", NAME, primary_key=True),
    Column("bucket", SmallInteger, primary_key=True),
    Column("claimed_handle", NAME),
    Column("pds", Text),
    Column("signing_key", Text),
    Column("fetched_at", TIME, nullable=False),
    Column("stale", Boolean, nullable=False),
    Column("problem", Text),
    Column("handle", NAME),
    Column("handle_attempts", Integer, nullable=False),
    Column("handle_due_at", TIME),
    Column("denials", Integer, nullable=False, server_default=text("0")),
    Column("denied_at", TIME),
    Column("refresh_at", TIME),
    Column("refresh_failures", Integer, nullable=False, server_default=text("0")),
    postgresql_with={"fillfactor": "90"},
)
Index(
    "identity_refresh",
    text("starts_with(did, 'did:web:')"),
    identity.c.refresh_at,
    postgresql_where=text("refresh_at is not null"),
)
Index("identity_handle", identity.c.handle, postgresql_where=text("handle <> 'handle.invalid'"))
Index("identity_handle_due", identity.c.handle_due_at, postgresql_where=text("handle_due_at is not null"))

lexicon = Table(
    "lexicon",
    metadata,
    Column("nsid", NAME, primary_key=True),
    Column("document", JSON, nullable=False),
    Column("source", Text, nullable=False),
    Column("view_name", NAME),
    Column("fields", JSONB),
    Column("definition", Text),
    Column("added_at", TIME, nullable=False, server_default=NOW),
    UniqueConstraint("view_name", name="lexicon_view_name"),
    CheckConstraint("(view_name is null) = (fields is null)", name="lexicon_has_view"),
)

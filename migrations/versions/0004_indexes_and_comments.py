"""Index records by collection, set `value_problem` for every null value, and describe every column.

The comments on the public schema say which columns may be null. docs/sql.md is generated from them.
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

STATEMENTS = (
    "create index record_collection on indexer.record (collection, indexed_at)",
    # LIMIT, because the planner multiplies the selectivities of did and bucket. Without it, the planner expects a 256th
    # of the rows and reads a whole collection for its first page.
    """
    create or replace view atproto.records as
    select c.did, c.collection, c.rkey, 'at://' || c.did || '/' || c.collection || '/' || c.rkey as uri,
        atproto.cid_text(c.cid) as cid, c.rev, c.value,
        coalesce(c.value_problem, case when c.value is null then 'not-stored' end) as value_problem, c.indexed_at
    from indexer.record c cross join lateral (
        select from indexer.repo r where r.did = c.did and r.bucket = c.bucket and r.active and not r.takedown limit 1
    ) shown
    """,
    # Postgres vacuums after a fifth of the rows changed by default, which is too late for a hundred million rows. The
    # number of buffered events changes too fast for any fraction.
    "alter table indexer.repo set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02)",
    """
    alter table indexer.record set (autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.02)
    """,
    "alter table indexer.kept_event set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000)",
)

COMMENTS = {
    "view atproto.repos": (
        "Every repo that we know of, with the state of our copy and the reason of it. Found by did; anything else "
        "reads all of them."
    ),
    "column atproto.repos.handle": "The handle that its DID document claims, when last read; null if none or not read.",
    "column atproto.repos.pds": "The base URL of its host, as its DID document says; null if none or not read.",
    "column atproto.repos.sync_reason": "Why it is not synchronized (docs/reasons.md); null if it is.",
    "column atproto.repos.data": "The CID of the root of the tree that our records stand at; null without a rev.",
    "column atproto.repos.hosting_status": (
        "What upstream says of the account, as sent; active or inactive where it gave no other word."
    ),
    "column atproto.repos.last_error": (
        "Why the last fetch failed; its first word is from a closed set (docs/reasons.md). Null if it didn''t."
    ),
    "column atproto.repos.synchronized_at": "When it last became synchronized; null if never.",
    "view atproto.records": (
        "The records of visible repos. Found by did; by did, collection and rkey, in that order; and across repos by "
        "collection and indexed_at."
    ),
    "column atproto.records.rev": "The repo''s revision that brought it, or at which a resync found it.",
    "column atproto.records.value": (
        "The record as AT Protocol JSON: links as $link objects, byte strings as $bytes objects. Null where "
        "value_problem says why."
    ),
    "column atproto.records.value_problem": (
        "Why the value is null or not as it came, from a closed set (docs/reasons.md): missing, not-stored, "
        "not-dag-cbor, too-large, too-deep, nul-character, reserved-key: null; number: as near as JSON gets; "
        "not-a-map, no-type, other-type: as it came, and unlike a record of its collection. Null: nothing to say."
    ),
    "column atproto.records.indexed_at": "When it was last written here, in the clock of this server.",
    "view atproto.cursors": "Up to which seq of each relay everything has its effect here. A few rows.",
    "column atproto.cursors.event_time": "The time of that message, in the relay''s own words; null if it has none.",
    "view atproto.rejected": (
        "Messages that were refused by their own fault, forged ones too; of each relay and reason the newest 1,000."
    ),
    "column atproto.rejected.seq": "Its sequence number; null where it could not be read.",
    "column atproto.rejected.did": (
        "The DID that it claims to be of, which for a forged one says nothing; null where it could not be read."
    ),
    "column atproto.rejected.reason": "The rule that it broke, from a closed set (docs/reasons.md).",
    "column atproto.changes.cid": "The record''s CID afterwards; null for a delete and for a change of the whole repo.",
    "column atproto.readers.behind_since": (
        "When the first change that it has not been given was committed; null if there is none."
    ),
    "function atproto.record_bytes(text, text, text)": (
        "A visible record''s DAG-CBOR where its value doesn''t hold all of it; null otherwise."
    ),
    "function atproto.request_resync(text)": (
        "Asks for a repo to be fetched anew; its records stay meanwhile. False if it is unknown. For atproto_operator."
    ),
    "function atproto.request_takedown(text, boolean)": (
        "Hides a repo here, whatever upstream says, or shows it again. False if it is unknown. For atproto_operator."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

"""Mark repos that the stream added, find repos of which nothing is stored, and store until when cursors are certain.

Comments of public columns say what holds today.
"""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

STATEMENTS = (
    "alter table indexer.repo add column from_stream boolean not null default false",
    "alter table indexer.cursor add column stored_until timestamptz",
    "drop index indexer.repo_denied",
    """
    create index repo_denied on indexer.repo (bucket, parked_at)
    where parked_at is not null and priority = 2 and (from_stream or last_error like 'identity-%')
    """,
    "create index repo_hidden on indexer.repo (bucket) where not active and priority = 2",
)

COMMENTS = {
    "column indexer.repo.from_stream": (
        "True if a message of the stream added the repo, and no repo list and no command has named it since."
    ),
    "column indexer.cursor.stored_until": (
        "The median time of the latest messages up to seq, not later than their arrival. Another relay is entered at "
        "this time, or earlier."
    ),
    "column atproto.records.value_problem": (
        "Why value is null or differs from the original, from a closed set (docs/reasons.md). Null value: missing, "
        "not-stored, not-dag-cbor, too-large, omitted, too-many-items, too-deep, nul-character, reserved-key. Nearest "
        "JSON value: number. Unchanged value that does not fit its collection: not-a-map, no-type, other-type. Null: "
        "no problem."
    ),
    "column atproto.changes.live": (
        "False for a difference found by a resync, and for completed. True for everything else: an event of the "
        "stream, also one that was buffered during a resync, an erasure, a takedown, and another PDS."
    ),
    "column atproto.cursors.caught_up_at": (
        "Everything until this time is stored: the median time of the latest messages, or the present time if the "
        "stream is open and no message has come for a while. Null if it is not known."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

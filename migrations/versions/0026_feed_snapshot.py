"""Store how far the snapshot for clients of tap was delivered, and the events that they refuse."""

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    alter table indexer.feed_delivery add column snapshot_did text, add column snapshot_collection text,
        add column snapshot_rkey text, add column refused jsonb not null default '[]'
    """,
)

COMMENTS = {
    "column indexer.feed_delivery.snapshot_did": (
        "The snapshot was delivered up to this repo, collection and record key; null if no snapshot is being delivered."
    ),
    "column indexer.feed_delivery.snapshot_collection": "Empty if only the repo itself was delivered, no record of it.",
    "column indexer.feed_delivery.snapshot_rkey": "Empty if only the repo itself was delivered, no record of it.",
    "column indexer.feed_delivery.refused": (
        "Events that clients do not acknowledge although they acknowledge others: objects with id, action, uri, "
        "attempts, since (Unix seconds) and failure."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

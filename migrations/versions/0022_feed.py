"""Log changes of handles and of hosting statuses, and store what the feed for clients of tap has delivered."""

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

STATEMENTS = (
    # NOT VALID: no stored change needs a check, because the set of actions only grows.
    """
    alter table indexer.change drop constraint change_action, add constraint change_action check (
        action in (
            'create', 'update', 'delete', 'hidden', 'visible', 'deleted', 'identity', 'moved', 'completed'
        )
    ) not valid
    """,
    """
    create table indexer.feed_delivery (
        consumer_id bigint not null,
        delivered_to bigint not null,
        undelivered bigint[] not null,
        constraint feed_delivery_pkey primary key (consumer_id)
    )
    """,
)

COMMENTS = {
    "table indexer.feed_delivery": (
        "Changes after the position of a consumer that its clients have acknowledged: those up to delivered_to, except "
        "those in undelivered."
    ),
    "column indexer.feed_delivery.consumer_id": "The id of the consumer.",
    "column indexer.feed_delivery.delivered_to": "The number of the newest change that was acknowledged.",
    "column indexer.feed_delivery.undelivered": "The numbers of earlier changes that were not acknowledged.",
    "column atproto.changes.action": (
        "For a record: create, update, delete. For a repo: hidden (its records are no longer visible), visible (they "
        "are visible again), deleted (the account was deleted upstream), identity (it has another handle, or another "
        "hosting status although its visibility did not change), moved (it has another PDS), completed (a resync "
        "completed; follows the changes of the resync)."
    ),
    "column atproto.changes.live": (
        "False for a difference found by a resync, and for completed. True for everything else: an event of the "
        "stream, also one that was buffered during a resync, an erasure, a takedown, another handle, and another PDS."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

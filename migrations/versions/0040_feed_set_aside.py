"""Store what the feed for clients of tap has passed without its delivery: records of hidden repos, refused events."""

from alembic import op

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create table indexer.feed_set_aside (
        consumer_id bigint not null,
        reason text not null,
        did text not null,
        collection text not null,
        rkey text not null,
        rev text not null,
        action text not null,
        attempts integer not null,
        since timestamptz not null,
        failure text not null,
        due boolean default false not null,
        constraint feed_set_aside_pkey primary key (consumer_id, reason, did, collection, rkey),
        constraint feed_set_aside_reason check (reason in ('hidden', 'refused'))
    )
    """,
    "create index feed_set_aside_due on indexer.feed_set_aside (consumer_id) where due",
)

COMMENTS = {
    "table indexer.feed_set_aside": (
        "What a consumer has not got although its position has passed it. hidden: records of a repo that was hidden "
        "when they were due, one row for the repo. refused: an event that its clients refused for too long."
    ),
    "column indexer.feed_set_aside.collection": "Empty for a whole repo.",
    "column indexer.feed_set_aside.rkey": "Empty for a whole repo.",
    "column indexer.feed_set_aside.rev": (
        "The rev of the event. For a hidden repo, the lowest one: its records of this rev and later ones are sent when "
        "it is visible again."
    ),
    "column indexer.feed_set_aside.action": "The action of a refused event; empty for a hidden repo.",
    "column indexer.feed_set_aside.due": (
        "Send it: the repo is visible again, or an operator asked for it. The row is deleted when it is acknowledged."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

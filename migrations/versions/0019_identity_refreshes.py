"""Store when each identity is refreshed, how often that failed, and how often its directory denied the DID.

An index finds repos whose DIDs never had an identity.
"""

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    alter table indexer.identity
        add column denials integer not null default 0,
        add column denied_at timestamptz,
        add column refresh_at timestamptz,
        add column refresh_failures integer not null default 0
    """,
    "update indexer.identity set refresh_at = fetched_at where stale",
    "drop index indexer.identity_stale",
    """
    create index identity_refresh on indexer.identity (starts_with(did, 'did:web:'), refresh_at)
    where refresh_at is not null
    """,
    """
    create index repo_denied on indexer.repo (bucket, parked_at)
    where parked_at is not null and priority = 2 and last_error like 'identity-%'
    """,
    """
    comment on column indexer.identity.denials is
        'How often in a row the directory denied the DID, hours apart. While it does, the document is the last one.'
    """,
    "comment on column indexer.identity.denied_at is 'The time of the last denial that counted.'",
    """
    comment on column indexer.identity.refresh_at is
        'When the identity is looked up again although no message needs it; null: there is no such time.'
    """,
    "comment on column indexer.identity.refresh_failures is 'Failed refreshes since the last successful one.'",
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)

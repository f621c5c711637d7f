"""Add the time at which a stream was last caught up, to tell a quiet stream from a stalled one."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

COMMENT = "When nothing more had come behind it for a while, on an open stream."


def upgrade() -> None:
    """Apply the migration."""
    op.execute("alter table indexer.cursor add column caught_up_at timestamptz")
    op.execute(
        "create or replace view atproto.cursors as "
        "select relay, shard, seq, event_time, updated_at, caught_up_at from indexer.cursor"
    )
    op.execute(f"comment on column atproto.cursors.caught_up_at is '{COMMENT}'")

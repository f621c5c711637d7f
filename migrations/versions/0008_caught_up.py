"""When the daemon last had nothing more to do: so that a quiet stream is told from one that stands still."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

COMMENT = "When nothing more had come behind it for a while, on an open stream."


def upgrade() -> None:
    op.execute("alter table indexer.cursor add column caught_up_at timestamptz")
    op.execute(
        "create or replace view atproto.cursors as "
        "select relay, shard, seq, event_time, updated_at, caught_up_at from indexer.cursor"
    )
    op.execute(f"comment on column atproto.cursors.caught_up_at is '{COMMENT}'")

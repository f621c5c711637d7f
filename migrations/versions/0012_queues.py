"""The queues of resyncs have a row each, so that one statement looks at the head of every one, distributed or not."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create table indexer.queue (
        bucket smallint not null, cold boolean not null, constraint queue_pkey primary key (bucket, cold)
    )
    """,
    "insert into indexer.queue (bucket, cold) select b, c from generate_series(0, 255) b, unnest(array[false, true]) c",
    """
    comment on table indexer.queue is
    'A row for each queue of repos that wait for a resync: by bucket, those whose records are shown apart.'
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)

"""Create one row per resync queue, and rank requested repos behind repos that broke.

One statement can then read the head of every queue, also on a distributed database. A request may be for all repos.
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

STATEMENTS = (
    "alter table indexer.repo drop column cold",
    """
    alter table indexer.repo add column rank smallint not null generated always as (
        case when rev is null then 2 when reason = 'requested' then 1 else 0 end
    ) stored
    """,
    """
    create index repo_due on indexer.repo (bucket, rank, coalesce(next_attempt_at, '-infinity'::timestamptz))
    where status = 'desynchronized' and active
    """,
    """
    create table indexer.queue (
        bucket smallint not null, rank smallint not null, constraint queue_pkey primary key (bucket, rank)
    )
    """,
    "insert into indexer.queue (bucket, rank) select b, r from generate_series(0, 255) b, generate_series(0, 2) r",
    """
    comment on column indexer.repo.rank is
    'Whose resync comes first: 0 of repos that we have and that broke, 1 that were asked for, 2 that we never had.'
    """,
    "comment on table indexer.queue is 'A row for each queue of repos that wait for a resync.'",
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)

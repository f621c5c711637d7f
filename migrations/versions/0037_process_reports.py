"""Store which state each process of the daemon reports, so that `indexer status` says what `/readyz` says.

A row is valid as long as the session that wrote it exists, so it says at once that a process has ended. A process of
the previous release writes none.
"""

from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

TABLE = """
    create table indexer.process_report (
        pid integer not null,
        role oid not null,
        started_at timestamptz not null,
        roles text[] not null,
        first_bucket smallint not null,
        last_bucket smallint not null,
        owns boolean not null,
        reported_at timestamptz not null,
        reasons jsonb not null,
        constraint process_report_pkey primary key (pid)
    )
"""

COMMENTS = {
    "table indexer.process_report": (
        "What each process of the daemon last reported about itself. A row is valid as long as the session exists."
    ),
    "column indexer.process_report.pid": "The process ID of the session in Postgres.",
    "column indexer.process_report.role": "The role of the session.",
    "column indexer.process_report.started_at": "When the session started.",
    "column indexer.process_report.roles": "The roles of the process: INDEXER_ROLES.",
    "column indexer.process_report.first_bucket": "The first position of its shard, as in indexer.shard_owner.",
    "column indexer.process_report.last_bucket": "The last position of its shard.",
    "column indexer.process_report.owns": "False while a process with the role live waits for its shard.",
    "column indexer.process_report.reported_at": "When it last reported; it does so every two seconds.",
    "column indexer.process_report.reasons": "The reasons of /readyz at that time.",
}


def upgrade() -> None:
    """Apply the migration."""
    op.execute(TABLE)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

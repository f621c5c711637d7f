"""Create the table and the public view of gaps, and number the epochs of a relay's sequence.

An epoch is one sequence of a relay: sequence numbers are comparable only within it. The progress of a reconciliation
names its shard and the newest gap before it began, so that it closes exactly the gaps that it covers.
"""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create table indexer.gap (
        id bigint generated always as identity primary key,
        relay text not null,
        shard text not null,
        reason text not null,
        first_seq bigint,
        last_seq bigint,
        opened_at timestamptz not null default now(),
        closed_at timestamptz,
        closed_by text
    )
    """,
    "create index gap_open on indexer.gap (id) where closed_at is null",
    "alter table indexer.cursor add column epoch bigint not null default 0",
    "alter table indexer.dead_letter add column epoch bigint not null default 0",
    "alter table indexer.repo add column hosting_epoch bigint not null default 0",
    "alter table indexer.crawl_progress add column shard text not null default '0/1'",
    "alter table indexer.crawl_progress alter column shard drop default",
    "alter table indexer.crawl_progress add column last_gap bigint not null default 0",
    "alter table indexer.crawl_progress alter column last_gap drop default",
    """
    alter table indexer.crawl_progress drop constraint crawl_progress_pkey,
        add constraint crawl_progress_pkey primary key (purpose, source, collection, shard)
    """,
    """
    create view atproto.gaps as
    select relay, shard, reason, opened_at, first_seq, last_seq, closed_at, closed_by from indexer.gap
    """,
    """
    do $$
    declare
        role text;
    begin
        foreach role in array array['atproto_reader', 'atproto_operator'] loop
            if exists (select from pg_roles where rolname = role) then
                execute format('grant select on atproto.gaps to %I', role);
            end if;
        end loop;
    end $$
    """,
)

COMMENTS = {
    "table indexer.gap": "Spans of a relay''s stream in which messages may have been missed.",
    "column indexer.cursor.epoch": "The number of times that the relay has started a new sequence.",
    "column indexer.dead_letter.epoch": "The epoch of the relay''s sequence that seq belongs to.",
    "column indexer.repo.hosting_epoch": "The epoch of the relay''s sequence that hosting_seq belongs to.",
    "column indexer.crawl_progress.shard": "The shard whose repos are compared, as index/count.",
    "column indexer.crawl_progress.last_gap": (
        "The newest gap when the reconciliation began; it closes no later gap. 0 for other crawls."
    ),
    "view atproto.gaps": (
        "Spans of a relay''s stream in which messages may have been missed. While a gap is open, repos of its shard "
        "may be outdated although they are synchronized."
    ),
    "column atproto.gaps.relay": "The URL of the relay.",
    "column atproto.gaps.shard": "The shard of the process that may have missed messages, as index/count.",
    "column atproto.gaps.reason": "Why messages may have been missed, from a closed set (docs/reasons.md).",
    "column atproto.gaps.opened_at": "When the gap was noticed.",
    "column atproto.gaps.first_seq": "The first seq that may be missing; null if it is not known.",
    "column atproto.gaps.last_seq": "The last seq that may be missing; null if it is not known.",
    "column atproto.gaps.closed_at": (
        "When every repo that may have been affected was found and either equal or desynchronized; null if open."
    ),
    "column atproto.gaps.closed_by": "The host whose repo list was compared with the database to close the gap.",
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

"""Add unverified revs, the relay of buffered events, and stored settings; let a request end a resync in progress.

A resync in progress may have read the repo before the fault that the request is about.
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

STATEMENTS = (
    'alter table indexer.repo add column heard_rev text collate "C"',
    "alter table indexer.kept_event add column relay text not null default ''",
    "alter table indexer.kept_event alter column relay drop default",
    """
    create or replace function atproto.request_resync(did text) returns boolean
    language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
    begin
        update indexer.repo r
        set version = r.version + 1, status = 'desynchronized', attempts = 0, next_attempt_at = null,
            updated_at = now(), reason = 'requested', lease_until = null, buffered_events = 0, buffered_bytes = 0
        where r.did = $1 and r.bucket = indexer.bucket_of($1);
        if not found then
            return false;
        end if;
        delete from indexer.kept_event k where k.did = $1 and k.bucket = indexer.bucket_of($1);
        return true;
    end $$
    """,
    "alter table indexer.record alter column indexed_at set default statement_timestamp()",
    "create table indexer.choice (name text constraint choice_pkey primary key, value text not null)",
    "comment on table indexer.choice is 'Settings that decide what is stored, as the last daemon to start had them.'",
    """
    comment on column indexer.repo.heard_rev is
    'The newest revision of a message that nobody could check, until the next resync is done.'
    """,
    "comment on column indexer.kept_event.relay is 'The relay that it came from, which numbered it.'",
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)

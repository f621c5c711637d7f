"""Add verified handles, beside the handles that DID documents claim.

The handles stored so far are claims, and become due for a check. The default that makes them due is a constant in the
catalog, so no row is rewritten.
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

STATEMENTS = (
    "drop index indexer.identity_handle",
    "alter table indexer.identity rename column handle to claimed_handle",
    """
    alter table indexer.identity
        add column handle text collate "C",
        add column handle_attempts integer not null default 0,
        add column handle_due_at timestamptz default now()
    """,
    """
    alter table indexer.identity
        alter column handle_attempts drop default,
        alter column handle_due_at drop default
    """,
    "create index identity_handle on indexer.identity (handle) where handle <> 'handle.invalid'",
    "create index identity_handle_due on indexer.identity (handle_due_at) where handle_due_at is not null",
    """
    create or replace view atproto.repos as
    select r.did, i.handle, i.pds,
        r.status as sync_status, r.reason as sync_reason,
        r.rev, atproto.cid_text(r.data) as data,
        coalesce(r.hosting_status, case when r.active then 'active' else 'inactive' end) as hosting_status,
        r.takedown, r.active and not r.takedown as visible,
        r.attempts as resync_attempts, r.next_attempt_at, r.last_error, r.synchronized_at, r.updated_at
    from indexer.repo r left join indexer.identity i using (did, bucket)
    """,
)

COMMENTS = {
    "table indexer.identity": "What each DID''s document said when it was last read, and whether its handle holds.",
    "column indexer.identity.claimed_handle": "What the document claims.",
    "column indexer.identity.handle_attempts": "Checks since the claimed handle was new or last held.",
    "column indexer.identity.handle_due_at": "When the claimed handle is checked; null if there is none.",
    "column atproto.repos.handle": (
        "The handle, if its DID document claims it and it leads back to the DID; handle.invalid if there is none such; "
        "null if that could not be checked yet."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

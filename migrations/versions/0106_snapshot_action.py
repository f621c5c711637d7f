"""Let the change log say that all records of a repo follow.

The lock is needed for a moment: existing changes are not checked again, because the constraint only allows more.
"""

from alembic import op

revision = "0106"
down_revision = "0105"
branch_labels = None
depends_on = None

ACTIONS = """
    alter table indexer.change drop constraint change_action, add constraint change_action check (case
        when action in ('create', 'update') then collection is not null and rkey is not null and cid is not null
        when action = 'delete' then collection is not null and rkey is not null and cid is null
        else action in ('hidden', 'visible', 'deleted', 'identity', 'moved', 'snapshot', 'completed')
            and collection is null and rkey is null and cid is null
    end) not valid
    """
COMMENTS = {
    "action": (
        "Of a record: create, update, delete. Of a repo: hidden, visible, deleted, identity, moved, snapshot, "
        "completed."
    ),
    "live": "False for snapshot and completed, and for differences found by a resync.",
}


def upgrade() -> None:
    """Execute the statements one by one, because Citus sends the text of some of them to other nodes."""
    op.execute(ACTIONS)
    for column, text in COMMENTS.items():
        op.execute(f"comment on column atproto.changes.{column} is '{text}'")

"""Store since when a relay withholds an account.

Earlier releases hid such accounts. The first reconciliation shows them again: it asks their hosts before, because the
status of an account itself may have been overwritten by the status of the relay.
"""

from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None

# Each function gets the column at one place. The rest of its text is that of an earlier migration.
CHANGED_FUNCTIONS = {
    "indexer.adapt_public_schema()": (
        "from indexer.repo r left join indexer.identity i",
        ", r.withheld_since from indexer.repo r left join indexer.identity i",
    ),
    "indexer.start_tracking(text, bigint)": (
        "hosting_status = null, erase_at = null",
        "hosting_status = null, withheld_since = null, erase_at = null",
    ),
}
_CHANGE_FUNCTION = """
    do $change$ declare
        before constant text := pg_get_functiondef('{function}'::regprocedure);
        after constant text := replace(before, '{old}', '{new}');
    begin
        assert after <> before, '{function} has an unknown text';
        execute after;
    end $change$
"""
COMMENTS = {
    "column indexer.repo.withheld_since": (
        "When the relay first said that it withholds the account, for the reason in hosting_status; null: it does not."
    ),
    "column atproto.repos.withheld_since": (
        "Since when the relay has said that it does not pass on the account, for a trouble of its own that "
        "hosting_status names, such as throttled. The records stay visible, and may be outdated. Null: it does not "
        "say so."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    op.execute("alter table indexer.repo add column withheld_since timestamptz")
    for function, (old, new) in CHANGED_FUNCTIONS.items():
        op.execute(_CHANGE_FUNCTION.format(function=function, old=old, new=new))
    op.execute("select indexer.adapt_public_schema()")
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

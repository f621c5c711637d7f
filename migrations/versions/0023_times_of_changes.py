"""Give each change a time of its own, so that a time in microseconds is a position in the change log.

The time of a change is the time of its batch plus its place in the batch. A batch gets the time of its commit, or a
later one if a change before it has that time, or if the clock was set back. Batches that are already in the log keep
their times, which may be closer to each other: a position among them is correct to about a millisecond.
"""

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

STATEMENTS = (
    "create sequence indexer.change_time",
    # No batch is numbered from here until the function below is in place.
    "lock table indexer.numbering_lock in share update exclusive mode",
    """
    select setval('indexer.change_time', (extract(epoch from time) * 1000000)::bigint + size - 1)
    from (
        select time, size from indexer.change_batch where first_seq is not null order by first_seq desc limit 1
    ) latest
    """,
    # As before, apart from the time.
    """
    create or replace function indexer.publish() returns trigger
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    declare
        first bigint;
        first_time bigint;
    begin
        lock table indexer.numbering_lock in share update exclusive mode;
        first := nextval('indexer.change_seq');
        perform setval('indexer.change_seq', first + new.size - 1);
        first_time := greatest(
            nextval('indexer.change_time'), (extract(epoch from clock_timestamp()) * 1000000)::bigint
        );
        perform setval('indexer.change_time', first_time + new.size - 1);
        update indexer.change_batch b
        set first_seq = first, time = timestamptz 'epoch' + first_time * interval '1 microsecond'
        where b.id = new.id and b.segment = new.segment;
        perform pg_notify('atproto_changes', '');
        return null;
    end $$
    """,
)

COMMENTS = {
    "sequence indexer.change_time": "The time of the latest change, in microseconds since the Unix epoch.",
    "column indexer.change_batch.time": (
        "When the transaction committed. No change of another batch has a time between it and as many microseconds "
        "later as the batch has changes."
    ),
    "column atproto.changes.time": (
        "When the change was committed here. Equal for the changes of one transaction, and later for later ones."
    ),
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")

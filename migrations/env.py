"""Alembic's entry: runs the migrations in the transaction that `indexer.store.migrate` has begun."""

from alembic import context

from indexer.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table_schema=metadata.schema,
    include_schemas=True,
)
context.run_migrations()

"""Entry point of Alembic: run the migrations in the transaction of the caller.

The caller (`indexer/db/migrate.py`) passes everything in `config.attributes`, so that this package imports nothing
of the application.
"""

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    version_table_schema="indexer",
    include_schemas=True,
    on_version_apply=attributes["on_version_apply"],
)
context.run_migrations()

"""The schema's history, for Alembic. Databases are brought to its head by `indexer.store.migrate`."""

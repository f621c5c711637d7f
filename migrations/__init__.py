"""The migrations of the database schema, for Alembic. `indexer.store.migrate` runs them."""

"""The migrations of the database schema, for Alembic. `indexer.db.migrate` runs them."""

"""Postgres: the tables, their face, and the statements on them."""

from indexer.store.errors import DatabaseError

__all__ = ["DatabaseError"]

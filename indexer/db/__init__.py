"""Access to Postgres: the schema of the tables, and every SQL statement of the program."""

from indexer.db.database import Database
from indexer.db.database_errors import DatabaseError

__all__ = ["Database", "DatabaseError"]

"""The embedded Postgres: a server under the data directory, for installations without a database of their own.

The first process that needs the server starts it, and later ones use the running server. It belongs to none of them:
its parent is a small process (`server_parent`) that stops it when its last user ends. If the server or its parent ends
too early, a user starts it again. The server listens on a Unix socket only. `cluster` manages the files,
whose locks show the parent who uses the server; `server` the use by this process.
"""

from indexer.embedded.server import database, embedded_database_exists, postgres_stage

__all__ = ["database", "embedded_database_exists", "postgres_stage"]

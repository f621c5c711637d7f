"""The embedded Postgres: a server under the data directory, for installations without a database of their own.

The first process that needs the server starts it as its child process and restarts it if it ends. Other processes use
the running server; one of them takes over when the owner ends. The server listens on a Unix socket only. `cluster`
manages the files, `server` manages the process.
"""

from indexer.store.embedded.server import EmbeddedPostgres, database

__all__ = ["EmbeddedPostgres", "database"]

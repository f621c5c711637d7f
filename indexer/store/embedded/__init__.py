"""The embedded Postgres: a server of our own under the data directory, for those who bring none.

Whoever needs it first starts it as its child and keeps it alive; others find it running, and the next of them
takes over when that process ends. It listens on a unix socket and nowhere else. `cluster` knows what is on the
disk and by whom it may be reached, `server` starts, stops and restarts.
"""

from indexer.store.embedded.server import EmbeddedPostgres, database

__all__ = ["EmbeddedPostgres", "database"]

"""The limit that the health check and `indexer status` share."""

MAX_READY_LAG_SECONDS = 60.0
"""Maximum age of the newest stored event of a daemon that is ready."""

"""Citus, and numbers that are larger on a cluster, where statements and commits wait for several nodes."""

BATCH_SIZE = 1_000
"""The maximum number of messages in a live batch."""
RESYNC_TURNS = 32
"""Exports that are written at a time: more repos share the transactions of more shards."""
GATHERING_SECONDS = 0.1
"""Time to wait for more free resync workers, so that one claim serves several."""

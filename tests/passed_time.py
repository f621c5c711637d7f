"""Statements that change the database as if time passed."""

EXPIRE_LEASES = "update indexer.repo set lease_until = 'epoch' where sync_status = 'in-progress'"
"""The leases of killed daemons expire."""
EXPIRE_WAITS = """
    update indexer.repo set next_attempt_at = null
    where sync_status = 'desynchronized' and next_attempt_at > now() and next_attempt_at < now() + interval '2 hours'
"""
"""Postponed attempts are due. A longer wait is one that the daemon must end by itself."""

"""Periodic work, one file each.

`run` suppresses errors of the database, and tries again. The other methods that use the database raise `DatabaseError`
if it is unavailable, and retry nothing themselves.
"""

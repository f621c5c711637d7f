"""Periodic work, one file each.

`run` of a stage suppresses errors of the database, and tries again. The other methods that use the database raise
`DatabaseError` if it is unavailable, except for a single account of several, and retry nothing themselves.
"""

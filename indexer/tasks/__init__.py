"""Periodic work, one file each."""

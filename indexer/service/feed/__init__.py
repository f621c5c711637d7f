"""Feeds of the change log over HTTP, for clients of other sync services."""

"""Requests to a PDS or relay about repos: exports, the latest commit, and lists (docs/protocol.md#exports)."""

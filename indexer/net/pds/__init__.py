"""Requests to a PDS or relay about repos: exports, the latest commit, and lists (docs/protocol.md#exports)."""

from indexer.net.pds.pds_client import LARGE_BYTES, ExportDownload, PdsClient

__all__ = ["LARGE_BYTES", "ExportDownload", "PdsClient"]

"""Requests to a PDS or relay about repos: exports, the latest commit, and lists (docs/protocol.md#exports)."""

from indexer.pds.export_download import ExportDownload
from indexer.pds.native_reader import reader_factory
from indexer.pds.pds_client import LARGE_BYTES, PdsClient
from indexer.pds.spool import Spool

__all__ = ["LARGE_BYTES", "ExportDownload", "PdsClient", "Spool", "reader_factory"]

"""What hosts serve of a repo: exports, streamed to disk, and the small answers about it (spec §2.2)."""

from indexer.pds.client import LARGE_BYTES, PdsClient
from indexer.pds.spool import Spool

__all__ = ["LARGE_BYTES", "PdsClient", "Spool"]

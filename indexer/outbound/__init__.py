"""Every outbound request of the daemon: to public addresses only, bounded in bytes, time and rate (spec §7.1)."""

from indexer.outbound.client import Outbound, Patience, Response, Stream

__all__ = ["Outbound", "Patience", "Response", "Stream"]

"""Every outbound request of the daemon: to public addresses only, bounded in bytes, time and rate (spec §7.1)."""

from indexer.outbound.client import Outbound, Patience, Response, Stream, host_of
from indexer.outbound.hosts import RESULTS, Hosts, HostState, Rates

__all__ = ["RESULTS", "HostState", "Hosts", "Outbound", "Patience", "Rates", "Response", "Stream", "host_of"]

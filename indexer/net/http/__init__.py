"""HTTP requests to other hosts, limited in address, size, time and rate (docs/protocol.md#outbound-requests)."""

from indexer.net.http.host_limits import HostLimits, HostPauses, RateLimits, registered_domain
from indexer.net.http.http_client import OutboundClient, OutboundSettings, Response, Timeouts, host_of

__all__ = [
    "HostLimits",
    "HostPauses",
    "OutboundClient",
    "OutboundSettings",
    "RateLimits",
    "Response",
    "Timeouts",
    "host_of",
    "registered_domain",
]

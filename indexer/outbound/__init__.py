"""HTTP requests to other hosts, limited in address, size, time and rate (docs/protocol.md#outbound-requests)."""

from indexer.outbound.host_limits import REQUEST_RESULTS, HostLimits, HostPauses, HostState, RateLimits
from indexer.outbound.http_client import OutboundClient, OutboundSettings, Response, ResponseStream, Timeouts, host_of
from indexer.outbound.registered_domain import registered_domain

__all__ = [
    "REQUEST_RESULTS",
    "HostLimits",
    "HostPauses",
    "HostState",
    "OutboundClient",
    "OutboundSettings",
    "RateLimits",
    "Response",
    "ResponseStream",
    "Timeouts",
    "host_of",
    "registered_domain",
]

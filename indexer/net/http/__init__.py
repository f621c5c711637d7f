"""HTTP requests to other hosts, limited in address, size, time and rate (docs/protocol.md#outbound-requests)."""

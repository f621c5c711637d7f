"""Identities: resolve DIDs to signing keys, hosts and handles, and verify handles (docs/protocol.md#identity)."""

from indexer.identity.did_resolver import METHODS, DidResolver, Method, method_of, web_host
from indexer.identity.dns_records import DnsRecords
from indexer.identity.handle_verifier import HandleVerifier
from indexer.identity.identity_cache import (
    FOUND_IN,
    REFRESH_CAUSES,
    REFRESH_RESULTS,
    CachedIdentity,
    IdentityCache,
    IdentityLifetimes,
    LookupTotals,
)

__all__ = [
    "FOUND_IN",
    "METHODS",
    "REFRESH_CAUSES",
    "REFRESH_RESULTS",
    "CachedIdentity",
    "DidResolver",
    "DnsRecords",
    "HandleVerifier",
    "IdentityCache",
    "IdentityLifetimes",
    "LookupTotals",
    "Method",
    "method_of",
    "web_host",
]

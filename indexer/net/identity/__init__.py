"""Identities: resolve DIDs to signing keys, hosts and handles, and verify handles (docs/protocol.md#identity)."""

from indexer.net.identity.did_resolver import METHODS, DidResolver, Method, method_of, web_host
from indexer.net.identity.handle_verifier import HandleVerifier, dids_in_dns
from indexer.net.identity.identity_cache import (
    CachedIdentity,
    IdentityCache,
    IdentityLifetimes,
    LookupTotals,
)

__all__ = [
    "METHODS",
    "CachedIdentity",
    "DidResolver",
    "HandleVerifier",
    "IdentityCache",
    "IdentityLifetimes",
    "LookupTotals",
    "Method",
    "dids_in_dns",
    "method_of",
    "web_host",
]

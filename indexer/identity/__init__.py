"""Identities: DIDs to keys, hosts and handles."""

from indexer.identity.cache import CAUSES, FOUND_IN, REFRESHES, Freshness, Identities, Known
from indexer.identity.handle import Handles
from indexer.identity.resolver import METHODS, Method, Resolver, method_of

__all__ = [
    "CAUSES",
    "FOUND_IN",
    "METHODS",
    "REFRESHES",
    "Freshness",
    "Handles",
    "Identities",
    "Known",
    "Method",
    "Resolver",
    "method_of",
]

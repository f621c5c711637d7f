"""Identities: DIDs to keys, hosts and handles."""

from indexer.identity.cache import Freshness, Identities, Known
from indexer.identity.handle import INVALID_HANDLE, Handles
from indexer.identity.resolver import Resolver

__all__ = ["INVALID_HANDLE", "Freshness", "Handles", "Identities", "Known", "Resolver"]

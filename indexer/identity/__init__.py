"""Identities: DIDs to keys, hosts and handles."""

from indexer.identity.cache import Identities, Known
from indexer.identity.resolver import Resolver

__all__ = ["Identities", "Known", "Resolver"]

"""A record-level sync indexer for the AT Protocol. docs/architecture.md is the overview."""

from importlib.metadata import version

__version__ = version("atproto-indexer")

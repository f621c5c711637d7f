"""A record-level sync indexer for the AT Protocol. Start reading at docs/architecture.md."""

from importlib.metadata import version

__version__ = version("indexer")

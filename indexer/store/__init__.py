"""Postgres: the tables, their face, and the statements on them."""

from indexer.store.errors import DatabaseError
from indexer.store.export import ExportedRecord
from indexer.store.letters import Letter, LetterGoneError
from indexer.store.queries import Counts
from indexer.store.records import Reading, StoredRecord
from indexer.store.resync import ResyncTransaction
from indexer.store.retention import Keep, ReaderState
from indexer.store.store import RESERVED, Store

__all__ = [
    "RESERVED",
    "Counts",
    "DatabaseError",
    "ExportedRecord",
    "Keep",
    "Letter",
    "LetterGoneError",
    "ReaderState",
    "Reading",
    "ResyncTransaction",
    "Store",
    "StoredRecord",
]

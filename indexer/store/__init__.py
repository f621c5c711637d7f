"""Access to Postgres: the schema of the tables, and every SQL statement of the program."""

from indexer.store.change_log_segments import ConsumerState, RetentionPolicy
from indexer.store.collection_export import ExportedRecord
from indexer.store.consistent_read import ConsistentRead, StoredRecord
from indexer.store.database_errors import DatabaseError
from indexer.store.dead_letters import DeadLetterGoneError, StoredDeadLetter
from indexer.store.report_queries import Counts
from indexer.store.resync_transaction import ResyncTransaction
from indexer.store.store import RESERVED_CONNECTIONS, Store

__all__ = [
    "RESERVED_CONNECTIONS",
    "ConsistentRead",
    "ConsumerState",
    "Counts",
    "DatabaseError",
    "DeadLetterGoneError",
    "ExportedRecord",
    "ResyncTransaction",
    "RetentionPolicy",
    "Store",
    "StoredDeadLetter",
    "StoredRecord",
]

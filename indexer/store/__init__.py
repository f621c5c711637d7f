"""Access to Postgres: the schema of the tables, and every SQL statement of the program."""

from indexer.store.change_log_segments import ChangeLogState, ConsumerState, RetentionPolicy, TrimPlan
from indexer.store.collection_export import ExportedRecord
from indexer.store.connections import RESERVED_CONNECTIONS
from indexer.store.consistent_read import ConsistentRead, RecordRow
from indexer.store.copy_records import NewRepoRecords, RecordsExistError
from indexer.store.database_check import DatabaseCheck
from indexer.store.database_errors import DatabaseError
from indexer.store.dead_letters import DeadLetterGoneError, StoredDeadLetter
from indexer.store.erase_records import ErasedBatch
from indexer.store.lexicon_indexes import LexiconIndex, UnknownColumnError
from indexer.store.lexicon_rows import AddedLexicon, AddedState, StoredLexicon, ViewInUseError
from indexer.store.link_progress import LinkProgress, LinkProgressState
from indexer.store.new_repos_transaction import NewReposTransaction
from indexer.store.report_queries import Counts
from indexer.store.resync_transaction import ResyncTransaction
from indexer.store.scope_changes import NarrowedPage
from indexer.store.scope_row import CollectionProgress
from indexer.store.status_queries import DeliveryState, RejectionSummary
from indexer.store.store import Store

__all__ = [
    "RESERVED_CONNECTIONS",
    "AddedLexicon",
    "AddedState",
    "ChangeLogState",
    "CollectionProgress",
    "ConsistentRead",
    "ConsumerState",
    "Counts",
    "DatabaseCheck",
    "DatabaseError",
    "DeadLetterGoneError",
    "DeliveryState",
    "ErasedBatch",
    "ExportedRecord",
    "LexiconIndex",
    "LinkProgress",
    "LinkProgressState",
    "NarrowedPage",
    "NewRepoRecords",
    "NewReposTransaction",
    "RecordRow",
    "RecordsExistError",
    "RejectionSummary",
    "ResyncTransaction",
    "RetentionPolicy",
    "Store",
    "StoredDeadLetter",
    "StoredLexicon",
    "TrimPlan",
    "UnknownColumnError",
    "ViewInUseError",
]

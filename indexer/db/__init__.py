"""Access to Postgres: the schema of the tables, and every SQL statement of the program."""

from indexer.db.change_log_segments import ChangeLogState, ConsumerState, RetentionPolicy, TrimPlan
from indexer.db.collection_export import ExportedRecord
from indexer.db.connections import RESERVED_CONNECTIONS
from indexer.db.consistent_read import ConsistentRead, RecordRow
from indexer.db.database import Database
from indexer.db.database_errors import DatabaseError
from indexer.db.dead_letters import DeadLetterGoneError, StoredDeadLetter
from indexer.db.erasure import ErasedBatch
from indexer.db.lexicon_indexes import LexiconIndex, UnknownColumnError
from indexer.db.lexicons import AddedLexicon, AddedState, StoredLexicon, ViewInUseError
from indexer.db.links import LinkProgress, LinkProgressState
from indexer.db.reports import Counts, DatabaseState, RejectionSummary
from indexer.db.resync_transaction import NewReposTransaction, ResyncTransaction
from indexer.db.scope import CollectionProgress
from indexer.db.scope_changes import NarrowedPage
from indexer.db.write import NewRepoRecords, RecordsExistError

__all__ = [
    "RESERVED_CONNECTIONS",
    "AddedLexicon",
    "AddedState",
    "ChangeLogState",
    "CollectionProgress",
    "ConsistentRead",
    "ConsumerState",
    "Counts",
    "Database",
    "DatabaseError",
    "DatabaseState",
    "DeadLetterGoneError",
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
    "StoredDeadLetter",
    "StoredLexicon",
    "TrimPlan",
    "UnknownColumnError",
    "ViewInUseError",
]

"""The errors that this program raises on purpose, by who has to act.

IndexerError
├── UpstreamError            another host broke a rule: count and reject its message, then continue
├── PlcLogError              a log of did:plc operations proves nothing: use nothing of it, ask the next directory
├── UnavailableError         a check or a fetch was not possible now: try again later
├── RefusedWriteError        the database cannot store these values: store less of them, then continue
├── BrokenInvariantError     this program broke one of its own rules: stop the process
├── LayoutChangedError       the database was distributed meanwhile: stop the process, which starts again
├── LexiconError             a document is not a lexicon, or nobody publishes one: one line, exit code 2
├── InvalidScopeError        the caller asked for a scope that cannot be: show the message, change nothing
└── SettingsError            the operator has to correct something: one line, exit code 2
    └── SchemaVersionError   the operator has to migrate the database
"""

from indexer.reasons import FetchFailure, LogFlaw, Rejection


class IndexerError(Exception):
    """Base class of all errors that this program raises on purpose."""


class UpstreamError(IndexerError):
    """A message, a file or bytes from another host break a rule of the protocol.

    Attributes:
        reason: The reason from a closed set, for metrics and columns.
        detail: More about this case, for people.
    """

    def __init__(self, reason: Rejection, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class PlcLogError(IndexerError):
    """A log of did:plc operations, or one of them, breaks a rule of the method.

    Attributes:
        reason: The reason from a closed set, for metrics.
        detail: More about this case, for people.
    """

    def __init__(self, reason: LogFlaw, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class UnavailableError(IndexerError):
    """A host or the database did not answer, or its answer decides nothing.

    Attributes:
        reason: The reason from a closed set, for metrics and columns.
        detail: More about this case, for people.
        retry_after: The minimum number of seconds to wait, if the other side named one.
        host: The host that gets no requests from any part of the program for `retry_after` seconds, if any.
    """

    def __init__(
        self, reason: FetchFailure, detail: str = "", *, retry_after: float | None = None, host: str | None = None
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
        self.retry_after = retry_after
        self.host = host


class RefusedWriteError(IndexerError):
    """The database answers, and cannot store what it was given. The same write would fail again."""


class BrokenInvariantError(IndexerError):
    """This program broke one of its own rules. Continuing could store wrong data, so the process stops."""


class LayoutChangedError(IndexerError):
    """The database was distributed while this process ran, so that its shard has other buckets now."""

    def __init__(self) -> None:
        super().__init__("The database was distributed while this process ran. Start the process again.")


class LexiconError(IndexerError):
    """A document is not a lexicon, or nobody publishes the lexicon of an NSID. The message names it in one line."""


class ViewInUseError(IndexerError):
    """A typed view cannot be changed, because objects of users depend on it. The message names them."""

    def __init__(self, reason: str) -> None:
        action = "drop what depends on the view, run the command again, and create it again"
        super().__init__(f"nothing was changed: {reason}; {action}")


class SettingsError(IndexerError):
    """A setting is unknown or has a bad value. The message is one line that names it."""


class InvalidScopeError(SettingsError):
    """The requested scope names something that is not a collection or a DID, or no collection. Nothing changed."""


class NoScopeError(SettingsError):
    """Neither the database nor a setting says what to index."""

    def __init__(self) -> None:
        super().__init__("Nothing says what to index. Set INDEXER_TRACK, or use `indexer run --lexicon NSID`.")


class SchemaVersionError(SettingsError):
    """This release cannot use the version of the database schema.

    Attributes:
        database: The version of the database schema; None if there is no schema.
        release: The version that this release needs.
    """

    def __init__(self, database: str | None, release: str, first: str) -> None:
        """Describe the versions; `first` is the oldest one that can be upgraded."""
        found = "has no schema" if database is None else f"schema is version {database}"
        action = "Run `indexer migrate`."
        if database is not None and database > release:
            action = "Use the release that upgraded it, or a newer one."
        elif database is not None and database < first:
            action = f"Versions before {first} are of unreleased commits: use an empty database."
        super().__init__(f"The database {found}; this release needs {release}. {action}")
        self.database = database
        self.release = release

"""The error tree, by whose fault it is.

IndexerError
├── UpstreamError      somebody else broke a rule: count it, refuse it, go on
├── UnavailableError   it could not be checked or fetched just now: try again later
├── BrokenInvariantError   we broke a rule of our own: crash loudly
└── SettingsError      the operator gave a bad setting: one line, exit code 2
"""

from indexer.reasons import FetchFailure, Rejection


class IndexerError(Exception):
    """Root of all errors that this program raises on purpose."""


class UpstreamError(IndexerError):
    """Bytes or a message from outside break a rule of the protocol.

    `reason` is from a closed set and is what gets counted; `detail` is for people.
    """

    def __init__(self, reason: Rejection, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class UnavailableError(IndexerError):
    """Something outside could not be asked, or gave an answer that settles nothing.

    `retry_after` is the least number of seconds to wait when the other side named one, `host` the other side if it is
    to be left alone for so long, by everybody.
    """

    def __init__(
        self, reason: FetchFailure, detail: str = "", *, retry_after: float | None = None, host: str | None = None
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
        self.retry_after = retry_after
        self.host = host


class BrokenInvariantError(IndexerError):
    """Our own promise is broken; going on would let the database lie."""


class SettingsError(IndexerError):
    """A setting is unknown or has a bad value; the message is one line that names it."""

"""Every reason that this program reports, in closed sets. docs/reasons.md is generated from this module."""

from enum import StrEnum
from typing import Self


class DescribedEnum(StrEnum):
    """Values for metric labels and columns, each with a sentence for people in `text`."""

    text: str

    def __new__(cls, value: str, text: str) -> Self:
        """Create a member that equals `value`."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


class Rejection(DescribedEnum):
    """Why a message or an export is rejected by its own fault. Except for `STORE_FAILED`, this changes nothing."""

    FRAME_TOO_LARGE = "frame-too-large", "The websocket message has too many bytes or items."
    FRAME_MALFORMED = "frame-malformed", "The message is not a header and a map in DAG-CBOR."
    FIELD_INVALID = "field-invalid", "A required field is missing or invalid."
    SEQ_NOT_INCREASING = "seq-not-increasing", "The sequence number is below the previous one."
    BLOCKS_TOO_LARGE = "blocks-too-large", "The blocks exceed the limit of the protocol."
    TOO_MANY_OPS = "too-many-ops", "The commit has too many operations."
    WRONG_HOST = "wrong-host", "The PDS does not host the account."
    FUTURE_REV = "future-rev", "The rev is too far in the future."
    CAR_MALFORMED = "car-malformed", "The blocks are not a well-formed CAR v1 file within the limits."
    BLOCK_HASH_MISMATCH = "block-hash-mismatch", "The bytes of a block do not hash to its CID."
    COMMIT_MISSING = "commit-missing", "The CAR lacks the commit that it names as its root."
    COMMIT_MISMATCH = "commit-mismatch", "The root of the CAR is not the commit that the message names."
    COMMIT_MALFORMED = "commit-malformed", "The commit is not a canonical version 3 commit object."
    ENVELOPE_MISMATCH = "envelope-mismatch", "Message and signed commit name different repos or revs."
    SIGNATURE_INVALID = "signature-invalid", "The account's signing key does not verify the signature."
    NO_SIGNING_KEY = "no-signing-key", "The identity does not exist or has no usable signing key."
    NODE_MALFORMED = "node-malformed", "A tree node is not canonical, out of order, or on the wrong layer."
    OPS_MISMATCH = "ops-mismatch", "The operations contradict each other, the tree, or the blocks."
    STORE_FAILED = "store-failed", "The database cannot store the effects of the message; its repo is fetched again."


class Desync(DescribedEnum):
    """Why a repo is not synchronized: the column `sync_reason`."""

    NEW = "new", "The repo is new; its export has not been fetched yet."
    REQUESTED = "requested", "An operator or an AppView requested a resync."
    CHAIN_BREAK = "chain-break", "A valid commit does not follow the stored rev: an event was missed."
    SYNC_EVENT = "sync-event", "An authentic #sync announced a state that differs from the stored one."
    EQUIVOCATION = "equivocation", "Two authentic states with the same rev were received."
    INVERSION = "inversion", "Inverting a commit's operations does not give its prevData."
    UNDECIDABLE = "undecidable", "A commit has too few blocks to invert its operations."
    STRUCTURE = "structure", "The tree nodes of a commit break the rules of the MST."
    OPS = "ops", "The operations of a commit contradict each other or its tree."
    RECORD_MISSING = "record-missing", "A commit or the export lacks the block of a record."
    LENIENT_COMMIT = (
        "lenient-commit",
        "A commit with an undecidable inversion was applied; the records are compared with an export.",
    )
    LEGACY = "legacy", "A commit has no prevData or prev, which would prove that its operations are complete."
    IDENTITY = "identity", "The signing key for an event could not be fetched."
    REACTIVATED = "reactivated", "The account became active again; commits may have been missed meanwhile."
    BUFFER_OVERFLOW = "buffer-overflow", "More events arrived during the resync than its buffer holds."
    DRAIN_BREAK = "drain-break", "The buffered events do not follow the fetched export."
    STALE_EXPORT = "stale-export", "Every available export is older than a rev that was received or stored."
    BEHIND = "behind", "A relay or host has a newer rev that the stream did not deliver."
    HINTED = "hinted", "A Jetstream or a request says that the repo has changed, which proves nothing."
    STATUS_UNKNOWN = (
        "status-unknown",
        "The relay, or with a Jetstream the host, does not tell the state of the repo.",
    )
    WITHHELD = "withheld", "The relay does not pass on the account, for a reason of its own."
    SCOPE_WIDENED = "scope-widened", "Collections were added to the scope."
    ERASED = "erased", "The records were erased: the account or its DID stayed deleted, or the repo was untracked."
    STORE_FAILED = "store-failed", "The database could not store the effects of a message."
    LEASE_EXPIRED = "lease-expired", "The resync worker stopped without finishing."


class FetchFailure(DescribedEnum):
    """Why a fetch failed: the column `last_failure`, and the first word of `last_error`."""

    UNREACHABLE = "unreachable", "The connection to the host failed or broke."
    NO_SUCH_HOST = "no-such-host", "The host name does not exist or has no address."
    TIMEOUT = "timeout", "The host took too long or sent too slowly."
    HTTP_STATUS = "http-status", "The host answered with an error status."
    THROTTLED = "throttled", "The host asked for a pause."
    HOST_PAUSED = "host-paused", "Requests to the host are paused: too many failed in a row."
    TOO_LARGE = "too-large", "The response exceeds the limit for its kind."
    REFUSED_ADDRESS = "refused-address", "Connections to this address are not allowed."
    BAD_ANSWER = "bad-answer", "The response has the wrong form."
    REPO_NOT_FOUND = "repo-not-found", "The host does not know the repo."
    REPO_TAKENDOWN = "repo-takendown", "The host has taken the repo down."
    REPO_SUSPENDED = "repo-suspended", "The host has suspended the repo."
    REPO_DEACTIVATED = "repo-deactivated", "The owner of the repo has deactivated it."
    IDENTITY_MISSING = "identity-missing", "The DID does not exist, or its document has no usable key or PDS."
    IDENTITY_GONE = "identity-gone", "The directory does not know the DID, or has tombstoned it."
    IDENTITY_DOUBTFUL = "identity-doubtful", "The directory denies a DID that it knew before, and is asked again."
    IDENTITY_UNAVAILABLE = "identity-unavailable", "No directory gave a usable answer."
    NEW_ACCOUNTS = "new-accounts", "The host's domain has more new accounts than INDEXER_NEW_ACCOUNTS_PER_HOST allows."
    EXPORT_REJECTED = "export-rejected", "The export broke a rule; the reason follows."
    EXPORT_INCOMPLETE = "export-incomplete", "The export was cut off, or lacks tree nodes."
    EXPORT_LACKS_RECORDS = "export-lacks-records", "The export lacks only blocks of records."
    EXPORT_STALE = "export-stale", "The export is older than a rev that was received or stored."
    SPOOL_FULL = "spool-full", "The spool directory is full or cannot be written."
    SPOOL_UNREADABLE = "spool-unreadable", "A spool file cannot be read: its disk has an error."
    NOT_STORABLE = "not-storable", "The database cannot store the records of the export."

    @property
    def is_permanent(self) -> bool:
        """True if no retry follows until an event unparks the repo."""
        return self in _PERMANENT

    @property
    def counts_as_attempt(self) -> bool:
        """True if the failure is the repo's own, so that its back-off grows."""
        return self not in _NOT_THE_REPOS_OWN


_PERMANENT = frozenset(
    {
        FetchFailure.REPO_NOT_FOUND,
        FetchFailure.REPO_TAKENDOWN,
        FetchFailure.REPO_SUSPENDED,
        FetchFailure.REPO_DEACTIVATED,
        FetchFailure.IDENTITY_MISSING,
        FetchFailure.IDENTITY_GONE,
    }
)
_NOT_THE_REPOS_OWN = frozenset(
    {
        FetchFailure.THROTTLED,
        FetchFailure.HOST_PAUSED,
        FetchFailure.SPOOL_FULL,
        FetchFailure.SPOOL_UNREADABLE,
        FetchFailure.IDENTITY_DOUBTFUL,
        FetchFailure.IDENTITY_UNAVAILABLE,
        FetchFailure.NEW_ACCOUNTS,
    }
)


class GapReason(DescribedEnum):
    """Why messages of a relay may have been missed: the column `reason` of `atproto.gaps`."""

    CURSOR_OUTDATED = "cursor-outdated", "The relay no longer has all messages after the cursor."
    CURSOR_RESET = "cursor-reset", "An operator has reset the cursor (`indexer cursor reset`)."
    CURSOR_UNPROVEN = "cursor-unproven", "The relay sent neither the message at the cursor again nor a later one."
    NO_CURSOR = "no-cursor", "The stream was entered without a usable cursor of this relay."
    SEQUENCE_RESTARTED = "sequence-restarted", "The relay started a new sequence of numbers."


class LogFlaw(DescribedEnum):
    """Why a log of did:plc operations is not believed. Nothing of it is used."""

    MALFORMED = "log-malformed", "The log, or an operation in it, does not have the form of the specification."
    TOO_LARGE = "log-too-large", "The log, or an operation in it, exceeds a limit of this program."
    OTHER_DID = "log-other-did", "The hash of the first operation, or an entry, is that of another DID."
    BROKEN_CHAIN = "log-broken-chain", "An operation does not follow one that is in force."
    SIGNATURE_INVALID = "log-signature-invalid", "No rotation key that may sign an operation verifies its signature."
    RECOVERY_LATE = "log-recovery-late", "An operation replaces another one after 72 hours, or is not the newest one."
    INCONSISTENT = (
        "log-inconsistent",
        "The directory's CIDs or marks of nullified operations contradict the operations.",
    )

"""Every reason this program gives, in three closed sets. docs/reasons.md is held to this file by a test."""

from enum import StrEnum
from typing import Self


class _Reason(StrEnum):
    """A value for counters and columns, with the sentence a person reads."""

    text: str

    def __new__(cls, value: str, text: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


class Rejection(_Reason):
    """Why a message or an export was refused, by its own fault. It changed nothing."""

    FRAME_TOO_LARGE = "frame-too-large", "The websocket message is over the frame limit."
    FRAME_MALFORMED = "frame-malformed", "The message is not a header and a payload map in DAG-CBOR."
    FIELD_INVALID = "field-invalid", "A field that we use is missing, of the wrong type, or of the wrong syntax."
    SEQ_NOT_INCREASING = "seq-not-increasing", "The sequence number is not above the one before it on this connection."
    BLOCKS_TOO_LARGE = "blocks-too-large", "The CAR slice is over the protocol's limit."
    TOO_MANY_OPS = "too-many-ops", "The commit has more operations than the protocol allows."
    WRONG_HOST = "wrong-host", "The stream is a PDS's own, and the account is hosted elsewhere."
    FUTURE_REV = "future-rev", "The revision lies further in the future than clocks may drift."
    CAR_MALFORMED = "car-malformed", "The blocks are not a well-formed CAR v1 file within the limits."
    BLOCK_HASH_MISMATCH = "block-hash-mismatch", "A block's bytes don't hash to its CID."
    COMMIT_MISSING = "commit-missing", "The CAR doesn't hold the commit that it names as its root."
    COMMIT_MISMATCH = "commit-mismatch", "The CAR's root is not the commit that the message names."
    COMMIT_MALFORMED = "commit-malformed", "The commit is not a canonical version 3 commit object."
    ENVELOPE_MISMATCH = "envelope-mismatch", "The message and the signed commit name another repo or revision."
    SIGNATURE_INVALID = "signature-invalid", "The signature is not by the account's current key over these bytes."
    NO_SIGNING_KEY = "no-signing-key", "The account's identity is gone or holds no usable atproto signing key."
    NODE_MALFORMED = "node-malformed", "A tree node is not canonical, out of order, or on the wrong layer."
    OPS_MISMATCH = "ops-mismatch", "The operations contradict each other, the tree, or the blocks."


class Desync(_Reason):
    """Why a repo is not synchronized: the column `sync_reason`."""

    NEW = "new", "Seen for the first time; its export has not been fetched yet."
    REQUESTED = "requested", "An operator or an AppView asked for a resync."
    CHAIN_BREAK = "chain-break", "A valid commit doesn't follow the revision that we hold: something was missed."
    SYNC_EVENT = "sync-event", "An authentic #sync announced another state than ours."
    EQUIVOCATION = "equivocation", "Two authentic states with one revision were seen."
    INVERSION = "inversion", "Undoing an authentic commit's operations doesn't give the tree it says it came from."
    UNDECIDABLE = "undecidable", "An authentic commit came with too few blocks to undo its operations."
    STRUCTURE = "structure", "An authentic commit's tree nodes break the rules of the tree."
    OPS = "ops", "An authentic commit's operations contradict each other or its tree."
    RECORD_MISSING = "record-missing", "A record's block was missing, in an authentic commit or in the export."
    LEGACY = "legacy", "An authentic commit lacks prevData or prev, so it can't be proven complete."
    IDENTITY = "identity", "An event could not be checked because the account's key could not be had."
    REACTIVATED = "reactivated", "The account became active again; its state may have moved on meanwhile."
    BUFFER_OVERFLOW = "buffer-overflow", "More events arrived during the resync than may be kept."
    DRAIN_BREAK = "drain-break", "The events kept during the resync don't follow the export that was fetched."
    STALE_EXPORT = "stale-export", "Every export to be had is older than a state that we have seen or hold."
    BEHIND = "behind", "A relay lists a newer revision than ours, and the stream didn't bring it."
    ERASED = "erased", "The account stayed deleted for the time of grace, and its records were erased."
    LEASE_EXPIRED = "lease-expired", "The worker that held the repo stopped without finishing."


class FetchFailure(_Reason):
    """Why a fetch came to nothing: the first word of the column `last_error`."""

    UNREACHABLE = "unreachable", "The host could not be connected to, or the connection broke."
    NO_SUCH_HOST = "no-such-host", "The host's name doesn't exist, or has no address."
    TIMEOUT = "timeout", "The host took too long, or sent too slowly."
    HTTP_STATUS = "http-status", "The host answered with an error status."
    THROTTLED = "throttled", "The host asked us to come back later."
    HOST_PAUSED = "host-paused", "Requests to the host failed one after the other; it is left alone for a while."
    TOO_LARGE = "too-large", "The answer is over the limit for its kind."
    REFUSED_ADDRESS = "refused-address", "The address is not one that we may connect to."
    BAD_ANSWER = "bad-answer", "The answer is not what was asked for."
    REPO_NOT_FOUND = "repo-not-found", "The host doesn't know the repo."
    REPO_TAKENDOWN = "repo-takendown", "The host has taken the repo down."
    REPO_SUSPENDED = "repo-suspended", "The host has suspended the repo."
    REPO_DEACTIVATED = "repo-deactivated", "The repo's owner has deactivated it."
    IDENTITY_MISSING = "identity-missing", "The DID doesn't exist, or names no key or PDS that we can use."
    IDENTITY_GONE = "identity-gone", "The directory doesn't know the DID, or not any more."
    IDENTITY_UNAVAILABLE = "identity-unavailable", "The directory could not be asked just now."
    EXPORT_REJECTED = "export-rejected", "The export broke a rule; the reason follows."
    EXPORT_INCOMPLETE = "export-incomplete", "The export was cut, or lacks tree nodes that it refers to."
    EXPORT_LACKS_RECORDS = "export-lacks-records", "The export has all tree nodes, and lacks blocks of records."
    EXPORT_STALE = "export-stale", "The export is older than a state that we have seen or hold."
    SPOOL_FULL = "spool-full", "The spool directory has no room for the export, or can't be written."

    @property
    def parks(self) -> bool:
        """Whether the failure is definite: no retry until something wakes the repo."""
        return self in _PARKING

    @property
    def spares(self) -> bool:
        """Whether it is no fault of the repo, and costs it no attempt."""
        return self in _SPARING


_PARKING = frozenset(
    {
        FetchFailure.REPO_NOT_FOUND,
        FetchFailure.REPO_TAKENDOWN,
        FetchFailure.REPO_SUSPENDED,
        FetchFailure.REPO_DEACTIVATED,
        FetchFailure.IDENTITY_MISSING,
        FetchFailure.IDENTITY_GONE,
    }
)
_SPARING = frozenset(
    {
        FetchFailure.THROTTLED,
        FetchFailure.HOST_PAUSED,
        FetchFailure.SPOOL_FULL,
        FetchFailure.IDENTITY_UNAVAILABLE,
    }
)

"""The stored state of identities and hosts: DID documents, the verification of handles, and the state of hosts."""

from dataclasses import dataclass, replace
from hashlib import sha256

from indexer.reasons import FetchFailure

INVALID_HANDLE = "handle.invalid"
"""Replaces a claimed handle that failed verification (docs/protocol.md#handles)."""

CERTAIN_DENIALS = 3
"""Denials in a row after which it is certain that a DID is gone. A tombstone is certain at once."""

DENIAL_SECONDS = 7_200.0
"""A denial counts only if it comes this long after the last one that counted."""

FINGERPRINT_BYTES = 4


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """The identity that the last successful lookup of a DID, or the last verified operation in an export, gave.

    While the directory denies the DID (`denials` > 0), the other fields are those of the last document.
    """

    did: str
    handle: str | None  # the handle that the DID document claims, not verified
    pds: str | None  # the base URL of the account's PDS
    signing_key: str | None  # a did:key
    fetched_at: float  # when the lookup asked, or the directory accepted the operation, in Unix seconds
    stale: bool = False  # True if the identity may have changed since then
    problem: str | None = None  # why the DID has no usable identity; None if it has one
    denials: int = 0  # how often in a row the directory denied the DID, hours apart; 0 if it knows the DID
    denied_at: float | None = None  # the time of the last denial that counted, in Unix seconds
    chain: bytes | None = None  # fingerprint of the last verified operation in an export, and the packed `PlcChain`
    handle_wanted: bool = True  # False if the handle is not verified, because the repo is not tracked

    @property
    def fingerprint(self) -> bytes:
        """A hash of key, host and handle, of `FINGERPRINT_BYTES`."""
        return sha256(f"{self.signing_key} {self.pds} {self.handle}".encode()).digest()[:FINGERPRINT_BYTES]

    @property
    def is_exported(self) -> bool:
        """True if it equals that of the last verified operation. Then it is as recent as the reading of the export."""
        return self.chain is not None and self.chain[:FINGERPRINT_BYTES] == self.fingerprint

    @property
    def gone(self) -> bool:
        """True if it is certain that the directory does not know the DID any more."""
        return self.denials >= CERTAIN_DENIALS

    @property
    def refresh_at(self) -> float | None:
        """When to look the identity up again although no message asks for it (Unix seconds); None: never."""
        if self.stale:
            return self.fetched_at
        if self.denied_at is None or self.gone or self.signing_key is None:
            return None
        return self.denied_at + DENIAL_SECONDS


def add_denial(known: StoredIdentity, denial: StoredIdentity) -> StoredIdentity:
    """Return the identity after a denial by the directory: the known document, with the denial counted."""
    counted = replace(known, fetched_at=denial.fetched_at, stale=denial.stale, problem=denial.problem)
    recent = known.denied_at is not None and denial.fetched_at < known.denied_at + DENIAL_SECONDS
    if known.gone or (recent and not denial.gone):
        return counted
    return replace(counted, denials=max(known.denials + 1, denial.denials), denied_at=denial.fetched_at)


@dataclass(frozen=True, slots=True)
class DueIdentity:
    """An identity that is due for a refresh."""

    did: str
    pds: str | None  # the base URL of the account's PDS, as far as it is known
    failures: int  # the number of failed refreshes since the last successful one


@dataclass(frozen=True, slots=True)
class HandleClaim:
    """A claimed handle that is due for verification."""

    did: str
    claimed: str | None  # the handle that the DID document claims
    known: str | None  # the result of the previous verification of this claim; None if there is none
    attempts: int  # the number of verifications since the claim was made or last confirmed


@dataclass(frozen=True, slots=True)
class HandleCheck:
    """The result of verifying a handle."""

    claim: HandleClaim
    handle: str | None  # the claimed handle, `INVALID_HANDLE`, or None if the verification could not be completed
    attempts: int
    due_at: float | None  # Unix seconds of the next verification; None if there is none


MAX_HOSTS = 16_384


@dataclass(slots=True)
class HostState:
    """The state of a host that is stored across restarts. Times are Unix seconds."""

    host: str
    requests: int  # requests in total in the table; in memory, requests since the state was last saved
    failures: int  # failed requests, counted like `requests`
    consecutive_failures: int  # failures since the last response
    paused_until: float | None  # end of the last pause; it may be over
    pause_reason: FetchFailure | None
    last_error: str | None
    last_success: float | None

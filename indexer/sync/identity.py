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

    Attributes:
        handle: The handle that the DID document claims, not verified.
        pds: The base URL of the account's PDS.
        signing_key: A did:key.
        fetched_at: When the lookup asked, or the directory accepted the operation, in Unix seconds.
        stale: True if the identity may have changed since then.
        problem: Why the DID has no usable identity; None if it has one.
        denials: How often in a row the directory denied the DID, hours apart; 0 if it knows the DID.
        denied_at: The time of the last denial that counted, in Unix seconds.
        chain: The fingerprint of the last verified operation in the directory's export, and the packed `PlcChain`; None
            if there is none.
        handle_wanted: False if the handle is not verified, because the repo is not tracked.
    """

    did: str
    handle: str | None
    pds: str | None
    signing_key: str | None
    fetched_at: float
    stale: bool = False
    problem: str | None = None
    denials: int = 0
    denied_at: float | None = None
    chain: bytes | None = None
    handle_wanted: bool = True

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
    """An identity that is due for a refresh.

    Attributes:
        pds: The base URL of the account's PDS, as far as it is known.
        failures: The number of failed refreshes since the last successful one.
    """

    did: str
    pds: str | None
    failures: int


@dataclass(frozen=True, slots=True)
class HandleClaim:
    """A claimed handle that is due for verification.

    Attributes:
        claimed: The handle that the DID document claims.
        known: The result of the previous verification of this claim; None if there is none.
        attempts: The number of verifications since the claim was made or last confirmed.
    """

    did: str
    claimed: str | None
    known: str | None
    attempts: int


@dataclass(frozen=True, slots=True)
class HandleCheck:
    """The result of verifying a handle.

    Attributes:
        handle: The claimed handle, `INVALID_HANDLE`, or None if the verification could not be completed.
        due_at: Unix seconds of the next verification; None if there is none.
    """

    claim: HandleClaim
    handle: str | None
    attempts: int
    due_at: float | None


MAX_HOSTS = 16_384


@dataclass(slots=True)
class HostState:
    """The state of a host that is stored across restarts. Times are Unix seconds.

    Attributes:
        requests: Requests in total in the table; in memory, requests since the state was last saved.
        failures: Failed requests, counted like `requests`.
        consecutive_failures: Failures since the last response.
        paused_until: End of the last pause; it may be over.
    """

    host: str
    requests: int
    failures: int
    consecutive_failures: int
    paused_until: float | None
    pause_reason: FetchFailure | None
    last_error: str | None
    last_success: float | None

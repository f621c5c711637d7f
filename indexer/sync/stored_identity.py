"""Identities as they are stored: the content of a DID document, and the verification of its handle."""

from dataclasses import dataclass

INVALID_HANDLE = "handle.invalid"
"""Replaces a claimed handle that failed verification (docs/protocol.md#handles)."""


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """The identity that the last successful lookup of a DID gave.

    Attributes:
        handle: The handle that the DID document claims, not verified.
        pds: The base URL of the account's PDS.
        signing_key: A did:key.
        fetched_at: Unix seconds.
        stale: True if the identity may have changed since then.
        problem: Why the DID has no usable identity; None if it has one.
    """

    did: str
    handle: str | None
    pds: str | None
    signing_key: str | None
    fetched_at: float
    stale: bool = False
    problem: str | None = None


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

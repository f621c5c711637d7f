"""An identity as it is stored: what a DID document said when it was last read, and whether its handle holds."""

from dataclasses import dataclass

INVALID_HANDLE = "handle.invalid"


@dataclass(frozen=True, slots=True)
class StoredIdentity:
    """`signing_key` is a did:key, `handle` what the document claims, `fetched_at` Unix seconds.

    `stale` says that something has changed since; `problem` why there is no identity to be had, definitely.
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
    """A claimed handle that is due to be checked. `known` is what an earlier check gave, one of this same claim.

    `attempts` are the checks since the claim was new or last held.
    """

    did: str
    claimed: str | None
    known: str | None
    attempts: int


@dataclass(frozen=True, slots=True)
class HandleCheck:
    """What a check gave: `handle` is the claimed one, `handle.invalid`, or None where it is not known.

    It is checked again at `due_at`, in Unix seconds, or not at all.
    """

    claim: HandleClaim
    handle: str | None
    attempts: int
    due_at: float | None

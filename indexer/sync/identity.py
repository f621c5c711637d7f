"""An identity as it is stored: what a DID document said when it was last read."""

from dataclasses import dataclass


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

"""The accounts of a repo list as a set in little memory, to find the stored accounts that the list does not contain."""

from collections.abc import Iterator
from hashlib import blake2b

_BITS_PER_ACCOUNT = 24
_HASHES = 12
MIN_ACCOUNTS = 10_000


class ListedAccounts:
    """A Bloom filter of DIDs: 3 bytes per account.

    A DID that was added is always in it. Another one is in it by chance with a probability of about 1 in 70,000, as
    long as at most `expected` DIDs were added.
    """

    def __init__(self, expected: int) -> None:
        self._bits = max(expected, MIN_ACCOUNTS) * _BITS_PER_ACCOUNT
        self._filter = bytearray(self._bits // 8 + 1)

    def add(self, did: str) -> None:
        """Add a DID."""
        for position in self._positions(did):
            self._filter[position >> 3] |= 1 << (position & 7)

    def __contains__(self, did: str) -> bool:
        """Return False only if the DID was not added."""
        return all(self._filter[position >> 3] >> (position & 7) & 1 for position in self._positions(did))

    def _positions(self, did: str) -> Iterator[int]:
        digest = blake2b(did.encode(), digest_size=16).digest()
        first, step = int.from_bytes(digest[:8]), int.from_bytes(digest[8:]) | 1
        return ((first + number * step) % self._bits for number in range(_HASHES))

"""Commit objects, repository format version 3 (docs/protocol.md#commit-objects)."""

from typing import NamedTuple

from indexer.atproto.cbor import CborError, Link, decode_canonical
from indexer.atproto.cid import is_cid
from indexer.atproto.syntax import is_did, is_tid
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

VERSION = 3
SIGNATURE_BYTES = 64
MAX_COMMIT_BYTES = 8_192
"""Maximum size of a commit. Most have 188 bytes; the rest is for a DID of 2,048 bytes and for unknown fields."""

_SIG_KEY_AND_HEAD = b"\x63sig\x58\x40"  # the key "sig" and the head of a byte string of 64 bytes
_MAP_OF_2 = 0xA2
_MAP_OF_23 = 0xB7  # the largest map whose size is in the first byte


class Commit(NamedTuple):
    """A decoded commit."""

    did: str
    rev: str
    data: bytes  # the CID of the tree's root
    sig: bytes
    unsigned: bytes  # the original bytes without the entry `sig`: the message that `sig` signs
    cid: bytes  # of the commit block


def decode_commit(block: bytes, cid: bytes) -> Commit:
    """Return the commit in a block with this CID.

    `prev` may be absent. Unknown fields are accepted, and are part of the signed bytes.

    Raises:
        UpstreamError: With COMMIT_MALFORMED, if the block is not a canonical version 3 commit.
    """
    if len(block) > MAX_COMMIT_BYTES:  # before decoding, because no signature has been verified yet
        raise UpstreamError(Rejection.COMMIT_MALFORMED, f"{len(block)} bytes")
    try:
        fields = decode_canonical(block)
    except CborError as error:
        raise UpstreamError(Rejection.COMMIT_MALFORMED, str(error)) from None
    if not isinstance(fields, dict):
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "not a map")
    did, rev, data, sig = (fields.get(name) for name in ("did", "rev", "data", "sig"))
    version, prev = fields.get("version"), fields.get("prev")
    if type(version) is not int or version != VERSION:
        raise UpstreamError(Rejection.COMMIT_MALFORMED, f"version {version!r:.20}")
    if not (isinstance(did, str) and is_did(did) and isinstance(rev, str) and is_tid(rev)):
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "did is not a DID, or rev is not a TID")
    if not (isinstance(data, Link) and is_cid(data) and isinstance(prev, Link | None)):
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "data or prev is not a link")
    if type(sig) is not bytes or len(sig) != SIGNATURE_BYTES:
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "sig is not 64 bytes")
    return Commit(did, rev, bytes(data), sig, _without_sig(block, sig), cid)


def _without_sig(block: bytes, sig: bytes) -> bytes:
    """Return the original bytes without the entry `sig`, and with a map head that counts one entry less.

    The entry has 70 bytes: key, head and value. A canonical map contains each key once, so these bytes can occur again
    only inside another value. Then it is unclear which ones are the entry, and the commit is rejected.
    """
    entry = _SIG_KEY_AND_HEAD + sig
    if not _MAP_OF_2 <= block[0] <= _MAP_OF_23 or block.count(entry) != 1:
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "more than 23 fields, or the bytes of sig occur twice")
    start = block.index(entry)
    return bytes([block[0] - 1]) + block[1:start] + block[start + len(entry) :]

"""Commit objects, repository format version 3 (spec §3.1)."""

from dataclasses import dataclass

from indexer.atproto.cbor import CborError, Link, decode_canonical, encode
from indexer.atproto.cid import is_cid
from indexer.atproto.syntax import is_did, is_tid
from indexer.errors import UpstreamError
from indexer.reasons import Rejection

VERSION = 3
SIGNATURE_BYTES = 64
BLOCK_BYTES = 8_192  # a usual commit has 188, the longest DID 2,048; the rest is room for fields of other times

_SIG_ENTRY = b"\x63sig\x58\x40"  # the key "sig" and the head of a 64 byte string
_DATA_ENTRY = b"\x64data\xd8\x2a"  # the key "data" and the tag of a link
_MAP_OF_TWO = 0xA2
_MAP_OF_23 = 0xB7


@dataclass(frozen=True, slots=True)
class Commit:
    """A decoded commit. `unsigned` are the original bytes without the entry `sig`: what was signed."""

    did: str
    rev: str
    data: bytes
    sig: bytes
    unsigned: bytes
    cid: bytes


def decode_commit(block: bytes, cid: bytes) -> Commit:
    """Strict: canonical, version 3, every field we use of its type, at most `BLOCK_BYTES`. Raises `UpstreamError`.

    An absent `prev` and fields that this version doesn't name are accepted; they stay in the signed bytes.
    """
    if len(block) > BLOCK_BYTES:  # nobody has signed for the work of decoding it yet
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
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "did or rev is not one")
    if not (isinstance(data, Link) and is_cid(data) and isinstance(prev, Link | None)):
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "data or prev is not a link")
    if type(sig) is not bytes or len(sig) != SIGNATURE_BYTES:
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "sig is not 64 bytes")
    return Commit(did, rev, bytes(data), sig, _without_sig(block, sig), cid)


def _without_sig(block: bytes, sig: bytes) -> bytes:
    """The original bytes minus the entry `sig`, the map's head counting one less.

    Canonical order puts `sig` behind the keys of one to three letters that sort before it, so the entry is found
    whole, key, head and value; no other place in a canonical commit can hold these 70 bytes unless a hostile
    value repeats them, and then the signature over the result doesn't hold.
    """
    entry = _SIG_ENTRY + sig
    if not _MAP_OF_TWO <= block[0] <= _MAP_OF_23 or block.count(entry) != 1:
        raise UpstreamError(Rejection.COMMIT_MALFORMED, "sig is not where it belongs")
    at = block.index(entry)
    return bytes([block[0] - 1]) + block[1:at] + block[at + len(entry) :]


def encode_unsigned(did: str, rev: str, data: bytes, prev: bytes | None = None) -> bytes:
    """The bytes to sign for a commit."""
    return encode({"did": did, "rev": rev, "data": data, "prev": prev, "version": VERSION})


def encode_signed(unsigned: bytes, sig: bytes) -> bytes:
    """The commit block for bytes of `encode_unsigned`: the entry `sig` put in its canonical place, before `data`.

    Before it stand only texts, which may well hold the letters "ddata", but never the link's head behind them.
    """
    at = unsigned.index(_DATA_ENTRY)
    return bytes([unsigned[0] + 1]) + unsigned[1:at] + _SIG_ENTRY + sig + unsigned[at:]

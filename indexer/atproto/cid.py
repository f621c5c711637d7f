"""CIDs as binary bytes and as text (docs/protocol.md#car-files).

The form of the protocol is CIDv1 with SHA-256 and codec dag-cbor or raw. Links in records may have any CIDv1 form:

    CID of the protocol    01  71|55    12         20        <32 bytes>
    any CIDv1              01  codec    hash       size      <size bytes>
                               varint   varint     1 byte
"""

import re
from base64 import b32decode, b32encode
from binascii import Error
from hashlib import sha256

DAG_CBOR = b"\x01\x71\x12\x20"
"""First bytes of a CID of the protocol for a DAG-CBOR block. The SHA-256 of the block follows."""
RAW = b"\x01\x55\x12\x20"
"""First bytes of a CID of the protocol for a raw block. The SHA-256 of the block follows."""
CID_BYTES = 36
"""Size of a CID of the protocol."""
MIN_LINK_BYTES = 4
"""Size of the smallest CIDv1: its digest is empty."""
MAX_LINK_BYTES = 100
"""Maximum size of a CID of any form."""

_VARINT = rb"(?:[\x80-\xff]{0,8}[\x01-\x7f]|\x00)"  # in its shortest form
_CIDV1_PREFIX = re.compile(rb"\x01" + _VARINT + _VARINT + rb"([\x00-\x7f])")  # codec, hash function, digest size


def cid_of(block: bytes) -> bytes:
    """Return the CID of a DAG-CBOR block."""
    return DAG_CBOR + sha256(block).digest()


def is_cid(data: bytes) -> bool:
    """Return True if the bytes are a CID of the protocol's form."""
    return len(data) == CID_BYTES and data.startswith((DAG_CBOR, RAW))


def link_size(data: bytes, start: int = 0) -> int | None:
    """Return the size in bytes of the CID of any CIDv1 form that begins at `start`; None if there is none."""
    prefix = _CIDV1_PREFIX.match(data, start)
    if prefix is None or len(data) - prefix.end() < prefix[1][0]:
        return None
    return prefix.end() + prefix[1][0] - start


def is_link(data: bytes) -> bool:
    """Return True if the bytes are a CID of any CIDv1 form, as a link in DAG-CBOR must contain."""
    return len(data) <= MAX_LINK_BYTES and link_size(data) == len(data)


def cid_text(cid: bytes) -> str:
    """Return the text form of a CID: `b` and lower-case base32 without padding."""
    return "b" + b32encode(cid).decode().rstrip("=").lower()


def parse_cid(text: str) -> bytes:
    """Return the bytes of a CID in text form.

    Raises:
        ValueError: The text is not a CID of the protocol's form.
    """
    try:
        cid = b32decode(text[1:].upper() + "======")
    except (Error, ValueError):
        cid = b""
    if not is_cid(cid) or cid_text(cid) != text:
        raise ValueError(f"not a CIDv1 with SHA-256 and codec dag-cbor or raw: {text[:80]!r}")
    return cid
